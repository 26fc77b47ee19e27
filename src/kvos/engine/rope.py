"""RoPE whose frequencies depend on a sequence's length: taken from the length that each sequence declared.

The library takes the length from the largest position in the forward call. There, neighbours in a batch would change
each other, keys in the cache would go stale when a sequence crosses the boundary, and the model disagrees with itself
between one piece and two. A length that is fixed when a session opens has none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvos.errors import EngineContractError, UnsupportedModelError
from kvos.models.architectures import DECLARED_ROPE_TYPES

__all__ = ["DeclaredRope", "declared_length", "length_dependent_modules"]


def length_dependent_modules(model: nn.Module) -> list[Any]:
    """The modules of ``model`` that make positions and look at the length; none in most models."""
    return [
        module
        for module in model.modules()
        if isinstance(kind := getattr(module, "rope_type", None), str) and kind in DECLARED_ROPE_TYPES
    ]


class DeclaredRope:
    """Takes the place of a model's length-dependent position modules; ``undo`` puts them back.

    Does nothing to a model that has none.

    Raises:
        UnsupportedModelError: somebody has put a forward of their own in the place of such a module's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = length_dependent_modules(model)
        self._frequencies: dict[str, torch.Tensor] = {}
        self._rows: torch.Tensor | None = None
        if any("forward" in vars(module) for module in self._modules):
            self._modules = []
            raise UnsupportedModelError("the model's RoPE has a forward of its own (a hook?), which kvos would replace")
        for module in self._modules:
            vars(module)["forward"] = self._forward_of(module)

    @property
    def is_needed(self) -> bool:
        """Whether the model's positions depend on the declared length at all."""
        return bool(self._modules)

    def position_class(self, length: int) -> str:
        """The same for all lengths that have the same frequencies; empty where positions do not depend on it."""
        return _class_of(self._modules[0], length) if self._modules else ""

    def prepare(self, lengths: npt.NDArray[np.int64]) -> None:
        """The next forward's rows belong to sequences of these declared lengths, ``[rows]``."""
        if not self._modules:
            return
        module = self._modules[0]
        unique, places = np.unique(lengths, return_inverse=True)
        table = torch.stack([self._frequencies_for(module, int(length)) for length in unique])
        self._rows = table[torch.from_numpy(places.reshape(-1)).to(table.device)]

    def _frequencies_for(self, module: Any, length: int) -> torch.Tensor:
        kind = _class_of(module, length)
        if kind not in self._frequencies:
            self._frequencies[kind] = _frequencies(module, length)
        return self._frequencies[kind]

    def _forward_of(self, module: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if self._rows is None or position_ids.shape != (1, len(self._rows)):
                raise EngineContractError("positions were asked for rows that nobody declared a length for")
            angles = position_ids[0, :, None].float() * self._rows
            both = torch.cat((angles, angles), dim=-1)[None]
            cos, sin = both.cos() * module.attention_scaling, both.sin() * module.attention_scaling
            return cos.to(x.dtype), sin.to(x.dtype)

        return forward

    def undo(self) -> None:
        """Put every module back. Idempotent."""
        for module in self._modules:
            vars(module).pop("forward", None)
        self._modules = []


@contextmanager
def declared_length(model: nn.Module, length: int | None) -> Iterator[None]:
    """A plain model computes positions for sequences of ``length`` tokens within the block; None leaves it alone."""
    modules = [] if length is None else length_dependent_modules(model)
    before = [(module.rope_type, module.inv_freq) for module in modules]
    for module in modules:
        module.inv_freq = _frequencies(module, int(length or 0))
        module.rope_type = "default"  # the library looks at the length for the others only
    try:
        yield
    finally:
        for module, (kind, frequencies) in zip(modules, before, strict=True):
            module.rope_type, module.inv_freq = kind, frequencies


def _class_of(module: Any, length: int) -> str:
    config = module.config
    if module.rope_type == "longrope":
        return "long" if length > config.rope_parameters["original_max_position_embeddings"] else "short"
    return str(max(length, config.max_position_embeddings))


def _frequencies(module: Any, length: int) -> torch.Tensor:
    """``[half of the rotated dimensions]`` in float32."""
    device = module.inv_freq.device
    total: Any = torch.tensor(length, device=device)  # the library hands over a tensor, and rounds accordingly
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[module.rope_type](module.config, device, seq_len=total)[0]
    return frequencies.float()
