"""Snapshots for people: counters, and which session holds which blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvos.residency import TierReport
from kvos.serving import EngineCore
from kvos.sessions import BlockSpan, CacheSession, SessionState
from kvos.storage import BlockCounts, BlockPool, BlockStatus, CacheBlock

__all__ = [
    "BlockReport",
    "FreeRuns",
    "RuntimeStats",
    "SessionReport",
    "block_report",
    "runtime_stats",
    "session_report",
]


@dataclass(frozen=True, slots=True)
class FreeRuns:
    """How free blocks lie: in runs of neighbours, each inside one segment.

    Blocks of segments that the pool has not taken from the system yet count as free.
    """

    blocks: int
    runs: int
    longest: int


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Counters and gauges at one moment.

    Attributes:
        counters: see ``kvos.counters.COUNTERS`` for what each counts.
        blocks: by status; ``max_blocks`` is how many there may be, since the pool grows as it is needed.
        utilisation: share of ``max_blocks`` that is held (active or reserved).
        free_now, free_at_start: how scattered the free room is, and was when the pool was empty.
        tiers: below the device, fast to slow.
        prefill_tokens_per_second: how fast prompts were computed lately; None before the first with tiers below.
    """

    model: str
    dtype: str
    block_size: int
    bytes_per_token: int
    max_blocks: int
    blocks: BlockCounts
    utilisation: float
    free_now: FreeRuns
    free_at_start: FreeRuns
    tiers: tuple[TierReport, ...]
    prefill_tokens_per_second: float | None
    sessions: int
    running: int
    counters: Mapping[str, int]

    @property
    def reuse_rate(self) -> float:
        """Of all prompt tokens so far, the share that was not computed."""
        prompts = self.counters["prompt_tokens"]
        return self.counters["tokens_reused"] / prompts if prompts else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "counters": dict(self.counters), "reuse_rate": self.reuse_rate}


@dataclass(frozen=True, slots=True)
class SessionReport:
    """One session: its size, and how many of its blocks it shares.

    Attributes:
        pending: tokens that the model has not seen yet.
        blocks: its block table.
        shared_blocks: blocks of it that other sessions hold too.
        swapped_out: whether it has left the device since its last request.
    """

    name: str
    tenant: str
    parent: str | None
    state: SessionState
    tokens: int
    pending: int
    messages: int
    blocks: tuple[int, ...]
    shared_blocks: tuple[int, ...]
    swapped_out: bool = False

    @property
    def private_blocks(self) -> int:
        return len(self.blocks) - len(self.shared_blocks)


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block, and what it holds of which session."""

    block: CacheBlock
    content: tuple[BlockSpan, ...]


def runtime_stats(core: EngineCore) -> RuntimeStats:
    """Engine thread only, like the others here. One numpy pass over the pool; reads no tensor and no file."""
    pool, residency = core.manager.pool, core.moves.residency
    counts = core.manager.allocator.counts()
    return RuntimeStats(
        model=core.engine.info.model_name,
        dtype=str(core.engine.info.compute_dtype).removeprefix("torch."),
        block_size=pool.layout.block_size,
        bytes_per_token=pool.layout.bytes_per_token,
        max_blocks=pool.max_blocks,
        blocks=counts,
        utilisation=counts.held / pool.max_blocks,
        free_now=_free_runs(pool, core.manager.allocator.free_spans(pool.blocks_per_segment)[1]),
        free_at_start=_free_runs(pool, np.zeros(0, np.int64), taken=0),
        tiers=() if residency is None else residency.report(),
        prefill_tokens_per_second=None if residency is None else residency.prefill_speed.per_second,
        sessions=len(core.sessions),
        running=core.num_running,
        counters=core.counters.snapshot(),
    )


def _free_runs(pool: BlockPool, lengths: npt.NDArray[np.int64], taken: int | None = None) -> FreeRuns:
    """Runs of these ``lengths``, with the segments behind the first ``taken`` blocks; by default those to come."""
    to_come = pool.max_blocks - (pool.num_blocks if taken is None else taken)
    whole, rest = divmod(to_come, pool.blocks_per_segment)
    return FreeRuns(
        blocks=int(lengths.sum()) + to_come,
        runs=len(lengths) + whole + (rest > 0),
        longest=max(int(lengths.max(initial=0)), pool.blocks_per_segment if whole else rest),
    )


def session_report(core: EngineCore, session: CacheSession) -> SessionReport:
    """Size and blocks of one session."""
    table = session.sequence.block_table()
    shared = [block.id for block in core.manager.allocator.blocks(table) if block.ref_count > 1]
    return SessionReport(
        name=session.id,
        tenant=session.tenant,
        parent=session.parent,
        state=session.state,
        tokens=session.sequence.num_tokens,
        pending=session.sequence.num_pending,
        messages=len(session.transcript.messages),
        blocks=tuple(table.tolist()),
        shared_blocks=tuple(int(block) for block in shared),
        swapped_out=session.is_swapped_out,
    )


def block_report(core: EngineCore) -> tuple[BlockReport, ...]:
    """Every block that holds something, with what it holds."""
    everything = core.manager.allocator.blocks(np.arange(core.manager.allocator.num_blocks))
    used = [block for block in everything if block.status in (BlockStatus.ACTIVE, BlockStatus.CACHED)]
    return tuple(BlockReport(block, core.sessions.spans_in_block(block.id)) for block in used)
