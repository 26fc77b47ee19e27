"""One agent's conversation over one sequence: what its tokens mean, and which blocks they are in.

Knows messages, spans and the sequence; knows no tensors and does no I/O. Engine thread only, but for ``transcript``
and ``state``, which are replaced as a whole and may be read from any thread.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from enum import Enum

import numpy as np

from kvos.errors import (
    ContextLengthExceededError,
    InvalidInputError,
    InvalidTokenError,
    SessionBusyError,
    SessionClosedError,
    SessionConflictError,
)
from kvos.sequences import SequenceCache
from kvos.sessions.messages import Message
from kvos.sessions.rendering import Extension
from kvos.sessions.spans import BlockSpan, Span, SpanBlock, SpanKind, Transcript
from kvos.types import SessionId, TokenIds

__all__ = ["CacheSession", "SessionLimits", "SessionState"]


class SessionState(Enum):
    """What a session may do now."""

    IDLE = "idle"
    BUSY = "busy"
    """A generation or a prefill runs on it."""
    CLOSED = "closed"


class SessionLimits:
    """What a session's model can take.

    Args:
        max_tokens: the longest sequence, in tokens.
        vocab_size: token ids are below this.
        declared: the length that positions are computed for, where they depend on it; by default ``max_tokens``. It
            stays when the sequence must end sooner, for want of blocks.
    """

    __slots__ = ("declared", "max_tokens", "vocab_size")

    def __init__(self, max_tokens: int, vocab_size: int, declared: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.declared = max_tokens if declared is None else declared


class CacheSession:
    """Spans over a sequence. Every verb checks first and changes nothing if it raises.

    ``turn`` is for callers, on any thread: who renders messages holds it until they are applied, so that two callers do
    not make each other's rendering void over and over. ``keeping`` is held while the session is written to a file, so
    that a slow caller does not put an older state in place of a newer one. The engine thread never takes either.
    ``described`` is the newest revision that a hibernation has written. ``is_named`` says that its caller chose the
    name, and may come back for it. ``is_swapped_out`` says that it has left the device since its last request.
    ``saved_kv_unusable`` tells the next request that the session was loaded, but not its keys and values.
    """

    def __init__(
        self,
        session_id: SessionId,
        sequence: SequenceCache,
        limits: SessionLimits,
        *,
        tenant: str = "default",
        parent: SessionId | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.id = session_id
        self.sequence = sequence
        self.limits = limits
        self.tenant = tenant
        self.parent = parent
        self.transcript = Transcript(revision=sequence.revision) if transcript is None else transcript
        self.state = SessionState.IDLE
        self.turn = threading.Lock()
        self.keeping = threading.Lock()
        self.described = -1
        self.saved_kv_unusable = False
        self.is_named = False
        self.is_swapped_out = False
        self._lost_tokens = 0
        self._stamp()

    # -- adding --------------------------------------------------------------------------------------------------

    def apply(self, extension: Extension) -> int:
        """Take over a rendered extension; returns how many held tokens had to go for it.

        Raises:
            SessionConflictError: the session has changed since the extension was rendered.
            InvalidTokenError: the tokenizer gave an id outside the vocabulary.
            ContextLengthExceededError: it would be longer than the model's context.
        """
        self.check_idle()
        self._check_vocabulary(extension.tokens)
        if extension.revision != self.sequence.revision:
            raise SessionConflictError(f"session {self.id} has changed meanwhile; render the messages again")
        self._check_length(extension.keep + len(extension.tokens))
        common = _common_prefix(extension.tokens, self.sequence.tokens(extension.keep))
        lost = self.sequence.num_tokens - extension.keep - common
        if lost:
            self.sequence.truncate(extension.keep + common)
        self.sequence.append(extension.tokens[common:])
        self.transcript = extension.transcript
        self._stamp()
        self._lost_tokens += lost
        return lost

    def take_lost_tokens(self) -> int:
        """Held tokens that had to go since the last call, because the template rewrote them."""
        lost, self._lost_tokens = self._lost_tokens, 0
        return lost

    def append_tokens(self, tokens: TokenIds, kind: SpanKind, version: str | None = None) -> None:
        """Add raw tokens as one span, to a session that holds no chat messages.

        Raises:
            InvalidInputError: no tokens, or the session holds messages.
            InvalidTokenError: an id outside the vocabulary.
            ContextLengthExceededError: it would be longer than the model's context.
        """
        self.check_idle()
        self._check_raw()
        if len(tokens) == 0:
            raise InvalidInputError(f"no tokens to append to session {self.id}")
        self._check_vocabulary(tokens)
        start = self.sequence.num_tokens
        self._check_length(start + len(tokens))
        self.sequence.append(tokens)
        self._add_span(kind, kind.value, start, start + len(tokens), version)

    def restore(self, transcript: Transcript, tokens: TokenIds) -> None:
        """Fill an empty session with what another one was; nothing is computed yet."""
        self.check_idle()
        self.sequence.append(tokens)
        self.transcript = transcript
        self._stamp()

    def swap_out(self, revision: int) -> bool:
        """Give the blocks back and keep the tokens; False if those have changed since ``revision``: all stays."""
        self.check_idle()
        if self.sequence.revision != revision:
            return False
        self.sequence.swap_out()
        self.is_swapped_out = True
        return True

    # -- a running generation ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the session busy with something that adds no tokens.

        Raises:
            InvalidInputError: the session holds nothing to compute.
        """
        self.check_idle()
        if self.sequence.num_tokens == 0:
            raise InvalidInputError(f"session {self.id} is empty; append a message first")
        self.state = SessionState.BUSY

    def begin_reply(self, prompt: Extension | None) -> int:
        """Make the session busy with a reply: an open assistant span at the end.

        Args:
            prompt: the rendered generation prompt, which is that span's beginning; None in a session of raw tokens.

        Returns:
            How many held tokens had to go, because the template rewrote them.

        Raises:
            ContextLengthExceededError: there is no room for a single generated token.
            InvalidInputError: the session is empty, or holds messages and no prompt was rendered.
        """
        self.check_idle()
        if self.sequence.num_tokens == 0:
            raise InvalidInputError(f"session {self.id} is empty; append a message first")
        lost = 0
        if prompt is None:
            self._check_raw()
            end = self.sequence.num_tokens
            self._check_length(end + 1)
            self._add_span(SpanKind.ASSISTANT, "assistant", end, end)
        else:
            self._check_length(prompt.keep + len(prompt.tokens) + 1)
            lost = self.apply(prompt)
        self.state = SessionState.BUSY
        return lost

    def extend_reply(self, token: int) -> None:
        """One generated token, at the end of the open span."""
        self.sequence.append(np.array([token], np.int32))

    def end_reply(self, content: str, text: str, keep: int) -> None:
        """Close the open span: its message says ``content``, ``keep`` tokens of the sequence remain and stand for
        ``text`` behind the generation prompt. A reply without tokens leaves no trace."""
        reply = self.transcript.spans[-1]
        if keep < self.sequence.num_tokens:
            self.sequence.truncate(keep)
        if keep <= reply.end and not content:
            self.drop_reply()
            return
        messages = self.transcript.messages
        if messages:
            messages = (*messages, Message("assistant", content))
        rendered = self.transcript.text + text
        reply = replace(reply, end=keep, text_end=len(rendered))
        self.transcript = Transcript(messages, (*self.transcript.spans[:-1], reply), rendered)
        self._stamp()
        self.state = SessionState.IDLE  # last: other threads read the transcript once they see it

    def drop_reply(self) -> None:
        """Take the open span back, tokens and all."""
        self._drop_spans(len(self.transcript.spans) - 1)
        self.state = SessionState.IDLE

    def end(self) -> None:
        """The pair of ``begin`` where no reply was opened."""
        self.state = SessionState.IDLE

    # -- forks, truncation, end ----------------------------------------------------------------------------------

    def fork(self, session_id: SessionId) -> CacheSession:
        """A child with the same history over the same blocks."""
        self.check_idle()
        child = self.sequence.fork(label=f"session {session_id}")
        return CacheSession(
            session_id, child, self.limits, tenant=self.tenant, parent=self.id, transcript=self.transcript
        )

    def truncate_spans(self, keep: int) -> None:
        """Keep the first ``keep`` spans (messages).

        Raises:
            InvalidInputError: negative, or more than there are.
        """
        self.check_idle()
        if not 0 <= keep <= len(self.transcript.spans):
            raise InvalidInputError(
                f"cannot keep {keep} messages of session {self.id}; it has {len(self.transcript.spans)}"
            )
        self._drop_spans(keep)

    def truncate_tokens(self, keep: int) -> None:
        """Keep the first ``keep`` tokens; in a session of messages only at the end of one.

        Raises:
            InvalidInputError: negative, more than there are, or inside a message.
        """
        self.check_idle()
        spans = self.transcript.spans
        if not 0 <= keep <= self.sequence.num_tokens:
            raise InvalidInputError(
                f"cannot keep {keep} tokens of session {self.id}; it has {self.sequence.num_tokens}"
            )
        whole = sum(span.end <= keep for span in spans)
        cut = whole < len(spans) and spans[whole].start < keep
        if cut and self.transcript.messages:
            near = spans[whole]
            raise InvalidInputError(
                f"token {keep} is inside message {whole} ({near.role}) of session {self.id}; "
                f"keep {near.start} or {near.end} tokens"
            )
        self._drop_spans(whole, partial=(replace(spans[whole], end=keep),) if cut else ())

    def _drop_spans(self, keep: int, partial: tuple[Span, ...] = ()) -> None:
        kept = self.transcript.spans[:keep] + partial
        self.sequence.truncate(kept[-1].end if kept else 0)
        text = self.transcript.text[: kept[-1].text_end if kept else 0]
        self.transcript = Transcript(self.transcript.messages[:keep], kept, text)
        self._stamp()

    def close(self) -> None:
        """Give the blocks back. Idempotent."""
        self.state = SessionState.CLOSED
        self.sequence.release()

    # -- the maps ------------------------------------------------------------------------------------------------

    def span_blocks(self, span: Span) -> tuple[SpanBlock, ...]:
        """Blocks and slot ranges that hold the computed tokens of ``span``."""
        size = self.sequence.block_size
        end = min(span.end, self.sequence.num_computed)
        table = self.sequence.block_table()
        parts: list[SpanBlock] = []
        for i in range(span.start // size, -(-end // size) if end > span.start else 0):
            first, last = max(span.start, i * size), min(end, (i + 1) * size)
            parts.append(SpanBlock(int(table[i]), first - i * size, last - i * size))
        return tuple(parts)

    def blocks_by_span(self) -> dict[int, tuple[SpanBlock, ...]]:
        """Dialogue span to blocks, by span id."""
        return {span.id: self.span_blocks(span) for span in self.transcript.spans}

    def blocks_by_version(self) -> dict[str, tuple[SpanBlock, ...]]:
        """System prompt version to the blocks that hold it, for the spans that name one."""
        found: dict[str, tuple[SpanBlock, ...]] = {}
        for span in self.transcript.spans:
            if span.version is not None:
                found[span.version] = found.get(span.version, ()) + self.span_blocks(span)
        return found

    def blocks_by_tool_message(self) -> dict[int, tuple[SpanBlock, ...]]:
        """Tool set, tool call and tool result spans to their blocks, by span id."""
        kinds = (SpanKind.TOOLS, SpanKind.TOOL_CALL, SpanKind.TOOL_RESULT)
        return {span.id: self.span_blocks(span) for span in self.transcript.spans if span.kind in kinds}

    def spans_in_block(self, block: int) -> tuple[BlockSpan, ...]:
        """The reverse: spans of this session that have tokens in ``block``, with their token ranges there."""
        size = self.sequence.block_size
        places = np.flatnonzero(self.sequence.block_table() == block)
        if len(places) == 0:
            return ()
        first = int(places[0]) * size
        last = min(first + size, self.sequence.num_computed)
        return tuple(
            BlockSpan(self.id, span, max(span.start, first), min(span.end, last))
            for span in self.transcript.spans
            if max(span.start, first) < min(span.end, last)
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raises SessionClosedError or SessionBusyError unless the session may be changed now."""
        if self.state is SessionState.CLOSED:
            raise SessionClosedError(f"session {self.id} is closed")
        if self.state is SessionState.BUSY:
            raise SessionBusyError(f"session {self.id} is generating; wait for the reply or cancel it")

    def _check_raw(self) -> None:
        if self.transcript.messages:
            raise InvalidInputError(f"session {self.id} holds chat messages; raw tokens cannot be mixed with them")

    def _check_vocabulary(self, tokens: TokenIds) -> None:
        outside = tokens[(tokens < 0) | (tokens >= self.limits.vocab_size)]
        if len(outside):
            raise InvalidTokenError(
                f"token id {int(outside[0])} is outside the model's vocabulary of {self.limits.vocab_size} tokens; "
                "tokenizer and model must belong together"
            )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.limits.max_tokens:
            raise ContextLengthExceededError(
                f"session {self.id} would hold {num_tokens} tokens; the context is {self.limits.max_tokens}. "
                "Truncate it, or fork from an earlier message."
            )

    def _add_span(self, kind: SpanKind, role: str, start: int, end: int, version: str | None = None) -> None:
        """A span of raw tokens, which stand for no text of their own."""
        spans, text_end = self.transcript.spans, len(self.transcript.text)
        span = Span(len(spans), kind, role, start, end, text_end, version)
        self.transcript = replace(self.transcript, spans=(*spans, span))
        self._stamp()

    def _stamp(self) -> None:
        self.transcript = replace(self.transcript, revision=self.sequence.revision)

    def check_invariants(self) -> None:
        """Raises AssertionError if spans have gaps, or do not end where the tokens and the text end."""
        self.sequence.check_invariants()
        spans = self.transcript.spans
        edge = 0
        for number, span in enumerate(spans):
            assert span.id == number
            assert span.start == edge, f"gap before span {number}"
            assert span.end >= span.start
            edge = span.end
        if self.state is SessionState.IDLE:
            assert edge == self.sequence.num_tokens, "spans and tokens end at different places"
            assert self.transcript.revision == self.sequence.revision
            if self.transcript.messages:
                assert len(self.transcript.messages) == len(spans), "one message per span"
                assert spans[-1].text_end == len(self.transcript.text)
        else:
            assert edge <= self.sequence.num_tokens or self.state is SessionState.CLOSED


def _common_prefix(new: TokenIds, old: TokenIds) -> int:
    n = min(len(new), len(old))
    differ = np.flatnonzero(new[:n] != old[:n])
    return int(differ[0]) if len(differ) else n
