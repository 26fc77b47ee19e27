"""A runtime's counters as a small JSON file, so that ``kvos stats`` can look at it from another process.

::

    HOME/run/                     mode 0700
        <pid>-<n>.json            mode 0600, replaced atomically; n counts the runtimes of one process
            format                1
            pid, process_started  who writes; the second (seconds since the epoch) tells a later process of that pid
            opened, updated       seconds since the epoch
            closed                the same once the runtime was closed, else null
            stats                 what ``RuntimeStats.as_dict`` gives

A process that ended without closing leaves ``closed`` null: whoever reads asks whether it still lives. Knows nothing of
engines and sessions, and nothing of who reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from kvos.errors import KvosError

__all__ = ["PUBLISHED_FORMAT", "StatsPublisher"]

PUBLISHED_FORMAT = 1
INTERVAL_SECONDS = 2.0
KEEP_ENDED_SECONDS = 24 * 3600.0
SAME_START_SECONDS = 1.0
"""Two readings of one process's start may differ by as much: the clock is set meanwhile."""
CLOSE_SECONDS = 2.0
"""How long the end of a runtime waits for the last write; a disk that hangs must not hold it up."""

_logger = logging.getLogger(__name__)


class StatsPublisher:
    """Writes ``read()`` every two seconds if it changed, and once at the end. A short life without work leaves no file.

    All reading and writing is done on a daemon thread of its own. What goes wrong there is logged once and disturbs
    nobody. ``start`` and ``stop`` are called once each, from any thread.

    Args:
        folder: where the file goes; made when it is needed.
        read: gives the stats, may wait for the engine.
    """

    def __init__(
        self, folder: Path, read: Callable[[], Mapping[str, Any]], *, interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._folder = folder
        self._read = read
        self._interval = interval_seconds
        self._opened = time.time()
        self._process_started = psutil.Process().create_time()
        self._path: Path | None = None
        self._written: Mapping[str, Any] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvos-stats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write the last state and end the thread, or give up on it after a while. Idempotent.

        Call it while ``read`` still works.
        """
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            at_first = self._read()
            while not self._ended.wait(self._interval):
                self._publish(self._read())
            at_last = self._read()
            if self._path is not None or at_last != at_first:
                self._publish(at_last, closed=time.time())
        except KvosError as error:
            _logger.debug("stats are no longer published: %s", error)  # the engine ended first
        except OSError as error:
            _logger.warning("kvos stats will not show this process, its state cannot be written: %s", error)

    def _publish(self, stats: Mapping[str, Any], closed: float | None = None) -> None:
        if stats == self._written and closed is None:
            return
        if self._path is None:
            self._path = self._claim()
        record = {
            "format": PUBLISHED_FORMAT,
            "pid": os.getpid(),
            "process_started": self._process_started,
            "opened": self._opened,
            "updated": time.time(),
            "closed": closed,
            "stats": stats,
        }
        _replace(self._path, json.dumps(record))
        self._written = stats

    def _claim(self) -> Path:
        """A file name that no other runtime has; made empty, which readers skip."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(self._folder)
        number = 0
        while True:
            path = self._folder / f"{os.getpid()}-{number}.json"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                number += 1
            else:
                return path


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sweep(folder: Path) -> None:
    """Delete what belongs to no runtime any more: after a day, or at once if it is a closed one of this process."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            mine = path.name.startswith(f"{os.getpid()}-")
            silent = time.time() - path.stat().st_mtime
            if (mine or silent > KEEP_ENDED_SECONDS) and _is_over(path, if_unreadable=not mine):
                path.unlink()


def _is_over(path: Path, *, if_unreadable: bool) -> bool:
    """Whether a file's runtime was closed or its process is gone. One that was just claimed is empty: unreadable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["closed"] is not None:
            return True
        started: float = psutil.Process(record["pid"]).create_time()
        return abs(started - float(record["process_started"])) > SAME_START_SECONDS
    except psutil.NoSuchProcess:
        return True
    except (ValueError, TypeError, KeyError):
        return if_unreadable
    except psutil.AccessDenied:
        return False
