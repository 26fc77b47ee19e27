"""A toy model in a folder, since a second process has to open it, too, and a story that suits it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvos.demo import Question, Script
from kvos.testing import toy_model, toy_tokenizer


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy_model(dtype=torch.float64).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_script() -> Script:
    return Script(
        system="You are the supervisor of a lamp shop. " * 4,
        supervisor="supervisor",
        turns=("Is it light?", "Is it dark?"),
        second_customer=Question("customer-2", "Who is there?"),
        sub_agents=(Question("a", "One?"), Question("b", "Two, or three?"), Question("c", "Four?")),
        resumed_turn="And now?",
        max_tokens=9,
        stop=(),
        histories=(40, 200),
    )
