"""What a runtime says of itself, counted by hand: blocks hold 8 tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import kvos
from kvos.counters import COUNTERS
from kvos.runtime.report import FreeRuns
from kvos.sessions import SessionState
from kvos.storage import BlockStatus
from serving.harness import some_ids

BYTES_PER_TOKEN = 3 * 2 * (16 + 16) * 8  # layers, KV heads, key and value, float64


def test_stats_count_tokens_blocks_and_sessions(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy(cache_bytes=40 * 8 * BYTES_PER_TOKEN)
    empty = runtime.stats()
    assert empty.counters == dict.fromkeys(COUNTERS, 0)
    assert (empty.reuse_rate, empty.utilisation, empty.sessions, empty.running) == (0.0, 0.0, 0, 0)
    first, second = runtime.session("first"), runtime.session("second")
    first.append_tokens(some_ids(20))
    first.prefill()
    second.append_tokens(some_ids(24))
    second.prefill()
    stats = runtime.stats()
    assert (stats.block_size, stats.bytes_per_token, stats.max_blocks) == (8, BYTES_PER_TOKEN, 40)
    assert (stats.model, stats.dtype, stats.sessions) == ("LlamaForCausalLM", "float64", 2)
    # first: 2 full blocks and 4 tokens; second shares the 2 and has one of its own
    assert (stats.blocks.active, stats.blocks.cached, stats.blocks.reserved) == (4, 0, 0)
    assert stats.utilisation == 4 / 40
    counted = {name: stats.counters[name] for name in ("tokens_computed", "tokens_reused", "tokens_shared", "requests")}
    assert counted == {"tokens_computed": 28, "tokens_reused": 16, "tokens_shared": 16, "requests": 2}
    assert stats.reuse_rate == pytest.approx(16 / 44)
    assert json.loads(json.dumps(stats.as_dict()))["reuse_rate"] == stats.reuse_rate
    first.close()
    second.close()
    after = runtime.stats()
    assert (after.blocks.active, after.blocks.cached) == (0, 3)
    assert after.sessions == 0


def test_free_runs_end_with_their_segment_and_count_what_the_pool_may_still_take(
    open_toy: Callable[..., kvos.Runtime],
) -> None:
    # 40 blocks in segments of 16, 16 and 8
    runtime = open_toy(cache_bytes=40 * 8 * BYTES_PER_TOKEN, segment_bytes=16 * 8 * BYTES_PER_TOKEN)
    start = FreeRuns(blocks=40, runs=3, longest=16)
    assert (runtime.stats().free_at_start, runtime.stats().free_now) == (start, start)
    sessions = []
    for number in range(3):  # blocks 0 and 1, 2 and 3, 4 and 5
        sessions.append(runtime.session(f"s{number}"))
        sessions[-1].append_tokens(some_ids(12, seed=number))
        sessions[-1].prefill()
    assert [session.report().blocks for session in sessions] == [(0, 1), (2, 3), (4, 5)]
    assert runtime.stats().free_now == FreeRuns(blocks=34, runs=3, longest=16)
    sessions[1].close()  # block 2 is full, and stays findable
    stats = runtime.stats()
    assert stats.free_now == FreeRuns(blocks=35, runs=4, longest=16)
    assert stats.free_at_start == start


def test_stats_say_what_the_tiers_say(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy(disk_cache_bytes=64 << 20, host_cache_bytes=1 << 20)
    assert runtime.stats().prefill_tokens_per_second is None
    session = runtime.session("s")
    session.append_tokens(some_ids(40))
    session.prefill()
    assert session.hibernate().safe == 5
    stats = runtime.stats()
    assert stats.tiers == runtime.tiers()
    assert [(tier.name, tier.usage.blocks, tier.switched_off) for tier in stats.tiers] == [
        ("host", 5, False),
        ("disk", 5, False),
    ]
    assert stats.tiers[0].usage.capacity_bytes == 1 << 20
    assert stats.prefill_tokens_per_second is not None
    assert stats.prefill_tokens_per_second > 0
    json.dumps(stats.as_dict())


def test_a_fork_is_no_request_for_what_its_parent_holds(runtime: kvos.Runtime) -> None:
    agent = runtime.session(messages={"role": "user", "content": "hello"})
    usages = [agent.generate(max_tokens=5, ignore_eos=True).result().usage]
    (child,) = agent.fork(1)  # computes the reply's last token first
    child.append({"role": "user", "content": "more"})
    usages.append(child.generate(max_tokens=5, ignore_eos=True).result().usage)
    counters = runtime.stats().counters
    assert counters["tokens_reused"] == sum(usage.reused_tokens for usage in usages)
    assert counters["prompt_tokens"] == sum(usage.prompt_tokens for usage in usages) + 1
    assert counters["full_hits"] == 0


def test_reports_of_sessions_say_what_is_shared_and_pending(runtime: kvos.Runtime) -> None:
    parent = runtime.session("parent", tenant="t")
    parent.append_tokens(some_ids(20))
    parent.prefill()
    (child,) = parent.fork(1, names=["child"])
    child.append_tokens([5, 6, 7])
    reports = {report.name: report for report in runtime.sessions()}
    ours, theirs = reports["parent"], reports["child"]
    assert (ours.tokens, ours.pending, ours.parent, ours.tenant) == (20, 0, None, "t")
    assert (theirs.tokens, theirs.pending, theirs.parent, theirs.tenant) == (23, 3, "parent", "t")
    assert ours.blocks == theirs.blocks == ours.shared_blocks
    assert (len(ours.blocks), ours.private_blocks) == (3, 0)
    child.prefill()
    assert (child.report().private_blocks, parent.report().private_blocks) == (1, 1)
    assert child.report().shared_blocks == child.report().blocks[:2]
    assert child.report().state is SessionState.IDLE
    child.close()
    assert child.report().state is SessionState.CLOSED
    assert parent.report().shared_blocks == ()


def test_reports_of_blocks_say_who_has_what_in_them(runtime: kvos.Runtime) -> None:
    session = runtime.session("s", messages=[{"role": "system", "content": "abc"}, {"role": "user", "content": "hi"}])
    session.prefill()
    gone = runtime.session("gone")
    gone.append_tokens(some_ids(8))
    gone.prefill()
    gone.close()
    reports = runtime.blocks()
    # <|im_start|>system\nabc<|im_end|>\n is 13 tokens, <|im_start|>user\nhi<|im_end|>\n 10
    by_block = {report.block.id: report for report in reports}
    first, second, third = (by_block[block] for block in session.report().blocks)
    assert [(part.span.id, part.start, part.end) for part in first.content] == [(0, 0, 8)]
    assert [(part.span.id, part.start, part.end) for part in second.content] == [(0, 8, 13), (1, 13, 16)]
    assert [(part.span.id, part.start, part.end) for part in third.content] == [(1, 16, 23)]
    assert (third.block.filled, third.block.published, third.block.ref_count) == (7, False, 1)
    cached = [report for report in reports if report.block.status is BlockStatus.CACHED]
    assert [report.content for report in cached] == [()]
    assert len(reports) == 4


def test_a_session_says_who_it_is(runtime: kvos.Runtime) -> None:
    session = runtime.session("support", messages={"role": "user", "content": "hi"})
    assert repr(session) == "<kvos.Session 'support', idle, 1 spans>"
    assert runtime.get("support").messages == session.messages == [{"role": "user", "content": "hi"}]
    assert runtime.session().name != runtime.session().name
