"""When do blocks come back? Learned from what was seen, as the worth of keeping a block of some class and age."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReturnEstimator", "age_edges", "gittins_index", "hazards"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def age_edges(per_octave: int = 4, octaves: int = 24) -> Ints:
    """Lower ends of log-spaced age buckets, in requests: 1, 2, 3 ...; the last bucket ends where it would double."""
    return np.unique(np.rint(2.0 ** (np.arange(per_octave * octaves) / per_octave)).astype(np.int64))


def hazards(returned: Floats, lost: Floats, trust: float = 0.0) -> Floats:
    """Chance to return within an age bucket, for what reached it; rows are classes, columns buckets.

    Args:
        returned: lives that ended in this bucket with a return.
        lost: lives that were last seen in this bucket, without a return; each counts as half observed there.
        trust: how many lives' worth the chance over all classes counts in each class; for rare classes.
    """
    ended = returned + lost
    reached = np.flip(np.cumsum(np.flip(ended, axis=1), axis=1), axis=1)
    observed = reached - lost / 2
    together = _ratio(returned.sum(axis=0), observed.sum(axis=0))
    return _ratio(returned + trust * together, observed + trust)


def gittins_index(hazard: Floats, widths: Floats) -> Floats:
    """Returns per block and request, over the best horizon, for a block at the beginning of each bucket.

    The maximum over horizons h of P(returns within h) / E(requests until h or the return, whichever is first). A
    return counts as in the middle of its bucket. Same shape as ``hazard``.
    """
    classes, buckets = hazard.shape
    alive = np.ones((classes, buckets + 1))
    np.cumprod(1 - hazard, axis=1, out=alive[:, 1:])
    spent = np.zeros((classes, buckets + 1))
    np.cumsum(alive[:, :-1] * widths * (1 - hazard / 2), axis=1, out=spent[:, 1:])
    returns = alive[:, :-1, None] - alive[:, None, 1:]
    time = spent[:, None, 1:] - spent[:, :-1, None]
    ahead = np.triu(np.ones((buckets, buckets), dtype=bool))
    worth: Floats = np.where(ahead, _ratio(returns, time), 0.0).max(axis=2)
    return worth


class ReturnEstimator:
    """Lives of blocks: from a use until the next one. Ages and times are counted in requests. One thread at a time."""

    def __init__(self, classes: int, trust: float = 16.0) -> None:
        self.edges = age_edges()
        self.widths = np.diff(self.edges, append=2 * self.edges[-1:]).astype(np.float64)
        self.trust = trust
        shape = (classes, len(self.edges))
        self.returned = np.zeros(shape)
        self.lost = np.zeros(shape)
        self.open = np.zeros((classes, 256))

    def begin(self, classes: Ints, time: int) -> None:
        """Lives of these classes begin at ``time``."""
        if time >= self.open.shape[1]:
            self.open = np.pad(self.open, ((0, 0), (0, max(time + 1, self.open.shape[1]))))
        np.add.at(self.open[:, time], classes, 1)

    def end(self, classes: Ints, begun: Ints, time: int, *, returned: bool) -> None:
        """Lives end at ``time``: by a return, or because nobody watches any longer."""
        np.subtract.at(self.open, (classes, begun), 1)
        np.add.at(self.returned if returned else self.lost, (classes, self.bucket(time - begun)), 1)

    def bucket(self, ages: Ints) -> Ints:
        """The bucket of each age; an age of 0 belongs to the first."""
        found = np.searchsorted(self.edges, ages, side="right") - 1
        return np.maximum(found, 0).astype(np.int64)

    def index(self, now: int) -> Floats:
        """Worth per class and bucket, from all lives seen so far, the open ones as having passed their age."""
        buckets = self.bucket(now + 1 - np.arange(now + 1))
        lost = self.lost.copy()
        for row, counts in zip(lost, self.open, strict=True):
            width = min(len(counts), now + 1)
            row += np.bincount(buckets[:width], weights=counts[:width], minlength=len(row))
        return gittins_index(hazards(self.returned, lost, self.trust), self.widths)


def _ratio(above: Floats, below: Floats) -> Floats:
    """Quotient; 0 where there is nothing to divide by."""
    return np.divide(above, below, out=np.zeros(np.broadcast(above, below).shape), where=below > 0)
