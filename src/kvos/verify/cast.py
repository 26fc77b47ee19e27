"""The sessions that are open at a moment of a history, and the player's own account of what each ought to hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvos.runtime import Runtime, Session

__all__ = ["MAX_SESSIONS", "Cast", "Live", "LostBlocksError", "WrongTokensError"]

MAX_SESSIONS = 7
MAX_ASLEEP = 5
"""Descriptions of hibernated sessions that are kept for the next restart."""


class WrongTokensError(Exception):
    """A session's tokens are not what it was given."""


class LostBlocksError(Exception):
    """Blocks that a lower tier took are not there any more, or not as they were."""


@dataclass(slots=True)
class Live:
    """An open session.

    Attributes:
        ids: every token that it was given or gave.
        is_chat: it holds messages, not raw tokens.
    """

    session: Session
    ids: list[int]
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class _Asleep:
    """A session as it was when it was hibernated last."""

    ids: tuple[int, ...]
    is_chat: bool


class Cast:
    """Open sessions of one runtime, in the order in which they were opened, and those that a restart would bring."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._live: list[Live] = []
        self._asleep: dict[str, _Asleep] = {}
        self._names = 0

    def new_name(self) -> str:
        """A name that nothing had before."""
        self._names += 1
        return f"s{self._names}"

    def has_room(self, n: int = 1) -> bool:
        """Whether ``n`` sessions more may be open."""
        return len(self._live) + n <= MAX_SESSIONS

    def pick(self, number: int, *, chat: bool | None = None) -> Live | None:
        """A session by number; only one of messages, or only one of raw tokens, if ``chat`` says so."""
        choice = self.all(chat=chat)
        return choice[number % len(choice)] if choice else None

    def pick_all(self, numbers: Iterable[int], *, chat: bool | None = None) -> list[Live]:
        """The sessions of these numbers, each once."""
        picked = (self.pick(number, chat=chat) for number in numbers)
        return list({live.session.name: live for live in picked if live is not None}.values())

    def all(self, *, chat: bool | None = None) -> list[Live]:
        """Every session, or those of one kind."""
        return [live for live in self._live if chat is None or live.is_chat is chat]

    def open(self, *, is_chat: bool = False) -> Live:
        """A new empty session; the oldest one leaves if there are too many."""
        if not self.has_room():
            self.close(self._live[0])
        return self.enter(self._runtime.session(self.new_name()), [], is_chat=is_chat)

    def enter(self, session: Session, ids: Iterable[int], *, is_chat: bool) -> Live:
        """Take in a session that was opened elsewhere."""
        live = Live(session, list(ids), is_chat)
        self._live.append(live)
        return live

    def close(self, live: Live) -> None:
        """Close a session; it is not part of the cast any more."""
        self._live.remove(live)
        live.session.close()

    def close_longest(self) -> None:
        """Make room for others."""
        if self._live:
            self.close(max(self._live, key=lambda live: len(live.ids)))

    def hibernate(self, live: Live) -> int:
        """Have a session leave the device; returns how many full blocks it had there.

        Raises:
            LostBlocksError: not all of them are safe.
        """
        summary = live.session.hibernate()
        name = live.session.name
        self._asleep.pop(name, None)
        self._asleep[name] = _Asleep(tuple(live.ids), live.is_chat)
        if len(self._asleep) > MAX_ASLEEP:
            oldest = next(iter(self._asleep))
            self._runtime.forget_hibernated(oldest)
            del self._asleep[oldest]
        if summary.safe != summary.wanted:
            raise LostBlocksError(f"of {summary.wanted} blocks of {name}, {summary.safe} are on disk")
        return summary.wanted

    def move_to(self, runtime: Runtime) -> list[Live]:
        """Whoever was open has ended with the runtime before; resume what was hibernated, as it was then."""
        self._runtime = runtime
        self._live.clear()
        found = set(runtime.hibernated_sessions())
        if found != set(self._asleep):
            raise WrongTokensError(f"{sorted(found)} can be resumed, {sorted(self._asleep)} were hibernated")
        for name, asleep in self._asleep.items():
            self.enter(runtime.resume(name), asleep.ids, is_chat=asleep.is_chat)
            runtime.forget_hibernated(name)
        self._asleep.clear()
        return self.all()

    def check(self) -> None:
        """Nothing is as it should not be.

        Raises:
            WrongTokensError, LostBlocksError
            AssertionError: the cache contradicts itself.
        """
        self._runtime.check_invariants()
        for tier in self._runtime.tiers():
            if damaged := tier.usage.counters.get("damaged", 0):  # nobody damages any here
                raise LostBlocksError(f"{damaged} blocks in the {tier.name} tier are not what was stored")
        for live in self._live:
            held = live.session.tokens.tolist()
            if held != live.ids:
                raise WrongTokensError(f"{live.session.name} holds {held}, it was given {live.ids}")
