"""What a player plays on: a runtime that can be restarted, a visitor beside it once it is needed, and a folder."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from kvos.runtime import Runtime
from kvos.verify.workplace import Workplace

__all__ = ["Stage"]


class Stage:
    """Use it in a ``with`` block; everything is closed and deleted at its end.

    Attributes:
        runtime: of the group, until the next restart.
        folder: for saved sessions.
        behind: tokens that sessions of raw tokens begin with.
    """

    def __init__(self, workplace: Workplace, group: int) -> None:
        self._workplace = workplace
        self._group = group
        self._size = group
        self._closing = ExitStack()
        self._running = ExitStack()
        self._open: list[Runtime] = []
        self._before: Counter[str] = Counter()
        self.folder = Path(self._closing.enter_context(TemporaryDirectory(prefix="kvos-verify-")))
        self._home = self.folder / "home"
        try:
            workplace.furnish(self._home)
            self.runtime = self._enter(workplace.open(group, self._home, self._size))
        except BaseException:
            self._closing.close()
            raise
        self.behind = workplace.behind
        self.vocab_size = workplace.vocab_size

    def visitor(self) -> Runtime:
        """The runtime with another block size; opened on the first call."""
        if len(self._open) < 2:
            self._enter(self._workplace.open_visitor(self._home, self._size))
        return self._open[1]

    def restart(self, step: int) -> Runtime:
        """Close all, and open another runtime over the same home, ``step`` block sizes further."""
        self._close_runtimes()
        self._size += step
        self.runtime = self._enter(self._workplace.open(self._group, self._home, self._size))
        return self.runtime

    def counters(self) -> Counter[str]:
        """Of all runtimes so far together; with ``tokens_from_host`` and ``tokens_from_disk``, read from the tiers."""
        total = self._before.copy()
        for runtime in self._open:
            total.update(runtime.stats().counters)
            for tier in runtime.tiers():
                total[f"tokens_from_{tier.name}"] += tier.usage.counters.get("hits", 0) * runtime.config.block_size
        return total

    def _enter(self, runtime: Runtime) -> Runtime:
        self._running.callback(runtime.close)
        self._open.append(runtime)
        return runtime

    def _close_runtimes(self) -> None:
        self._before = self.counters()
        self._open.clear()
        self._running.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._running.close()
        finally:
            self._closing.close()
