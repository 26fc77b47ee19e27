"""What a model's attention layers ask for and store: found by one small forward, not read off the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from kvos.engine.attention import ATTENTION_NAME, AttentionLayer, LayerCall, register, running
from kvos.errors import EngineContractError, KvosError, UnsupportedModelError
from kvos.storage import KVLayout, LayerSpec

__all__ = ["failing_plainly", "layout_from", "probe_layers"]

_PROBE_TOKENS = 2


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
        self.layers.append(AttentionLayer(query.shape[1], spec, call.scale, call.window, call.softcap, sinks))
        return value.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """Run two tokens through ``model`` and note what each layer's attention asks for; the model is left as it was.

    Raises:
        UnsupportedModelError: attention does not go through ``AttentionInterface`` once per layer, in order; or not
            with the windows that the config speaks of; or it asks for something that kvos does not know.
    """
    register()
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    before = model.config._attn_implementation
    probe = _Probe()
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        if model.config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(f"{name} does not dispatch attention through AttentionInterface")
        with running(probe), failing_plainly(name):
            model(input_ids=torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    expected = list(range(model.config.num_hidden_layers))
    if probe.numbers != expected:
        raise UnsupportedModelError(
            f"{name} has {len(expected)} layers, and attention ran in layers {probe.numbers}; "
            "kvos needs each layer exactly once, in order"
        )
    _check_sizes(probe.layers, name)
    return tuple(probe.layers)


@contextmanager
def failing_plainly(name: str) -> Iterator[None]:
    """An error of the model's own forward, or of a guard in it, says whose it is."""
    try:
        yield
    except EngineContractError as error:
        raise UnsupportedModelError(f"{name} would not run exactly: {error}") from error
    except (KvosError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "memory" in str(error):  # what PyTorch's allocator for the CPU says is a RuntimeError
            raise
        raise UnsupportedModelError(
            f"{name} fails in its own forward, as its config or its code stands: {type(error).__name__}: {error}"
        ) from error


def _check_sizes(layers: Sequence[AttentionLayer], name: str) -> None:
    windows = [layer.window for layer in layers if layer.window is not None and layer.window < 1]
    if windows:
        raise UnsupportedModelError(f"{name} has a sliding window of {windows[0]} tokens; a row sees itself at least")
    scales = [layer.scale for layer in layers if not layer.scale > 0]
    if scales:
        raise UnsupportedModelError(f"{name} scales its scores by {scales[0]}; kvos needs a positive number")


def layout_from(layers: tuple[AttentionLayer, ...], block_size: int, dtype: torch.dtype) -> KVLayout:
    """What the layers store.

    Raises:
        InvalidConfigError: ``block_size`` is not allowed.
    """
    return KVLayout(tuple(layer.spec for layer in layers), block_size, dtype)
