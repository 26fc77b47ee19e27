"""A session leaves the device and comes back, in this process and in a later one, as if it had never been away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvos
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError, SessionClosedError, SessionFileMismatchError, SessionNotFoundError
from kvos.serving import EngineCore, WhyComputed
from kvos.testing import FaultyTier, TierFault
from kvos.testing.models import toy_model, toy_tokenizer
from kvos.tiers import Tier
from kvos.types import OwnerId

BLOCK = 8
TEXT = "The agent reads the whole file, calls a tool, and waits for its answer until somebody comes back. " * 3


@pytest.fixture
def open_runtime(tmp_path: Path) -> Iterator[Any]:
    opened = []

    def open_one(seed: int = 0, **settings: Any) -> kvos.Runtime:
        chosen = {
            "home": tmp_path,
            "block_size": BLOCK,
            "cache_bytes": 4 << 20,
            "disk_cache_bytes": 64 << 20,
            **settings,
        }
        runtime = kvos.open(toy_model(seed=seed, dtype=torch.float64), tokenizer=toy_tokenizer(), **chosen)
        opened.append(runtime)
        return runtime

    yield open_one
    for runtime in opened:
        runtime.close()


def told(session: kvos.Session) -> str:
    session.append([{"role": "user", "content": TEXT}])
    return session.generate(max_tokens=12, ignore_eos=True).result().text


def empty(runtime: kvos.Runtime) -> None:
    """Reclaim every block that nobody holds."""
    manager = runtime.inspect(lambda core: core.manager)

    def reclaim(core: EngineCore) -> None:
        counts = manager.allocator.counts()
        manager.allocator.release(manager.allocate(counts.free + counts.cached, OwnerId(99)))

    runtime.inspect(reclaim)


def goes_on(session: kvos.Session) -> kvos.Reply:
    session.append([{"role": "user", "content": "And then?"}])
    return session.generate(max_tokens=8, ignore_eos=True).result()


def test_a_hibernated_session_comes_back_without_computing_its_full_blocks(open_runtime: Any) -> None:
    runtime = open_runtime()
    plain = runtime.session("plain", tenant="other")
    told(plain)
    expected = goes_on(plain)
    plain.close()
    session = runtime.session("long")
    told(session)
    tokens = session.tokens.tolist()
    summary = session.hibernate()
    assert summary.safe == summary.wanted == (len(tokens) - 1) // BLOCK
    assert session.tokens.tolist() == tokens, "while out, it answers what it holds"
    assert session.report().blocks == ()
    empty(runtime)
    reply = goes_on(session)
    assert reply.text == expected.text
    assert reply.usage.restored_tokens == summary.safe * BLOCK
    assert reply.usage.computed_tokens == reply.usage.prompt_tokens - reply.usage.restored_tokens
    assert reply.usage.why_computed is WhyComputed.NEW_TOKENS
    runtime.check_invariants()


def test_a_new_process_finds_the_session_and_its_blocks(open_runtime: Any) -> None:
    runtime = open_runtime()
    session = runtime.session("long")
    told(session)
    tokens = session.tokens.tolist()
    summary = session.hibernate()
    runtime.close()
    later = open_runtime()
    assert later.hibernated_sessions() == ("long",)
    back = later.resume("long")
    assert back.tokens.tolist() == tokens
    reply = goes_on(back)
    assert reply.usage.restored_tokens == summary.safe * BLOCK > 0
    later.forget_hibernated("long")
    assert later.hibernated_sessions() == ()
    with pytest.raises(SessionNotFoundError):
        later.resume("nobody")


def test_a_prefix_of_yesterday_is_found_without_being_told(open_runtime: Any) -> None:
    runtime = open_runtime()
    told(runtime.session("named"))
    runtime.close()
    later = open_runtime()
    again = later.session("another")
    again.append([{"role": "user", "content": TEXT}])
    usage = again.generate(max_tokens=2).result().usage
    assert usage.restored_tokens > 8 * BLOCK


def test_what_was_prewarmed_is_there_when_it_is_asked_for(open_runtime: Any) -> None:
    runtime = open_runtime()
    session = runtime.session("long")
    told(session)
    summary = session.hibernate()
    empty(runtime)
    session.prewarm()
    deadline = time.monotonic() + 10
    while not session.report().blocks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(session.report().blocks) == summary.safe
    usage = goes_on(session).usage
    assert usage.restored_tokens == 0
    assert usage.reused_tokens == summary.safe * BLOCK
    runtime.check_invariants()
    session.close()
    assert runtime.stats().blocks.active == 0, "nobody else holds what was prewarmed"


def test_a_prewarm_waits_for_its_time_and_is_in_nobodys_way(open_runtime: Any) -> None:
    runtime = open_runtime()
    session = runtime.session("long")
    told(session)
    session.hibernate()
    empty(runtime)
    session.prewarm(after_s=0.3)
    time.sleep(0.1)
    assert session.report().blocks == ()
    time.sleep(0.6)
    assert session.report().blocks
    session.hibernate()
    empty(runtime)
    session.prewarm()
    assert goes_on(session).usage.reused_tokens > 0
    session.prewarm(after_s=60)
    session.close()
    runtime.check_invariants()
    with pytest.raises(InvalidInputError, match="after_s"):
        runtime.session().prewarm(-1)
    with pytest.raises(SessionClosedError):
        session.prewarm()


def test_a_session_that_has_left_is_saved_with_its_keys_and_values(open_runtime: Any) -> None:
    runtime = open_runtime()
    session = runtime.session("long")
    told(session)
    summary = session.hibernate()
    empty(runtime)
    session.save("file")
    runtime.close()
    later = open_runtime(disk_cache_bytes=0)
    usage = goes_on(later.load("file")).usage
    assert usage.computed_tokens < usage.prompt_tokens - summary.safe * BLOCK + BLOCK


def test_closing_a_runtime_ends_what_waits_for_a_prewarm(open_runtime: Any) -> None:
    runtime = open_runtime()
    session = runtime.session("long")
    told(session)
    over = runtime.inspect(lambda core: core.moves.prewarm(core.sessions.get("long"), 60.0))
    runtime.close()
    assert over.done()


def test_another_tenant_and_another_model_find_nothing(open_runtime: Any) -> None:
    runtime = open_runtime()
    session = runtime.session("named")
    told(session)
    session.hibernate()
    runtime.close()
    later = open_runtime()
    stranger = later.session("named", tenant="stranger")
    stranger.append([{"role": "user", "content": TEXT}])
    assert stranger.generate(max_tokens=2).result().usage.restored_tokens == 0
    later.close()
    other = open_runtime(seed=1)
    with pytest.raises(SessionFileMismatchError):
        other.resume("named")
    same = other.session("mine")
    same.append([{"role": "user", "content": TEXT}])
    assert same.generate(max_tokens=2).result().usage.restored_tokens == 0


def test_without_a_disk_cache_a_session_still_hibernates_and_is_computed_again(open_runtime: Any) -> None:
    runtime = open_runtime(disk_cache_bytes=0)
    session = runtime.session("long")
    told(session)
    assert session.hibernate().safe == 0
    runtime.close()
    later = open_runtime(disk_cache_bytes=0)
    reply = goes_on(later.resume("long"))
    assert reply.usage.restored_tokens == 0
    assert reply.usage.computed_tokens == reply.usage.prompt_tokens


def test_a_lossy_tier_has_a_class_of_its_own(open_runtime: Any, tmp_path: Path) -> None:
    exact = open_runtime()
    told(exact.session("exact"))
    exact.get("exact").save("file")
    exact.get("exact").hibernate()
    exact.close()
    lossy = open_runtime(disk_codec="int8")
    assert [tier.lossless for tier in lossy.tiers()] == [False]
    other = lossy.session("other")
    other.append([{"role": "user", "content": TEXT}])
    assert other.generate(max_tokens=2).result().usage.restored_tokens == 0, "exact blocks lie in another class"
    loaded = lossy.load("file", name="loaded")
    usage = goes_on(loaded).usage
    assert (usage.why_computed, usage.restored_tokens) == (WhyComputed.SAVED_KV_UNUSABLE, 0)
    other.close()
    summary = loaded.hibernate()
    empty(lossy)
    assert goes_on(loaded).usage.restored_tokens == summary.safe * BLOCK
    lossy.close()
    again = open_runtime()
    back = again.session("back")
    back.append([{"role": "user", "content": TEXT}])
    assert back.generate(max_tokens=1).result().usage.restored_tokens > 0, "what was exact is still there"
    assert KvosConfig(home=tmp_path, disk_codec="int4").exactness == "approximate (int4 on disk)"
    assert KvosConfig(home=tmp_path, disk_codec="int4", disk_cache_bytes=0).exactness == "exact"


def test_a_broken_secret_is_no_reason_to_fail(open_runtime: Any, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    runtime = open_runtime()
    assert "without tiers" in caplog.text
    assert runtime.tiers() == ()
    assert told(runtime.session("named"))


def test_the_last_turn_of_a_short_life_is_stored_before_it_ends(open_runtime: Any) -> None:
    runtime = open_runtime()
    slow: list[FaultyTier] = []

    def wrap(tier: Tier) -> Tier:
        slow.append(FaultyTier(tier))
        slow[0].bytes_per_second = 5e6
        return slow[0]

    runtime.inspect(lambda core: core.moves.residency.wrap_tiers(wrap))
    session = runtime.session("long")
    for _ in range(8):
        told(session)
    blocks = (len(session.tokens) - 1) // BLOCK
    assert slow[0].usage().blocks < blocks, "it was too fast for this test to say anything"
    runtime.close()
    later = open_runtime()
    assert later.tiers()[0].usage.blocks == blocks


def test_closing_does_not_wait_for_a_tier_that_hangs(open_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvos.residency.residency.EXIT_PATIENCE_S", 0.5)
    runtime = open_runtime()
    hung: list[FaultyTier] = []

    def wrap(tier: Tier) -> Tier:
        hung.append(FaultyTier(tier))
        hung[0].always("store", TierFault.HANG)
        return hung[0]

    runtime.inspect(lambda core: core.moves.residency.wrap_tiers(wrap))
    told(runtime.session("long"))
    begun = time.monotonic()
    runtime.close()
    assert time.monotonic() - begun < 3
    hung[0].release()
    assert hung[0].closed.wait(10), "the one left behind closes itself"
