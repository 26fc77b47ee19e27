"""Which models the engines run. What was not tested is refused, by the name of the feature that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvos.errors import UnsupportedModelError
from kvos.storage import KVLayout, LayerSpec

__all__ = ["TESTED_MODEL_TYPES", "TESTED_ROPE_TYPES", "check_model", "check_supported", "layout_of"]

TESTED_MODEL_TYPES = frozenset({"llama"})
TESTED_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3"})
"""Position schemes where a key depends on its own position alone. ``dynamic`` and ``longrope`` depend on the longest
position of the packed row, that is, on the neighbours in the batch."""

COMPUTE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

_FEATURE_OF_TYPE = {
    "gpt_oss": "attention sinks",
    "gpt2": "learned absolute positions",
    "opt": "learned absolute positions",
    "bloom": "ALiBi position biases",
    "mpt": "ALiBi position biases",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "rwkv": "recurrent layers",
}
"""Features that no config attribute gives away."""


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse a model that the engines would not run exactly.

    Raises:
        UnsupportedModelError: the text names the feature that is missing, and the model type.
    """
    for find in _FINDERS:
        feature = find(config)
        if feature is not None:
            raise UnsupportedModelError(
                f"this engine has no {feature}, which model type {config.model_type!r} needs. "
                f"Supported model types: {', '.join(sorted(TESTED_MODEL_TYPES))}."
            )
    if config.model_type not in TESTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} was not tested with this engine. "
            f"Supported model types: {', '.join(sorted(TESTED_MODEL_TYPES))}."
        )


def _encoder(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "encoder-decoder attention"
    if getattr(config, "is_causal", True) is False:
        return "bidirectional attention"
    return "inputs other than text" if getattr(config, "sub_configs", None) else None


def _window(config: PreTrainedConfig) -> str | None:
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if "sliding_attention" in others:
        return "sliding-window attention"
    if others:
        return f"layers of type {', '.join(sorted(map(str, others)))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window attention"
    return "chunked attention" if getattr(config, "attention_chunk_size", None) else None


def _scores(config: PreTrainedConfig) -> str | None:
    if getattr(config, "attn_logit_softcapping", None):
        return "attention soft cap"
    if getattr(config, "alibi", False):
        return "ALiBi position biases"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention"
    return _FEATURE_OF_TYPE.get(config.model_type)


def _rope(config: PreTrainedConfig) -> str | None:
    parameters: Any = getattr(config, "rope_parameters", None)
    if not parameters:
        return "position scheme other than RoPE"
    if "rope_type" not in parameters:
        return "RoPE that differs between layers"
    rope_type = parameters["rope_type"]
    if rope_type not in TESTED_ROPE_TYPES:
        return f"{rope_type} RoPE, whose keys depend on the length of the sequence"
    return None


_FINDERS: tuple[Callable[[PreTrainedConfig], str | None], ...] = (_encoder, _window, _scores, _rope)


def check_model(model: nn.Module) -> torch.dtype:
    """Refuse a model object that the engines would not run exactly; returns its compute dtype.

    Raises:
        UnsupportedModelError: as ``check_supported``; also for quantised or otherwise wrapped weights, more than one
            dtype or device, and classes that do not dispatch attention through ``AttentionInterface``.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Transformers PreTrainedModel; a wrapper (PEFT, compile, parallel) has to "
            "be merged or taken off first"
        )
    check_supported(model.config)
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not dispatch attention through AttentionInterface")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head")
    parameters = dict(model.named_parameters())
    wrapped = [key for key, value in parameters.items() if type(value.detach()) is not torch.Tensor]
    packed = [key for key, value in parameters.items() if value.dtype not in COMPUTE_DTYPES]
    if wrapped or packed:
        raise UnsupportedModelError(f"{name} has quantised layers, which this engine lacks: {(wrapped + packed)[0]}")
    if len({value.dtype for value in parameters.values()}) > 1:
        raise UnsupportedModelError(f"{name} mixes weight dtypes; load it in one dtype")
    if (
        len({value.device for value in parameters.values()}) > 1
        or next(iter(parameters.values())).device.type == "meta"
    ):
        raise UnsupportedModelError(f"{name} is spread over several devices; this engine runs on one")
    dtype: torch.dtype = model.dtype
    return dtype


def layout_of(config: PreTrainedConfig, block_size: int, dtype: torch.dtype) -> KVLayout:
    """What the attention layers of a supported model store.

    Raises:
        InvalidConfigError: ``block_size`` is not allowed.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout((LayerSpec(kv_heads, head_dim, head_dim),) * config.num_hidden_layers, block_size, dtype)
