"""Plain Transformers with its own cache: the yardstick."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvos.engine.dynamic_cache import cache_keyword

__all__ = ["PlainDecoder", "plain_prefill_seconds"]


@dataclass(slots=True)
class PlainDecoder:
    """A batch of equally long sequences that decodes greedily, as ``model.generate`` does in its loop."""

    model: PreTrainedModel
    cache: DynamicCache
    last: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def start(cls, model: PreTrainedModel, prompts: torch.Tensor) -> PlainDecoder:
        """Prefill ``prompts`` ``[sequences, tokens]``."""
        cache = DynamicCache()
        output = _forward(model, prompts, cache)
        return cls(model, cache, output.logits[:, -1].argmax(-1, keepdim=True))

    @torch.inference_mode()
    def step_seconds(self, steps: int) -> list[float]:
        """Time of each of the next ``steps`` decode steps."""
        seconds: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            output = _forward(self.model, self.last, self.cache)
            self.last = output.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - begin)
        return seconds


@torch.inference_mode()
def plain_prefill_seconds(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    """Time to prefill ``prompt`` ``[1, tokens]`` in one call, up to the last token's logits."""
    begin = time.perf_counter()
    output = _forward(model, prompt, DynamicCache())
    output.logits[:, -1].argmax(-1)
    return time.perf_counter() - begin


def _forward(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> Any:
    return model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
