"""What a model's attention layers ask for and store: found by one small forward, not read off the config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvos.engine.attention import ATTENTION_NAME, LayerCall, register, running
from kvos.errors import UnsupportedModelError
from kvos.storage import KVLayout, LayerSpec

__all__ = ["AttentionLayer", "layout_from", "probe_layers"]

_PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention.

    Attributes:
        heads: query heads.
        spec: what it stores per token.
        window, softcap: see ``LayerCall``.
        has_sinks: there is a score per head without a value.
        scale: of the scores.
    """

    heads: int
    spec: LayerSpec
    window: int | None
    softcap: float | None
    has_sinks: bool
    scale: float

    @property
    def is_plain(self) -> bool:
        """Nothing but scaled scores over all tokens."""
        return self.window is None and self.softcap is None and not self.has_sinks


class _Probe:
    """Notes every call and answers zeros."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []
        self.layers: list[AttentionLayer] = []

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        self.numbers.append(getattr(module, "layer_idx", None))
        spec = LayerSpec(key.shape[1], key.shape[-1], value.shape[-1])
        sinks = call.sinks is not None
        self.layers.append(AttentionLayer(query.shape[1], spec, call.window, call.softcap, sinks, call.scale))
        return value.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """Run two tokens through ``model`` and note what each layer's attention asks for; the model is left as it was.

    Raises:
        UnsupportedModelError: attention does not go through ``AttentionInterface`` once per layer, in order.
        EngineContractError: it asks for something that kvos does not know.
    """
    register()
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    before = model.config._attn_implementation
    probe = _Probe()
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        if model.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(f"{name} does not dispatch attention through AttentionInterface")
        with running(probe):
            model(input_ids=torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    expected = list(range(model.config.num_hidden_layers))
    if probe.numbers != expected:
        raise UnsupportedModelError(
            f"{name} has {len(expected)} layers, and attention ran in layers {probe.numbers}; "
            "kvos needs each layer exactly once, in order"
        )
    return tuple(probe.layers)


def layout_from(layers: tuple[AttentionLayer, ...], block_size: int, dtype: torch.dtype) -> KVLayout:
    """What the layers store.

    Raises:
        InvalidConfigError: ``block_size`` is not allowed.
    """
    return KVLayout(tuple(layer.spec for layer in layers), block_size, dtype)
