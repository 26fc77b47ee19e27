"""The demo as a person runs it. It asserts counts and the check, never a time."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvos.demo import run_demo


@pytest.mark.long  # three minutes; the toy model's demo, child process and all, runs always
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_the_real_demo_passes_its_check_and_reuses_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    code = run_demo(json_path=path, console=Console(file=io.StringIO(), width=120))
    data = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0
    assert data["check"]["ok"]
    first, *warm = [one for one in data["replies"] if one["scene"] == "turn"]
    assert 1200 <= first["computed_tokens"] <= 1800
    assert all(one["computed_tokens"] < 100 < 1200 <= one["reused_tokens"] for one in warm)
    assert data["forks"]["full_blocks_copied"] == 0
    assert data["resume"]["reply"]["reused_tokens"] == data["resume"]["saved_computed_tokens"]
