"""What is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvos.engine import DynamicCacheEngine, TransformersEngine, check_supported
from kvos.engine.probe import layout_from, probe_layers
from kvos.engine.support import check_model
from kvos.errors import InvalidConfigError, UnsupportedModelError
from kvos.testing import toy_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 64,
}


def config_of(model_type: str, **settings: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**settings)
    return config


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        YARN,
        LLAMA3,
    ],
)
def test_llama_with_positions_that_stand_alone_is_supported(rope: dict[str, Any]) -> None:
    check_supported(LlamaConfig(rope_parameters=rope))


@pytest.mark.parametrize(
    ("model_type", "settings", "feature"),
    [
        ("olmo2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic RoPE"),
        ("olmo2", {"rope_parameters": LONGROPE}, "longrope RoPE"),
        ("llama", {"is_causal": False}, "bidirectional attention"),
        ("t5", {}, "encoder-decoder"),
        ("bloom", {}, "ALiBi"),
        ("llava", {}, "inputs other than text"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("exaone4", {}, "not tested"),
    ],
)
def test_a_feature_that_is_missing_is_named_with_the_model_type(
    model_type: str, settings: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=feature) as caught:
        check_supported(config_of(model_type, **settings))
    assert repr(model_type) in str(caught.value)


@pytest.mark.parametrize("engine", [TransformersEngine, DynamicCacheEngine])
def test_an_unsupported_model_is_refused_before_anything_changed(engine: Any) -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=50)).train()
    with pytest.raises(UnsupportedModelError):
        engine(model)
    assert model.training
    assert model.config._attn_implementation != "kvos"


def test_a_wrapper_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not a Transformers PreTrainedModel"):
        check_model(nn.Sequential(toy_model()))


def test_quantised_layers_are_refused() -> None:
    model = toy_model()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"quantised layers.*up_proj"):
        check_model(model)


def test_mixed_dtypes_are_refused() -> None:
    model = toy_model()
    model.lm_head.to(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="mixes weight dtypes"):
        check_model(model)


def test_experts_in_a_kernel_without_float64_are_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = config_of("mixtral", vocab_size=64, num_local_experts=2, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").double()
    with pytest.raises(UnsupportedModelError, match="set_experts_implementation"):
        check_model(model)
    model.set_experts_implementation("eager")
    assert check_model(model) == torch.float64


def test_weights_that_are_nowhere_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="several devices"):
        check_model(toy_model().to("meta"))


def test_the_layout_counts_kv_heads() -> None:
    layout = layout_from(probe_layers(toy_model()), 16, torch.float32)
    assert layout.bytes_per_token == 2 * 3 * 2 * 16 * 4  # K and V, layers, KV heads, head size, float32


def test_a_block_size_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="block_size is 12"):
        TransformersEngine(toy_model(), block_size=12)
