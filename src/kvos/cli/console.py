"""Where a command speaks: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = [
    "counted",
    "error_console",
    "human_bytes",
    "human_seconds",
    "output_console",
    "printable",
    "short_dtype",
    "working",
    "write_json",
]

DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PIPED_WIDTH = 120
"""Columns where there is no terminal to ask."""


def output_console() -> Console:
    """For results. Whatever styles say, it prints plain text where stdout is no terminal or ``NO_COLOR`` is set."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def error_console() -> Console:
    """For progress, hints and errors."""
    return Console(stderr=True, highlight=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on stderr that something takes a moment; on a terminal it moves, and is gone at the end."""
    console = error_console()
    if not console.is_terminal:
        yield
        return
    with console.status(what, spinner="dots"):
        yield


def counted(count: int, noun: str) -> str:
    """``1 block``, ``1,200 blocks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_bytes(count: float) -> str:
    """``1.5 GiB``; binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def human_seconds(seconds: float) -> str:
    """``85 ms``, ``1.2 s``, ``3 min``, ``5 h``, ``2 days``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 20 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"


def printable(text: str) -> str:
    """``text`` without control characters but tab and newline: a model's words must not steer the terminal."""
    return "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else "\ufffd" for c in text)


def short_dtype(name: str) -> str:
    """The field's name for one of torch's: ``bf16`` for ``bfloat16``; others stay as they are."""
    dtype, comma, rest = name.partition(",")
    return DTYPES.get(dtype, dtype) + comma + rest


def write_json(path: Path | None, data: Any) -> None:
    """Write ``data`` for programs; nothing without a path.

    Raises:
        OSError: it cannot be written.
    """
    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
