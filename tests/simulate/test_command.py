"""``kvos simulate`` on a small trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvos.cli import app
from kvos.cli.simulate import PolicyChoice
from kvos.policy import POLICIES


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "120"})


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f'{{"hash_ids": [{number}]}}\n' for number in (1, 2, 3, 1, 2)), encoding="utf-8")
    return str(file)


def test_json_holds_a_row_for_each_size(trace: str) -> None:
    done = call(trace, "--blocks", "2,3", "--policy", "lru", "--json")
    assert json.loads(done.stdout) == {
        "policy": "lru",
        "requests": 5,
        "asked": 5,
        "distinct": 3,
        "ceiling": 0.4,
        "rows": [
            {"blocks": 2, "policy": 0.0, "lru": 0.0, "optimum": 0.4},
            {"blocks": 3, "policy": 0.4, "lru": 0.4, "optimum": 0.4},
        ],
    }


def test_the_table_shows_the_policy_beside_its_yardsticks(trace: str) -> None:
    lines = call(trace, "--blocks", "3").stdout.splitlines()
    assert lines[0].startswith("5 requests, 5 blocks, 3 of them different")
    assert lines[-2].split() == ["BLOCKS", "EXPECTED-RETURN", "LRU", "OPTIMUM", "NO", "BOUNDS"]
    assert lines[-1].split() == ["3", "40.0%", "40.0%", "40.0%", "40.0%"]


def test_the_yardstick_alone_is_shown_once(trace: str) -> None:
    assert call(trace, "--blocks", "2", "--policy", "lru").stdout.splitlines()[-1].split() == [
        "2",
        "0.0%",
        "40.0%",
        "40.0%",
    ]


def test_every_policy_can_be_chosen() -> None:
    assert [choice.value for choice in PolicyChoice] == list(POLICIES)


@pytest.mark.parametrize("sizes", ["", "0", "-1", "5,,6", "many", "1e3", "9999999999999"])
def test_a_size_that_is_none_is_refused(trace: str, sizes: str) -> None:
    done = call(trace, f"--blocks={sizes}")
    assert done.exit_code == 2
    assert "is no pool size" in done.output


def test_a_missing_trace_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    done = call(str(tmp_path / "gone.jsonl"), "--blocks", "5")
    assert done.exit_code != 0
    assert "cannot be read as a trace" in done.output
    assert "Traceback" not in done.output
