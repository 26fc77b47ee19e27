"""From a history that shows a fault to the shortest one that does: delta debugging, then smaller numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvos.verify.operations import Operation, simpler

__all__ = ["MAX_TRIALS", "shrink"]

MAX_TRIALS = 150
"""Histories that are tried, at most; with the default model one takes a few seconds."""

Predicate = Callable[[tuple[Operation, ...]], bool]


class _NoTrialsLeftError(Exception):
    pass


@dataclass(slots=True)
class _Search:
    """The shortest failing history so far."""

    best: tuple[Operation, ...]
    fails: Predicate
    trials: int

    def accept(self, candidate: tuple[Operation, ...]) -> bool:
        """Take ``candidate`` if it fails, too."""
        if self.trials <= 0:
            raise _NoTrialsLeftError
        self.trials -= 1
        if not self.fails(candidate):
            return False
        self.best = candidate
        return True


def shrink(operations: Sequence[Operation], fails: Predicate, *, max_trials: int = MAX_TRIALS) -> tuple[Operation, ...]:
    """The shortest history found from which ``fails`` is still true; ``operations`` must be one for which it is.

    No single operation can be left out of the result, and no number in it made smaller in one step, unless
    ``max_trials`` or Ctrl-C ended the search.
    """
    search = _Search(tuple(operations), fails, max_trials)
    try:
        while _remove(search) | _simplify(search):
            pass
    except (_NoTrialsLeftError, KeyboardInterrupt):
        pass
    return search.best


def _remove(search: _Search) -> bool:
    """Leave out runs of operations: half of them, a quarter, ... single ones, until none can go."""
    shorter = False
    size = max(1, len(search.best) // 2)
    while True:
        removed = False
        start = 0
        while start < len(search.best) and len(search.best) > 1:
            if search.accept(search.best[:start] + search.best[start + size :]):
                removed = shorter = True
            else:
                start += size
        if size == 1 and not removed:
            return shorter
        size = max(1, size // 2)


def _simplify(search: _Search) -> bool:
    smaller = False
    for i in range(len(search.best)):
        progress = True
        while progress:
            candidates = simpler(search.best[i])
            progress = any(search.accept((*search.best[:i], one, *search.best[i + 1 :])) for one in candidates)
            smaller = smaller or progress
    return smaller
