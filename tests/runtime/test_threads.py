"""Many threads on one runtime: nothing is lost, nobody hangs, and what the model says stays right."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvos
from kvos.errors import (
    ContextLengthExceededError,
    EngineStoppedError,
    InvalidInputError,
    OutOfBlocksError,
    SessionBusyError,
    SessionConflictError,
)
from kvos.serving import FinishReason
from serving.harness import assert_same_logits, plain_logits, some_ids

WAIT_S = 90


def run_all(works: list[Callable[[], object]]) -> None:
    """All at once, each on its own thread; the first error is raised."""
    start = threading.Barrier(len(works))

    def work(function: Callable[[], object]) -> object:
        start.wait(WAIT_S)
        return function()

    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work, function) for function in works]:
            future.result(timeout=WAIT_S)


def check(session: kvos.Session) -> None:
    ids = session.tokens.tolist()
    if ids:
        (twin,) = session.fork(1)
        try:
            assert_same_logits(twin.score([7]) if not session.messages else twin_logits(twin), [*ids, 7])
        finally:
            twin.close()


def twin_logits(twin: kvos.Session):  # type: ignore[no-untyped-def]
    """A chat's history as raw tokens, read through the same blocks."""
    raw = twin._parts.thread.call(lambda core: twin._parts.open_session(core, None, twin.tenant))
    handle = kvos.Session(twin._parts, raw)
    handle.append_tokens(twin.tokens)
    try:
        return handle.score([7])
    finally:
        handle.close()


def test_appends_of_many_threads_all_arrive_whole(runtime: kvos.Runtime) -> None:
    chat, raw = runtime.session("chat"), runtime.session("raw")

    def say(who: int) -> None:
        for number in range(6):
            runtime.get("chat").append(
                [{"role": "user", "content": f"{who}:{number}"}, {"role": "user", "content": "."}]
            )
            raw.append_tokens([10 + who] * 3)

    run_all([lambda who=who: say(who) for who in range(8)])
    contents = [message["content"] for message in chat.messages]
    assert contents[1::2] == ["."] * 48
    for who in range(8):
        mine = [content for content in contents[::2] if content.startswith(f"{who}:")]
        assert mine == [f"{who}:{number}" for number in range(6)]
    assert raw.tokens.reshape(-1, 3).min(1).tolist() == raw.tokens.reshape(-1, 3).max(1).tolist()
    assert raw.report().tokens == 8 * 6 * 3
    runtime.check_invariants()


def test_of_many_who_start_a_reply_one_gets_it(runtime: kvos.Runtime) -> None:
    session = runtime.session()
    session.append_tokens(some_ids(10))
    replies: list[kvos.ReplyStream] = []
    refused: list[SessionBusyError] = []
    hold = threading.Event()
    blocked = threading.Thread(target=lambda: runtime.inspect(lambda core: hold.wait(WAIT_S)))
    blocked.start()

    def start() -> None:
        try:
            replies.append(session.generate(max_tokens=200, ignore_eos=True))
        except SessionBusyError as error:
            refused.append(error)

    threading.Timer(0.2, hold.set).start()
    run_all([start] * 6)
    blocked.join()
    assert (len(replies), len(refused)) == (1, 5)
    replies[0].cancel()
    replies[0].result()
    check(session)


def test_scores_of_two_threads_never_mix(runtime: kvos.Runtime) -> None:
    session = runtime.session()
    session.append_tokens(some_ids(10))
    session.prefill()
    lock, scored = threading.Lock(), []

    def score(who: int) -> None:
        done = 0
        while done < 4:
            try:
                logits = session.score([20 + who, 30 + who, 40 + who])
            except SessionBusyError:
                continue
            done += 1
            with lock:
                scored.append((who, logits))

    run_all([lambda who=who: score(who) for who in range(3)])
    tokens = session.tokens.tolist()
    assert len(tokens) == 10 + 3 * 12
    order = [token - 20 for token in tokens[10::3]]
    expected = plain_logits(tokens)
    for who in range(3):
        places = [10 + 3 * place for place, speaker in enumerate(order) if speaker == who]
        mine = [logits for speaker, logits in scored if speaker == who]
        for place, logits in zip(places, mine, strict=True):
            assert (logits - expected[place : place + 3]).abs().max() < 1e-6 * expected.abs().max()


class Agent:
    """One thread's random life."""

    def __init__(self, runtime: kvos.Runtime, seed: int, shared: list[kvos.Session]) -> None:
        self.runtime = runtime
        self.random = random.Random(seed)
        self.shared = shared
        self.own = [runtime.session()]
        self.own[0].append_tokens(some_ids(self.random.randint(1, 30)))

    def live(self, turns: int) -> None:
        for _ in range(turns):
            session = self.random.choice(self.own if self.random.random() < 0.6 else self.shared)
            act = self.random.choice([self.add, self.reply, self.reply, self.fork, self.cut, self.close, self.look])
            try:
                act(session)
            except (SessionBusyError, SessionConflictError):
                assert session in self.shared
            except (OutOfBlocksError, ContextLengthExceededError):
                with contextlib.suppress(SessionBusyError, InvalidInputError):
                    session.truncate(**({"messages": 1} if session.messages else {"tokens": 5}))

    def add(self, session: kvos.Session) -> None:
        if session.messages:
            session.append({"role": "user", "content": self.random.choice(["yes", "no", "é"])})
        else:
            session.append_tokens(some_ids(self.random.randint(1, 12), self.random.randint(0, 2)))

    def reply(self, session: kvos.Session) -> None:
        reply = session.generate(max_tokens=self.random.randint(1, 10), ignore_eos=True)
        if self.random.random() < 0.3:
            for _ in reply:
                break
        result = reply.result()
        if session in self.own:
            now = session.tokens.tolist()
            said = list(result.tokens)
            assert now[len(now) - len(said) :] == said
            expected = plain_logits(now)[len(now) - len(said) - 1 : -1].argmax(-1).tolist() if said else []
            assert said == expected
            assert said or result.finish_reason is FinishReason.CANCELLED

    def fork(self, session: kvos.Session) -> None:
        if len(self.own) < 4:
            self.own += session.fork(self.random.randint(1, 2))

    def cut(self, session: kvos.Session) -> None:
        if session in self.own and not session.messages:
            session.truncate(tokens=self.random.randint(1, session.report().tokens))

    def close(self, session: kvos.Session) -> None:
        if session in self.own and len(self.own) > 1:
            session.close()
            self.own.remove(session)

    def look(self, session: kvos.Session) -> None:
        assert session.name in {report.name for report in self.runtime.sessions()}
        session.span_blocks()
        self.runtime.blocks()
        self.runtime.check_invariants()


@pytest.mark.parametrize("blocks", [200, 40])
def test_threads_at_random_get_right_results(
    open_toy: Callable[..., kvos.Runtime], rounds: Callable[[int, int], int], blocks: int
) -> None:
    for seed in range(rounds(1, 40)):
        runtime = open_toy(cache_bytes=blocks * 8 * 1536, max_context_tokens=250, max_batch_tokens=48, max_running=6)
        chat = runtime.session("chat", messages={"role": "user", "content": "hello"})
        raw = runtime.session("raw")
        raw.append_tokens(some_ids(20))
        agents = [Agent(runtime, 100 * seed + number, [chat, raw]) for number in range(4)]
        run_all([lambda agent=agent: agent.live(25) for agent in agents])
        runtime.check_invariants()
        assert runtime.stats().running == 0
        mine = [session for agent in agents for session in agent.own]
        while mine:
            session = mine.pop()
            try:
                check(session)
            except OutOfBlocksError:
                assert mine or blocks < 100
            session.close()
        check(raw)
        check(chat)
        for session in (chat, raw):
            session.close()
        counts = runtime.stats().blocks
        assert (counts.active, counts.reserved) == (0, 0)
        runtime.close()


def test_closing_under_load_hangs_nobody(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy()
    shared = runtime.session()
    shared.append_tokens(some_ids(10))

    def live(seed: int) -> None:
        with pytest.raises(EngineStoppedError):
            Agent(runtime, seed, [shared]).live(100_000)

    threading.Timer(0.7, runtime.close).start()
    run_all([lambda seed=seed: live(seed) for seed in range(4)])
