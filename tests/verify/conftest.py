"""Verification of the toy model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvos.testing import toy_model, toy_tokenizer
from kvos.verify import VerifyReport, run_verify


@pytest.fixture
def verify_toy() -> Callable[..., VerifyReport]:
    """``run_verify`` on the toy model in float64, or in the ``dtype`` that is given."""

    def verify(*, dtype: torch.dtype = torch.float64, **settings: Any) -> VerifyReport:
        return run_verify(toy_model(dtype=dtype), tokenizer=toy_tokenizer(), **settings)

    return verify
