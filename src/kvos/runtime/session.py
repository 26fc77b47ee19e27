"""The handle by which callers use a session, from any thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvos.errors import (
    EngineStoppedError,
    InvalidInputError,
    InvalidTokenError,
    SessionBusyError,
    SessionClosedError,
    SessionConflictError,
)
from kvos.residency import StoreSummary
from kvos.runtime.archive import describe_session, export_session
from kvos.runtime.parts import RuntimeParts, check_name
from kvos.runtime.reply import Reply, ReplyStream
from kvos.runtime.report import SessionReport, session_report
from kvos.runtime.session_file import write_session
from kvos.serving import EngineCore, Event, FinishReason, RequestId, SamplingParams, Usage
from kvos.sessions import (
    CacheSession,
    Extension,
    MessageInput,
    SessionState,
    SpanBlock,
    SpanKind,
    Transcript,
    parse_messages,
)
from kvos.types import TokenIds, shown, token_array

__all__ = ["Session", "sampling_params"]

T = TypeVar("T")

MOST_SECONDS = 7 * 24 * 3600
"""A prewarm further ahead than a week is a mistake of units."""

RENDER_ATTEMPTS = 16
"""How often a message is rendered again because another thread changed the session meanwhile."""

Sink = Callable[[Event], None]


class Session:
    """One agent's conversation. Any thread may call; each call is one step on the engine thread.

    Two threads that append at once both succeed, in some order. A second ``generate`` while one runs raises
    ``SessionBusyError``.
    """

    def __init__(self, parts: RuntimeParts, inner: CacheSession) -> None:
        self._parts = parts
        self._inner = inner

    def __repr__(self) -> str:
        return f"<kvos.Session {self.name!r}, {self._inner.state.value}, {len(self.transcript.spans)} spans>"

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._inner.id

    @property
    def tenant(self) -> str:
        return self._inner.tenant

    @property
    def transcript(self) -> Transcript:
        """Messages, spans and text at this moment."""
        return self._inner.transcript

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages."""
        return [message.as_dict() for message in self.transcript.messages]

    @property
    def tokens(self) -> TokenIds:
        """A copy of the token ids."""
        return self._call(lambda core: self._inner.sequence.tokens().copy())

    def report(self) -> SessionReport:
        """Tokens, blocks, and which of them other sessions hold too."""
        return self._call(lambda core: session_report(core, self._inner))

    def span_blocks(self) -> dict[int, tuple[SpanBlock, ...]]:
        """Dialogue span to blocks and slots, by span id."""
        return self._call(lambda core: self._inner.blocks_by_span())

    def version_blocks(self) -> dict[str, tuple[SpanBlock, ...]]:
        """Prompt version to the blocks that hold it."""
        return self._call(lambda core: self._inner.blocks_by_version())

    def tool_blocks(self) -> dict[int, tuple[SpanBlock, ...]]:
        """Tool sets, calls and results to their blocks, by span id."""
        return self._call(lambda core: self._inner.blocks_by_tool_message())

    # -- adding --------------------------------------------------------------------------------------------------

    def append(self, messages: MessageInput, *, kind: SpanKind | str | None = None, version: str | None = None) -> None:
        """Add chat messages; they are computed with the next ``generate`` or ``prefill``.

        Args:
            messages: a dict with ``role`` and ``content``, or a list of them.
            kind: what the spans are to the agent; by default it follows from the role.
            version: a name for this version of a prompt, a tool set or a memory.

        Raises:
            InvalidMessageError: see ``parse_messages``; or the chat template refuses the conversation.
            ContextLengthExceededError, SessionBusyError, SessionClosedError
        """
        parsed = parse_messages(messages)
        span_kind = None if kind is None else _span_kind(kind)
        _check_version(version)
        self._with_rendering(
            lambda held: self._parts.renderer.append(held, parsed, kind=span_kind, version=version),
            self._apply,
        )

    def append_tokens(self, tokens: npt.ArrayLike, *, kind: SpanKind | str = SpanKind.USER) -> None:
        """Add raw token ids as one span, to a session that holds no chat messages.

        Raises:
            InvalidTokenError: not whole numbers, or outside the vocabulary.
            InvalidInputError: no tokens, or the session holds messages.
            ContextLengthExceededError, SessionBusyError, SessionClosedError
        """
        ids, span_kind = _token_ids(tokens), _span_kind(kind)
        self._call(lambda core: self._inner.append_tokens(ids, span_kind))

    # -- computing -----------------------------------------------------------------------------------------------

    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> ReplyStream:
        """Start a reply; returns at once. Iterate for text, or call ``result()``.

        Args:
            params: how to sample; or give its fields as keywords (``max_tokens=64, temperature=0.7``).
            on_prefill: called with ``(done, total)`` prompt tokens, on the thread that reads the reply.

        Raises:
            InvalidInputError: an unknown or impossible setting, or an empty session.
            ContextLengthExceededError, OutOfBlocksError, SessionBusyError, SessionClosedError
        """
        chosen = sampling_params(params, settings)
        return ReplyStream(lambda sink: self.start_reply(chosen, sink), on_prefill)

    def start_reply(self, params: SamplingParams, sink: Sink) -> Callable[[], None]:
        """Start a reply whose events go to ``sink``, called on the engine thread; returns what cancels it."""

        called_at = time.perf_counter()

        def start(core: EngineCore, prompt: Extension | None) -> RequestId:
            return core.generate(self._inner, params, sink, prompt, called_at=called_at)

        if self._is_raw():
            request = self._call(lambda core: start(core, None))
        else:
            request = self._with_rendering(self._parts.renderer.open_reply, start)
        return lambda: self._parts.run(lambda core: core.cancel(request))

    def prefill(self, *, on_progress: Callable[[int, int], None] | None = None) -> Usage:
        """Compute what is pending, so that the next reply or fork starts warm. Waits; Ctrl-C cancels.

        Raises:
            InvalidInputError: an empty session.
            SessionClosedError: also if it was closed meanwhile.
            OutOfBlocksError, SessionBusyError
        """
        return self.prefilled(ReplyStream(self.start_prefill, on_progress).result())

    def prefilled(self, ended: Reply) -> Usage:
        """What a prefill cost; raises SessionClosedError if it did not come to its end."""
        if ended.finish_reason is FinishReason.CANCELLED:
            raise SessionClosedError(f"session {self.name} was closed, or its prefill cancelled, before the end")
        return ended.usage

    def score(self, tokens: npt.ArrayLike) -> torch.Tensor:
        """Add raw tokens and return the logits behind each of them, ``[tokens, vocab]`` (teacher forcing).

        Raises: as ``append_tokens`` and ``prefill``.
        """
        ids = _token_ids(tokens)
        start = 0

        def begin(sink: Sink) -> Callable[[], None]:
            def command(core: EngineCore) -> RequestId:
                nonlocal start
                start = self._inner.sequence.num_tokens
                self._inner.append_tokens(ids, SpanKind.USER)
                try:
                    return core.prefill(self._inner, sink, start)
                except BaseException:
                    self._inner.truncate_tokens(start)
                    raise

            request = self._call(command)
            return lambda: self._parts.run(lambda core: core.cancel(request))

        stream = ReplyStream(begin)
        try:
            if stream.result().finish_reason is FinishReason.CANCELLED:
                raise SessionClosedError(f"session {self.name} was closed, or its scoring cancelled, before the end")
        except BaseException:
            with contextlib.suppress(SessionBusyError, SessionClosedError, EngineStoppedError):
                self._call(lambda core: self._take_back(start, len(ids)))
            raise
        logits = stream.finished().logits
        if logits is None:
            raise RuntimeError("a scored request gave no logits")
        return logits

    def _take_back(self, start: int, n: int) -> None:
        """Forget tokens ``start`` to ``start + n`` if they still are the last ones."""
        if self._inner.sequence.num_tokens == start + n:
            self._inner.truncate_tokens(start)

    def start_prefill(self, sink: Sink, *, before_fork: bool = False) -> Callable[[], None]:
        """Start computing what is pending; as ``start_reply``. ``before_fork``: see ``EngineCore.prefill``."""
        request = self._call(lambda core: core.prefill(self._inner, sink, before_fork=before_fork))
        return lambda: self._parts.run(lambda core: core.cancel(request))

    # -- forks, truncation, end ----------------------------------------------------------------------------------

    def fork(self, n: int = 1, *, names: Sequence[str] | None = None) -> list[Session]:
        """Children with the same history over the same blocks; what is pending is computed first, once for all.

        Raises:
            InvalidInputError: fewer than one child, or not one name for each.
            SessionExistsError: a name is taken; no child was made.
            OutOfBlocksError, SessionBusyError, SessionClosedError
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidInputError(f"cannot fork into {n!r} children; at least 1")
        if names is not None and (isinstance(names, str) or not isinstance(names, Sequence) or len(names) != n):
            raise InvalidInputError(f"{n} children need {n} names, got {names!r}")
        wishes = [check_name("session", name) for name in names] if names is not None else [None] * n
        if self._call(lambda core: self._inner.sequence.num_pending):
            self.prefilled(ReplyStream(lambda sink: self.start_prefill(sink, before_fork=True)).result())
        children = self._call(lambda core: core.fork(self._inner, wishes))
        return [Session(self._parts, child) for child in children]

    def truncate(self, *, messages: int | None = None, tokens: int | None = None) -> None:
        """Forget everything behind the first ``messages`` messages, or the first ``tokens`` tokens.

        Raises:
            InvalidInputError: not exactly one of the two; negative; more than there are; or inside a message.
            SessionBusyError, SessionClosedError
        """
        if (messages is None) == (tokens is None):
            raise InvalidInputError("say how much to keep: either messages=N or tokens=N")
        keep = messages if tokens is None else tokens
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise InvalidInputError(f"cannot keep {keep!r}; expected a whole number")
        cut = self._inner.truncate_spans if tokens is None else self._inner.truncate_tokens
        self._call(lambda core: cut(keep))

    def save(self, target: str | Path) -> None:
        """Save under a name in ``KVOS_HOME``, or to a file if ``target`` is a ``Path``. Atomic, and safe on disk.

        A session that has left the device is brought back first, as far as its blocks are still somewhere.

        Raises:
            InvalidInputError: a name that cannot be a file's.
            OSError: the disk's; what was saved before is still there.
            SessionBusyError, SessionClosedError
        """
        identity = self._parts.identity()
        if self._inner.is_swapped_out:
            over = self._call(lambda core: core.moves.prewarm(self._inner, 0.0))
            if over is not None:  # it has a deadline of its own, and closing the runtime ends it, too
                over.result()
        with self._inner.keeping:
            saved = self._call(lambda core: export_session(core, self._inner, self._parts, identity))
            if isinstance(target, Path):
                write_session(target, saved)
            else:
                self._parts.store(self.tenant).put(target, saved)

    def hibernate(self) -> StoreSummary:
        """Leave the device: blocks go to the lower tiers, and a description of the session to ``KVOS_HOME``.

        When this returns, ``Runtime.resume`` finds the session in any later process of this home, also after a crash.
        The session stays open, and goes on with its next ``generate``; tokens behind the last full block
        are computed again.

        Returns:
            How many blocks there were, and how many the last tier has safely; the others will be computed again.

        Raises:
            InvalidInputError: the session's name cannot be a file's.
            OSError: the description could not be written; the session is as before.
            SessionBusyError, SessionClosedError
        """
        identity = self._parts.identity()
        saved = self._call(lambda core: describe_session(core, self._inner, self._parts, identity))
        storing = self._call(lambda core: core.moves.hibernate(self._inner))
        summary = StoreSummary(0, 0) if storing is None else self._parts.outcome(storing)
        with self._inner.keeping:
            if saved.manifest.transcript.revision >= self._inner.described:  # else somebody has hibernated more of it
                self._parts.hibernated(self.tenant).put(self.name, saved)
                self._inner.described = saved.manifest.transcript.revision
        with contextlib.suppress(SessionBusyError):  # somebody has come back meanwhile
            self._call(lambda core: core.swap_out(self._inner, saved.manifest.transcript.revision))
        return summary

    def prewarm(self, after_s: float = 0.0) -> None:
        """Bring the blocks back to the device ``after_s`` seconds from now, before they are asked for; returns at once.

        For a user who is about to return, or a tool call about to end. Does nothing if the session is in use then, or
        if others would have to leave for it; a later call replaces this one.

        Raises:
            InvalidInputError: a negative or endless time.
            SessionClosedError
        """
        if isinstance(after_s, bool) or not isinstance(after_s, int | float) or not 0 <= after_s <= MOST_SECONDS:
            raise InvalidInputError(f"after_s is {shown(after_s)}; expected seconds from 0 to {MOST_SECONDS}")
        self._call(lambda core: core.moves.prewarm(self._inner, after_s))

    def close(self) -> None:
        """Cancel what runs and give the blocks back. Idempotent, also after the runtime's end."""
        with contextlib.suppress(EngineStoppedError):
            self._call(lambda core: core.forget(self._inner))

    # -- inside --------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[EngineCore], T]) -> T:
        return self._parts.thread.call(work)

    def _apply(self, core: EngineCore, extension: Extension) -> None:
        lost = self._inner.apply(extension)
        if extension.rewritten and lost:
            core.counters.add("history_rewritten")

    def _is_raw(self) -> bool:
        held = self.transcript
        return bool(held.spans) and not held.messages

    def _with_rendering(
        self, render: Callable[[Transcript], Extension], use: Callable[[EngineCore, Extension], T]
    ) -> T:
        """Render on this thread, use on the engine thread; again if the session changed in between."""
        with self._inner.turn:
            for _ in range(RENDER_ATTEMPTS - 1):
                if self._inner.state is not SessionState.IDLE:
                    # Asked on the engine thread, behind a cancellation that may be on its way there.
                    self._call(lambda core: self._inner.check_idle())
                extension = render(self.transcript)
                try:
                    return self._call(lambda core, made=extension: use(core, made))  # type: ignore[misc]
                except SessionConflictError:
                    continue
            extension = render(self.transcript)
            return self._call(lambda core: use(core, extension))


def sampling_params(params: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    """Raises InvalidInputError for both at once, or for a name that is no setting."""
    if params is not None:
        if settings:
            raise InvalidInputError("give either a SamplingParams or its fields as keywords, not both")
        if not isinstance(params, SamplingParams):
            raise InvalidInputError(f"expected SamplingParams or its fields as keywords, got {type(params).__name__}")
        return params
    names = [field.name for field in fields(SamplingParams)]
    for name in settings:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(names)
            raise InvalidInputError(f"there is no sampling setting {name!r}; {hint}")
    return SamplingParams(**settings)


def _span_kind(kind: SpanKind | str) -> SpanKind:
    try:
        return SpanKind(kind)
    except ValueError:
        raise InvalidInputError(f"{kind!r} is no kind of span; one of {', '.join(SpanKind)}") from None


def _check_version(version: object) -> None:
    if version is None:
        return
    if not isinstance(version, str) or not version.isprintable():
        raise InvalidInputError(f"a version is printable text, got {version!r}")


def _token_ids(tokens: npt.ArrayLike) -> TokenIds:
    try:
        values = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTokenError(f"token ids are a list of whole numbers: {error}") from error
    if values.ndim != 1:
        raise InvalidTokenError(f"token ids are a list of whole numbers, got {values.ndim} dimensions")
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise InvalidTokenError(f"token ids are whole numbers, got {values.dtype}")
    if values.size and (int(values.max()) > np.iinfo(np.int32).max or int(values.min()) < 0):
        raise InvalidTokenError("token ids are from 0 to the vocabulary's size")
    return token_array(values)
