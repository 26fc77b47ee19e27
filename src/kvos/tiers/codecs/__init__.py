"""The codecs of the tiers below the device. Each knows the KV layout, none knows keys or files."""

from __future__ import annotations

from kvos.tiers.codecs.lossless import LosslessCodec
from kvos.tiers.codecs.quantised import QuantisedCodec
from kvos.tiers.codecs.raw import RawCodec

__all__ = ["LosslessCodec", "QuantisedCodec", "RawCodec"]
