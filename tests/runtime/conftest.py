"""A runtime over the toy model in float64, and the plain model beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvos
from kvos.testing import toy_model, toy_tokenizer


@pytest.fixture
def open_toy(tmp_path: Path) -> Iterator[Callable[..., kvos.Runtime]]:
    """``open_toy(seed=0, dtype=torch.float64, **settings)``; everything is closed at the end."""
    opened: list[kvos.Runtime] = []

    def open_one(*, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> kvos.Runtime:
        options = {"block_size": 8, "cache_bytes": 4 << 20, "home": tmp_path / "home"} | settings
        opened.append(kvos.open(toy_model(seed=seed, dtype=dtype), tokenizer=toy_tokenizer(), **options))
        return opened[-1]

    yield open_one
    for runtime in opened:
        runtime.close()


@pytest.fixture
def runtime(open_toy: Callable[..., kvos.Runtime]) -> kvos.Runtime:
    return open_toy()
