"""What can be done to a population of sessions, as plain values that can be listed, replayed and removed one by one.

An operation names a session by a number that is taken modulo the sessions that are open when it runs, so a history
stays playable whatever is removed from it. An operation that finds nothing to work on does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum

__all__ = [
    "ChatTurn",
    "Close",
    "Compact",
    "Extend",
    "Fork",
    "Generate",
    "Hibernate",
    "Left",
    "Load",
    "Migrate",
    "Open",
    "Operation",
    "Prewarm",
    "Probe",
    "Restart",
    "Save",
    "SideBySide",
    "Truncate",
    "Twin",
    "simpler",
]


@dataclass(frozen=True, slots=True)
class Open:
    """A new session with the first ``tokens`` tokens of a text; the first ``silent`` of them bring no logits."""

    text: int
    tokens: int
    silent: int

    def __str__(self) -> str:
        return f"open a session on {self.tokens} tokens of text {self.text}, logits of {self.tokens - self.silent}"


@dataclass(frozen=True, slots=True)
class Twin:
    """A new session that begins like another one (whose blocks it should find) and goes on with tokens of its own."""

    session: int
    keep_permille: int
    salt: int
    tokens: int

    def __str__(self) -> str:
        share = f"{self.keep_permille / 10:g} %"
        return f"open a twin of session {self.session}: {share} of its tokens, then {self.tokens} of salt {self.salt}"


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens behind a session; the first ``silent`` of them bring no logits."""

    session: int
    salt: int
    tokens: int
    silent: int

    def __str__(self) -> str:
        wanted = self.tokens - self.silent
        return f"extend session {self.session} by {self.tokens} tokens of salt {self.salt}, logits of {wanted}"


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several sessions, each extended piece by piece from a thread of its own; by equal tokens if ``salt`` is even."""

    sessions: tuple[int, ...]
    salt: int
    pieces: tuple[int, ...]

    def __str__(self) -> str:
        pieces = " + ".join(map(str, self.pieces))
        return f"extend sessions {_numbers(self.sessions)} side by side by {pieces} tokens of salt {self.salt}"


@dataclass(frozen=True, slots=True)
class Generate:
    """Greedy replies of several sessions at once."""

    sessions: tuple[int, ...]
    tokens: int

    def __str__(self) -> str:
        return f"generate {self.tokens} tokens in sessions {_numbers(self.sessions)} side by side"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A message through the chat template and a greedy reply, in a session of messages; a new one if there is none."""

    session: int
    message: int
    tokens: int

    def __str__(self) -> str:
        return f"chat session {self.session}: message {self.message}, reply of {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Fork:
    """Children of a session."""

    session: int
    children: int

    def __str__(self) -> str:
        return f"fork session {self.session} into {self.children}"


@dataclass(frozen=True, slots=True)
class Truncate:
    """Back to the first part of a session: at any token, or at a message in a session of messages."""

    session: int
    keep_permille: int

    def __str__(self) -> str:
        return f"truncate session {self.session} to {self.keep_permille / 10:g} % of its tokens"


@dataclass(frozen=True, slots=True)
class Close:
    """The end of a session; its full blocks stay findable."""

    session: int

    def __str__(self) -> str:
        return f"close session {self.session}"


@dataclass(frozen=True, slots=True)
class Save:
    """A session to a file."""

    session: int

    def __str__(self) -> str:
        return f"save session {self.session}"


@dataclass(frozen=True, slots=True)
class Load:
    """One of the latest files as a new session."""

    file: int

    def __str__(self) -> str:
        return f"load saved file {self.file}"


@dataclass(frozen=True, slots=True)
class Migrate:
    """A session through a file to a runtime with another block size, extended there, and back as a new session."""

    session: int
    salt: int
    tokens: int

    def __str__(self) -> str:
        where = "a runtime with another block size"
        return f"move a copy of session {self.session} to {where}, extend it there by {self.tokens} tokens, and back"


class Left(Enum):
    """Where the blocks of hibernated sessions are left. The device forgets all that nobody holds, but for DEVICE."""

    DEVICE = "on the device, in host memory and on disk"
    BELOW = "in host memory and on disk"
    HOST = "in host memory alone"
    DISK = "on disk alone"
    IN_TURN = "in host memory and on disk in turn"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Hibernate:
    """Sessions leave the device, and stay open; whoever touches them next brings them back from where they are left."""

    sessions: tuple[int, ...]
    left: Left

    def __str__(self) -> str:
        return f"hibernate sessions {_numbers(self.sessions)}, their blocks left {self.left.value}"


@dataclass(frozen=True, slots=True)
class Prewarm:
    """Sessions are to come back ahead of need; what follows may find them in the midst of it."""

    sessions: tuple[int, ...]

    def __str__(self) -> str:
        return f"prewarm sessions {_numbers(self.sessions)}"


@dataclass(frozen=True, slots=True)
class Restart:
    """The runtime is closed, and another one opened over the same home; all that was ever hibernated is resumed.

    Attributes:
        sessions: hibernated before; others that never were end here.
        step: 0 for the same block size, else how many further in the list of them.
        warm: sessions that return are computed at once, and not when they are touched next.
    """

    sessions: tuple[int, ...]
    step: int
    warm: bool

    def __str__(self) -> str:
        size = "another" if self.step else "the same"
        ending = " and compute them" if self.warm else ""
        sessions = _numbers(self.sessions)
        return f"hibernate sessions {sessions}, restart with {size} block size, resume what was hibernated{ending}"


@dataclass(frozen=True, slots=True)
class Compact:
    """Tables are scattered and moved together again, between the steps of greedy replies of sessions, too."""

    sessions: tuple[int, ...]
    tokens: int

    def __str__(self) -> str:
        return f"scatter and compact tables while sessions {_numbers(self.sessions)} generate {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Probe:
    """One token more in every session: its logits depend on everything that is cached. Ends a round."""

    salt: int
    close: bool

    def __str__(self) -> str:
        ending = ", then close all" if self.close else ""
        return f"extend every session by one token{ending}"


Operation = (
    Open
    | Twin
    | Extend
    | SideBySide
    | Generate
    | ChatTurn
    | Fork
    | Truncate
    | Close
    | Save
    | Load
    | Migrate
    | Hibernate
    | Prewarm
    | Restart
    | Compact
    | Probe
)


def simpler(operation: Operation) -> Iterator[Operation]:
    """The same operation with less in it: fewer tokens, children, sessions, one block size; strongest first."""
    floors = {"tokens": 1, "silent": 0, "children": 1, "step": 0}
    for field in fields(operation):
        value = getattr(operation, field.name)
        if field.name in floors:
            low = floors[field.name]
            for smaller in sorted({low, (value + low) // 2, value - 1}):
                if low <= smaller < value:
                    yield _with(operation, field.name, smaller)
        elif field.name in ("sessions", "pieces") and len(value) > 1:
            yield _with(operation, field.name, value[:1])
            yield _with(operation, field.name, value[:-1])


def _with(operation: Operation, field: str, value: object) -> Operation:
    changed: Operation = replace(operation, **{field: value})  # type: ignore[arg-type]  # the field is one of its own
    if isinstance(changed, Open | Extend) and changed.silent >= changed.tokens:
        return replace(changed, silent=changed.tokens - 1)
    return changed


def _numbers(sessions: tuple[int, ...]) -> str:
    return ", ".join(map(str, sessions))
