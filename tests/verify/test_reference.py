"""Runs without a cache, the noise between them, and the fewest of them that are needed."""

from __future__ import annotations

from math import comb

import pytest
import torch

from kvos.testing import toy_model
from kvos.verify.reference import NoiseFloor, Reference, cover, spread

IDS = tuple(range(40, 70))


def test_a_sequence_is_covered_by_any_that_it_begins() -> None:
    kept = cover([(1, 2), (1, 2, 3), (1, 2, 4, 5), (1,), (2,), (1, 2, 3), (1, 2, 4)])
    assert sorted(kept) == [(1, 2, 3), (1, 2, 4, 5), (2,)]


def test_spread_is_the_largest_difference_between_any_two_runs() -> None:
    base = torch.zeros(3, 4)
    high, low = base.clone(), base.clone()
    high[1, 2], low[1, 2] = 0.25, -0.5
    assert spread([base, high, low, base, base]) == 0.75


def test_spread_looks_only_at_rows_that_both_runs_have() -> None:
    base, other = torch.zeros(4, 2), torch.zeros(4, 2)
    other[3] = 9.0
    short = torch.full((2, 2), 0.5)
    assert spread([base, base, base, base, short]) == 0.5
    assert spread([base, base, base, other, short]) == 9.0


def test_a_floor_needs_eight_pairs() -> None:
    with pytest.raises(ValueError, match="at least 8 pairs"):
        spread([torch.zeros(1, 2)] * 4)  # six pairs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("first_row", [0, 20, 29])
def test_every_other_shape_computes_the_same_rows(dtype: torch.dtype, first_row: int) -> None:
    reference = Reference(toy_model(dtype=dtype))
    expected = reference.logits(IDS)[first_row:]
    runs = list(reference.other_shapes(IDS, first_row, salt=1))
    assert len(runs) == reference.num_other_shapes
    assert comb(len(runs) + 1, 2) >= 8
    for run in runs:
        assert len(run) in (len(expected), max(1, len(IDS) // 2 - first_row))
        assert (run - expected[: len(run)]).abs().max() < 1e-4  # eager attention has a softmax in float32


def test_short_sequences_have_a_floor_too() -> None:
    floor = NoiseFloor(Reference(toy_model(dtype=torch.bfloat16)))
    floor.measure((5,), 0)
    floor.measure((5, 6, 7), 2)
    assert floor.sequences == 2
    assert floor.value > 0


def test_the_reference_leaves_the_model_as_it_was() -> None:
    model = toy_model()
    reference = Reference(model)
    attention, logits = model.config._attn_implementation, reference.logits(IDS)
    NoiseFloor(reference).measure(IDS, 0)
    assert model.config._attn_implementation == attention
    assert torch.equal(reference.logits(IDS), logits)
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_floor_grows_with_the_coarseness_of_the_dtype() -> None:
    floors = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        floor = NoiseFloor(Reference(toy_model(dtype=dtype)))
        floor.measure(IDS, 0)
        floor.measure(IDS, 0)  # once is enough
        assert floor.sequences == 1
        assert floor.pairs >= 8
        floors[dtype] = floor.value
    assert floors[torch.float64] < floors[torch.float32] < floors[torch.bfloat16] / 100
