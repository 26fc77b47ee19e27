"""Listing, verifying and removing the models on this machine."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from kvos.errors import ModelDamagedError, ModelNotAvailableError
from kvos.models.catalogue import DEFAULT_MODEL
from kvos.models.store import (
    ModelSource,
    list_models,
    model_folder,
    open_manifest,
    remove_model,
    verify_folder,
    verify_model,
    write_manifest,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose default model consists of three small files."""
    folder = model_folder(DEFAULT_MODEL, tmp_path)
    folder.mkdir(parents=True)
    for name, content in (("config.json", b"{}"), ("model.safetensors", b"w" * 1000), ("tokenizer.json", b"[]")):
        (folder / name).write_bytes(content)
    write_manifest(folder, model=DEFAULT_MODEL, licence="MIT", source=ModelSource("p==1", "f.gguf", "00"))
    return tmp_path


def test_list_names_what_is_there_with_its_size(home: Path, tmp_path: Path) -> None:
    (model,) = list_models(home)
    assert model.name == DEFAULT_MODEL
    assert model.licence == "Apache-2.0"
    assert model.size == 1004 + (model.path / "manifest.json").stat().st_size
    assert list_models(tmp_path / "elsewhere") == ()


def test_a_sound_model_verifies_under_its_aliases(home: Path) -> None:
    assert verify_model("SmolLM2-135M-Instruct", home).name == DEFAULT_MODEL


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_one_flipped_bit_is_found_and_the_file_named(home: Path, name: str) -> None:
    path = model_folder(DEFAULT_MODEL, home) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelDamagedError, match=rf"{name}.*sha256.*kvos model fetch {DEFAULT_MODEL} --force"):
        verify_model(DEFAULT_MODEL, home)


def test_a_shortened_and_a_missing_file_are_found_without_hashing(home: Path) -> None:
    folder = model_folder(DEFAULT_MODEL, home)
    (folder / "model.safetensors").write_bytes(b"w" * 999)
    with pytest.raises(ModelDamagedError, match=r"expected 1,000 bytes, the file has 999 bytes"):
        open_manifest(folder, DEFAULT_MODEL)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelDamagedError, match="the file is missing"):
        open_manifest(folder, DEFAULT_MODEL)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"files": 3}'])
def test_an_unreadable_manifest_is_damage(home: Path, content: str) -> None:
    folder = model_folder(DEFAULT_MODEL, home)
    (folder / "manifest.json").write_text(content)
    with pytest.raises(ModelDamagedError, match=r"manifest\.json"):
        verify_folder(folder, DEFAULT_MODEL)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"files": ' * 100_000, '{"size": 1e999}', '{"format": 1e999}'], ids=range(4)
)
def test_a_manifest_of_deep_nesting_or_endless_numbers_is_damage(home: Path, content: str) -> None:
    path = model_folder(DEFAULT_MODEL, home) / "manifest.json"
    good = path.read_text()
    if "1e999" in content:
        (key,) = json.loads(content)
        content, found = re.subn(rf'"{key}": \d+', content.strip("{}"), good)
        assert found
    path.write_text(content)
    with pytest.raises(ModelDamagedError, match=r"manifest\.json"):
        verify_folder(path.parent, DEFAULT_MODEL)


def test_a_manifest_of_another_format_or_without_weights_is_refused(home: Path) -> None:
    folder = model_folder(DEFAULT_MODEL, home)
    manifest = dataclasses.asdict(open_manifest(folder, DEFAULT_MODEL))
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ModelDamagedError, match="format 99"):
        open_manifest(folder, DEFAULT_MODEL)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(ModelDamagedError, match="can't be read"):
        open_manifest(folder, DEFAULT_MODEL)


def test_remove_deletes_the_files_and_a_second_one_says_there_are_none(home: Path) -> None:
    remove_model(DEFAULT_MODEL, home)
    assert {path.name for path in (home / "models").iterdir()} <= {".lock"}
    with pytest.raises(ModelNotAvailableError, match="not on this machine"):
        remove_model(DEFAULT_MODEL, home)
    with pytest.raises(ModelNotAvailableError, match=f"kvos model fetch {DEFAULT_MODEL}"):
        verify_model(DEFAULT_MODEL, home)
    with pytest.raises(ModelNotAvailableError, match="no model 'other'"):
        remove_model("other", home)
