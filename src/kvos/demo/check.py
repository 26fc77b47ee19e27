"""The demo's own check: what the cached runs chose and computed, against a plain model that has no cache.

The rules, the reference and the noise floor are those of ``kvos verify``; here they are applied to the replies that a
person has just read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvos.demo.evidence import Evidence
from kvos.demo.record import CheckPart, CheckRecord
from kvos.verify.compare import FP64_TOLERANCE, NOISE_FACTOR
from kvos.verify.reference import Reference, cover, spread

__all__ = ["check"]

OnProgress = Callable[[int, int], None]
Ids = tuple[int, ...]


def check(
    model: Any, evidence: Sequence[Evidence], on_progress: OnProgress, declared: int | None = None
) -> CheckRecord:
    """Run every session's token ids without a cache and compare logits, and tokens where noise can't decide them.

    Args:
        model: a copy that no kvos engine has open.
        on_progress: called with ``(done, total)`` runs.
        declared: see ``Reference``.
    """
    return _Check(Reference(model, declared), evidence, on_progress).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    """One session against the reference, before anybody knows the limit.

    Attributes:
        gaps: between the reference's two best logits, ``[rows]``.
        best: the reference's token, ``[rows]``.
        difference: the largest of a logit; NaN if there is one.
    """

    evidence: Evidence
    ids: Ids
    gaps: torch.Tensor
    best: torch.Tensor
    difference: float
    largest_logit: float

    @classmethod
    def of(cls, evidence: Evidence, ids: Ids, expected: torch.Tensor) -> _Comparison:
        top = expected.topk(2, dim=1)
        return cls(
            evidence=evidence,
            ids=ids,
            gaps=top.values[:, 0] - top.values[:, 1],
            best=top.indices[:, 0],
            difference=float((evidence.logits.to(expected.dtype) - expected).abs().max()),
            largest_logit=float(expected.abs().max()),
        )

    def judged(self, limit: float, *, exact: bool) -> CheckPart:
        compared = torch.ones_like(self.best, dtype=torch.bool) if exact else self.gaps > limit
        different = (torch.tensor(self.evidence.chosen) != self.best) & compared
        return CheckPart(
            label=self.evidence.label,
            tokens=len(self.best),
            skipped=int((~compared).sum()),
            different=int(different.sum()),
            largest_difference=self.difference,
            ok=self.difference <= limit and not bool(different.any()),  # false for NaN
        )


class _Check:
    """One check; ``run`` once."""

    def __init__(self, reference: Reference, evidence: Sequence[Evidence], on_progress: OnProgress) -> None:
        self._reference = reference
        self._evidence = evidence
        self._on_progress = on_progress
        self._runs = cover(one.ids for one in evidence)
        self._run_of = {one.label: max(ids for ids in self._runs if ids[: len(one.ids)] == one.ids) for one in evidence}
        self._total = len(self._runs) + reference.num_other_shapes
        self._done = 0
        self._floor = 0.0
        self._pairs = 0
        self._measurements = 0

    def run(self) -> CheckRecord:
        self._on_progress(0, self._total)
        comparisons: list[_Comparison] = []
        for ids in self._runs:
            comparisons += self._compare(ids)
        parts = [comparison.judged(self._limit(comparisons), exact=self._exact) for comparison in comparisons]
        for ids in dict.fromkeys(one.ids for one, part in zip(comparisons, parts, strict=True) if not part.ok):
            if not self._exact:
                # Judged by the noise on these very ids, in yet other shapes.
                self._total += 1 + self._reference.num_other_shapes
                self._measure_floor(ids, self._logits(ids))
        parts = [comparison.judged(self._limit(comparisons), exact=self._exact) for comparison in comparisons]
        return CheckRecord(
            parts=tuple(parts),
            sequences=len(self._runs),
            logits_compared=sum(one.logits.numel() for one in self._evidence),
            largest_difference=_worst(part.largest_difference for part in parts),
            noise_floor=self._floor,
            noise_pairs=self._pairs,
            limit=self._limit(comparisons),
        )

    @property
    def _exact(self) -> bool:
        return self._reference.dtype == torch.float64

    def _limit(self, comparisons: Sequence[_Comparison]) -> float:
        if self._exact:
            return FP64_TOLERANCE * max(comparison.largest_logit for comparison in comparisons)
        return NOISE_FACTOR * self._floor

    def _covered(self, ids: Ids) -> list[Evidence]:
        """The sessions that this run speaks for; one that begins several runs belongs to one of them."""
        return [one for one in self._evidence if self._run_of[one.label] == ids]

    def _rows(self, ids: Ids) -> list[int]:
        """Every row of ``ids`` that chose a token in some session, ascending."""
        return sorted({row for one in self._covered(ids) for row in one.rows})

    def _logits(self, ids: Ids) -> torch.Tensor:
        rows = self._rows(ids)
        logits = self._reference.logits(ids, rows[0])[_index(rows, rows[0])]
        self._tick()
        return logits

    def _compare(self, ids: Ids) -> list[_Comparison]:
        """One run of ``ids``; the longest ones are also where the noise is measured."""
        rows, logits = self._rows(ids), self._logits(ids)
        if len(ids) == max(map(len, self._runs)) and not self._measurements:
            self._measure_floor(ids, logits)
        place = {row: i for i, row in enumerate(rows)}
        return [
            _Comparison.of(one, ids, logits[torch.tensor([place[row] for row in one.rows])])
            for one in self._covered(ids)
        ]

    def _measure_floor(self, ids: Ids, first: torch.Tensor) -> None:
        """How far runs of ``ids`` without a cache lie apart if only their shape differs; ``first`` is one of them."""
        rows = self._rows(ids)
        runs = [first]
        for logits in self._reference.other_shapes(ids, rows[0], salt=self._measurements):
            runs.append(logits[_index([row for row in rows if row - rows[0] < len(logits)], rows[0])])
            self._tick()
        self._floor = max(self._floor, spread(runs))
        self._pairs += len(runs) * (len(runs) - 1) // 2
        self._measurements += 1

    def _tick(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)


def _index(rows: Sequence[int], first: int) -> torch.Tensor:
    return torch.tensor([row - first for row in rows])


def _worst(differences: Any) -> float:
    """The largest; NaN is the worst."""
    worst = 0.0
    for difference in differences:
        worst = worst if worst >= difference else difference
    return worst
