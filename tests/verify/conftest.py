"""The toy model on one thread: for matrices this small a second one only waits for the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvos.testing import toy_model, toy_tokenizer
from kvos.verify import VerifyReport, run_verify


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def verify_toy() -> Callable[..., VerifyReport]:
    """``run_verify`` on the toy model in float64, or in the ``dtype`` that is given."""

    def verify(*, dtype: torch.dtype = torch.float64, **settings: Any) -> VerifyReport:
        return run_verify(toy_model(dtype=dtype), tokenizer=toy_tokenizer(), **settings)

    return verify
