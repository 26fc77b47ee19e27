"""Sampling settings are checked when they are made, and not when a step stumbles over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvos.errors import InvalidInputError
from kvos.serving import SamplingParams

NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"),
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
    ("temperature", None), ("temperature", True),
    ("top_p", 0), ("top_p", 1.01), ("top_p", float("nan")), ("top_p", None),
    ("top_k", -1), ("top_k", 1.5), ("top_k", True), ("top_k", None),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", float("nan")), ("min_p", "x"),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", float("inf")),
    ("repetition_penalty", float("nan")), ("repetition_penalty", None),
    ("stop", ""), ("stop", ("a", "")), ("stop", (1,)), ("stop", 5), ("stop", None), ("stop", b"bytes"),
    ("seed", -1), ("seed", 2**63), ("seed", 1.5), ("seed", True), ("seed", "1"),
    ("max_tokens", 2**63), ("top_k", 2**63),
    ("temperature", np.array([1.0, 2.0])), ("top_k", np.array([1, 2])), ("stop", np.array([["a", "b"]])),
    ("ignore_eos", 1), ("ignore_eos", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_out_of_its_range_is_an_error_that_names_the_setting(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_any_length_is_refused_by_name(name: str, digits: int) -> None:
    for number in (10**digits, -(10**digits)):
        with pytest.raises(InvalidInputError, match=f"{name} is "):
            SamplingParams(**{name: number})


def test_whole_numbers_of_any_kind_are_whole_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(5), top_k=np.int32(3), seed=np.uint8(7), temperature=np.float32(0.5))
    assert (params.max_tokens, params.top_k, params.seed, params.temperature) == (5, 3, 7, 0.5)
    assert SamplingParams(temperature=1).temperature == 1


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["END", "\n"]).stop == ("END", "\n")


def test_stop_strings_that_come_one_by_one_are_all_kept() -> None:
    assert SamplingParams(stop=(text for text in ["END", "\n"])).stop == ("END", "\n")
    with pytest.raises(InvalidInputError, match="stop"):
        SamplingParams(stop=(text for text in ["END", ""]))
