"""What was delivered against what the model says without a cache, and the limit between noise and fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kvos.verify.observed import Fault, FaultKind, LogitRecord, Observation, TokenRecord
from kvos.verify.reference import FreshRuns, NoiseFloor, Reference, cover

__all__ = ["FP64_TOLERANCE", "NOISE_FACTOR", "Judge", "Tally"]

FP64_TOLERANCE = 1e-6
"""Of the largest logit, in float64: norms and RoPE of the library compute in float32 inside."""
NOISE_FACTOR = 2.0
"""Limit in a working dtype, in noise floors."""
FIRST_FLOORS = 4
FLOOR_EVERY = 25
"""The floor is measured on a sequence of each of the first rounds, and then on one of every so many rounds."""


@dataclass(slots=True)
class Tally:
    """What was compared so far.

    Attributes:
        logit_rows: rows of the vocabulary's size, in ``runs`` reference runs.
        tokens_compared: generated tokens that had to be equal.
        tokens_skipped: those where the reference's two best logits lie within the limit.
        largest_difference: of a logit.
        largest_relative: the same, as a share of the largest logit of its comparison.
    """

    logit_rows: int = 0
    runs: int = 0
    tokens_compared: int = 0
    tokens_skipped: int = 0
    largest_difference: float = 0.0
    largest_relative: float = 0.0

    def add(self, other: Tally) -> None:
        """Take over what ``other`` counted."""
        self.logit_rows += other.logit_rows
        self.runs += other.runs
        self.tokens_compared += other.tokens_compared
        self.tokens_skipped += other.tokens_skipped
        self.largest_difference = _worse(self.largest_difference, other.largest_difference)
        self.largest_relative = _worse(self.largest_relative, other.largest_relative)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """On one record: what was counted, and what was wrong."""

    counted: Tally
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run of the reference: logits behind tokens ``first_row`` to the end of ``ids``, ``[rows, vocab]``."""

    ids: tuple[int, ...]
    first_row: int
    logits: torch.Tensor

    def covers(self, record: LogitRecord | TokenRecord) -> bool:
        """Whether the record's sequence is a prefix of this one, so that its rows are among these."""
        return self.ids[: len(record.ids)] == record.ids


@dataclass(slots=True)
class Judge:
    """Compares observations with runs of ``reference``.

    Attributes:
        reference: fresh runs of kvos are compared with to the bit.
        floor: measured as the rounds go, on their own sequences; None where bits are compared.
        tally: of all rounds that were judged.
    """

    reference: Reference | FreshRuns
    floor: NoiseFloor | None = field(init=False)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.floor = NoiseFloor(self.reference) if isinstance(self.reference, Reference) else None

    @property
    def is_bitwise(self) -> bool:
        return self.floor is None

    @property
    def is_exact(self) -> bool:
        """For bits and in float64 the limit is fixed; the floor is only for information."""
        return self.is_bitwise or self.reference.dtype == torch.float64

    @property
    def limit(self) -> float:
        """Largest allowed difference of a logit; in float64 as a share of the largest logit."""
        if self.floor is None:
            return 0.0
        return FP64_TOLERANCE if self.is_exact else NOISE_FACTOR * self.floor.value

    def judge(self, seen: Observation, *, round_number: int | None = None) -> Fault | None:
        """The first fault in ``seen``, or None.

        Args:
            round_number: counts the comparison in ``tally``, and takes part in measuring the floor; None for neither.
        """
        records = seen.records
        runs = {ids: _first_row(ids, records) for ids in cover(record.ids for record in records)}
        if round_number is not None:
            self._sample_floor(round_number, runs)
        faults = [seen.fault] if seen.fault is not None else []
        for ids, first_row in runs.items():
            run = _Run(ids, first_row, self.reference.logits(ids, first_row))
            verdicts = [self._compare(record, run) for record in records if run.covers(record)]
            faults += [verdict.fault for verdict in verdicts if verdict.fault is not None]
            if round_number is not None:
                self.tally.runs += 1
                for verdict in verdicts:
                    self.tally.add(verdict.counted)
        return min(faults, key=lambda fault: fault.operation, default=None)

    def _sample_floor(self, number: int, runs: dict[tuple[int, ...], int]) -> None:
        if self.floor is None:
            return
        due = self.floor.sequences < FIRST_FLOORS or (not self.is_exact and number % FLOOR_EVERY == 0)
        if due and runs:
            ids = max(runs, key=lambda sequence: len(sequence) - runs[sequence])
            self.floor.measure(ids, runs[ids])

    def _compare(self, record: LogitRecord | TokenRecord, run: _Run) -> _Verdict:
        rows = run.logits[record.first_row - run.first_row : len(record.ids) - run.first_row]
        verdict = self._verdict(record, rows)
        if verdict.fault is None or self.is_exact or self.floor is None:
            return verdict
        self.floor.measure(run.ids, run.first_row)  # judged by the noise on these very ids and positions
        return self._verdict(record, rows)

    def _verdict(self, record: LogitRecord | TokenRecord, rows: torch.Tensor) -> _Verdict:
        return self._of_logits(record, rows) if isinstance(record, LogitRecord) else self._of_tokens(record, rows)

    def _of_logits(self, record: LogitRecord, rows: torch.Tensor) -> _Verdict:
        if record.logits.shape != rows.shape:
            text = f"{tuple(record.logits.shape)} logits were delivered where {tuple(rows.shape)} were due"
            return _Verdict(Tally(), Fault(FaultKind.LOGITS, record.operation, text))
        apart = (record.logits.to(rows.dtype) - rows).abs()
        largest = float(rows.abs().max())
        difference = float(apart.max())
        counted = Tally(len(rows), largest_difference=difference, largest_relative=difference / largest)
        limit = self.limit * largest if self.is_exact else self.limit
        if difference <= limit:  # false for NaN
            return _Verdict(counted)
        row, entry = divmod(int(apart.nan_to_num(nan=torch.inf).argmax()), rows.shape[1])
        wrong = int((~(apart.amax(dim=1) <= limit)).sum())
        text = (
            f"logit {entry} behind token {record.start + row} of {len(record.ids)} is "
            f"{float(record.logits[row, entry]):.9g}, without cache {float(rows[row, entry]):.9g}: "
            f"difference {difference:.3g}, largest logit {largest:.3g}, limit {self._limit_text()}; "
            f"{wrong} of {len(rows)} rows are wrong"
        )
        return _Verdict(counted, Fault(FaultKind.LOGITS, record.operation, text))

    def _of_tokens(self, record: TokenRecord, rows: torch.Tensor) -> _Verdict:
        counted = Tally()
        for i, given in enumerate(record.ids[record.start :]):
            best = rows[i].topk(2)
            gap = float(best.values[0] - best.values[1])
            if not self.is_exact and gap <= self.limit:
                counted.tokens_skipped += 1
                continue
            counted.tokens_compared += 1
            expected = int(best.indices[0])
            if given != expected and float(rows[i, given]) != float(best.values[0]):  # of equal ones any may be chosen
                text = (
                    f"token {record.start + i} was generated as {given}; without cache it is {expected}, "
                    f"{gap:.3g} logits ahead of the next (limit {self._limit_text()})"
                )
                return _Verdict(counted, Fault(FaultKind.TOKENS, record.operation, text))
        return _Verdict(counted)

    def _limit_text(self) -> str:
        if self.is_bitwise:
            return "0, bit by bit"
        if self.is_exact:
            return f"{self.limit:g} of the largest logit"
        return f"{self.limit:.3g}, that is {NOISE_FACTOR:g} noise floors"


def _first_row(ids: tuple[int, ...], records: Iterable[LogitRecord | TokenRecord]) -> int:
    return min(record.first_row for record in records if ids[: len(record.ids)] == record.ids)


def _worse(known: float, new: float) -> float:
    """The larger one; NaN is the worst."""
    return known if known >= new else new
