"""``bench_decode`` on a toy model: that it measures what it says. Never how fast."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvos.bench import bench_decode, render
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError


def test_every_size_that_was_asked_for_is_measured_on_both_sides(toy_folder: Path, config: KvosConfig) -> None:
    told: list[str] = []
    report = bench_decode(
        str(toy_folder), sequences=(1, 3), tokens=20, prefill_tokens=(40,), config=config, progress=told.append
    )
    assert [(row.sequences, row.tokens) for row in report.steps] == [(1, 20), (3, 20)]
    assert all(0 < row.kvos_model_ms <= row.kvos_ms for row in report.steps)
    assert all(row.plain_ms > 0 for row in report.steps)
    assert [row.tokens for row in report.prefill] == [40]
    assert min(report.prefill[0].kvos_tokens_per_s, report.prefill[0].plain_tokens_per_s) > 0
    assert any("3 sequences" in line for line in told)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(report))
    assert "3 of 20 tokens" in captured.get()
    assert report.as_dict()["steps"][1]["speed_up"] == report.steps[1].plain_ms / report.steps[1].kvos_ms


def test_sizes_that_cannot_be_measured_are_refused(toy_folder: Path, config: KvosConfig) -> None:
    with pytest.raises(InvalidInputError, match="whole numbers from 1"):
        bench_decode(str(toy_folder), sequences=(), config=config)
    with pytest.raises(InvalidInputError, match="context is 256"):
        bench_decode(str(toy_folder), sequences=(1,), tokens=250, config=config)
