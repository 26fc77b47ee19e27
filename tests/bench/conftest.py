"""A toy model's folder, and settings that keep everything in the test's own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvos.config import KvosConfig
from kvos.testing import toy_model, toy_tokenizer


@pytest.fixture(scope="package")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy_model(max_position_embeddings=256).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> KvosConfig:
    return KvosConfig(home=tmp_path, cache_bytes=8 << 20, dtype="fp32", offline=True)
