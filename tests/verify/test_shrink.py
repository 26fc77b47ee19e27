"""Shrinking, on predicates whose shortest histories are known."""

from __future__ import annotations

from kvos.verify.operations import Close, Extend, Fork, Open, Operation, Truncate
from kvos.verify.shrink import shrink

NOISE = [Extend(1, 0, 4, 0), Close(3), Extend(2, 1, 9, 2)]


def test_only_what_shows_the_fault_remains() -> None:
    history = [Open(0, 30, 0), *NOISE, Fork(0, 2), *NOISE, Truncate(0, 500), *NOISE]

    def fails(candidate: tuple[Operation, ...]) -> bool:
        kinds = [type(operation) for operation in candidate]
        return Fork in kinds and Truncate in kinds and kinds.index(Fork) < kinds.index(Truncate)

    assert shrink(history, fails) == (Fork(0, 1), Truncate(0, 500))


def test_numbers_become_as_small_as_they_can() -> None:
    def fails(candidate: tuple[Operation, ...]) -> bool:
        return sum(operation.tokens for operation in candidate if isinstance(operation, Open)) >= 17

    assert shrink([Open(0, 60, 40), Open(1, 5, 0)], fails) == (Open(0, 17, 0),)


def test_the_search_ends_with_its_trials() -> None:
    asked: list[int] = []

    def fails(candidate: tuple[Operation, ...]) -> bool:
        asked.append(len(candidate))
        return len(candidate) >= 3

    shortest = shrink(NOISE * 4, fails, max_trials=4)
    assert len(asked) == 4
    assert len(shortest) < 12
    assert fails(shortest)


def test_a_history_that_cannot_shrink_stays() -> None:
    history = (Fork(0, 1), Close(0))
    assert shrink(history, lambda candidate: candidate == history) == history
