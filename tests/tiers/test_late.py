"""A tier that cannot be opened yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvos.errors import InvalidConfigError
from kvos.testing import FakeClock
from kvos.tiers.base import Loaded, Stored, Tier
from kvos.tiers.late import PAUSE_S, LateTier
from tiers.tier_suite import TIERS, found, key_of, store


def test_it_holds_nothing_until_it_can_be_opened_and_is_that_tier_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []
    usable = False

    def open_it() -> Tier:
        tries.append(1)
        if not usable:
            raise InvalidConfigError("the folder is a file")
        return TIERS["disk"](4, tmp_path / "cache")

    clock = FakeClock()
    tier = LateTier("disk", 1000, open_it, clock=clock)
    assert store(tier, 0) == [Stored.FAILED], "it has just failed"
    assert not tries
    clock.advance(PAUSE_S)
    assert store(tier, 0, 1) == [Stored.FAILED] * 2
    assert store(tier, 0) == [Stored.FAILED]
    assert len(tries) == 1, "not more often than the pause allows"
    assert "the folder is a file" in caplog.text
    assert found(tier, 0) == [Loaded.MISS]
    assert tier.contains([key_of(0)]) == [False]
    tier.drop([key_of(0)])
    usage = tier.usage()
    assert (usage.capacity_bytes, usage.used_bytes, usage.blocks, usage.counters) == (1000, 0, 0, {"open_errors": 2})
    usable = True
    clock.advance(PAUSE_S)
    assert store(tier, 0, 1) == [Stored.STORED] * 2
    assert found(tier, 0, 1) == [Loaded.HIT] * 2
    assert tier.contains([key_of(0)]) == [True]
    tier.drop([key_of(0)])
    assert found(tier, 0) == [Loaded.MISS]
    assert tier.usage().blocks == 1
    tier.close()
    tier.close()
    assert TIERS["disk"](4, tmp_path / "cache").usage().blocks == 1, "it was closed, and its folder is free"


def test_it_is_not_opened_after_its_end(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = LateTier("disk", 1000, lambda: TIERS["disk"](4, tmp_path), clock=clock)
    tier.close()
    clock.advance(PAUSE_S)
    assert store(tier, 0) == [Stored.FAILED]
    assert not list(tmp_path.iterdir())
