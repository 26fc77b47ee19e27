"""The identity follows the values of the weights and the facts of the config, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvos.engine import DynamicCacheEngine, TransformersEngine
from kvos.testing import toy_model


def identity(dtype: torch.dtype = torch.float32, **settings: Any) -> str:
    return TransformersEngine(toy_model(dtype=dtype, **settings), kernels="generic").identity()


def test_equal_models_have_equal_identities_in_every_engine() -> None:
    assert identity() == identity() == DynamicCacheEngine(toy_model()).identity()
    assert len(identity()) == 64


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"hidden_act": "gelu"},
    ],
)
def test_weights_and_settings_that_change_results_change_it(settings: dict[str, Any]) -> None:
    assert identity(**settings) != identity()


@pytest.mark.parametrize("settings", [{"eos_token_id": 5}, {"use_cache": False}, {"max_position_embeddings": 99}])
def test_settings_that_change_no_result_leave_it(settings: dict[str, Any]) -> None:
    assert identity(**settings) == identity()


def test_one_bit_of_one_weight_changes_it() -> None:
    model = toy_model()
    with torch.no_grad():
        model.model.norm.weight.view(torch.int32)[3] ^= 1
    assert TransformersEngine(model, kernels="generic").identity() != identity()


def _scaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 0.5


def _stretched(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.25


def _smoothed(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [_scaled, _stretched, _smoothed])
def test_what_somebody_changed_on_the_modules_changes_it(change: Callable[[Any], None]) -> None:
    model = toy_model()
    change(model)
    assert TransformersEngine(model, kernels="generic").identity() != identity()


def test_widening_without_loss_keeps_it_and_rounding_changes_it() -> None:
    assert identity(torch.float64) == identity()
    assert identity(torch.bfloat16) != identity()
    widened = toy_model(dtype=torch.bfloat16).float()
    assert TransformersEngine(widened, kernels="generic").identity() == identity(torch.bfloat16)
