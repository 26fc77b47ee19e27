"""Numbers and a model's words as a person reads them."""

from __future__ import annotations

import time

from kvos.demo.record import ReplyRecord

__all__ = ["Pace", "facts", "printable", "seconds", "size", "times"]

LINE_EVERY_SECONDS = 10.0


class Pace:
    """Keeps progress that comes as lines from becoming many: ``is_due`` is true every ten seconds at most."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < LINE_EVERY_SECONDS:
            return False
        self._last = now
        return True


def seconds(value: float) -> str:
    """``4.2 ms``, ``31 ms``, ``3.41 s`` or ``143 s``."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def size(count: int) -> str:
    """``78.1 MB``; decimal units."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def times(slow: float, fast: float) -> str:
    """How many times ``slow`` is ``fast``: ``42x``."""
    if fast <= 0:
        return ""
    ratio = slow / fast
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def facts(reply: ReplyRecord) -> str:
    """What a reply cost, in one line."""
    return (
        f"{reply.reused_tokens:,} tokens reused, {reply.computed_tokens:,} computed; "
        f"TTFT {seconds(reply.ttft_s)}, {seconds(reply.tpot_s)} per token"
    )


def printable(text: str) -> str:
    """``text`` without control characters but newlines: a model's words must not steer the terminal."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)
