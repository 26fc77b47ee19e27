"""kvos: the memory manager that an LLM agent's context runs on.

``kvos.open()`` gives a ``Runtime``; ``runtime.session()`` gives a ``Session``; a session takes messages (``append``),
answers (``generate``), and forks (``fork``). Everything else is in the documentation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any  # noqa: TID251 - no cycle: it is for lazy imports

if TYPE_CHECKING:  # what __getattr__ imports on first use; the library's import itself stays fast
    from kvos.config import KvosConfig
    from kvos.runtime import AsyncSession, Reply, ReplyStream, Runtime, Session
    from kvos.runtime import open_runtime as open
    from kvos.serving import FinishReason, SamplingParams, Usage, WhyComputed
    from kvos.sessions import SpanKind

__version__ = "0.1.0"

_PUBLIC = {
    "AsyncSession": ("kvos.runtime", "AsyncSession"),
    "FinishReason": ("kvos.serving", "FinishReason"),
    "KvosConfig": ("kvos.config", "KvosConfig"),
    "Reply": ("kvos.runtime", "Reply"),
    "ReplyStream": ("kvos.runtime", "ReplyStream"),
    "Runtime": ("kvos.runtime", "Runtime"),
    "SamplingParams": ("kvos.serving", "SamplingParams"),
    "Session": ("kvos.runtime", "Session"),
    "SpanKind": ("kvos.sessions", "SpanKind"),
    "Usage": ("kvos.serving", "Usage"),
    "WhyComputed": ("kvos.serving", "WhyComputed"),
    "open": ("kvos.runtime", "open_runtime"),
}

__all__ = [
    "AsyncSession",
    "FinishReason",
    "KvosConfig",
    "Reply",
    "ReplyStream",
    "Runtime",
    "SamplingParams",
    "Session",
    "SpanKind",
    "Usage",
    "WhyComputed",
    "open",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: torch takes a second, and ``kvos --help`` should not."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvos' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
