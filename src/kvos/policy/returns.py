"""When do blocks come back? Learned from what was seen, as the worth of keeping a block of some class and age."""

from __future__ import annotations

import numpy as np

from kvos.policy.base import Floats, Ints

__all__ = ["ReturnHistory", "age_edges", "gittins_index", "hazards"]

TRUST = 64.0
"""What is known of all classes together counts in each as much as the lives of so many requests; blocks of one request
share their fate, so a block alone says little."""

LIVES_KEPT = 1 << 20
"""Counts are halved when so many lives have ended: what is worth knowing fades in over a thousand full prompts, and
chances from a million lives are exact enough."""

YOUNG = 1 << 14
"""Buckets of ages below that are looked up, not searched for: ten times as fast."""

MOST_REQUESTS_BETWEEN = 256
"""What was learned is never older than so many requests."""


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

    The maximum over horizons h of P(returns within h) / E(requests until h or the return, whichever is first): the
    Gittins index of a single return (Aalto, Ayesta, Righter 2009, for service times). A return counts as in the middle
    of its bucket. Same shape as ``hazard``.
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


class ReturnHistory:
    """Lives of blocks, from a use to the next one, by class and age in requests. One thread at a time."""

    def __init__(self, classes: int) -> None:
        self.edges = age_edges()
        self.widths = np.diff(self.edges, append=2 * self.edges[-1:]).astype(np.float64)
        self.returned = np.zeros((classes, len(self.edges)))
        self.lost = np.zeros((classes, len(self.edges)))
        self._worth = np.zeros((classes, len(self.edges)))
        self._relearn_at = 0
        self._young = self._search(np.arange(YOUNG))

    def end(self, classes: Ints, ages: Ints, *, returned: bool) -> None:
        """Lives ended at these ages: by a return, or because nobody watches any longer."""
        ended = self.returned if returned else self.lost
        ended += self._count(classes, ages)

    def is_due(self, now: int) -> bool:
        """Whether there is something to learn, at request ``now``."""
        return now >= self._relearn_at

    def learn(self, classes: Ints, ages: Ints, now: int, *, per_request: float = 1.0) -> None:
        """Compute what blocks are worth, from all lives that ended and from open ones, which have passed their ages.

        ``per_request``: lives that begin with a request, in the mean.
        """
        if self.returned.sum() + self.lost.sum() > LIVES_KEPT:
            self.returned /= 2
            self.lost /= 2
        lost = self.lost + self._count(classes, ages)
        self._worth = gittins_index(hazards(self.returned, lost, TRUST * per_request), self.widths)
        # While little was seen, every request teaches something.
        self._relearn_at = now + 1 + min(now // 64, MOST_REQUESTS_BETWEEN)

    def worth(self, classes: Ints, ages: Ints) -> Floats:
        """Returns per block and request, for blocks that live on from these ages, as of the last ``learn``."""
        worth: Floats = self._worth[classes, self.bucket(ages + 1)]
        return worth

    def bucket(self, ages: Ints) -> Ints:
        """The bucket of each age; an age of 0 belongs to the first."""
        if ages.size and ages.max() >= YOUNG:
            return self._search(ages)
        buckets: Ints = self._young[ages]
        return buckets

    def _search(self, ages: Ints) -> Ints:
        found = np.searchsorted(self.edges, ages, side="right") - 1
        return np.maximum(found, 0).astype(np.int64)

    def _count(self, classes: Ints, ages: Ints) -> Floats:
        shape = self.returned.shape
        places = classes * shape[1] + self.bucket(ages)
        return np.bincount(places, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)


def _ratio(above: Floats, below: Floats) -> Floats:
    """Quotient; 0 where there is nothing to divide by."""
    return np.divide(above, below, out=np.zeros(np.broadcast(above, below).shape), where=below > 0)
