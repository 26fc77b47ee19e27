"""What a model's config says about whether kvos can run it: looked at before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from kvos.errors import UnsupportedModelError
from kvos.models.architectures import ARCHITECTURES, DECLARED_ROPE_TYPES, REFUSED, TESTED_ROPE_TYPES, Need

__all__ = ["check_supported", "context_of", "has_experts", "rope_types", "takes_declared_length"]

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_supported(config: PreTrainedConfig, *, untested: bool = False) -> None:
    """Refuse a model that the engines would not run exactly.

    Args:
        untested: let types pass that nobody has tested, as long as no feature is known to be missing.

    Raises:
        UnsupportedModelError: the text names the feature that is missing, and the model type.
    """
    model_type = config.model_type
    for find in _FINDERS:
        reason = find(config)
        if reason is not None:
            raise UnsupportedModelError(
                f"model type {model_type!r} {reason}, and kvos would not run that exactly. `kvos models` lists what it "
                "runs; untested_models=True does not help here."
            )
    if model_type not in ARCHITECTURES and not untested:
        raise UnsupportedModelError(
            f"model type {model_type!r} was not tested with this engine; `kvos models` lists those that were. To try "
            "it at your own risk, open it with untested_models=True (KVOS_UNTESTED_MODELS=1): it has to pass a "
            "self-test first."
        )


def _refused(config: PreTrainedConfig) -> str | None:
    refused = REFUSED.get(config.model_type)
    return None if refused is None else f"has {refused.has}"


def _encoder(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "has encoder-decoder attention"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        return "has bidirectional attention"
    if getattr(config, "sub_configs", None):
        return "takes inputs other than text (its text model, given as an object, may do)"
    return None


def _layers(config: PreTrainedConfig) -> str | None:
    others = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if others:
        return f"has layers of type {', '.join(sorted(map(str, others)))}"
    if getattr(config, "attention_chunk_size", None):
        return "has chunked attention"
    return "has ALiBi position biases" if getattr(config, "alibi", False) else None


def _rope(config: PreTrainedConfig) -> str | None:
    for kind in sorted(rope_types(config) - TESTED_ROPE_TYPES):
        if kind not in DECLARED_ROPE_TYPES:
            return f"has {kind} RoPE, which kvos does not know"
        if not takes_declared_length(config):
            able = [one.model_type for one in ARCHITECTURES.values() if Need.DECLARED_LENGTH in one.needs]
            return f"has {kind} RoPE, whose keys depend on the length; kvos has that for {' and '.join(able)} only"
    return None


def rope_types(config: PreTrainedConfig) -> frozenset[str]:
    """The kinds of RoPE of all layers; ``default`` where the config says nothing."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [parameters] if not parameters or "rope_type" in parameters else parameters.values()
    return frozenset(one.get("rope_type", "default") if isinstance(one, dict) else "default" for one in by_layer_type)


def takes_declared_length(config: PreTrainedConfig) -> bool:
    """Whether keys depend on the length of the sequence, and kvos knows how to fix that length for this type."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    known = ARCHITECTURES.get(config.model_type)
    return (
        parameters.get("rope_type") in DECLARED_ROPE_TYPES and known is not None and Need.DECLARED_LENGTH in known.needs
    )


def has_experts(config: PreTrainedConfig) -> bool:
    """Whether it is a mixture of experts, by the table or by its own words."""
    known = ARCHITECTURES.get(config.model_type)
    if known is not None:
        return Need.EXPERTS in known.needs
    counts = [getattr(config, name, None) or 0 for name in _EXPERT_COUNTS]
    return any(not isinstance(count, int) or count > 1 for count in counts)  # some list a count per layer


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
