"""Blocks from the device into a tier and back, through the runtime's own verbs, beside plain copies of the same runs.

Both sides take turns in one run; medians are compared. What is forced: that a tier has nothing of it before, and the
device nothing afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from kvos.bench.files import drop_from_page_cache, plain_read_seconds, plain_write_seconds
from kvos.bench.workplace import Workplace, empty_device, invent_kv, random_tokens
from kvos.errors import ServerError
from kvos.residency import PIECE_BLOCKS, Residency, RestoreEnd
from kvos.runtime import Runtime
from kvos.serving import EngineCore
from kvos.sessions.session import CacheSession
from kvos.storage import BlockPool
from kvos.tiers import BlockKey, PayloadBytes
from kvos.types import BlockIds

__all__ = ["MoveRow", "measure_disk", "measure_host", "plain_copy_seconds"]

ROUNDS = 7
PATIENCE_S = 60.0
POLL_S = 20e-6
OVERHEAD_BYTES = 64 << 20
"""Room on disk for a catalog, and for what is deleted late."""


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One tier: MB/s down and up (10^6 bytes), kvos and plain; medians of rounds that took turns.

    Attributes:
        ratio: of speeds there and back, kvos over plain: the median over rounds.
    """

    tier: str
    megabytes: float
    down_mb_s: float
    plain_down_mb_s: float
    up_mb_s: float
    plain_up_mb_s: float
    ratio: float


@dataclass(slots=True)
class _Times:
    """Seconds per round."""

    down: list[float] = field(default_factory=list)
    plain_down: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    plain_up: list[float] = field(default_factory=list)

    def row(self, tier: str, num_bytes: int) -> MoveRow:
        columns = (self.down, self.plain_down, self.up, self.plain_up)
        there_and_back = [(pd + pu) / (d + u) for d, pd, u, pu in zip(*columns, strict=True)]
        down, plain_down, up, plain_up = (num_bytes / 1e6 / median(column) for column in columns)
        return MoveRow(tier, num_bytes / 1e6, down, plain_down, up, plain_up, median(there_and_back))


def measure_host(place: Workplace, tokens: int, rounds: int = ROUNDS) -> MoveRow:
    """The host tier, raw, with room for everything; plain: one gather or scatter per layer and segment."""
    with place.open(
        "host",
        cache_bytes=2 * place.room(tokens),
        host_cache_bytes=place.room(tokens),
        host_codec="raw",
        disk_cache_bytes=0,
    ) as runtime:
        plain = _buffer(runtime, tokens)
        times, blocks = _Times(), _fill(runtime, tokens)
        for _ in range(rounds):
            times.down.append(_down(runtime))
            times.plain_down.append(runtime.inspect(lambda core: _plain_copy(core, plain, back=False)))
            runtime.inspect(_leave_device)
            times.up.append(runtime.inspect(_up))
            times.plain_up.append(runtime.inspect(lambda core: _plain_copy(core, plain, back=True)))
            runtime.inspect(_leave_tier)
        return times.row("host", blocks * plain.shape[1])


def measure_disk(place: Workplace, tokens: int, rounds: int = ROUNDS) -> MoveRow:
    """The disk tier, raw, read with a cold page cache; plain: as many blocks in as many files, written and read alike,
    from and to memory that is there already."""
    with place.open(
        "disk",
        cache_bytes=2 * place.room(tokens),
        disk_cache_bytes=4 * place.room(tokens) + OVERHEAD_BYTES,
        disk_codec="raw",
    ) as runtime:
        plain, folder = _buffer(runtime, tokens), place.home / "plain"
        times, blocks = _Times(), _fill(runtime, tokens)
        files = [min(PIECE_BLOCKS, blocks - start) for start in range(0, blocks, PIECE_BLOCKS)]
        for _ in range(rounds):
            times.down.append(_down(runtime))
            times.plain_down.append(plain_write_seconds(folder, plain, files))
            runtime.inspect(_leave_device)
            drop_from_page_cache(place.home)
            times.up.append(runtime.inspect(_up))
            times.plain_up.append(plain_read_seconds(folder, plain, files))
            runtime.inspect(_leave_tier)
        return times.row("disk", blocks * plain.shape[1])


def _fill(runtime: Runtime, tokens: int) -> int:
    """Open the session that moves; how many full blocks it has. Without a model's work: any bytes move alike."""
    session = runtime.session()  # without a name, so that nothing is stored but by hand
    session.append_tokens(random_tokens(runtime, tokens))
    runtime.inspect(lambda core: invent_kv(core, _session(core).sequence))
    return tokens // runtime.config.block_size


def _buffer(runtime: Runtime, tokens: int) -> PayloadBytes:
    """``[blocks, bytes_per_block]``, with memory behind it."""
    layout = runtime.inspect(lambda core: core.manager.pool.layout)
    return np.ones((tokens // layout.block_size, layout.bytes_per_block), np.uint8)


def _residency(core: EngineCore) -> Residency:
    if core.moves.residency is None:
        raise ServerError("the tier that was to be measured could not be opened; the log says why")
    return core.moves.residency


def _down(runtime: Runtime) -> float:
    """Seconds until the tier has everything. The engine thread gathers, the mover stores."""
    begin = time.perf_counter()
    storing = runtime.inspect(lambda core: core.moves.hibernate(_session(core)))
    if storing is None:
        raise ServerError("the tier that was to be measured could not be opened; the log says why")
    summary = storing.result(PATIENCE_S)
    seconds = time.perf_counter() - begin
    if summary.safe < summary.wanted:
        raise ServerError(f"the tier took {summary.safe} of {summary.wanted} blocks; the log says why")
    return seconds


def _up(core: EngineCore) -> float:
    """Seconds until everything is in blocks again. The mover loads, the engine thread writes."""
    sequence = _session(core).sequence
    residency = _residency(core)
    begin = time.perf_counter()
    restore = residency.begin_restore(sequence)
    while restore is not None and restore.end is None:
        if not residency.advance(restore, None):
            time.sleep(POLL_S)
    seconds = time.perf_counter() - begin
    if restore is None or restore.end is not RestoreEnd.COMPLETE:
        raise ServerError(f"the tier did not give everything back: {None if restore is None else restore.end}")
    return seconds


def _leave_device(core: EngineCore) -> None:
    _session(core).sequence.swap_out()
    empty_device(core)


def _leave_tier(core: EngineCore) -> None:
    keys = [BlockKey(entry.address) for entry in _session(core).sequence.published()]
    for tier in _residency(core).tiers:
        tier.drop(keys)


def _session(core: EngineCore) -> CacheSession:
    """The only one."""
    return next(iter(core.sessions))


def _plain_copy(core: EngineCore, other: PayloadBytes, *, back: bool) -> float:
    return plain_copy_seconds(core.manager.pool, _session(core).sequence.block_table(), other, back=back)


def plain_copy_seconds(pool: BlockPool, blocks: BlockIds, other: PayloadBytes, *, back: bool) -> float:
    """Time to copy ``blocks`` into ``other``, or ``back``: one gather or scatter per layer and segment.

    ``other`` has room for them, in an order of its own: each tensor's blocks one after the other.
    """
    begin = time.perf_counter()
    flat = torch.from_numpy(other).view(-1).view(pool.layout.dtype)
    which = blocks // pool.blocks_per_segment
    start = 0
    for number in np.unique(which):
        inside = torch.from_numpy(blocks[which == number] - number * pool.blocks_per_segment).to(pool.device)
        for tensor in (*pool.segments[int(number)].keys, *pool.segments[int(number)].values):
            end = start + len(inside) * tensor[0].numel()
            there = flat[start:end].view(len(inside), *tensor.shape[1:])
            if back:
                tensor.index_copy_(0, inside, there.to(pool.device))
            elif pool.device.type == "cpu":
                torch.index_select(tensor, 0, inside, out=there)
            else:
                there.copy_(tensor.index_select(0, inside))
            start = end
    return time.perf_counter() - begin
