"""The limit between noise and fault, on numbers made for it."""

from __future__ import annotations

import pytest
import torch

from kvos.testing import toy_model
from kvos.verify.compare import Judge
from kvos.verify.observed import Fault, FaultKind, LogitRecord, Observation, TokenRecord
from kvos.verify.reference import Reference

IDS = tuple(range(40, 60))


def judge_of(dtype: torch.dtype) -> Judge:
    return Judge(Reference(toy_model(dtype=dtype)))


def delivered(judge: Judge, start: int = 12) -> torch.Tensor:
    """What a runtime without any error gives behind tokens ``start`` to the end."""
    return judge.reference.logits(IDS, start).clone()


@pytest.mark.parametrize(("share", "is_fault"), [(0.9e-6, False), (1.1e-6, True)])
def test_float64_allows_a_millionth_of_the_largest_logit(share: float, is_fault: bool) -> None:
    judge = judge_of(torch.float64)
    logits = delivered(judge)
    logits[3, 7] += share * logits.abs().max()
    fault = judge.judge(Observation([LogitRecord(4, IDS, 12, logits)]), round_number=0)
    assert (fault is not None) is is_fault
    assert judge.tally.largest_relative == pytest.approx(share, rel=1e-3)
    assert judge.tally.logit_rows == 8
    if fault is not None:
        assert fault.kind is FaultKind.LOGITS
        assert fault.operation == 4
        assert "logit 7 behind token 15 of 20" in fault.text
        assert "1 of 8 rows are wrong" in fault.text


@pytest.mark.parametrize(("floors", "is_fault"), [(1.8, False), (2.2, True)])
def test_a_working_dtype_allows_twice_the_floor(floors: float, is_fault: bool) -> None:
    judge = judge_of(torch.float32)
    judge.floor.measure(IDS, 12)
    logits = delivered(judge)
    logits[0, 0] += floors * judge.floor.value
    fault = judge.judge(Observation([LogitRecord(0, IDS, 12, logits)]))
    assert (fault is not None) is is_fault


def test_before_a_fault_is_declared_the_noise_of_its_own_tokens_is_measured() -> None:
    judge = judge_of(torch.float32)
    assert judge.limit == 0
    logits = delivered(judge)
    noise = float((logits - next(judge.reference.other_shapes(IDS, 12, salt=0))).abs().max())
    logits[0, 0] += noise / 2
    assert judge.judge(Observation([LogitRecord(0, IDS, 12, logits)])) is None
    assert judge.floor.value >= noise


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_logit_that_is_no_number_is_a_fault(dtype: torch.dtype) -> None:
    judge = judge_of(dtype)
    logits = delivered(judge)
    logits[1, 1] = torch.nan
    fault = judge.judge(Observation([LogitRecord(0, IDS, 12, logits)]), round_number=0)
    assert fault is not None
    assert not judge.tally.largest_difference <= 1e9


def test_rows_of_another_number_are_a_fault() -> None:
    judge = judge_of(torch.float64)
    fault = judge.judge(Observation([LogitRecord(0, IDS, 12, delivered(judge)[:-1])]))
    assert fault is not None
    assert "were due" in fault.text


def greedy(judge: Judge, n: int) -> tuple[int, ...]:
    ids = IDS
    for _ in range(n):
        ids = (*ids, int(judge.reference.logits(ids, len(ids) - 1).argmax()))
    return ids


def test_greedy_tokens_are_what_the_reference_says() -> None:
    judge = judge_of(torch.float64)
    ids = greedy(judge, 3)
    assert judge.judge(Observation([TokenRecord(0, ids, len(IDS))]), round_number=0) is None
    assert (judge.tally.tokens_compared, judge.tally.tokens_skipped) == (3, 0)
    wrong = (*ids[:-1], (ids[-1] + 1) % 259)
    fault = judge.judge(Observation([TokenRecord(2, wrong, len(IDS))]))
    assert fault is not None
    assert fault.kind is FaultKind.TOKENS
    assert f"token 22 was generated as {wrong[-1]}; without cache it is {ids[-1]}" in fault.text


def test_a_token_is_skipped_where_the_best_two_are_closer_than_the_limit() -> None:
    judge = judge_of(torch.float32)
    gap = float(judge.reference.logits(IDS, len(IDS) - 1)[0].topk(2).values.diff().abs())
    other = (*IDS, 0)
    judge.floor.value = gap / 2 * 1.01
    assert judge.judge(Observation([TokenRecord(0, other, len(IDS))]), round_number=100) is None
    assert (judge.tally.tokens_compared, judge.tally.tokens_skipped) == (0, 1)
    judge.floor.value = gap / 2 * 0.99
    assert judge.judge(Observation([TokenRecord(0, other, len(IDS))])) is not None


def test_of_equal_best_logits_any_may_be_chosen() -> None:
    judge = judge_of(torch.float64)
    rows = judge.reference.logits(IDS, len(IDS) - 1).clone()
    best, second, third = (int(i) for i in rows[0].topk(3).indices)
    rows[0, second] = rows[0, best]
    judge.reference.logits = lambda *_: torch.cat([rows, rows])  # type: ignore[method-assign, union-attr]
    for token, is_fault in ((best, False), (second, False), (third, True)):
        fault = judge.judge(Observation([TokenRecord(0, (*IDS, token), len(IDS))]))
        assert (fault is not None) == is_fault


def test_one_run_serves_every_prefix_of_its_sequence() -> None:
    judge = judge_of(torch.float64)
    records: list[LogitRecord | TokenRecord] = [
        LogitRecord(0, IDS[:end], end - 2, judge.reference.logits(IDS[:end], end - 2)) for end in (5, 9, 20)
    ]
    assert judge.judge(Observation(records), round_number=0) is None
    assert judge.tally.runs == 1
    assert judge.tally.logit_rows == 6


def test_the_earliest_fault_is_reported() -> None:
    judge = judge_of(torch.float64)
    logits = delivered(judge)
    logits[0, 0] += 1
    known = Fault(FaultKind.INVARIANT, 7, "")
    early, late = LogitRecord(3, IDS, 12, logits), LogitRecord(9, IDS, 12, logits)
    for records, operation in (([early], 3), ([late], 7)):
        fault = judge.judge(Observation(list(records), known))
        assert fault is not None
        assert fault.operation == operation
