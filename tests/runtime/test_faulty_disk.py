"""A disk that is full, unreadable, slow or hung under a whole runtime: replies are right, and come in time."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvos
from kvos.residency import residency
from kvos.serving import EngineCore, WhyComputed
from kvos.testing import FaultyTier, FileFaults, file_faults
from kvos.tiers import Tier
from kvos.types import OwnerId
from serving.harness import plain_greedy, some_ids

IDS = some_ids(163)
DEADLINE_MS = 400
SOON = 20.0
SLACK_S = 10.0
"""For a machine that does much else; a wait without an end is longer."""

OpenToy = Callable[..., kvos.Runtime]


@pytest.fixture
def faults() -> Iterator[FileFaults]:
    with file_faults() as made:
        yield made


@pytest.fixture
def runtime(open_toy: OpenToy, faults: FileFaults, tmp_path: Path) -> Iterator[kvos.Runtime]:
    """``IDS`` are on disk and not on the device."""
    made = open_toy(disk_cache_bytes=64 << 20, restore_deadline_ms=DEADLINE_MS)
    stored(made)
    yield made
    faults.heal()


def stored(runtime: kvos.Runtime) -> None:
    with_ids = runtime.session("stored")
    with_ids.append_tokens(IDS)
    with_ids.prefill()
    assert with_ids.hibernate().safe == len(IDS) // 8
    with_ids.close()
    empty(runtime)


def empty(runtime: kvos.Runtime) -> None:
    def reclaim(core: EngineCore) -> None:
        others = core.manager.pool.max_blocks - core.manager.allocator.counts().held
        core.manager.allocator.release(core.manager.allocate(others, OwnerId(99)))

    runtime.inspect(reclaim)


def forget_speed(runtime: kvos.Runtime) -> None:
    """Nobody knows how long computing takes: this model would be faster than any disk."""
    runtime.inspect(lambda core: setattr(core.moves.residency.prefill_speed, "per_second", None))


def asked(runtime: kvos.Runtime, ids: list[int] = IDS, n: int = 3) -> kvos.Reply:
    forget_speed(runtime)
    with_ids = runtime.session()
    with_ids.append_tokens(np.array(ids, np.int32))
    reply = with_ids.generate(max_tokens=n, ignore_eos=True).result()
    assert with_ids.tokens.tolist() == ids + plain_greedy(ids, n)
    with_ids.close()
    return reply


def test_a_hung_disk_costs_one_deadline_and_works_again_by_itself(runtime: kvos.Runtime, faults: FileFaults) -> None:
    faults.hang("preadv")
    begun = time.monotonic()
    late = asked(runtime)
    assert time.monotonic() - begun < DEADLINE_MS / 1000 + SLACK_S
    assert late.usage.why_computed is WhyComputed.TIER_LATE
    assert faults.hanging.is_set()
    empty(runtime)
    time.sleep(DEADLINE_MS / 1000)  # from then on the call is known to hang
    assert asked(runtime).usage.why_computed is WhyComputed.TIER_OFF
    assert runtime.tiers()[0].switched_off
    faults.heal()
    until = time.monotonic() + SOON
    while runtime.tiers()[0].switched_off:
        assert time.monotonic() < until
        time.sleep(0.01)
    empty(runtime)
    assert asked(runtime).usage.restored_tokens == 160
    runtime.check_invariants()


def test_others_decode_while_one_waits_for_a_hung_disk(open_toy: OpenToy, faults: FileFaults) -> None:
    runtime = open_toy(disk_cache_bytes=64 << 20, restore_deadline_ms=60_000)
    stored(runtime)
    forget_speed(runtime)  # so the whole minute would be waited
    faults.hang("preadv")
    waiting = runtime.session()
    waiting.append_tokens(IDS)
    stream = waiting.generate(max_tokens=3, ignore_eos=True)
    assert faults.hanging.wait(SOON)
    assert asked(runtime, some_ids(20, seed=4), 30).usage.generated_tokens == 30
    assert runtime.inspect(lambda core: core.num_running) == 1
    faults.heal()
    assert stream.result().usage.restored_tokens == 160
    assert waiting.tokens.tolist() == IDS + plain_greedy(IDS, 3)


def test_closing_leaves_a_hung_disk_behind(
    runtime: kvos.Runtime, faults: FileFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "EXIT_PATIENCE_S", 0.3)
    faults.hang("preadv")
    asked(runtime)
    begun = time.monotonic()
    runtime.close()
    assert time.monotonic() - begun < 0.3 + SLACK_S


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_still_reads_and_takes_blocks_again_later(
    runtime: kvos.Runtime, faults: FileFaults, call: str
) -> None:
    faults.fail(call, errno.ENOSPC)
    other = runtime.session("other")
    other.append_tokens(some_ids(40, seed=6))
    other.prefill()
    assert other.hibernate().safe == 0
    assert asked(runtime).usage.restored_tokens == 160
    faults.heal()
    other.prefill()
    assert other.hibernate().safe == 5
    assert runtime.stats().counters["stores_failed"] >= 1


def test_a_disk_that_cannot_be_read_is_computed(runtime: kvos.Runtime, faults: FileFaults) -> None:
    faults.fail("preadv", errno.EIO)
    assert asked(runtime).usage.why_computed is WhyComputed.TIER_FAILED
    faults.heal()
    empty(runtime)
    assert asked(runtime).usage.restored_tokens == 160


def test_a_slow_disk_is_waited_for_no_longer_than_the_deadline(runtime: kvos.Runtime) -> None:
    def slow(tier: Tier) -> FaultyTier:
        wrapped = FaultyTier(tier)
        wrapped.bytes_per_second = 50_000.0  # five seconds for these blocks
        return wrapped

    runtime.inspect(lambda core: core.moves.residency.wrap_tiers(slow))
    begun = time.monotonic()
    assert asked(runtime).usage.why_computed is WhyComputed.TIER_LATE
    assert time.monotonic() - begun < 4.0
