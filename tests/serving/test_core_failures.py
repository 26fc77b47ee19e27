"""What goes wrong hits those whose it is, gives back what it held, and leaves sessions that give right results."""

from __future__ import annotations

import pytest

from kvos.engine import Engine, PackedBatch
from kvos.errors import (
    ContextLengthExceededError,
    EngineContractError,
    InvalidInputError,
    OutOfBlocksError,
    SessionBusyError,
    SessionClosedError,
)
from kvos.serving import Event, Failed, Finished, FinishReason, SamplingParams, StepBudget, TextDelta
from kvos.sessions import SessionState
from kvos.testing import FaultyEngine
from serving.harness import Bench, plain_greedy, some_ids

# -- out of blocks ---------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_is_refused_with_the_holders_and_changes_nothing() -> None:
    bench = Bench(max_blocks=10)
    holder = bench.raw(some_ids(60), "holder")
    bench.compute(holder)
    bench.generate(holder)  # in use: it can't be asked to leave
    late = bench.raw(some_ids(30, 1), "late")
    before = bench.state()
    for start in (lambda: bench.generate(late), lambda: bench.prefill(late)):
        with pytest.raises(OutOfBlocksError) as caught:
            start()
        error = caught.value
        assert (error.asked, error.free, error.cached, error.held) == (4, 2, 0, 8)
        assert error.holders == (("session holder", 8),)
        assert bench.state() == before
    bench.core.forget(holder)
    assert list(bench.reply(late, max_tokens=3).tokens) == plain_greedy(some_ids(30, 1), 3, [2])


def test_a_chat_whose_generation_prompt_does_not_fit_is_as_before() -> None:
    bench = Bench(max_blocks=7)
    session = bench.chat({"role": "system", "content": "x" * 10}, {"role": "user", "content": "hello"})
    bench.compute(session)
    holder = bench.raw(some_ids(16), "holder")
    bench.compute(holder)
    bench.generate(holder)
    before = bench.state()
    with pytest.raises(OutOfBlocksError):
        bench.generate(session)
    assert bench.state() == before


def test_cached_blocks_leave_before_anybody_is_refused() -> None:
    bench = Bench(max_blocks=10)
    first = bench.raw(some_ids(60))
    bench.compute(first)
    bench.core.forget(first)
    second = bench.raw(some_ids(75, 1))
    bench.compute(second)
    assert bench.count("blocks_reclaimed") == 7  # its full blocks; the partial tail was free at once
    bench.check(second)


def test_one_who_runs_out_while_decoding_fails_and_the_others_go_on() -> None:
    bench = Bench(max_blocks=8)
    sessions = [bench.raw(some_ids(30, n), f"s{n}") for n in range(2)]
    first, second = (bench.generate(session, max_tokens=12, ignore_eos=True) for session in sessions)
    bench.run()
    failed, went_on = (first, second) if isinstance(first[-1], Failed) else (second, first)
    error = failed.error
    assert isinstance(error, OutOfBlocksError)
    assert dict(error.holders) == {"session s0": 4, "session s1": 4}
    winner = sessions[0] if went_on is first else sessions[1]
    assert isinstance(went_on[-1], Finished)  # the failed one is idle, and leaves
    loser = sessions[1] if went_on is first else sessions[0]
    kept = loser.sequence.tokens().tolist()
    assert kept == kept[:30] + plain_greedy(kept[:30], len(kept) - 30)
    assert loser.is_swapped_out
    bench.check(winner)
    tokens = winner.sequence.tokens().tolist()
    assert tokens[30:] == plain_greedy(tokens[:30], len(tokens) - 30)


def test_out_of_blocks_in_a_step_fails_one_request_while_others_finish() -> None:
    bench = Bench(max_blocks=10)
    small = bench.raw(some_ids(7), "small")
    grows = bench.raw(some_ids(56, 1), "grows")
    little = bench.generate(small, max_tokens=9, ignore_eos=True)  # ends at token 15, in its second block
    much = bench.generate(grows, max_tokens=30, ignore_eos=True)
    bench.run()
    assert isinstance(much.error, OutOfBlocksError)
    assert list(little.finished.tokens) == plain_greedy(some_ids(7), 9)
    assert bench.manager.allocator.counts().reserved == 0
    assert grows.state is SessionState.IDLE


# -- the engine fails ------------------------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def failing(*passes: int) -> type[Engine] | object:
    return lambda engine: FaultyEngine(engine, lambda number, batch: Boom(str(number)) if number in passes else None)


@pytest.mark.parametrize("broken", [1, 2, 3, 4, 5, 8])
def test_a_failed_step_fails_its_requests_and_the_sessions_go_on_rightly(broken: int) -> None:
    bench = Bench(budget=StepBudget(16, 10, 8), wrap=failing(broken))  # type: ignore[arg-type]
    sessions = [bench.raw(some_ids(12 + 9 * n, n)) for n in range(3)]
    ends = [bench.generate(session, max_tokens=8, ignore_eos=True) for session in sessions]
    bench.run()
    assert any(isinstance(end[-1], Failed) for end in ends)
    assert bench.count("requests_failed") == sum(isinstance(end[-1], Failed) for end in ends)
    assert bench.manager.allocator.counts().reserved == 0
    for n, (session, end) in enumerate(zip(sessions, ends, strict=True)):
        prompt = some_ids(12 + 9 * n, n)
        if isinstance(end[-1], Failed):
            assert isinstance(end.error, Boom)
        else:
            assert list(end.finished.tokens) == plain_greedy(prompt, 8)
        assert session.state is SessionState.IDLE
        kept = session.sequence.tokens().tolist()
        assert kept == prompt + plain_greedy(prompt, len(kept) - len(prompt))
        bench.check(session)
        more = bench.reply(session, max_tokens=3, ignore_eos=True)
        assert list(more.tokens) == plain_greedy(kept, 3)


def test_blocks_of_a_failed_step_are_given_back() -> None:
    bench = Bench(wrap=failing(2))  # type: ignore[arg-type]
    session = bench.raw(some_ids(20))
    bench.compute(session)
    bench.handle(session).append_tokens(some_ids(40, 1))
    held = bench.manager.allocator.counts()
    events = bench.prefill(session)
    bench.run()
    assert isinstance(events.error, Boom)
    assert bench.manager.allocator.counts() == held
    assert len(bench.table(session)) == 3


def test_garbage_of_a_failed_step_is_never_read_even_by_a_fork() -> None:
    bench = Bench(wrap=failing(2))  # type: ignore[arg-type]
    session = bench.raw(some_ids(20))
    bench.compute(session)
    bench.handle(session).append_tokens([9])
    bench.prefill(session)
    bench.run()
    (child,) = bench.core.fork(session, [None])
    bench.check(child)
    bench.check(session)


def test_a_chat_whose_first_step_failed_has_no_trace_of_a_reply() -> None:
    bench = Bench(wrap=failing(1))  # type: ignore[arg-type]
    session = bench.chat({"role": "user", "content": "hello"})
    transcript, tokens = session.transcript, session.sequence.tokens().tolist()
    events = bench.generate(session, max_tokens=4)
    bench.run()
    assert isinstance(events.error, Boom)
    assert session.transcript.messages == transcript.messages
    assert session.transcript.spans == transcript.spans
    assert session.sequence.tokens().tolist() == tokens
    bench.check(session)


def test_a_caller_whose_sink_raises_is_dropped_and_nobody_else_notices() -> None:
    bench = Bench()

    def broken_sink(event: Event) -> None:
        raise RuntimeError("the event loop is closed")

    session, other = bench.raw(some_ids(9)), bench.raw(some_ids(12, 1))
    bench.core.generate(session, SamplingParams(max_tokens=50, ignore_eos=True), broken_sink)
    events = bench.generate(other, max_tokens=6, ignore_eos=True)
    bench.run()
    assert list(events.finished.tokens) == plain_greedy(some_ids(12, 1), 6)
    assert session.state is SessionState.IDLE
    assert session.sequence.num_tokens < 9 + 50, "nobody listens: there is no reason to go on"
    bench.check(session)


def test_memory_that_cannot_be_had_for_a_segment_fails_one_request() -> None:
    bench = Bench(max_blocks=12, blocks_per_segment=6)
    small, grows = bench.raw(some_ids(7), "small"), bench.raw(some_ids(30, 1), "grows")
    ends = [bench.generate(session, max_tokens=20, ignore_eos=True) for session in (small, grows)]
    grow = bench.manager.pool.grow

    def no_memory() -> int:
        bench.manager.pool.grow = grow  # type: ignore[method-assign]
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    bench.manager.pool.grow = no_memory  # type: ignore[method-assign]
    bench.run()
    failed = [end for end in ends if isinstance(end[-1], Failed)]
    assert len(failed) == 1
    assert isinstance(failed[0].error, OutOfBlocksError)
    assert failed[0].error.held == 6
    for session in (small, grows):
        bench.check(session)


# -- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
def test_a_reply_can_be_cancelled_at_every_stage(steps: int) -> None:
    bench = Bench(budget=StepBudget(16, 8, 8))
    session, other = bench.raw(some_ids(20)), bench.raw(some_ids(9, 1))
    events = bench.generate(session, max_tokens=30, ignore_eos=True)
    company = bench.generate(other, max_tokens=6, ignore_eos=True)
    for _ in range(steps):
        bench.step()
    bench.core.cancel(events.request)
    bench.core.check_invariants()
    finished = events.finished
    assert finished.reason is FinishReason.CANCELLED
    assert list(finished.tokens) == plain_greedy(some_ids(20), len(finished.tokens))
    assert session.sequence.tokens().tolist() == some_ids(20) + list(finished.tokens)
    assert session.state is SessionState.IDLE
    bench.run()
    assert bench.manager.allocator.counts().reserved == 0
    assert list(company.finished.tokens) == plain_greedy(some_ids(9, 1), 6)
    bench.core.cancel(events.request)
    assert (bench.count("requests_cancelled"), len([e for e in events if isinstance(e, Finished)])) == (1, 1)
    bench.check(session)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prefill_can_be_cancelled(steps: int) -> None:
    bench = Bench(budget=StepBudget(8, 8, 8))
    session = bench.raw(some_ids(40))
    events = bench.prefill(session)
    for _ in range(steps):
        bench.step()
    bench.core.cancel(events.request)
    assert events.finished.reason is FinishReason.CANCELLED
    assert session.sequence.num_computed == 8 * steps
    assert bench.manager.allocator.counts().reserved == 0
    bench.check(session)


def test_what_was_streamed_before_a_cancellation_is_the_content() -> None:
    bench = Bench()
    session = bench.chat({"role": "user", "content": "hi"})
    events = bench.generate(session, max_tokens=30, ignore_eos=True, stop=["never to be seen"])
    for _ in range(9):
        bench.step()
    bench.core.cancel(events.request)
    assert events.text == events.finished.content == session.transcript.messages[-1].content
    assert all(isinstance(e, TextDelta) for e in list(events)[1:-1])


def test_closing_a_running_session_cancels_and_gives_everything_back() -> None:
    bench = Bench(budget=StepBudget(8, 8, 8))
    session, other = bench.raw(some_ids(40)), bench.raw(some_ids(5, 1))
    events, company = bench.generate(session), bench.generate(other, max_tokens=4, ignore_eos=True)
    bench.step()
    bench.core.forget(session)
    assert events.finished.reason is FinishReason.CANCELLED
    assert session.state is SessionState.CLOSED
    bench.run()
    assert list(company.finished.tokens) == plain_greedy(some_ids(5, 1), 4)
    bench.core.forget(other)
    bench.core.check_invariants()
    counts = bench.manager.allocator.counts()
    assert (counts.active, counts.reserved) == (0, 0)


def test_everybody_can_be_failed_at_once() -> None:
    bench = Bench(budget=StepBudget(8, 8, 8))
    ends = [bench.generate(bench.raw(some_ids(20, n))) for n in range(3)]
    bench.step()
    bench.core.fail_all(Boom("all"))
    assert all(isinstance(end.error, Boom) for end in ends)
    assert bench.core.num_running == 0
    bench.core.check_invariants()


# -- limits and states -----------------------------------------------------------------------------------------------


def test_a_reply_ends_where_the_context_ends() -> None:
    bench = Bench(max_tokens=40)
    session = bench.raw(some_ids(30))
    finished = bench.reply(session, ignore_eos=True)
    assert finished.reason is FinishReason.LENGTH
    assert list(finished.tokens) == plain_greedy(some_ids(30), 10)
    assert session.sequence.num_tokens == 40
    bench.check(session)
    before = bench.state()
    with pytest.raises(ContextLengthExceededError, match="40"):
        bench.generate(session)
    with pytest.raises(ContextLengthExceededError):
        bench.handle(session).append_tokens([5])
    assert bench.state() == before


def test_the_last_free_token_of_the_context_can_be_generated() -> None:
    bench = Bench(max_tokens=40)
    session = bench.raw(some_ids(39))
    assert list(bench.reply(session, ignore_eos=True).tokens) == plain_greedy(some_ids(39), 1)


def test_a_pool_of_just_the_context_is_enough_for_it() -> None:
    bench = Bench(max_tokens=40, max_blocks=5, blocks_per_segment=2)
    session = bench.raw(some_ids(30))
    assert list(bench.reply(session, ignore_eos=True).tokens) == plain_greedy(some_ids(30), 10)


def test_what_would_be_too_long_is_refused_before_anything_changed() -> None:
    bench = Bench(max_tokens=60)
    session = bench.chat({"role": "user", "content": "hello"})
    before = bench.state()
    with pytest.raises(ContextLengthExceededError, match="60"):
        bench.handle(session).append({"role": "user", "content": "x" * 60})
    assert bench.state() == before
    raw = bench.raw(some_ids(50))
    before = bench.state()
    with pytest.raises(ContextLengthExceededError):
        bench.handle(raw).append_tokens(some_ids(11))
    assert bench.state() == before


def test_a_generation_prompt_that_does_not_leave_room_for_a_token_is_refused() -> None:
    bench = Bench()
    session = bench.chat({"role": "user", "content": "x" * 5})
    tokens = session.sequence.num_tokens
    prompt = len("<assistant\n")
    bench.parts.limits.max_tokens = tokens + prompt
    before = bench.state()
    with pytest.raises(ContextLengthExceededError):
        bench.generate(session)
    assert bench.state() == before
    bench.parts.limits.max_tokens += 1
    assert len(bench.reply(session, ignore_eos=True).tokens) == 1


def test_a_busy_session_takes_nothing_else() -> None:
    bench = Bench()
    session = bench.raw(some_ids(9))
    events = bench.generate(session, max_tokens=5, ignore_eos=True)
    bench.step()
    before = bench.state()
    for refused in (
        lambda: bench.generate(session),
        lambda: bench.prefill(session),
        lambda: bench.handle(session).append_tokens([5]),
        lambda: bench.core.fork(session, [None]),
        lambda: bench.handle(session).truncate(tokens=1),
    ):
        with pytest.raises(SessionBusyError, match=session.id):
            refused()
        assert bench.state() == before
    bench.run()
    assert list(events.finished.tokens) == plain_greedy(some_ids(9), 5)


def test_a_closed_session_takes_nothing() -> None:
    bench = Bench()
    session = bench.raw(some_ids(9), "gone")
    bench.core.forget(session)
    before = bench.state()
    for refused in (
        lambda: bench.generate(session),
        lambda: bench.prefill(session),
        lambda: bench.handle(session).append_tokens([5]),
        lambda: bench.core.fork(session, [None]),
        lambda: bench.handle(session).truncate(tokens=0),
    ):
        with pytest.raises(SessionClosedError, match="gone"):
            refused()
        assert bench.state() == before


def test_settings_that_the_sampler_refuses_do_not_leave_a_busy_session() -> None:
    bench = Bench()
    session = bench.raw(some_ids(9))
    with pytest.raises(InvalidInputError):
        bench.generate(session, seed=1.5)
    assert session.state is SessionState.IDLE


def test_a_model_that_breaks_its_contract_fails_only_its_own_step() -> None:
    def contract(number: int, batch: PackedBatch) -> BaseException | None:
        return EngineContractError("two attention calls are missing") if number == 1 else None

    bench = Bench(wrap=lambda engine: FaultyEngine(engine, contract))
    session = bench.raw(some_ids(9))
    events = bench.generate(session, max_tokens=2)
    bench.run()
    assert isinstance(events.error, EngineContractError)
    assert list(bench.reply(session, max_tokens=2).tokens) == plain_greedy(some_ids(9), 2, [2])
