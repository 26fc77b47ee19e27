"""A small random model of each tested architecture, its special features where they bite: a window of 13 tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvos.testing.models import TOY_VOCAB_SIZE

__all__ = ["FAMILIES", "Family"]

WINDOW = 13
LAYERS = 4
COMMON: dict[str, Any] = {
    "vocab_size": TOY_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


PLAIN_ROPE = {"rope_parameters": rope("default")}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
DYNAMIC = rope("dynamic", factor=4.0)
LONGROPE = rope(
    "longrope",
    factor=4.0,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
    original_max_position_embeddings=100,
)
PHI3_LONGROPE = {
    "rope_parameters": LONGROPE,
    "original_max_position_embeddings": 100,
    "sliding_window": WINDOW,
}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)


@dataclass(frozen=True)
class Family:
    """How to build one.

    Attributes:
        without: settings that switch a special feature off, with the same weights; None if it has none.
        declared: how long its sequences may become, if its positions depend on that.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] | None = None
    label: str = ""
    declared: int | None = None

    @property
    def name(self) -> str:
        return self.label or self.model_type

    def model(self, dtype: torch.dtype = torch.float32, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
        """Weights depend on the seed and the settings alone."""
        merged = copy.deepcopy({**COMMON, **self.settings, **settings})  # a config changes what it is given
        config = CONFIG_MAPPING[self.model_type](**{key: value for key, value in merged.items() if value is not ...})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    torch.nn.init.normal_(parameter)
        if getattr(model.config, "_experts_implementation", None) is not None:
            model.set_experts_implementation("eager")  # the grouped kernel has no float64
        ready: PreTrainedModel = model.to(dtype=dtype).eval()
        return ready


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", {"head_dim": 16}, {"rope_parameters": rope("default", rope_theta=100.0)}),
        Family(
            "llama", {"head_dim": 16, "rope_parameters": rope("linear", factor=4.0)}, PLAIN_ROPE, label="llama-linear"
        ),
        Family("llama", {"head_dim": 16, "rope_parameters": YARN}, PLAIN_ROPE, label="llama-yarn"),
        Family("llama", {"head_dim": 16, "rope_parameters": LLAMA3}, PLAIN_ROPE, label="llama-llama3"),
        Family("olmo2"),
        Family("granite", {"attention_multiplier": 0.4}, {"attention_multiplier": 0.25}),
        Family(
            "gpt_neox", {"num_key_value_heads": ...}, {"rope_parameters": rope("default", partial_rotary_factor=1.0)}
        ),
        Family(
            "gpt2",
            {"num_key_value_heads": ..., "intermediate_size": ..., "scale_attn_by_inverse_layer_idx": True},
            {"scale_attn_by_inverse_layer_idx": False},
        ),
        Family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": ...}),
        Family("mistral", {"sliding_window": WINDOW}, {"sliding_window": None}),
        Family(
            "mixtral",
            {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
            {"sliding_window": None},
        ),
        Family(
            "qwen2",
            {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
            {"use_sliding_window": False, "layer_types": ["full_attention"] * LAYERS},
        ),
        Family(
            "qwen3",
            {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED, "head_dim": 16},
            {"use_sliding_window": False, "layer_types": ["full_attention"] * LAYERS},
        ),
        Family(
            "qwen3_moe",
            {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
            {"use_sliding_window": False, "sliding_window": None},
        ),
        Family("phi3", {"sliding_window": WINDOW}, {"sliding_window": None}),
        Family("starcoder2", {"sliding_window": WINDOW}, {"sliding_window": None}),
        Family(
            "smollm3",
            {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "layer_types": MIXED,
                "no_rope_layers": [1, 0, 1, 1],
            },
            {"no_rope_layers": [1, 1, 1, 1]},
        ),
        Family(
            "cohere2",
            {"sliding_window": WINDOW, "layer_types": MIXED, "logit_scale": 1.0},
            {"layer_types": ["full_attention"] * LAYERS},
        ),
        Family(
            "gemma2",
            {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
            {"attn_logit_softcapping": None},
        ),
        Family(
            "gemma3_text",
            {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 24, "layer_types": MIXED},
            {"rope_parameters": {kind: rope("default", rope_theta=1e4) for kind in MIXED[:2]}},
        ),
        Family(
            "gpt_oss",
            {
                "sliding_window": WINDOW,
                "head_dim": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": MIXED,
                "rope_parameters": {**YARN, "truncate": False},
            },
            PLAIN_ROPE,
        ),
        Family("stablelm", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}),
        Family("nemotron", {"head_dim": 16, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}),
        Family(
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
                "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
            PLAIN_ROPE,
        ),
        Family(
            "llama",
            {"head_dim": 16, "max_position_embeddings": 48, "rope_parameters": DYNAMIC},
            {"max_position_embeddings": 512, **PLAIN_ROPE},
            label="llama-dynamic",
            declared=150,
        ),
        Family(
            "llama", {"head_dim": 16, "rope_parameters": LONGROPE}, PLAIN_ROPE, label="llama-longrope", declared=150
        ),
        Family("phi3", PHI3_LONGROPE, PLAIN_ROPE, label="phi3-longrope", declared=150),
        Family("phi3", PHI3_LONGROPE, label="phi3-longrope-short", declared=80),
    )
}
