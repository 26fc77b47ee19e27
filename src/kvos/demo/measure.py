"""What is measured beside the story: cold starts, forks in blocks, and a token's price at growing history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from kvos.demo.record import ColdStart, ForkRecord, GrowthPoint, SessionBlocks
from kvos.runtime import Runtime, Session

__all__ = ["ForkMeter", "block_tables", "cold_start", "growth_lengths", "growth_points"]

DECODE_TOKENS = 16
"""Tokens that are generated to time one of them."""
ENOUGH_SECONDS = 1.0
"""Recomputes are repeated for about so long; one that takes longer is measured once."""
MOST_REPEATS = 5


def cold_start(
    runtime: Runtime, prompt: Sequence[int], of: str, on_prefill: Callable[[int, int], None] | None = None
) -> ColdStart:
    """The same token ids to the first token, for a tenant of its own: nothing is cached for it.

    Args:
        of: which reply's prompt it is; once per runtime.
    """
    session = runtime.session(tenant=f"cold start of {of}")
    try:
        session.append_tokens(list(prompt))
        usage = session.generate(max_tokens=1, on_prefill=on_prefill).usage
    finally:
        session.close()
    return ColdStart(of, usage.prompt_tokens, usage.reused_tokens, usage.computed_tokens, usage.ttft_s)


class ForkMeter:
    """Counts blocks around a fork: made before it, told of it, asked for the record after the children's work.

    The parent's blocks are those at construction, when it has nothing left to compute.
    """

    def __init__(self, runtime: Runtime, parent: Session) -> None:
        self._runtime = runtime
        self._block_size = runtime.stats().block_size
        report = parent.report()
        self._full = report.blocks[: (report.tokens - report.pending) // self._block_size]
        self._before = self._counters()
        self._at_fork: Mapping[str, int] = self._before
        self._started = time.perf_counter()
        self._fork_s = 0.0
        self._children: Sequence[Session] = ()

    def forked(self, children: Sequence[Session]) -> None:
        self._fork_s = time.perf_counter() - self._started
        self._children = children
        self._at_fork = self._counters()

    def record(self) -> ForkRecord:
        now = self._counters()
        copied = 0
        for child in self._children:
            table = child.report().blocks[: len(self._full)]
            copied += sum(mine != theirs for mine, theirs in zip(table, self._full, strict=True))
        return ForkRecord(
            children=len(self._children),
            fork_s=self._fork_s,
            blocks_allocated_at_fork=self._at_fork["blocks_allocated"] - self._before["blocks_allocated"],
            blocks_copied_at_fork=self._at_fork["blocks_copied"] - self._before["blocks_copied"],
            blocks_allocated=now["blocks_allocated"] - self._before["blocks_allocated"],
            blocks_copied=now["blocks_copied"] - self._before["blocks_copied"],
            parent_full_blocks=len(self._full),
            full_blocks_copied=copied,
        )

    def _counters(self) -> Mapping[str, int]:
        return self._runtime.stats().counters


def block_tables(runtime: Runtime, sessions: Sequence[Session]) -> tuple[SessionBlocks, ...]:
    """The block tables of ``sessions``, in that order."""
    block_size = runtime.stats().block_size
    tables: list[SessionBlocks] = []
    for session in sessions:
        report = session.report()
        shared = set(report.shared_blocks)
        computed = report.tokens - report.pending
        tail = computed - (len(report.blocks) - 1) * block_size
        tables.append(SessionBlocks(session.name, tuple(block in shared for block in report.blocks), tail))
    return tuple(tables)


def growth_points(runtime: Runtime, plain: Any, text: Sequence[int], lengths: Sequence[int]) -> Iterator[GrowthPoint]:
    """Time one token behind ``lengths`` tokens of ``text``: a decode step over cached blocks, and all of it computed.

    Lazy, one point after another: callers show what they wait for. A text that is too short goes on from its start.
    """
    for length in lengths:
        ids = [text[i % len(text)] for i in range(length)]
        yield GrowthPoint(length, _decode_seconds(runtime, ids), _recompute_seconds(plain, ids))


def growth_lengths(histories: Sequence[int], context: int) -> list[int]:
    """``histories`` ascending, each once, with room behind it for the tokens that are timed."""
    return sorted({min(history, context - DECODE_TOKENS) for history in histories})


def _decode_seconds(runtime: Runtime, ids: list[int]) -> float:
    session = runtime.session()
    try:
        session.append_tokens(ids)
        session.prefill()
        return session.generate(max_tokens=DECODE_TOKENS, ignore_eos=True).usage.tpot_s
    finally:
        session.close()


@torch.inference_mode()
def _recompute_seconds(plain: Any, ids: list[int]) -> float:
    """One token's price without a cache: everything before it goes through ``plain`` again. Median of some."""
    tokens = torch.tensor([ids], dtype=torch.long, device=plain.device)
    seconds: list[float] = []
    while len(seconds) < MOST_REPEATS and sum(seconds) < ENOUGH_SECONDS:
        begin = time.perf_counter()
        plain(input_ids=tokens, use_cache=False, logits_to_keep=1).logits.argmax(-1).item()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
