"""The public Python facade; wires one of everything."""

from kvos.runtime.aio import AsyncSession
from kvos.runtime.reply import AsyncReplyStream, Reply, ReplyStream
from kvos.runtime.report import BlockReport, FreeRuns, RuntimeStats, SessionReport
from kvos.runtime.runtime import DEFAULT_MODEL, DEFAULT_TENANT, Runtime, open_runtime
from kvos.runtime.session import Session

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_TENANT",
    "AsyncReplyStream",
    "AsyncSession",
    "BlockReport",
    "FreeRuns",
    "Reply",
    "ReplyStream",
    "Runtime",
    "RuntimeStats",
    "Session",
    "SessionReport",
    "open_runtime",
]
