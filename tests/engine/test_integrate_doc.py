"""The example of docs/integrate.md works as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from engine.driver import Driver, Work, plain_logits
from kvos.engine import Engine
from kvos.testing import toy_model

PAGE = Path(__file__).parents[2] / "docs" / "integrate.md"


class Mine:
    """Somebody's inference code: past keys and values and new tokens in, logits and new keys and values out."""

    layers, kv_heads, head_dim, vocab_size, max_positions, digest = 3, 2, 16, 259, 4096, "mine"

    def __init__(self) -> None:
        self.model = toy_model()

    @torch.inference_mode()
    def run(self, history: list[Any], token_ids: np.ndarray, positions: np.ndarray) -> Any:
        cache = DynamicCache(config=self.model.config)
        past = len(history[0][0])
        for layer, (keys, values) in enumerate(history):
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        ids, places = (torch.from_numpy(given.astype(np.int64))[None] for given in (token_ids, positions))
        logits = self.model(ids, None, places, cache, use_cache=True).logits[0]
        new = [tuple(kv[0, :, past:].transpose(0, 1) for kv in (kept.keys, kept.values)) for kept in cache.layers]
        return logits, new


def test_the_engine_of_the_page_gives_what_the_plain_model_gives() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class " in block)
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    engine: Engine = names["MyEngine"](Mine())
    driver = Driver(engine, blocks_per_segment=11)
    first, second = driver.history(50), driver.history(33)
    parts = [driver.step(Work(first, 20), Work(second, 33)), driver.step(Work(first, 30), Work(second, 1, write=False))]
    assert torch.allclose(torch.cat([part[0] for part in parts]), plain_logits(toy_model(), first.ids), atol=1e-4)
    assert torch.allclose(parts[0][1], plain_logits(toy_model(), second.ids), atol=1e-4)
    assert torch.allclose(parts[1][1], plain_logits(toy_model(), second.ids)[-1:], atol=1e-4)
    engine.close()
