"""A reply while it is generated, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from types import TracebackType

from kvos.errors import InvalidInputError
from kvos.serving import Event, Failed, Finished, FinishReason, PrefillProgress, TextDelta, Usage

__all__ = ["AsyncReplyStream", "Reply", "ReplyStream"]


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply.

    Attributes:
        text: without the stop string that ended it, if one did.
        tokens: every token that was sampled, an end-of-sequence token included.
        usage: what it cost, and what the cache saved.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage

    @classmethod
    def of(cls, finished: Finished) -> Reply:
        return cls(finished.content, finished.tokens, finished.reason, finished.usage)

    def __str__(self) -> str:
        return self.text


class ReplyStream:
    """Iterate for text as it comes, or wait for ``result()``. Leaving early cancels; what was generated is kept.

    For one consumer. Generation goes on whether or not anybody reads; a stream that nobody holds any more is cancelled.

    Args:
        start: takes where events go, starts the work, and returns what cancels it.
        on_prefill: called with ``(done, total)`` prompt tokens while they are computed, on the consumer's thread.
    """

    def __init__(
        self,
        start: Callable[[Callable[[Event], None]], Callable[[], None]],
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> None:
        self._on_prefill = on_prefill
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._unread: deque[TextDelta] = deque()
        self._end: Finished | Failed | None = None
        self._cancel = start(self._events.put)

    def __iter__(self) -> Iterator[str]:
        with contextlib.closing(self.deltas()) as deltas:
            for event in deltas:
                yield event.text

    def deltas(self) -> Generator[TextDelta, None, None]:
        """Like iterating, with token ids."""
        try:
            while self._unread:  # what waiting for the end has passed over
                yield self._unread.popleft()
            while (event := self._next()) is not None:
                yield event
        finally:
            self._leave()

    def result(self) -> Reply:
        """Wait for the end. If waiting is interrupted, the reply is cancelled.

        Text that nobody has read yet can still be iterated over.

        Raises:
            KvosError: what ended the reply early; the session keeps what was generated.
        """
        try:
            while (event := self._next()) is not None:
                self._unread.append(event)
        finally:
            self._leave()
        return Reply.of(self.finished())

    def finished(self) -> Finished:
        """The last event of a reply that went well, once it has come."""
        if not isinstance(self._end, Finished):
            raise RuntimeError("the reply has not ended; call result() first")
        return self._end

    @property
    def usage(self) -> Usage:
        """What the reply cost; waits for its end."""
        return self.result().usage

    def cancel(self) -> None:
        """Ask for the end; returns at once. Idempotent."""
        self._cancel()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        if getattr(self, "_end", self) is None and hasattr(self, "_cancel"):
            self._cancel()

    def _next(self) -> TextDelta | None:
        """The next text, or None at the end; raises what the reply failed with."""
        while self._end is None:
            event = self._events.get()
            if isinstance(event, TextDelta):
                return event
            if isinstance(event, PrefillProgress):
                if self._on_prefill is not None:
                    self._on_prefill(event.done, event.total)
            else:
                self._end = event
        if isinstance(self._end, Failed):
            raise self._end.error
        return None

    def _leave(self) -> None:
        """Cancel unless it has ended, and wait for that end: at most one step, and the session is free again."""
        if self._end is None:
            self.cancel()
        while self._end is None:
            event = self._events.get()
            if isinstance(event, Finished | Failed):
                self._end = event


class AsyncReplyStream:
    """``ReplyStream`` for asyncio: ``async for`` for text, ``await result()`` for the end. For one consumer.

    Cancelling the task that reads cancels the reply.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._unread: deque[TextDelta] = deque()
        self._loop = asyncio.get_running_loop()
        self._end: Finished | Failed | None = None
        self._cancel: Callable[[], None] | None = None

    def sink(self, event: Event) -> None:
        """Called on the engine thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def started(self, cancel: Callable[[], None]) -> AsyncReplyStream:
        self._cancel = cancel
        return self

    async def __aiter__(self) -> AsyncIterator[str]:
        while self._unread:  # what waiting for the end has passed over
            yield self._unread.popleft().text
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for event in deltas:
                yield event.text

    async def _deltas(self) -> AsyncGenerator[TextDelta, None]:
        try:
            while self._end is None:
                event = await self._events.get()
                if isinstance(event, TextDelta):
                    yield event
                elif isinstance(event, Finished | Failed):
                    self._end = event
        finally:
            if self._end is None:
                self.cancel()
        if isinstance(self._end, Failed):
            raise self._end.error

    async def result(self) -> Reply:
        """Wait for the end; raises what the reply failed with. Unread text can still be iterated over."""
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for event in deltas:
                self._unread.append(event)
        if isinstance(self._end, Finished):
            return Reply.of(self._end)
        raise RuntimeError("the reply has no end")

    @property
    def usage(self) -> Usage:
        """What the reply cost, once it has ended.

        Raises:
            InvalidInputError: it is still running; read it, or await ``result()``.
        """
        if not isinstance(self._end, Finished):
            raise InvalidInputError("the reply has not ended well yet; read it to the end, or await result()")
        return self._end.usage

    def cancel(self) -> None:
        """Ask for the end; returns at once. Idempotent."""
        if self._cancel is not None:
            self._cancel()
