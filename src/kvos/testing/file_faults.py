"""Errors of the file system under the disk tier: a full disk, a broken one, one that doesn't answer."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvos.tiers.disk import pack

__all__ = ["FileFaults", "file_faults"]

CALLS = ("write", "fsync", "preadv")


class FileFaults:
    """What the disk tiers of this process meet when they call the operating system. Any thread.

    Attributes:
        calls: how often each of ``write``, ``fsync`` and ``preadv`` was called.
        hanging: set while a call hangs; a test may wait for it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.hanging = threading.Event()
        self._errors: dict[str, int] = {}
        self._hung: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def fail(self, call: str, error: int) -> None:
        """From now on ``call`` raises ``OSError(error)`` (``errno.ENOSPC``, ``errno.EIO``)."""
        with self._lock:
            self._errors[_known(call)] = error

    def hang(self, call: str) -> None:
        """From now on ``call`` doesn't return before ``heal``."""
        with self._lock:
            self._hung[_known(call)] = threading.Event()

    def heal(self) -> None:
        """Nothing goes wrong any more, and what hangs goes on, rightly."""
        with self._lock:
            hung, self._hung = self._hung, {}
            self._errors.clear()
            self.hanging.clear()
        for event in hung.values():
            event.set()

    def meet(self, call: str) -> None:
        """What ``call`` meets now."""
        with self._lock:
            self.calls[call] += 1
            error, hung = self._errors.get(call), self._hung.get(call)
            if hung is not None:
                self.hanging.set()
        if hung is not None:
            hung.wait()
        if error is not None:
            raise OSError(error, os.strerror(error))


class _FaultyOs:
    """The module ``os``, but for three calls."""

    def __init__(self, faults: FileFaults) -> None:
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, handle: int, data: Any) -> int:
        self._faults.meet("write")
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        self._faults.meet("fsync")
        os.fsync(handle)

    def preadv(self, handle: int, buffers: Any, offset: int) -> int:
        self._faults.meet("preadv")
        return os.preadv(handle, buffers, offset)


def _known(call: str) -> str:
    if call not in CALLS:
        raise ValueError(f"{call!r} cannot fail here; one of {', '.join(CALLS)} can")
    return call


@contextmanager
def file_faults() -> Iterator[FileFaults]:
    """Within it, disk tiers meet the faults that are set; nothing else of the process does, SQLite neither."""
    faults = FileFaults()
    before = vars(pack)["os"]
    vars(pack)["os"] = _FaultyOs(faults)
    try:
        yield faults
    finally:
        vars(pack)["os"] = before
        faults.heal()
