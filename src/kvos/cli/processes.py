"""The other side of ``kvos.runtime.published``: what kvos processes wrote about themselves. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

__all__ = ["ProcessState", "PublishedRuntime", "command_of", "read_published", "running_process"]

FORMAT = 1
SAME_START_SECONDS = 1.0
"""Two readings of one process's start may differ by as much: the clock is set meanwhile."""


class ProcessState(Enum):
    """What has become of a runtime."""

    RUNNING = "running"
    CLOSED = "closed"
    ENDED = "ended without closing"


@dataclass(frozen=True, slots=True)
class PublishedRuntime:
    """One runtime as it described itself last.

    Attributes:
        opened, updated: seconds since the epoch.
        stats: what ``RuntimeStats.as_dict`` gave.
    """

    pid: int
    command: str
    state: ProcessState
    opened: float
    updated: float
    stats: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "command": self.command,
            "state": self.state.value,
            "opened": self.opened,
            "updated": self.updated,
            "stats": dict(self.stats),
        }


def read_published(home: Path) -> tuple[PublishedRuntime, ...]:
    """Every runtime under ``home`` that can be read: running ones first, then by the time of their last word."""
    found = [one for path in (home / "run").glob("[0-9]*.json") if (one := _read(path)) is not None]
    return tuple(sorted(found, key=lambda one: (one.state is not ProcessState.RUNNING, -one.updated)))


def _read(path: Path) -> PublishedRuntime | None:
    """None for a file that is empty, gone meanwhile, or of another version of kvos."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            return None
        process = running_process(record["pid"], record["process_started"])
        state = ProcessState.RUNNING if process else ProcessState.ENDED
        if record["closed"] is not None:
            state = ProcessState.CLOSED
        return PublishedRuntime(
            pid=record["pid"],
            command=command_of(process),
            state=state,
            opened=record["opened"],
            updated=record["updated"],
            stats=record["stats"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running_process(pid: int, started: float) -> psutil.Process | None:
    """The process that wrote, unless it ended; a later one with its number does not count."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - started) <= SAME_START_SECONDS else None
    except psutil.Error:
        return None


def command_of(process: psutil.Process | None) -> str:
    """What a person started: the command line without interpreter and folders; empty if it can't be known."""
    if process is None:
        return ""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    words[:1] = [Path(word).name for word in words[:1]]
    if words and words[0].startswith("python"):
        words = words[2:] if words[1:2] == ["-m"] else words[1:]
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)
