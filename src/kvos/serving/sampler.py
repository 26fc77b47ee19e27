"""From logits to tokens, through the logits processors of Transformers. Engine thread only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvos.errors import EngineContractError
from kvos.serving.params import SamplingParams
from kvos.types import TokenIds

__all__ = ["SamplingState", "sample"]


@dataclass(frozen=True, slots=True)
class SamplingState:
    """One reply's parameters and its own random numbers: a reply never depends on who else is being served."""

    params: SamplingParams
    generator: torch.Generator

    @classmethod
    def start(cls, params: SamplingParams) -> SamplingState:
        generator = torch.Generator()
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        return cls(params, generator)


def sample(logits: torch.Tensor, states: Sequence[SamplingState], histories: Sequence[TokenIds]) -> list[int]:
    """One token per row of ``logits`` ``[sequences, vocab]``; rows with equal warping are warped together.

    Args:
        histories: per row, the tokens so far; read only where a repetition penalty asks for them.

    Raises:
        EngineContractError: logits that are not numbers, as an overflow in float16 gives.
    """
    logits = logits.float().cpu() if logits.dtype != torch.float64 else logits.cpu()
    logits = _penalise(logits, states, histories)
    best, tokens = logits.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise EngineContractError("the model's logits are not finite; try dtype fp32 or bf16")
    chosen: list[int] = tokens.tolist()
    for warpers, rows in _warping_groups(states).items():
        # The likeliest token becomes 0, which changes no probability and keeps a small temperature from overflowing.
        probabilities = _warp(logits[rows] - best[rows, None], warpers).softmax(dim=-1)
        for row, distribution in zip(rows, probabilities, strict=True):
            chosen[row] = int(torch.multinomial(distribution, 1, generator=states[row].generator))
    return chosen


def _penalise(logits: torch.Tensor, states: Sequence[SamplingState], histories: Sequence[TokenIds]) -> torch.Tensor:
    rows = [row for row, state in enumerate(states) if state.params.repetition_penalty != 1]
    if rows:
        logits = logits.clone()
    for row in rows:
        processor = RepetitionPenaltyLogitsProcessor(states[row].params.repetition_penalty)
        seen = torch.from_numpy(histories[row].astype("int64"))[None]
        logits[row] = processor(seen, logits[row : row + 1])[0]
    return logits


_Warping = tuple[float, int, float, float]


def _warping_groups(states: Sequence[SamplingState]) -> dict[_Warping, list[int]]:
    groups: dict[_Warping, list[int]] = defaultdict(list)
    for row, state in enumerate(states):
        params = state.params
        if not params.is_greedy:
            groups[params.temperature, params.top_k, params.top_p, params.min_p].append(row)
    return groups


def _warp(logits: torch.Tensor, warping: _Warping) -> torch.Tensor:
    temperature, top_k, top_p, min_p = warping
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    no_history = torch.LongTensor(len(logits), 0)
    warped: torch.Tensor = warpers(no_history, logits)
    return warped
