"""Which models the engines run. What was not tested is refused, by the name of the feature that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvos.errors import UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES, DECLARED_ROPE_TYPES, REFUSED, TESTED_ROPE_TYPES, Need

__all__ = ["check_model", "check_supported", "context_of", "takes_declared_length"]

COMPUTE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_supported(config: PreTrainedConfig, *, untested: bool = False) -> None:
    """Refuse a model that the engines would not run exactly.

    Args:
        untested: let types pass that nobody has tested, as long as no feature is known to be missing.

    Raises:
        UnsupportedModelError: the text names the feature that is missing, and the model type.
    """
    model_type = config.model_type
    known = f"Tested model types: {', '.join(sorted(ARCHITECTURES))}."
    for find in _FINDERS:
        feature = find(config)
        if feature is not None:
            raise UnsupportedModelError(f"this engine has no {feature}, which model type {model_type!r} needs. {known}")
    if model_type not in ARCHITECTURES and not untested:
        raise UnsupportedModelError(
            f"model type {model_type!r} was not tested with this engine. {known} To try it at your own risk, open it "
            "with untested_models=True (KVOS_UNTESTED_MODELS=1): it has to pass a self-test first."
        )


def _refused(config: PreTrainedConfig) -> str | None:
    refused = REFUSED.get(config.model_type)
    return None if refused is None else refused.missing


def _encoder(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "encoder-decoder attention"
    if getattr(config, "is_causal", True) is False:
        return "bidirectional attention"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    return "inputs other than text" if getattr(config, "sub_configs", None) else None


def _layers(config: PreTrainedConfig) -> str | None:
    others = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if others:
        return f"layers of type {', '.join(sorted(map(str, others)))}"
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention"
    return "ALiBi position biases" if getattr(config, "alibi", False) else None


def _rope(config: PreTrainedConfig) -> str | None:
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    by_layer_type = parameters.values() if "rope_type" not in parameters else [parameters]
    for one in by_layer_type:
        rope_type = one.get("rope_type", "default") if isinstance(one, dict) else "default"
        if rope_type in TESTED_ROPE_TYPES or (one is parameters and takes_declared_length(config)):
            continue
        return f"{rope_type} RoPE, whose keys depend on the length of the sequence"
    return None


def takes_declared_length(config: PreTrainedConfig) -> bool:
    """Whether keys depend on the length of the sequence, and kvos knows how to fix that length for this type."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    known = ARCHITECTURES.get(config.model_type)
    return (
        parameters.get("rope_type") in DECLARED_ROPE_TYPES and known is not None and Need.DECLARED_LENGTH in known.needs
    )


def context_of(config: PreTrainedConfig) -> int:
    """The longest sequence that the model was made for, in tokens.

    Raises:
        UnsupportedModelError: the config does not say.
    """
    tokens = getattr(config, "max_position_embeddings", None)
    if not isinstance(tokens, int) or tokens < 1:
        raise UnsupportedModelError(f"model type {config.model_type!r} does not say how long its context is")
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":  # the config's figure is where its frequencies begin to change
        return int(tokens * parameters["factor"])
    return tokens


_FINDERS: tuple[Callable[[PreTrainedConfig], str | None], ...] = (_refused, _encoder, _layers, _rope)


def check_model(model: nn.Module, *, untested: bool = False) -> torch.dtype:
    """Refuse a model object that the engines would not run exactly; returns its compute dtype.

    Raises:
        UnsupportedModelError: as ``check_supported``; also for quantised or otherwise wrapped weights, more than one
            dtype or device, layers with state of their own, and classes that do not dispatch attention through
            ``AttentionInterface``.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Transformers PreTrainedModel; a wrapper (PEFT, compile, parallel) has to "
            "be merged or taken off first"
        )
    check_supported(model.config, untested=untested)
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not dispatch attention through AttentionInterface")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} has layers that cache something other than keys and values")
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
