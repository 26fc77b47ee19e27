"""Random histories of sessions on a pool that is too small for them, with a real model, against runs without any cache.

Everything at once: appends, replies side by side, forks, truncations, cancellations, closes, exports and imports, in
two tenants; blocks run out and are reclaimed. After each step the bookkeeping must agree with itself and with what each
session was told; replies must be the plain model's likeliest tokens, and in the end so must be every session's next
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvos.errors import ContextLengthExceededError, OutOfBlocksError
from kvos.runtime.archive import export_session, import_session
from kvos.serving import Failed, StepBudget
from kvos.sessions import CacheSession, SavedSession, SessionState
from serving.harness import Bench, Events, assert_same_logits, plain_logits, some_ids

MAX_BLOCKS, MOST_SESSIONS, MOST_TOKENS = 22, 6, 100
TENANTS = ("alice", "bob")
TEXTS = (some_ids(MOST_TOKENS), some_ids(20) + some_ids(MOST_TOKENS, 1), [7] * MOST_TOKENS)
texts = st.integers(0, len(TEXTS) - 1)
lengths = st.integers(1, 40)
contents = st.sampled_from(["hi", "a longer question", "é", "why?"])


@dataclass(eq=False)
class Expected:
    """One session, and what it should be."""

    session: CacheSession
    tokens: list[int] = field(default_factory=list)
    text: int = 0
    running: Events | None = None
    limit: int = 0

    @property
    def is_chat(self) -> bool:
        return bool(self.session.transcript.messages)

    @property
    def is_idle(self) -> bool:
        return self.session.state is SessionState.IDLE


class SessionMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    archive = Bundle("archive")

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(
            max_blocks=MAX_BLOCKS, blocks_per_segment=9, max_tokens=MOST_TOKENS, budget=StepBudget(24, 10, 4)
        )
        self.live: list[Expected] = []
        self.numbers = count()

    def room(self) -> bool:
        return len(self.live) < MOST_SESSIONS

    def keep(self, expected: Expected) -> Expected:
        self.live.append(expected)
        return expected

    # -- opening -----------------------------------------------------------------------------------------------------

    @initialize(target=sessions, text=texts, n=lengths)
    def first(self, text: int, n: int) -> Expected:
        return self.open(TENANTS[0], text, n)

    @precondition(room)
    @rule(target=sessions, tenant=st.sampled_from(TENANTS), text=texts, n=lengths)
    def open(self, tenant: str, text: int, n: int) -> Expected:
        session = self.bench.raw(TEXTS[text][:n], tenant=tenant)
        return self.keep(Expected(session, TEXTS[text][:n], text))

    @precondition(room)
    @rule(target=sessions, tenant=st.sampled_from(TENANTS), content=contents)
    def open_chat(self, tenant: str, content: str) -> Expected:
        session = self.bench.chat({"role": "user", "content": content}, tenant=tenant)
        return self.keep(Expected(session, session.sequence.tokens().tolist()))

    # -- changing ----------------------------------------------------------------------------------------------------

    @rule(one=sessions, n=lengths)
    def append(self, one: Expected, n: int) -> None:
        if not one.is_idle or one.is_chat:
            return
        more = TEXTS[one.text][len(one.tokens) : len(one.tokens) + n] or [9] * n
        self.try_to(one, lambda: self.bench.handle(one.session).append_tokens(more))
        if one.session.sequence.num_tokens > len(one.tokens):
            one.tokens += more

    @rule(one=sessions, content=contents)
    def say(self, one: Expected, content: str) -> None:
        if one.is_idle and one.is_chat:
            self.try_to(one, lambda: self.bench.handle(one.session).append({"role": "user", "content": content}))
            grown = one.session.sequence.tokens().tolist()
            assert grown[: len(one.tokens)] == one.tokens, "this template never rewrites"
            one.tokens = grown

    @rule(one=sessions, part=st.floats(0, 1))
    def truncate(self, one: Expected, part: float) -> None:
        if not one.is_idle:
            return
        if one.is_chat:
            ends = [0, *(span.end for span in one.session.transcript.spans)]
            keep = int(part * (len(ends) - 1))
            self.bench.handle(one.session).truncate(messages=keep)
            one.tokens = one.tokens[: ends[keep]]
        else:
            keep = int(part * len(one.tokens))
            self.bench.handle(one.session).truncate(tokens=keep)
            one.tokens = one.tokens[:keep]

    @precondition(room)
    @rule(target=sessions, parent=sessions)
    def fork(self, parent: Expected) -> Expected:
        if not parent.is_idle:
            return parent
        allocated = self.bench.count("blocks_allocated")
        (child,) = self.bench.core.fork(parent.session, [None])
        assert self.bench.count("blocks_allocated") == allocated, "a fork copies nothing"
        return self.keep(Expected(child, list(parent.tokens), parent.text))

    @rule(one=consumes(sessions))
    def close(self, one: Expected) -> None:
        if one in self.live:  # a fork of a busy session gave the parent again
            self.live.remove(one)
            self.bench.core.forget(one.session)

    # -- computing ---------------------------------------------------------------------------------------------------

    @rule(one=sessions, n=st.integers(1, 12))
    def generate(self, one: Expected, n: int) -> None:
        if one.is_idle and one.tokens:
            self.start(one, lambda: self.bench.generate(one.session, max_tokens=n))

    @rule(one=sessions, last=st.none() | st.integers(1, 30))
    def prefill(self, one: Expected, last: int | None) -> None:
        if one.is_idle and one.tokens:
            start = None if last is None else max(0, len(one.tokens) - last)
            self.start(one, lambda: self.bench.prefill(one.session, start))

    def start(self, one: Expected, begin: Callable[[], Events]) -> None:
        def remember() -> None:
            one.running = begin()

        self.try_to(one, remember)

    @rule(n=st.integers(1, 6))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.bench.step()
            self.collect()

    @rule(one=sessions)
    def cancel(self, one: Expected) -> None:
        if one.running is not None:
            self.bench.core.cancel(one.running.request)
            self.collect()

    def try_to(self, one: Expected, work: Callable[[], object]) -> None:
        """What is refused for lack of room must leave the session as it was."""
        session = one.session
        before = (session.transcript.messages, session.transcript.spans, session.sequence.tokens().tolist())
        try:
            work()
        except (OutOfBlocksError, ContextLengthExceededError):
            after = (session.transcript.messages, session.transcript.spans, session.sequence.tokens().tolist())
            assert after == before
            assert one.is_idle

    def collect(self) -> None:
        """Check what has ended."""
        for one in self.live:
            if one.running is None or not one.running.is_over:
                continue
            events, one.running = one.running, None
            now = one.session.sequence.tokens().tolist()
            if isinstance(events[-1], Failed):
                assert isinstance(events.error, OutOfBlocksError), events.error
            elif events.finished.logits is not None:
                scored = events.finished.logits
                covered = now[: len(now) - one.session.sequence.num_pending]
                assert_same_logits(scored, covered)
            if len(now) > len(one.tokens):
                self.check_reply(one, events, now)
            one.tokens = now

    @staticmethod
    def check_reply(one: Expected, events: Events, now: list[int]) -> None:
        assert now[: len(one.tokens)] == one.tokens
        if isinstance(events[-1], Failed):
            return
        said = list(events.finished.tokens)
        prompt = now[: len(now) - len(said)]
        assert now[len(prompt) :] == said
        expected = plain_logits(now)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert said == expected

    # -- saving ------------------------------------------------------------------------------------------------------

    @rule(target=archive, one=sessions)
    def export(self, one: Expected) -> tuple[SavedSession, int] | None:
        if not one.is_idle:
            return None
        return export_session(self.bench.core, one.session, self.bench.parts, "toy"), one.text

    @precondition(room)
    @rule(target=sessions, saved=archive, tenant=st.sampled_from(TENANTS), other=sessions)
    def load(self, saved: tuple[SavedSession, int] | None, tenant: str, other: Expected) -> Expected:
        if saved is None:
            return other
        name = f"loaded {next(self.numbers)}"
        with suppress(OutOfBlocksError):
            session = import_session(self.bench.core, saved[0], self.bench.parts, name, tenant)
            return self.keep(Expected(session, saved[0].tokens.tolist(), saved[1]))
        return other

    # -- what must always hold ---------------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        self.bench.core.check_invariants()
        assert len(self.bench.core.sessions) == len(self.live)
        for one in self.live:
            assert one.is_idle == (one.running is None)
            if one.is_idle:
                assert one.session.sequence.tokens().tolist() == one.tokens
                if one.is_chat:
                    assert self.bench.core._decode(one.tokens) == one.session.transcript.text

    @invariant()
    def tenants_share_no_block(self) -> None:
        held = {tenant: set[int]() for tenant in TENANTS}
        for one in self.live:
            held[one.session.tenant].update(self.bench.table(one.session))
        assert not held["alice"] & held["bob"]

    @rule(one=sessions)
    def compare(self, one: Expected) -> None:
        """Only while nothing else runs, since this takes steps."""
        if one in self.live and not self.bench.core.num_running and one.tokens:
            with suppress(OutOfBlocksError):
                self.bench.check(one.session)

    def teardown(self) -> None:
        """Let everything end, then compare one after the other, closing what was compared to make room."""
        self.bench.run()
        self.collect()
        while self.live:
            self.everything_agrees()
            checked = [one for one in self.live if self.is_checked(one)] or self.live[:1]
            for one in checked:
                self.live.remove(one)
                self.bench.core.forget(one.session)
        counts = self.bench.manager.allocator.counts()
        assert (counts.active, counts.reserved) == (0, 0)

    def is_checked(self, one: Expected) -> bool:
        with suppress(OutOfBlocksError):
            self.bench.check(one.session)
            return True
        return False


TestSessionMachine = SessionMachine.TestCase
