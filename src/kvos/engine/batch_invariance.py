"""Batch-invariant mode: the same token ids give the same bits, whatever the batch, the chunks or the cache did.

Three things of a forward depend on what is beside a row. Linear layers take other matrix kernels for few rows than for
many; from ``ROW_MULTIPLE`` on, and in multiples of it, they add up alike, so batches are filled up with rows that
nobody reads. Attention depends on how many rows share a call, so each row has one of its own. So do activations: a
vectorised function computes the last elements of a thread's share by other code than the rest. That all this holds on
a machine, and for a model, is tried when the model is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvos.engine.base import EngineInfo, PackedBatch
from kvos.engine.trial import Run
from kvos.errors import EngineContractError, UnsupportedModelError
from kvos.models.config_checks import has_experts
from kvos.storage import BlockPool, KVLayout

__all__ = ["ROW_MULTIPLE", "check_bits", "check_deterministic", "padded", "row_by_row"]

ROW_MULTIPLE = 8
TRIAL_CUTS = ((136,), (1,) * 9 + (104, 23), (40, 40, 56), (3, 9, 88, 36))
"""Pieces of one sequence. It is long enough that a few threads share its activations, unevenly."""
TRIAL_TOKENS = 136

_FUNCTIONS = "celu elu gelu glu hardswish logsigmoid mish selu sigmoid silu softplus tanh"
_OPERATIONS = "cos erf exp expm1 log log1p pow sigmoid sin softplus tanh"

_TRANSCENDENTAL = frozenset(
    {getattr(nn.functional, name) for name in _FUNCTIONS.split()}
    | {getattr(place, name) for place in (torch, torch.Tensor) for name in _OPERATIONS.split() if hasattr(place, name)}
)
"""Of one tensor, element by element. Sums, products and square roots are rounded alike by all code. The list has what
decoders use; what it lacks, the run at load has to find."""

_SQUARES = (2, 3)
"""Powers that are products."""


def check_deterministic(model: PreTrainedModel) -> None:
    """Refuse what cannot be batch-invariant.

    Raises:
        UnsupportedModelError: the text says why.
    """
    if has_experts(model.config):
        raise UnsupportedModelError(
            f"deterministic mode is not for a mixture of experts ({model.config.model_type!r}): how many tokens of a "
            "batch share an expert changes their bits"
        )
    if model.device.type != "cpu":
        raise UnsupportedModelError(f"deterministic mode is for the CPU; the model is on {model.device}")


def padded(batch: PackedBatch) -> PackedBatch:
    """The same batch with rows, and rows with logits, filled up to multiples of ``ROW_MULTIPLE``.

    Further rows come as sequences of their own that compute the first sequence's last row again and store nothing.
    Logits of further rows come last.
    """
    rows = -batch.num_rows % ROW_MULTIPLE
    outputs = -len(batch.logit_rows) % ROW_MULTIPLE
    last = int(batch.query_starts[1]) - 1

    def again(values: np.ndarray, at: int, count: int) -> np.ndarray:
        return np.concatenate([values, np.repeat(values[at : at + 1], count, axis=0)])

    declared = batch.declared_lengths
    return replace(
        batch,
        token_ids=again(batch.token_ids, last, rows),
        positions=again(batch.positions, last, rows),
        query_starts=np.concatenate([batch.query_starts, batch.num_rows + 1 + np.arange(rows)]),
        context_lengths=again(batch.context_lengths, 0, rows),
        block_tables=again(batch.block_tables, 0, rows),
        logit_rows=again(batch.logit_rows, 0, outputs) if len(batch.logit_rows) else batch.logit_rows,
        declared_lengths=None if declared is None else again(declared, 0, rows),
    )


class _RowByRow(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _TRANSCENDENTAL and "out" not in options:
            x, *others = args or (options.pop("input"),)
            numbers = not any(isinstance(one, torch.Tensor) for one in others)
            if isinstance(x, torch.Tensor) and x.dim() > 1 and numbers and not (others and others[0] in _SQUARES):
                outputs = [func(row, *others, **options) for row in x.reshape(-1, x.shape[-1])]
                return torch.stack(outputs).reshape(*x.shape[:-1], -1) if outputs else func(x, *others, **options)
            return func(x, *others, **options)
        return func(*args, **options)


def row_by_row() -> TorchFunctionMode:
    """Within the block, activations and the like have a call per row, so that shapes are the same in every batch."""
    return _RowByRow()


@torch.inference_mode()
def check_bits(run: Run, layout: KVLayout, info: EngineInfo) -> None:
    """Run the same tokens in several cuts, alone and beside others, and compare the bits.

    Raises:
        EngineContractError: they differ: this machine's kernels add up in another order than kvos knows.
    """
    tokens = min(TRIAL_TOKENS, info.max_positions)
    ids = np.asarray((np.arange(tokens) * 7919 + 11) % 65537 % info.vocab_size, dtype=np.int32)
    results = [_logits(run, layout, ids, cut, beside=3 * (n % 2)) for n, cut in enumerate(TRIAL_CUTS)]
    if not all(torch.equal(result, results[0]) for result in results):
        raise EngineContractError(
            f"{info.model_name} does not give the same bits in batches and chunks of other sizes on this machine; "
            "deterministic mode is not possible here"
        )


def _logits(run: Run, layout: KVLayout, ids: np.ndarray, cut: tuple[int, ...], *, beside: int) -> torch.Tensor:
    """Logits of all ``ids``, computed in pieces of ``cut`` with ``beside`` other sequences in each batch.

    Pieces end where ``ids`` do: a model may have a short context.
    """
    size = layout.block_size
    blocks = -(-len(ids) // size)
    pool = BlockPool(layout, max_blocks=blocks * (1 + beside), blocks_per_segment=blocks * (1 + beside))
    pool.grow()
    tables = np.arange(blocks * (1 + beside)).reshape(1 + beside, blocks)
    parts = []
    start = 0
    for piece in cut:
        rows = min(piece, len(ids) - start)
        if rows == 0:
            break
        place = np.arange(start, start + rows)
        starts = rows * np.arange(2 + beside)
        batch = PackedBatch(
            token_ids=np.concatenate([(ids[place] + 13 * n) % ids.max() for n in range(1, 1 + beside)] + [ids[place]]),
            positions=np.tile(place, 1 + beside),
            write_rows=np.arange(starts[-1]),
            write_slots=np.concatenate([table[place // size] * size + place % size for table in tables]),
            query_starts=starts,
            context_lengths=np.full(1 + beside, start + rows),
            block_tables=tables,
            logit_rows=starts[-2] + np.arange(rows),
            declared_lengths=np.full(1 + beside, len(ids)),
        )
        parts.append(run(batch, pool))
        start += rows
    return torch.cat(parts)
