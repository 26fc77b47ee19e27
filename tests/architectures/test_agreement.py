"""Every architecture of the table agrees with its own eager attention, whatever the cache did.

One sequence a call there: packed rows of plain Transformers are wrong for some types.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kvos.engine.attention
from architectures.families import FAMILIES, WINDOW, Family
from engine.driver import Driver, History, Work
from kvos.engine import TransformersEngine
from kvos.engine.attention import LayerCall
from kvos.engine.probe import probe_layers
from kvos.engine.rope import declared_length
from kvos.errors import UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES, Need

TOLERANCE = {torch.float64: 5e-6, torch.float32: 2e-5}
"""Of the largest logit. The library's eager softmax computes in float32, in a float64 model, too."""
TOKENS = 75
DTYPES = [torch.float64, torch.float32]


class Pair:
    """An engine, and the plain model beside it."""

    def __init__(self, family: Family, dtype: torch.dtype) -> None:
        self.plain = family.model(dtype)
        self.plain.set_attn_implementation("eager")
        self.engine = TransformersEngine(family.model(dtype), block_size=8)
        self.declared = family.declared
        self.driver = Driver(self.engine, declared=family.declared)
        self.tolerance = TOLERANCE[dtype]

    def check(self, history: History, logits: torch.Tensor, start: int = 0) -> None:
        with torch.inference_mode(), declared_length(self.plain, self.declared):
            ids = torch.from_numpy(history.ids.astype(np.int64))[None]
            expected = self.plain(input_ids=ids, use_cache=False).logits[0, start : start + len(logits)]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= self.tolerance * expected.abs().max()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(params=DTYPES, ids=["fp64", "fp32"])
def pair(request: pytest.FixtureRequest, family: Family) -> Pair:
    return Pair(family, request.param)


def test_the_table_and_the_tests_know_the_same_types() -> None:
    assert {family.model_type for family in FAMILIES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("chunk", [TOKENS, 5, 16, 33])
def test_a_prompt_in_one_piece_or_in_chunks(pair: Pair, chunk: int) -> None:
    history = pair.driver.history(TOKENS)
    pair.check(history, pair.driver.prefill(history, *[chunk] * (TOKENS // chunk)))


def test_ragged_decodes_beside_a_prefill(pair: Pair) -> None:
    driver = pair.driver
    histories = [driver.history(tokens) for tokens in (70, 5, WINDOW + 1, 40)]
    logits = [[part] for part in driver.step(*(Work(history, len(history.ids) - 4) for history in histories))]
    late = driver.history(30)
    parts = []
    for rows in (1, 1, 1, 1):
        *steps, part = driver.step(*(Work(history, rows) for history in histories), Work(late, 7))
        parts.append(part)
        for mine, step in zip(logits, steps, strict=True):
            mine.append(step)
    for history, mine in zip((*histories, late), (*logits, parts), strict=True):
        pair.check(history, torch.cat(mine))


def test_a_shared_prefix(pair: Pair) -> None:
    driver = pair.driver
    parent = driver.history(60)
    pair.check(parent, driver.prefill(parent))
    forks = [driver.history(tokens, prefix=parent) for tokens in (59, 75)]
    for fork, part in zip(forks, driver.step(*(Work(fork, len(fork.ids) - 56) for fork in forks)), strict=True):
        pair.check(fork, part, start=56)


FEATURES: dict[Need, dict[str, Any]] = {
    Need.WINDOW: {"window": None},
    Need.SOFT_CAP: {"softcap": None},
    Need.SINKS: {"sinks": None},
    Need.SCALING: {},  # the usual scale instead, see below
}
CASES = [
    (name, need)
    for name, family in FAMILIES.items()
    for need in ARCHITECTURES[family.model_type].needs
    if need in FEATURES
]


@pytest.mark.parametrize(("name", "need"), CASES, ids=lambda value: value if isinstance(value, str) else value.name)
def test_without_its_special_feature_an_architecture_does_not_agree(
    name: str, need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feature is lost between the model's call and kvos's attention."""
    usual = probe_layers(FAMILIES[name].model())[0].spec.k_dim ** -0.5

    def forgetful(*asked: Any) -> LayerCall:
        return replace(LayerCall(*asked), **(FEATURES[need] or {"scale": usual}))

    monkeypatch.setattr(kvos.engine.attention, "LayerCall", forgetful)
    with pytest.raises((AssertionError, UnsupportedModelError)):
        test_a_prompt_in_one_piece_or_in_chunks(Pair(FAMILIES[name], torch.float64), 16)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.without is not None])
def test_a_model_without_the_feature_does_not_agree_with_one_that_has_it(name: str) -> None:
    with_feature = Pair(FAMILIES[name], torch.float64)
    lost = replace(FAMILIES[name], settings={**FAMILIES[name].settings, **(FAMILIES[name].without or {})})
    without_feature = Pair(lost, torch.float64)
    history = without_feature.driver.history(TOKENS)
    logits = without_feature.driver.prefill(history)
    without_feature.check(history, logits)
    with pytest.raises(AssertionError):
        with_feature.check(history, logits)


def test_only_the_plainest_have_no_feature_to_switch_off() -> None:
    assert {name for name, one in FAMILIES.items() if one.without is None} == {"olmo2", "opt", "phi3-longrope-short"}


@pytest.mark.parametrize("one_off", [-1, 1])
def test_a_window_that_is_one_token_off_is_noticed(one_off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(scale: float, window: int | None, *rest: Any) -> LayerCall:
        return LayerCall(scale, None if window is None else window + one_off, *rest)

    monkeypatch.setattr(kvos.engine.attention, "LayerCall", shifted)
    for chunk in (TOKENS, 16, 1):
        with pytest.raises(AssertionError):
            test_a_prompt_in_one_piece_or_in_chunks(Pair(FAMILIES["mistral"], torch.float64), chunk)
