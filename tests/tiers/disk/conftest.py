"""Helpers beside these tests."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers.tier_suite import FAST_FOLDER

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fast_folder() -> Iterator[Path]:
    """An empty folder in memory, where there is one: for what syncs thousands of times."""
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
        yield Path(folder)
