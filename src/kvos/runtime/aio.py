"""Sessions for asyncio: the same verbs, waited for beside the event loop; cancelling a task cancels its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvos.residency import StoreSummary
from kvos.runtime.reply import AsyncReplyStream
from kvos.runtime.report import SessionReport
from kvos.runtime.session import Session, sampling_params
from kvos.serving import Event, SamplingParams, Usage
from kvos.sessions import MessageInput

__all__ = ["AsyncSession"]


class AsyncSession:
    """A ``Session`` whose calls are awaited; ``sync`` is the session itself."""

    def __init__(self, session: Session) -> None:
        self.sync = session

    @property
    def name(self) -> str:
        return self.sync.name

    async def append(self, messages: MessageInput, **details: Any) -> None:
        """See ``Session.append``."""
        await asyncio.to_thread(self.sync.append, messages, **details)

    async def generate(self, params: SamplingParams | None = None, **settings: Any) -> AsyncReplyStream:
        """See ``Session.generate``; the stream is read with ``async for``, or awaited with ``result()``."""
        chosen = sampling_params(params, settings)
        return await _started(lambda sink: self.sync.start_reply(chosen, sink))

    async def prefill(self) -> Usage:
        """See ``Session.prefill``."""
        return self.sync.prefilled(await (await _started(self.sync.start_prefill)).result())

    async def fork(self, n: int = 1, *, names: Sequence[str] | None = None) -> list[AsyncSession]:
        """See ``Session.fork``."""
        children = await asyncio.to_thread(lambda: self.sync.fork(n, names=names))
        return [AsyncSession(child) for child in children]

    async def truncate(self, *, messages: int | None = None, tokens: int | None = None) -> None:
        """See ``Session.truncate``."""
        await asyncio.to_thread(lambda: self.sync.truncate(messages=messages, tokens=tokens))

    async def save(self, target: str | Path) -> None:
        """See ``Session.save``."""
        await asyncio.to_thread(self.sync.save, target)

    async def hibernate(self) -> StoreSummary:
        """See ``Session.hibernate``."""
        return await asyncio.to_thread(self.sync.hibernate)

    async def prewarm(self, after_s: float = 0.0) -> None:
        """See ``Session.prewarm``."""
        await asyncio.to_thread(self.sync.prewarm, after_s)

    async def report(self) -> SessionReport:
        """See ``Session.report``."""
        return await asyncio.to_thread(self.sync.report)

    async def close(self) -> None:
        """See ``Session.close``."""
        await asyncio.to_thread(self.sync.close)


async def _started(start: Callable[[Callable[[Event], None]], Callable[[], None]]) -> AsyncReplyStream:
    """Start a request beside the event loop. If the task is cancelled meanwhile, so is the request."""
    stream = AsyncReplyStream()
    starting = asyncio.ensure_future(asyncio.to_thread(start, stream.sink))
    try:
        return stream.started(await asyncio.shield(starting))
    except asyncio.CancelledError:
        starting.add_done_callback(_cancel_request)
        raise


def _cancel_request(starting: asyncio.Future[Callable[[], None]]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result()()
