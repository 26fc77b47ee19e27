"""Compiled parts of the engine, all optional: what they compute, the generic path computes too, only slower."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from kvos.engine.attention import AttentionLayer, DecodeKernel
from kvos.engine.base import PackedBatch
from kvos.engine.kernels.fused_norm import FusedNorms
from kvos.engine.kernels.packed_linear import PackedLinears, can_pack
from kvos.engine.kernels.threads import WorkerThreads
from kvos.errors import InvalidConfigError, MissingDependencyError
from kvos.storage import BlockPool, KVLayout

logger = logging.getLogger(__name__)

__all__ = ["KernelSet", "Kernels", "select_kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which compiled parts to use.

    Attributes:
        attention: ``numba`` for one-row sequences in float32 on the CPU; ``generic`` is plain PyTorch.
        linear: ``packed`` for weights packed for oneDNN, on the CPU; ``plain`` leaves the model's layers alone.
        norm: ``fused`` for RMS norms in one operation, in float32; ``plain`` leaves the model's norms alone.
    """

    attention: Literal["auto", "numba", "generic"] = "auto"
    linear: Literal["auto", "packed", "plain"] = "auto"
    norm: Literal["auto", "fused", "plain"] = "auto"


GENERIC = Kernels("generic", "plain", "plain")


class KernelSet:
    """The kernels at work on one model; ``undo`` restores it.

    Args:
        chosen: no field is ``auto``.
        model: whose linear layers are packed, if chosen.
        heads: query heads of each layer.
        layout: of the pools to come.
        drop_plain_weights: packed weights need no plain copy beside them.
        folder: where compiled code is kept; None keeps none.
    """

    def __init__(
        self,
        chosen: Kernels,
        model: PreTrainedModel,
        heads: int,
        layout: KVLayout,
        *,
        drop_plain_weights: bool,
        folder: Path | None,
    ) -> None:
        self.chosen = chosen
        self._decode = None
        if chosen.attention == "numba":
            from kvos.engine.kernels.decode_step import NumbaDecode

            self._decode = NumbaDecode(layout, heads, WorkerThreads.find(), folder)
        self._norms = FusedNorms(model) if chosen.norm == "fused" else None
        self._linears = None
        if chosen.linear == "packed":
            try:
                self._linears = PackedLinears(model, drop_plain=drop_plain_weights)
            except BaseException:
                self.undo()
                raise

    def decode_kernel(self, batch: PackedBatch, pool: BlockPool) -> DecodeKernel | None:
        """The compiled kernel made ready for a checked batch; None when it has nothing to do."""
        if self._decode is None:
            return None
        sequences = np.flatnonzero(np.diff(batch.query_starts) == 1)
        if len(sequences) == 0:
            return None
        from kvos.engine.kernels.decode_step import NumbaDecodeStep

        return NumbaDecodeStep(self._decode, batch, pool, sequences)

    def undo(self) -> None:
        """Put the model's layers back. Idempotent."""
        try:
            if self._linears is not None:
                self._linears.undo()
        finally:
            if self._norms is not None:
                self._norms.undo()


def select_kernels(
    wanted: Kernels | Literal["auto", "generic"],
    model: PreTrainedModel,
    layers: Sequence[AttentionLayer],
    layout: KVLayout,
    *,
    drop_plain_weights: bool,
    folder: Path | None,
) -> KernelSet:
    """Turn ``auto`` into what this machine has and what pays, and put it to work on ``model``.

    Raises:
        InvalidConfigError: no such kernel, or one that cannot serve this dtype or device.
        MissingDependencyError: Numba was asked for by name, and is not installed or cannot compile the kernel.
    """
    if wanted == "generic":
        wanted = GENERIC
    elif wanted == "auto":
        wanted = Kernels()
    elif not isinstance(wanted, Kernels):
        raise InvalidConfigError(f"kernels is {wanted!r}; choose 'auto', 'generic' or a Kernels object")
    chosen = Kernels(
        _attention(wanted.attention, model, layers, layout),
        _linear(wanted.linear, model),
        _norm(wanted.norm, layout.dtype),
    )
    try:
        return KernelSet(chosen, model, layers[0].heads, layout, drop_plain_weights=drop_plain_weights, folder=folder)
    except MissingDependencyError as error:
        if wanted.attention != "auto":
            raise
        logger.warning("decode attention runs without the compiled kernel: %s", error)
        chosen = replace(chosen, attention="generic")
        return KernelSet(chosen, model, layers[0].heads, layout, drop_plain_weights=drop_plain_weights, folder=folder)


def _attention(
    wanted: str, model: PreTrainedModel, layers: Sequence[AttentionLayer], layout: KVLayout
) -> Literal["numba", "generic"]:
    equal = len({(layer.heads, layer.spec) for layer in layers}) == 1
    plain = equal and all(layer.is_plain for layer in layers)
    fits = plain and layout.dtype == torch.float32 and next(model.parameters()).device.type == "cpu"
    if wanted == "numba":
        if find_spec("numba") is None:
            raise MissingDependencyError("the numba attention kernel needs Numba: pip install 'kvos[fast]'")
        if not fits:
            raise InvalidConfigError(
                "the numba attention kernel is for float32 on the CPU, and for equal layers without windows, soft caps "
                "and sinks"
            )
        return "numba"
    if wanted not in ("auto", "generic"):
        raise InvalidConfigError(f"attention kernel {wanted!r} is none of 'auto', 'numba', 'generic'")
    usable = fits and find_spec("numba") is not None and WorkerThreads.find() is not None
    return "numba" if wanted == "auto" and usable else "generic"


def _linear(wanted: str, model: PreTrainedModel) -> Literal["packed", "plain"]:
    if wanted not in ("auto", "packed", "plain"):
        raise InvalidConfigError(f"linear kernel {wanted!r} is none of 'auto', 'packed', 'plain'")
    if wanted == "packed" and not can_pack(model):
        raise InvalidConfigError(
            "packed linear layers need float32 (or bfloat16 with CPU support) on a CPU with oneDNN"
        )
    return "packed" if wanted == "packed" or (wanted == "auto" and can_pack(model)) else "plain"


def _norm(wanted: str, dtype: torch.dtype) -> Literal["fused", "plain"]:
    if wanted not in ("auto", "fused", "plain"):
        raise InvalidConfigError(f"norm kernel {wanted!r} is none of 'auto', 'fused', 'plain'")
    if wanted == "fused" and dtype != torch.float32:
        raise InvalidConfigError("fused norms are for float32")
    return "fused" if wanted != "plain" and dtype == torch.float32 else "plain"
