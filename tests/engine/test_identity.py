"""The identity follows the values of the weights and the facts of the config, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures.families import FAMILIES
from kvos.engine import DynamicCacheEngine, TransformersEngine
from kvos.engine.identity import model_identity, weights_of
from kvos.testing import toy_model


def identity(dtype: torch.dtype = torch.float32, **settings: Any) -> str:
    return TransformersEngine(toy_model(dtype=dtype, **settings), kernels="generic").identity()


def test_equal_models_have_equal_identities_in_every_engine() -> None:
    assert identity() == identity() == DynamicCacheEngine(toy_model()).identity()
    weights, _, settings = identity().partition(".")
    assert (len(weights), len(settings)) == (64, 32)
    assert weights_of(identity()) == weights


def test_the_model_is_known_by_its_weights_whatever_the_config_says() -> None:
    one, other = FAMILIES["mistral"].model(), FAMILIES["mistral"].model(sliding_window=None)
    assert model_identity(one) != model_identity(other)
    assert weights_of(model_identity(one)) == weights_of(model_identity(other))
    assert weights_of(model_identity(one)) != weights_of(model_identity(FAMILIES["mistral"].model(seed=1)))


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


SETTINGS_OF_FAMILIES = [
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("qwen2", {"layer_types": ["full_attention"] * 4}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    ("gemma2", {"sliding_window": 20}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 64}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    ("granite", {"residual_multiplier": 2.0}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"topk_group": 2}),
]


@pytest.mark.parametrize(("family", "settings"), SETTINGS_OF_FAMILIES)
def test_every_setting_that_changes_logits_changes_it(family: str, settings: dict[str, Any]) -> None:
    one, other = FAMILIES[family].model(), FAMILIES[family].model(**settings)
    other.load_state_dict(one.state_dict())
    ids = torch.arange(5, 65)[None]
    with torch.inference_mode():
        assert not torch.allclose(one(ids).logits, other(ids).logits, atol=1e-3)
    assert model_identity(one) != model_identity(other)


def test_a_number_that_is_rounded_to_the_dtype_does_not_change_it(tmp_path: Path) -> None:
    FAMILIES["gemma3_text"].model(torch.bfloat16, hidden_size=72).save_pretrained(tmp_path)  # 72 has no exact root
    wide, narrow = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype) for dtype in (torch.float32, "auto"))
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert model_identity(wide) == model_identity(narrow)


def test_a_window_that_was_changed_on_a_module_changes_it() -> None:
    model = FAMILIES["mistral"].model()
    before = model_identity(model)
    model.model.layers[2].self_attn.sliding_window = 7
    assert model_identity(model) != before


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
