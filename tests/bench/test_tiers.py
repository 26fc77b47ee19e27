"""``bench_tiers``, ``bench_resume`` and ``bench_compaction`` on a toy model: that they measure what they say. Never how
fast."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from kvos.bench import (
    CompactionRow,
    Turns,
    bench_compaction,
    bench_resume,
    bench_tiers,
    render_compaction,
    render_resume,
    render_tiers,
)
from kvos.bench.files import drop_from_page_cache, plain_read_seconds, plain_write_seconds
from kvos.bench.resume import ResumeReport
from kvos.bench.slow import SlowTier
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError
from kvos.tiers import BlockBatch, BlockKey, BlockRequest, Loaded, Stored
from kvos.tiers.memory import MemoryTier

TURNS = Turns(sessions=5, prompt_tokens=(24, 20), reply_tokens=2)


def text_of(view: RenderableType) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_tiers_move_everything_and_small_pools_come_to_the_same_tokens(toy_folder: Path, config: KvosConfig) -> None:
    told: list[str] = []
    report = bench_tiers(str(toy_folder), tokens=64, turns=TURNS, rounds=1, config=config, progress=told.append)
    # 4 blocks of 16 tokens; float32 keys and values of each layer.
    assert [row.tier for row in report.moves] == ["host", "disk"]
    assert report.moves[0].megabytes == report.moves[1].megabytes > 0
    assert all(min(row.down_mb_s, row.plain_down_mb_s, row.up_mb_s, row.plain_up_mb_s) > 0 for row in report.moves)
    tiers, slow = report.workloads
    # On a large pool each token is computed once, but the last one of each session, which nothing follows.
    assert tiers.other_computed_tokens == TURNS.tokens - TURNS.sessions
    assert tiers.pool_tokens * 4 <= TURNS.tokens
    assert tiers.computed_tokens >= tiers.other_computed_tokens
    assert slow.other_computed_tokens > tiers.other_computed_tokens, "the small pool held everything"
    assert any("disk" in line for line in told)
    assert "at most 1.25" in text_of(render_tiers(report))
    assert json.loads(json.dumps(report.as_dict()))["workloads"][0]["tokens"] == TURNS.tokens
    assert [path.name for path in config.home.iterdir() if path.name.startswith("bench-")] == []


def test_a_new_process_resumes_the_whole_session(toy_folder: Path, config: KvosConfig) -> None:
    report = bench_resume(str(toy_folder), tokens=64, processes=1, config=config)
    assert (report.restored_tokens, report.processes) == (64, 1)
    assert report.stored_bytes > 0
    assert min(report.resumed_s, report.warm_s, report.computed_s) > 0
    assert report.allowed_s == report.warm_s + 1.5 * report.stored_bytes / report.read_bytes_per_s
    assert "64 tokens came back" in text_of(render_resume(report))
    with pytest.raises(InvalidInputError, match="no disk"):
        bench_resume(str(toy_folder), config=replace(config, disk_cache_bytes=0))


def test_what_a_resume_report_derives() -> None:
    figures = (2000, "raw", 1, 10_000_000, 2000, 0.12, 0.1, 3.6, 1e9, 2.0)
    report = ResumeReport("toy", "float32", "cpu", *figures)
    assert report.read_s == pytest.approx(0.01)  # 10 MB at 1 GB/s
    assert report.allowed_s == pytest.approx(0.115)
    assert report.speed_up == pytest.approx(30)


def test_compaction_is_measured_on_tables_that_are_scattered(toy_folder: Path, config: KvosConfig) -> None:
    report = bench_compaction(str(toy_folder), tokens=(96,), rounds=1, config=config)
    row = report.rows[0]
    assert (row.tokens, row.blocks) == (96, 6)
    assert row.runs > 2
    assert min(row.scattered_ms, row.compact_ms, row.short_ms, row.compaction_ms) > 0
    assert "96 tokens" in text_of(render_compaction(report))
    with pytest.raises(InvalidInputError, match="context"):
        bench_compaction(str(toy_folder), tokens=(250,), config=config)


def test_what_a_compaction_row_derives() -> None:
    row = CompactionRow(4096, 256, 250, scattered_ms=30, compact_ms=25, short_ms=10, compaction_ms=50)
    assert row.attention_gain == 0.25  # 5 of 20 ms
    assert row.steps_to_pay == 10
    assert replace(row, compact_ms=31).steps_to_pay is None


def test_plain_files_give_back_what_was_written(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (5, 1000)).astype(np.uint8)
    assert plain_write_seconds(tmp_path / "plain", data, [3, 2]) > 0
    assert sorted(path.stat().st_size for path in (tmp_path / "plain").iterdir()) == [2000, 3000]
    assert drop_from_page_cache(tmp_path) == data.nbytes
    out = np.zeros_like(data)
    plain_read_seconds(tmp_path / "plain", out, [3, 2])
    assert np.array_equal(out, data)


def test_a_slow_tier_waits_so_many_times_as_long_and_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = iter([0.0, 0.5, 10.0, 10.25])
    monkeypatch.setattr("kvos.bench.slow.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("kvos.bench.slow.time.sleep", slept.append)
    tier = SlowTier(MemoryTier(8, 1000), times=20)
    blocks = BlockRequest((BlockKey(b"k" * 32),), (BlockKey(b"p" * 32),), np.zeros((1, 16), np.int32))
    data, out = np.arange(8, dtype=np.uint8)[None], np.zeros((1, 8), np.uint8)
    assert tier.store(BlockBatch(blocks, data)) == [Stored.STORED]
    assert tier.load(blocks, out) == [Loaded.HIT]
    assert np.array_equal(out, data)
    assert slept == pytest.approx([9.5, 4.75])


def test_sizes_that_cannot_be_measured_are_refused(toy_folder: Path, config: KvosConfig) -> None:
    with pytest.raises(InvalidInputError, match="at least one block"):
        bench_tiers(str(toy_folder), tokens=15, config=config)
    with pytest.raises(InvalidInputError, match="whole numbers"):
        bench_compaction(str(toy_folder), tokens=(), config=config)
    with pytest.raises(InvalidInputError, match="one process"):
        bench_resume(str(toy_folder), processes=0, config=config)
