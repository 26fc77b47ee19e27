"""Which model objects the engines run. What was not tested is refused, by the name of the feature that is missing."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from kvos.errors import UnsupportedModelError
from kvos.models.config_checks import check_supported

__all__ = ["check_model", "is_changed_by_hand"]

LIBRARIES = ("transformers.", "torch.nn.")
COMPUTE_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def check_model(model: nn.Module, *, untested: bool = False) -> torch.dtype:
    """Refuse a model object that the engines would not run exactly; returns its compute dtype.

    Raises:
        UnsupportedModelError: as ``check_supported``; also for quantised, compiled or otherwise wrapped models, more
            than one dtype or device, layers with state of their own, experts in a kernel without float64, and classes
            that do not dispatch attention through ``AttentionInterface``.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a Transformers PreTrainedModel; a wrapper (PEFT, compile, parallel) has to "
            "be merged or taken off first"
        )
    check_supported(model.config, untested=untested)
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    _check_modules(model, name)
    _check_weights(model, name)
    dtype: torch.dtype = model.dtype
    experts = getattr(model.config, "_experts_implementation", None)
    if dtype == torch.float64 and experts not in (None, "eager"):
        raise UnsupportedModelError(
            f"{name} computes its experts with {experts!r}, which has no float64; call "
            "model.set_experts_implementation('eager') first"
        )
    return dtype


def _check_modules(model: PreTrainedModel, name: str) -> None:
    if any(_is_compiled(module) for module in model.modules()):
        raise UnsupportedModelError(f"{name} was compiled, in whole or in part; open it before torch.compile")
    quantised = [key for key, module in model.named_modules() if type(module).__module__.startswith("torch.ao.")]
    if quantised:
        raise UnsupportedModelError(f"{name} has quantised layers, which this engine lacks: {quantised[0]}")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not dispatch attention through AttentionInterface")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} has layers that cache something other than keys and values")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head")


def _check_weights(model: PreTrainedModel, name: str) -> None:
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


def _is_compiled(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    return module._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable")


def is_changed_by_hand(model: PreTrainedModel) -> bool:
    """Whether the object may compute something else than its type: by classes of its own, by hooks, by new forwards."""
    return any(
        not type(module).__module__.startswith(LIBRARIES)
        or "forward" in vars(module)
        or not all(
            getattr(hook, "__module__", "").startswith(LIBRARIES)  # the library leaves some that record outputs
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
        for module in model.modules()
    )
