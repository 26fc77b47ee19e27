"""What a player plays on: a runtime, a visitor beside it once it is needed, and a folder for files."""

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
        runtime: of the group.
        folder: for saved sessions.
        behind: tokens that sessions of raw tokens begin with.
    """

    def __init__(self, workplace: Workplace, group: int) -> None:
        self._workplace = workplace
        self._group = group
        self._closing = ExitStack()
        self._visitor: Runtime | None = None
        self.folder = Path(self._closing.enter_context(TemporaryDirectory(prefix="kvos-verify-")))
        try:
            self.runtime = self._closing.enter_context(workplace.open(group))
        except BaseException:
            self._closing.close()
            raise
        self.behind = workplace.behind
        self.vocab_size = workplace.vocab_size

    def visitor(self) -> Runtime:
        """The runtime with another block size; opened on the first call."""
        if self._visitor is None:
            self._visitor = self._closing.enter_context(self._workplace.open_visitor(self._group))
        return self._visitor

    def counters(self) -> Counter[str]:
        """Of the runtime and its visitor together."""
        total = Counter(self.runtime.stats().counters)
        if self._visitor is not None:
            total.update(self._visitor.stats().counters)
        return total

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
