"""What it buys to have a session's blocks next to each other: time of a decode step over long tables, both ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from kvos.bench.workplace import Workplace, invent_kv, open_workplace
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError
from kvos.runtime import DEFAULT_MODEL
from kvos.sequences import SequenceCache
from kvos.serving import EngineCore, SamplingParams
from kvos.sessions import SpanKind
from kvos.types import TokenIds

__all__ = ["CompactionReport", "CompactionRow", "bench_compaction"]

ROUNDS = 6
STEPS_PER_ROUND = 6
SHORT_TOKENS = 16
NAMES = ("short", "scattered", "compact")
SEED = 3


@dataclass(frozen=True, slots=True)
class CompactionRow:
    """Decode steps of one sequence of ``tokens`` tokens, in milliseconds; medians of rounds that took turns.

    Attributes:
        runs: pieces of neighbouring blocks that the table consisted of before, of ``blocks``.
        short_ms: a step of a sequence of a few tokens: nearly all of it is not attention over a table.
        compaction_ms: moving the blocks, once.
    """

    tokens: int
    blocks: int
    runs: int
    scattered_ms: float
    compact_ms: float
    short_ms: float
    compaction_ms: float

    @property
    def attention_gain(self) -> float:
        """Share of the time over the table that compaction saves; 0 is none."""
        scattered = self.scattered_ms - self.short_ms
        return (self.scattered_ms - self.compact_ms) / scattered if scattered > 0 else 0.0

    @property
    def steps_to_pay(self) -> float | None:
        """Decode steps after which the moving has paid; None if a step gains nothing."""
        saved = self.scattered_ms - self.compact_ms
        return self.compaction_ms / saved if saved > 0 else None


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What ``kvos bench compaction`` found, and on what."""

    model: str
    dtype: str
    device: str
    torch_threads: int
    rows: tuple[CompactionRow, ...]

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(r), "attention_gain": r.attention_gain, "steps_to_pay": r.steps_to_pay} for r in self.rows]
        return {**asdict(self), "rows": rows}


def bench_compaction(
    model: str = DEFAULT_MODEL,
    *,
    tokens: tuple[int, ...] = (1024, 4096),
    rounds: int = ROUNDS,
    config: KvosConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CompactionReport:
    """Measure tables whose blocks lie in random order, and the same compacted. Keys and values are made up.

    Raises:
        InvalidInputError: sizes below one, or with the steps longer than the model's context.
    """
    config = KvosConfig.from_env() if config is None else config
    if not tokens or min(tokens) < 1 or rounds < 1:
        raise InvalidInputError("numbers of tokens and rounds are whole numbers from 1")
    progress("loading the model")
    with open_workplace(model, config) as place:
        rows = []
        for length in tokens:
            progress(f"decode steps behind {length} tokens, scattered and compact")
            rows.append(_measure(place, length, rounds))
        return CompactionReport(
            model=place.loaded.name,
            dtype=str(place.loaded.dtype).removeprefix("torch."),
            device=str(place.loaded.device),
            torch_threads=torch.get_num_threads(),
            rows=tuple(rows),
        )


def _measure(place: Workplace, tokens: int, rounds: int) -> CompactionRow:
    steps = rounds * (STEPS_PER_ROUND + 1)
    room = 4 * place.room(tokens + steps) + 4 * place.room(SHORT_TOKENS + steps)
    with place.open("compaction", cache_bytes=room, disk_cache_bytes=0, compaction=False) as runtime:
        if tokens + steps + 1 > runtime.max_context_tokens:
            raise InvalidInputError(f"{steps} steps behind {tokens} tokens are more than the context")
        for name in NAMES:
            runtime.session(name)
        return runtime.inspect(lambda core: _measure_here(core, tokens, rounds))


def _measure_here(core: EngineCore, tokens: int, rounds: int) -> CompactionRow:
    """All on the engine thread, so that it does nothing else meanwhile."""
    lengths = {"short": SHORT_TOKENS, "scattered": tokens, "compact": tokens}
    _scatter_free_blocks(core, _sequence(core, "short"))
    for name, length in lengths.items():
        _invent(core, name, length)
    compact = _sequence(core, "compact")
    begin = time.perf_counter()
    core.manager.compact(compact.id)
    compaction_ms = 1000 * (time.perf_counter() - begin)
    table = _sequence(core, "scattered").block_table()
    blocks, runs = len(table), core.manager.num_runs(table)
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            seconds[name] += _steps(core, name)
    short, scattered, compacted = (1000 * median(seconds[name]) for name in NAMES)
    return CompactionRow(tokens, blocks, runs, scattered, compacted, short, compaction_ms)


def _scatter_free_blocks(core: EngineCore, sequence: SequenceCache) -> None:
    """Leave the blocks of half the pool free in random order, as after much coming and going; the rest stays in order.

    Blocks are handed out in the order in which they became free.
    """
    manager = core.manager
    half = manager.allocate(manager.pool.max_blocks // 2, sequence.owner)
    rest = manager.allocate(manager.pool.max_blocks - len(half), sequence.owner)
    manager.allocator.release(np.random.default_rng(SEED).permutation(half))
    manager.allocator.release(rest)


def _sequence(core: EngineCore, name: str) -> SequenceCache:
    return core.sessions.get(name).sequence


def _invent(core: EngineCore, name: str, tokens: int) -> None:
    session = core.sessions.get(name)
    session.append_tokens(_tokens(core, tokens, len(name)), SpanKind.USER)
    invent_kv(core, session.sequence)


def _tokens(core: EngineCore, n: int, seed: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, core.engine.info.vocab_size, n).astype(np.int32)


def _steps(core: EngineCore, name: str) -> list[float]:
    """Seconds of decode steps of one session, behind one that is not counted."""
    request = core.generate(core.sessions.get(name), SamplingParams(ignore_eos=True), lambda _: None)
    core.step()
    seconds = []
    for _ in range(STEPS_PER_ROUND):
        begin = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - begin)
    core.cancel(request)
    return seconds
