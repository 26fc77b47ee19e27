"""What stretches of tokens mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvos.sessions.messages import Message

__all__ = ["BlockSpan", "Span", "SpanBlock", "SpanKind", "Transcript", "kind_of"]


class SpanKind(StrEnum):
    """What a span is to an agent."""

    SYSTEM = "system"
    TOOLS = "tools"
    MEMORY = "memory"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Span:
    """One message's tokens; spans follow each other without a gap.

    Attributes:
        id: number of the span within its session, from 0.
        start, end: token range, ``end`` excluded.
        text_end: characters of rendered text up to ``end``.
        version: what the caller calls this version of a prompt, a tool set or a memory.
    """

    id: int
    kind: SpanKind
    role: str
    start: int
    end: int
    text_end: int
    version: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SpanBlock:
    """A part of a span: slots ``first_slot`` to ``end_slot`` (excluded) of one block. Nothing is padded."""

    block: int
    first_slot: int
    end_slot: int


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """The reverse: what a block holds of one session. A block on a boundary belongs to several spans."""

    session: str
    span: Span
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation at one moment: what was said, the text it renders to, and which tokens stand for it.

    Attributes:
        messages: one per span; empty for a session of raw tokens.
        text: rendered text that the tokens up to the last span's end stand for.
        revision: of the sequence, at that moment.
    """

    messages: tuple[Message, ...] = ()
    spans: tuple[Span, ...] = ()
    text: str = ""
    revision: int = 0

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0


def kind_of(message: Message) -> SpanKind:
    """The kind that follows from a message's role."""
    if message.role == "assistant":
        return SpanKind.TOOL_CALL if message.has_tool_calls else SpanKind.ASSISTANT
    return {"system": SpanKind.SYSTEM, "user": SpanKind.USER, "tool": SpanKind.TOOL_RESULT}[message.role]
