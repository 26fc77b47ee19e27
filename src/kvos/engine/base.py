"""The small protocol behind which a model runs over block tables, and the batch that it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvos.storage import BlockPool, KVLayout
from kvos.types import SlotIds, TokenIds, TokenPositions

__all__ = ["Engine", "EngineInfo", "PackedBatch"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """New tokens of many sequences in one row: prefill chunks and decodes mix.

    ::

        rows            0 1 2 3 4 | 5 | 6 7 8        three sequences: a chunk of 5, a decode, a chunk of 3
        query_starts    0           5   6       9
        context_lengths 21          340 3            tokens that the LAST row of each sequence may see, itself included

    Row ``j`` of the ``n`` rows of a sequence sees its first ``context_length - n + j + 1`` tokens, all of which lie in
    the blocks of its table; those of this very batch are written before they are read.

    Attributes:
        token_ids: ``[rows]`` int32.
        positions: ``[rows]`` int64, what RoPE sees.
        write_rows: ``[writes]`` int64, the rows whose KV is stored, ascending. A row left out is computed only for its
            logits: its KV is in a block already (full prefix hit) and must not be written again.
        write_slots: ``[writes]`` int64 slot ids (``block_id * block_size + offset``) for ``write_rows``.
        query_starts: ``[sequences + 1]`` int64, where each sequence's rows begin; the last entry is ``rows``.
        context_lengths: ``[sequences]`` int64.
        block_tables: ``[sequences, widest table]`` int64; entries past a sequence's own length are never read.
        logit_rows: ``[outputs]`` int64, rows whose logits are wanted.
        declared_lengths: ``[sequences]`` int64, how long each sequence may become at most; None stands for the context
            lengths. Only models whose positions depend on the length look at it.
    """

    token_ids: TokenIds
    positions: TokenPositions
    write_rows: npt.NDArray[np.int64]
    write_slots: SlotIds
    query_starts: npt.NDArray[np.int64]
    context_lengths: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]
    logit_rows: npt.NDArray[np.int64]
    declared_lengths: npt.NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the layers above need to know of a model.

    Attributes:
        model_name: as a person would call it; for messages and saved files.
        vocab_size: token ids are below this.
        max_positions: the longest sequence that the model was made for, in tokens.
        num_layers: decoder layers, each with one attention call.
        compute_dtype: dtype of weights, activations and KV.
        deterministic: the same tokens give the same bits, whatever the batch and the cache did.
    """

    model_name: str
    vocab_size: int
    max_positions: int
    num_layers: int
    compute_dtype: torch.dtype
    deterministic: bool = False


class Engine(ABC):
    """Runs a model over block tables. One thread only: the engine thread.

    Life: construct, read ``layout`` and ``info``, ``attach`` a pool of that layout, ``forward`` many times, ``close``.
    """

    layout: KVLayout
    info: EngineInfo

    @abstractmethod
    def attach(self, pool: BlockPool) -> None:
        """Use ``pool`` from now on. The pool stays the caller's; it may grow by segments later."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Compute all rows, write their KV into their slots, return logits ``[outputs, vocab]``.

        Logits come in ``compute_dtype``, but never below float32.

        Raises:
            EngineContractError: the model did not call attention once per layer, or not through kvos.
        """

    def position_class(self, max_tokens: int) -> str:
        """What positions depend on beside themselves, in a sequence that may grow to ``max_tokens``.

        Sequences of different classes share no keys. Empty, as for most models: on nothing.
        """
        return ""

    @property
    def arithmetic(self) -> str:
        """What decides on bits, where they are promised (``info.deterministic``); else empty."""
        return ""

    @abstractmethod
    def identity(self) -> str:
        """Hex digest of weights, config and RoPE: equal for equal models anywhere. Cached; slow the first time."""

    @abstractmethod
    def close(self) -> None:
        """Undo whatever was changed on the model object. Idempotent."""
