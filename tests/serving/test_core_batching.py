"""Which rows a step takes, and that neither chunks nor neighbours change what a sequence gets."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.serving import Finished, FinishReason, StepBudget, WhyComputed
from serving.harness import Bench, assert_same_logits, plain_greedy, some_ids


@pytest.mark.parametrize(("tokens", "chunk", "expected"), [
    (64, 10, [10, 10, 10, 7]),
    (64, 64, [37]),
    (5, 64, [5, 5, 5, 5, 5, 5, 5, 2]),
    (64, 1, [1] * 37),
])  # fmt: skip
def test_a_prompt_is_computed_in_chunks_of_the_budget(tokens: int, chunk: int, expected: list[int]) -> None:
    bench = Bench(budget=StepBudget(tokens, chunk, 4))
    session = bench.raw(some_ids(37))
    events = bench.prefill(session)
    bench.run()
    assert bench.engine.rows() == [[n] for n in expected]
    assert events.progress == [(int(done), 37) for done in np.cumsum(expected)]
    assert (bench.count("steps"), bench.count("tokens_computed")) == (len(expected), 37)
    bench.check(session)


def test_decodes_go_first_and_prefill_chunks_fill_the_rest_of_the_budget() -> None:
    bench = Bench(budget=StepBudget(12, 8, 8))
    writers = [bench.generate(bench.raw(some_ids(4, n)), max_tokens=9, ignore_eos=True) for n in range(2)]
    bench.step()
    prompt = bench.raw(some_ids(30, 9))
    arriving = bench.generate(prompt, max_tokens=2, ignore_eos=True)
    bench.engine.batches.clear()
    bench.run()
    assert bench.engine.rows()[:5] == [[1, 1, 8], [1, 1, 8], [1, 1, 8], [1, 1, 6], [1, 1, 1]]
    for n, writer in enumerate(writers):
        assert list(writer.finished.tokens) == plain_greedy(some_ids(4, n), 9)
    assert list(arriving.finished.tokens) == plain_greedy(some_ids(30, 9), 2)


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    bench = Bench(budget=StepBudget(8, 8, 8))
    writer = bench.generate(bench.raw(some_ids(5)), max_tokens=20, ignore_eos=True)
    bench.step()
    bench.prefill(bench.raw(some_ids(150, 1)))
    for _ in range(10):
        bench.step()
    assert len(bench.engine.batches) == 11
    assert all(rows[0] == 1 for rows in bench.engine.rows()[1:])
    bench.run()
    assert list(writer.finished.tokens) == plain_greedy(some_ids(5), 20)


def test_no_step_has_more_sequences_or_tokens_than_the_budget_and_everyone_gets_an_answer() -> None:
    bench = Bench(budget=StepBudget(6, 4, 3))
    replies = [
        (n, bench.generate(bench.raw(some_ids(3 + n, n)), max_tokens=2 + n % 3, ignore_eos=True)) for n in range(8)
    ]
    bench.run()
    assert all(len(rows) <= 3 and sum(rows) <= 6 and max(rows) <= 4 for rows in bench.engine.rows())
    for n, reply in replies:
        assert list(reply.finished.tokens) == plain_greedy(some_ids(3 + n, n), 2 + n % 3)


def test_a_packed_batch_says_for_each_sequence_where_its_tokens_are() -> None:
    bench = Bench()
    first, second = bench.raw(some_ids(10)), bench.raw(some_ids(3, 1))
    bench.compute(first)
    bench.engine.batches.clear()
    bench.handle(first).append_tokens([5, 6])
    bench.prefill(first)
    bench.prefill(second)
    bench.step()
    (batch,) = bench.engine.batches
    assert batch.token_ids.tolist() == [5, 6, *some_ids(3, 1)]
    assert batch.positions.tolist() == [10, 11, 0, 1, 2]
    assert batch.query_starts.tolist() == [0, 2, 5]
    assert batch.context_lengths.tolist() == [12, 3]
    (_, tail), (block,) = bench.table(first), bench.table(second)
    assert batch.write_slots.tolist() == [tail * 8 + 2, tail * 8 + 3, block * 8, block * 8 + 1, block * 8 + 2]
    assert batch.write_rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.logit_rows.tolist() == [1, 4]


# -- what is shared --------------------------------------------------------------------------------------------------


def test_the_same_system_prompt_is_shared_without_being_asked_for() -> None:
    bench = Bench()
    system = {"role": "system", "content": "You answer for Tidewater Ferries. Refunds take five days."}
    first = bench.chat(system, {"role": "user", "content": "How long?"})
    second = bench.chat(system, {"role": "user", "content": "Where?"})
    bench.reply(first, max_tokens=3)
    usage = bench.reply(second, max_tokens=3).usage
    common = first.transcript.spans[0].end + len("<\nuser\n") - 1  # <|im_start|> is one token
    assert usage.shared_tokens == usage.reused_tokens == common // 8 * 8
    assert usage.computed_tokens == usage.prompt_tokens - usage.reused_tokens
    assert usage.why_computed is WhyComputed.NEW_TOKENS
    blocks = common // 8
    assert bench.table(first)[:blocks] == bench.table(second)[:blocks]
    assert not set(bench.table(first)[blocks:]) & set(bench.table(second)[blocks:])
    bench.check(first)
    bench.check(second)


def test_what_a_closed_session_had_computed_is_found_again() -> None:
    bench = Bench()
    first = bench.raw(some_ids(40))
    bench.compute(first)
    bench.core.forget(first)
    assert bench.manager.allocator.counts().cached == 5
    second = bench.raw([*some_ids(40)[:20], 7])
    usage = bench.compute(second).usage
    assert (usage.shared_tokens, usage.computed_tokens) == (16, 5)
    bench.check(second)


def test_equal_text_at_another_offset_shares_nothing() -> None:
    bench = Bench()
    first = bench.raw(some_ids(32))
    bench.compute(first)
    second = bench.raw([9] * 8 + some_ids(32))
    assert bench.compute(second).usage.shared_tokens == 0
    assert not set(bench.table(first)) & set(bench.table(second))
    bench.check(second)


def test_another_tenant_shares_nothing() -> None:
    bench = Bench()
    ours, theirs = bench.raw(some_ids(40)), bench.raw(some_ids(40), tenant="other")
    bench.compute(ours)
    usage = bench.compute(theirs).usage
    assert (usage.shared_tokens, usage.computed_tokens) == (0, 40)
    assert not set(bench.table(ours)) & set(bench.table(theirs))
    bench.check(theirs)


def test_two_who_compute_the_same_at_once_end_on_the_same_blocks() -> None:
    bench = Bench()
    sessions = [bench.raw(some_ids(40)) for _ in range(3)]
    for session in sessions:
        bench.prefill(session)
    bench.run()
    assert bench.engine.rows() == [[40, 40, 40]]
    assert bench.count("blocks_deduplicated") == 10
    tables = [bench.table(session) for session in sessions]
    assert tables[0] == tables[1] == tables[2]
    for session in sessions:
        bench.check(session)


def test_one_who_follows_another_takes_over_what_was_published_meanwhile() -> None:
    bench = Bench(budget=StepBudget(8, 8, 4))
    ahead, behind = bench.raw(some_ids(40)), bench.raw(some_ids(40))
    first, second = bench.generate(ahead, max_tokens=3), bench.generate(behind, max_tokens=3)
    bench.run()
    usage = second.finished.usage
    assert usage.shared_tokens >= 32
    assert bench.count("tokens_computed") < 60
    assert first.finished.tokens == second.finished.tokens == tuple(plain_greedy(some_ids(40), 3, [2]))


def test_scores_are_complete_although_the_tokens_are_published_by_another_meanwhile() -> None:
    bench = Bench(budget=StepBudget(8, 8, 4))
    ahead, behind = bench.raw(some_ids(40)), bench.raw(some_ids(40))
    first, second = bench.prefill(ahead, 3), bench.prefill(behind, 12)
    bench.run()
    for events, start in ((first, 3), (second, 12)):
        logits = events.finished.logits
        assert logits is not None
        assert len(logits) == 40 - start
        assert_same_logits(logits, some_ids(40))


@pytest.mark.parametrize("start", [0, 7, 8, 20, 31, 39])
def test_scores_of_cached_tokens_are_computed_without_writing(start: int) -> None:
    bench = Bench()
    session = bench.raw(some_ids(32))
    bench.compute(session)
    bench.handle(session).append_tokens(some_ids(8, 5))
    bench.engine.batches.clear()
    events = bench.prefill(session, start)
    bench.run()
    logits = events.finished.logits
    assert logits is not None
    assert_same_logits(logits, some_ids(32) + some_ids(8, 5))
    assert len(logits) == 40 - start
    assert [len(batch.write_rows) for batch in bench.engine.batches] == [8]


def test_a_full_hit_computes_one_token_and_writes_nothing() -> None:
    bench = Bench()
    bench.compute(bench.raw(some_ids(40)))
    second = bench.raw(some_ids(40))
    bench.engine.batches.clear()
    finished = bench.reply(second, max_tokens=1)
    (batch,) = bench.engine.batches
    assert (batch.num_rows, len(batch.write_rows), batch.positions.tolist()) == (1, 0, [39])
    assert finished.usage.reused_tokens == finished.usage.prompt_tokens == 40
    assert (finished.usage.computed_tokens, finished.usage.why_computed) == (0, WhyComputed.NOTHING)
    assert bench.count("full_hits") == 1
    assert list(finished.tokens) == plain_greedy(some_ids(40), 1)


def test_a_fork_goes_on_from_its_parents_logits_without_a_forward_pass() -> None:
    bench = Bench()
    parent = bench.raw(some_ids(21))
    bench.compute(parent)
    children = bench.core.fork(parent, ["a", "b"])
    steps = bench.count("steps")
    events = [bench.generate(child, max_tokens=1) for child in children]
    bench.run()
    assert bench.count("steps") == steps
    for end in events:
        assert list(end.finished.tokens) == plain_greedy(some_ids(21), 1)
        assert end.finished.reason is FinishReason.LENGTH
    assert bench.count("blocks_copied") == 0
    bench.check(parent)


def test_a_fork_copies_a_partial_tail_once_for_each_who_writes() -> None:
    bench = Bench()
    parent = bench.raw(some_ids(21))
    bench.compute(parent)
    children = bench.core.fork(parent, [None, None])
    allocated = bench.count("blocks_allocated")
    for number, child in enumerate(children):
        bench.handle(child).append_tokens([10 + number, 11])
        bench.compute(child)
    assert (bench.count("blocks_copied"), bench.count("blocks_allocated")) == (2, allocated + 2)
    tables = [bench.table(session) for session in (parent, *children)]
    assert [len(table) for table in tables] == [3, 3, 3]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    for session in (parent, *children):
        bench.check(session)


def test_inherited_logits_are_void_when_the_fork_says_something_else() -> None:
    bench = Bench()
    parent = bench.raw(some_ids(21))
    bench.compute(parent)
    (child,) = bench.core.fork(parent, [None])
    bench.handle(child).truncate(tokens=20)
    assert list(bench.reply(child, max_tokens=2).tokens) == plain_greedy(some_ids(21)[:20], 2, [2])
    bench.handle(parent).append_tokens([44])
    assert list(bench.reply(parent, max_tokens=2).tokens) == plain_greedy([*some_ids(21), 44], 2, [2])


def test_the_counters_add_up() -> None:
    bench = Bench()
    first = bench.raw(some_ids(20))
    ends: list[Finished] = [bench.compute(first), bench.reply(first, max_tokens=5, ignore_eos=True)]
    second = bench.raw([*some_ids(20), 3, 4])
    ends.append(bench.reply(second, max_tokens=4, ignore_eos=True))
    prompts = sum(end.usage.prompt_tokens for end in ends)
    reused = sum(end.usage.reused_tokens for end in ends)
    assert bench.count("tokens_reused") == reused == 0 + 20 + 16
    assert prompts - reused == sum(end.usage.computed_tokens for end in ends) == 20 + 0 + 6
    assert bench.count("tokens_generated") == 9
    # Each reply's last token has not been through the model; the first reply began from known logits.
    assert bench.count("tokens_computed") == 20 + 4 + 6 + 3
    assert bench.count("requests") == 3
    assert (bench.count("requests_failed"), bench.count("requests_cancelled")) == (0, 0)
    assert bench.count("tokens_shared") == 16


def test_a_fork_behind_a_truncation_says_what_follows_there() -> None:
    bench = Bench()
    session = bench.raw(some_ids(30))
    bench.compute(session)  # from here on the logits behind its last token are known
    bench.handle(session).truncate(tokens=21)
    (child,) = bench.core.fork(session, [None])
    assert list(bench.reply(child, max_tokens=4, ignore_eos=True).tokens) == plain_greedy(some_ids(30)[:21], 4)


def test_both_sides_of_a_fork_write_behind_a_shared_tail() -> None:
    bench = Bench()
    parent = bench.raw(some_ids(21))  # the last block is not full
    bench.compute(parent)
    (child,) = bench.core.fork(parent, [None])
    for session, more in ((parent, some_ids(9, 1)), (child, some_ids(9, 2))):
        bench.handle(session).append_tokens(more)
        bench.compute(session)
    bench.check(parent)
    bench.check(child)


def test_what_follows_a_truncation_is_found_by_what_it_is_now() -> None:
    bench = Bench()
    old, new = some_ids(40), some_ids(10) + some_ids(30, 1)
    session = bench.raw(old)
    bench.compute(session)
    bench.handle(session).truncate(tokens=10)
    bench.handle(session).append_tokens(new[10:])
    bench.compute(session)
    full_blocks = len(new) // bench.manager.block_size
    assert bench.compute(bench.raw(new)).usage.shared_tokens == full_blocks * bench.manager.block_size
