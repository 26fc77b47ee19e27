"""Whoever is killed loses nothing that was acknowledged, and leaves nothing torn and nothing uncounted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiers.tier_suite import FAST_FOLDER

HERE = Path(__file__).parent
EVENTS = (
    "save",
    "hibernate",
    "restored_tokens",
    "killed_in_a_call",
    "killed_while_opening",
    "unfinished",
    "later_than_acknowledged",
)
MANY = 50
"""From so many kills on, every kind of moment has been hit."""


@pytest.fixture(params=["memory", pytest.param("disk", marks=pytest.mark.long)])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """In memory a process spends its time between the syncs, on a disk within them: other moments to die at."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
            yield Path(folder)


def killed(home: Path, kills: int, capacity: str, record: Callable[[str, object], None]) -> dict[str, int]:
    run = subprocess.run(
        [sys.executable, HERE / "killed_agent.py", home, str(kills), str(kills), capacity],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )
    assert run.returncode == 0, run.stderr
    seen: dict[str, int] = json.loads(run.stdout)
    record(f"killed agent, {capacity}", run.stdout)
    assert seen["kills"] == kills
    assert seen.get("save", 0) + seen.get("hibernate", 0) > 0
    assert seen.get("damaged", 0) == 0
    assert seen.get("catalogs_rebuilt", 0) == 0
    if kills >= MANY:
        for event in EVENTS:
            assert seen.get(event, 0) > 0, f"{event}: never; this test shows nothing"
    return seen


def test_everything_acknowledged_is_there_after_a_kill(
    home: Path, rounds: Callable[[int, int], int], record_property: Callable[[str, object], None]
) -> None:
    killed(home, rounds(5, 150), "roomy", record_property)


def test_a_kill_while_blocks_are_evicted_leaves_whole_blocks_within_the_capacity(
    home: Path, rounds: Callable[[int, int], int], record_property: Callable[[str, object], None]
) -> None:
    seen = killed(home, rounds(5, 150), "small", record_property)
    assert seen.get("evicted", 0) > 0 or seen["kills"] < MANY
