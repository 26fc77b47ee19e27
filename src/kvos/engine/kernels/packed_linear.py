"""Linear layers that compute from weights packed for oneDNN, on the CPU. Undone without a trace.

Packing puts a weight into the order in which oneDNN's matrix kernels read it: twice as fast as a plain weight at 2 to
16 rows, and no slower at one row or at hundreds. Layers that read the same input (queries, keys and values; gate and
up) are packed as one, which a step of few rows gains most from: the first of them computes for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import nn

__all__ = ["PackedLinears", "can_pack"]

ROWS_HINT = 64
"""Rows for which oneDNN chooses the packing. Packings for one row are slow at all others; from 8 on they are alike."""

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that it calls with one and the same tensor."""


def can_pack(model: nn.Module) -> bool:
    """Whether oneDNN is here, the weights are on the CPU, and their dtype is one that oneDNN computes in natively."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinears:
    """The linear layers of a model, packed; ``undo`` puts them back.

    Args:
        model: its ``nn.Linear`` modules get a ``forward`` of their own, unless they have one already.
        drop_plain: give up plain weights that nothing else uses; ``undo`` unpacks them again, bit by bit the same.
    """

    def __init__(self, model: nn.Module, *, drop_plain: bool = False) -> None:
        users = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
        self._groups: list[_Group] = []
        try:
            for linears in _groups(model):
                drop = drop_plain and all(users[id(linear.weight)] == 1 for linear in linears)
                self._groups.append(_Group(linears, drop_plain=drop))
        except BaseException:  # no memory for another copy
            self.undo()
            raise

    def undo(self) -> None:
        """Put every layer back. Idempotent."""
        for group in self._groups:
            group.undo()
        self._groups.clear()


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Every plain linear layer once, together with those that read the same input."""
    seen: set[nn.Module] = set()
    for parent in model.modules():
        for names in _SAME_INPUT:
            found = [child for name in names if _is_plain(child := getattr(parent, name, None))]
            if len(set(found)) == len(names) and seen.isdisjoint(found):  # some models share one projection
                seen.update(found)
                yield found
    for module in model.modules():
        if _is_plain(module) and module not in seen:
            seen.add(module)
            yield [module]


def _is_plain(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and "forward" not in vars(module)


class _Group:
    """Linear layers that read the same input, as one packed weight."""

    def __init__(self, linears: Sequence[nn.Linear], *, drop_plain: bool) -> None:
        self._linears = linears
        self._dropped = drop_plain
        self._sizes = [linear.out_features for linear in linears]
        weights = [linear.weight.detach() for linear in linears]
        with torch.inference_mode():
            joined = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(joined, ROWS_HINT)
            self._bias = _join_biases(linears)
        self._pointwise = torch.ops.mkldnn._linear_pointwise.default
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []
        for part, linear in enumerate(linears):
            vars(linear)["forward"] = self._compute if len(linears) == 1 else self._part(part)
            if drop_plain:
                linear.weight.data = linear.weight.data.new_empty(0)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], sum(self._sizes)))
        result: torch.Tensor = self._pointwise(x, self._packed, self._bias, "none", [], "")
        return result

    def _part(self, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The forward of one layer: its share, computed by whichever is called first with an input."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            mine = self._outputs[part] if x is self._input else None
            if mine is None:
                self._input, self._outputs = x, list(self._compute(x).split(self._sizes, dim=-1))
                mine = self._outputs[part]
            self._outputs[part] = None
            if not any(output is not None for output in self._outputs):
                self._input, self._outputs = None, []
            return mine  # type: ignore[return-value] # just computed

        return forward

    def undo(self) -> None:
        for linear in self._linears:
            vars(linear).pop("forward", None)
        if self._dropped:
            for linear, weight in zip(self._linears, self._packed.to_dense().split(self._sizes), strict=True):
                linear.weight.data = weight.clone()


def _join_biases(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )
