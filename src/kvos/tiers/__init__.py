"""Memory below the device: host, disk, remote. Blocks by key; knows no sessions and no models."""

from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage
from kvos.tiers.codec import Codec

__all__ = [
    "BlockBatch",
    "BlockKey",
    "BlockRequest",
    "Codec",
    "Loaded",
    "PayloadBytes",
    "Stored",
    "Tier",
    "TierUsage",
]
