"""Whole sessions as files: safetensors, checksummed, token-major, replaced atomically.

::

    metadata   kvos          JSON: format, model, model_name, numeric_class, manifest, digest of each tensor
               kvos_digest   BLAKE2b of that JSON
    tensors    tokens        [num_tokens] int32
               k.0 v.0 ...   [num_computed, kv_heads, head_dim], one pair per layer

Damage to the metadata or the tokens makes the file unusable; damage to keys or values only means that they are computed
again. Knows files; knows no engine and no blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvos.errors import InvalidInputError, SessionFileDamagedError, SessionNotFoundError
from kvos.sessions import SavedSession, SessionManifest
from kvos.types import shown

__all__ = ["SESSION_SUFFIX", "FileSessionStore", "read_session", "write_session"]

SESSION_SUFFIX = ".kvos"
FORMAT = 1
STALE_SECONDS = 3600
"""Age from which an unfinished file cannot be somebody's who is still writing."""

UNFINISHED = ".unfinished"
UNFINISHED_NAME = "session"
LONGEST_SHOWN = 40
"""Characters of a session's file name in the name of the folder where it is written."""

LONGEST_FILE_NAME = 200
"""A space takes three characters in a file's name, of which file systems take 255."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,119}")


def write_session(path: Path, session: SavedSession) -> None:
    """Write ``session`` to ``path`` with mode 0600, in place of what was there. A crash leaves the old file or the new.

    Raises:
        InvalidInputError: no file can have that path.
        OSError: the disk's; nothing was replaced.
    """
    _check_path(path)
    tensors = {"tokens": torch.from_numpy(np.array(session.tokens, np.int32))}
    for layer, (key, value) in enumerate(zip(session.keys, session.values, strict=True)):
        tensors[f"k.{layer}"], tensors[f"v.{layer}"] = key.contiguous(), value.contiguous()
    header = json.dumps(
        {
            "format": FORMAT,
            "model": session.model,
            "model_name": session.model_name,
            "numeric_class": session.numeric_class,
            "manifest": session.manifest.to_json(),
            "digests": {name: _digest(tensor) for name, tensor in tensors.items()},
        }
    )
    metadata = {"kvos": header, "kvos_digest": _text_digest(header)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as unfinished:
        try:
            save_file(tensors, unfinished, metadata)
        except SafetensorError as error:  # the library wraps what the disk said
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error), str(path)) from error


def read_session(path: Path) -> SavedSession:
    """The pair of ``write_session``.

    Raises:
        InvalidInputError: no file can have that path.
        SessionNotFoundError: there is no such file.
        SessionFileDamagedError: it is not a session, or what a session can't do without is damaged.
    """
    _check_path(path)
    if not path.is_file():
        raise SessionNotFoundError(f"there is no saved session at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:  # somebody has just forgotten it
        raise SessionNotFoundError(f"there is no saved session at {path}") from error
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise SessionFileDamagedError(f"{path} cannot be read as a session: {error}") from error
    try:
        return _parse(path, header, tensors)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SessionFileDamagedError(f"the description in {path} cannot be read: {error!r}") from error


def _parse(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> SavedSession:
    digests: dict[str, str] = header["digests"]
    if "tokens" not in tensors or _digest(tensors["tokens"]) != digests["tokens"]:
        raise SessionFileDamagedError(f"the tokens in {path} are not what was written")
    try:
        manifest = SessionManifest.from_json(header["manifest"])
    except SessionFileDamagedError as error:
        raise SessionFileDamagedError(f"{path} cannot be used: {error}") from error
    tokens = tensors["tokens"].numpy()
    if tokens.dtype != np.int32 or tokens.shape != (manifest.num_tokens,):
        raise SessionFileDamagedError(f"{path} holds {tokens.shape} tokens, its manifest says {manifest.num_tokens}")
    model, model_name, numeric_class = (_text_of(header, key) for key in ("model", "model_name", "numeric_class"))
    problem = _kv_problem(tensors, digests)
    layers = range(len(digests) // 2) if problem is None else range(0)
    return SavedSession(
        manifest=manifest,
        model=model,
        model_name=model_name,
        numeric_class=numeric_class,
        tokens=tokens,
        keys=[tensors[f"k.{layer}"] for layer in layers],
        values=[tensors[f"v.{layer}"] for layer in layers],
        kv_problem=problem,
    )


class FileSessionStore:
    """Sessions as files in one folder, mode 0700; names become file names. Any thread.

    ``kept`` says in errors how they are kept.
    """

    def __init__(self, folder: Path, kept: str = "saved") -> None:
        self._folder = folder
        self._kept = kept

    def put(self, name: str, session: SavedSession) -> None:
        path = self._path(name)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_session(path, session)

    def get(self, name: str) -> SavedSession:
        path = self._path(name)
        if not path.is_file():
            known = ", ".join(self.names()) or "none"
            raise SessionNotFoundError(f"no session is {self._kept} as {name!r}; {self._kept} are: {known}")
        return read_session(path)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(unquote(path.stem) for path in self._folder.glob(f"*{SESSION_SUFFIX}") if path.is_file()))

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink()
            _sync_folder(self._folder)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise SessionNotFoundError(f"no session is {self._kept} as {name!r}") from error

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(quote(name, safe="")) > LONGEST_FILE_NAME:
            raise InvalidInputError(
                f"{shown(name)} cannot be the name of a saved session; use up to 120 letters, digits, spaces, '.', "
                "'_' and '-', beginning with a letter or digit"
            )
        return self._folder / f"{quote(name, safe='')}{SESSION_SUFFIX}"


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    text = metadata.get("kvos")
    if text is None:
        raise SessionFileDamagedError(f"{path} is not a session that kvos saved")
    if _text_digest(text) != metadata.get("kvos_digest"):
        raise SessionFileDamagedError(f"the description in {path} is not what was written")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise SessionFileDamagedError(f"the description in {path} is a {type(header).__name__}; expected an object")
    if header.get("format") != FORMAT:
        raise SessionFileDamagedError(f"{path} has format {header.get('format')}; this kvos reads format {FORMAT}")
    return header


def _text_of(header: dict[str, Any], key: str) -> str:
    if not isinstance(header[key], str):
        raise ValueError(f"{key} is not a text")
    return str(header[key])


def _check_path(path: Path) -> None:
    """Raises InvalidInputError if no file system takes such a path."""
    try:
        path.lstat()
    except ValueError as error:
        raise InvalidInputError(f"{str(path)[:100]!r} cannot be the path of a session file: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            beginning = f"{str(path)[:100]!r}... ({len(str(path))} characters)"
            raise InvalidInputError(
                f"{beginning} is too long for the path of a session file; use a shorter one"
            ) from error


def _kv_problem(tensors: dict[str, torch.Tensor], digests: dict[str, str]) -> str | None:
    for name, digest in digests.items():
        if name not in tensors or _digest(tensors[name]) != digest:
            return f"tensor {name} of the saved keys and values is damaged"
    return None


def _digest(tensor: torch.Tensor) -> str:
    """BLAKE2b over dtype, shape and bytes."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=32)
    if tensor.numel():  # an empty tensor can't be viewed as bytes
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file in a private folder beside ``path``; it takes ``path``'s place, safely on disk, when the block ends well.

    In a folder, because the library that writes it has temporary files of its own.
    """
    _sweep(path.parent)
    # The name is cut, so that the longest one that a file may have is not too long with what is added to it.
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name[:LONGEST_SHOWN]}.", suffix=UNFINISHED, dir=path.parent))
    try:
        unfinished = folder / UNFINISHED_NAME
        yield unfinished
        unfinished.chmod(0o600)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    finally:
        _remove_unfinished(folder)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left in ``folder`` while they wrote sessions."""
    for unfinished in folder.glob(f".*.????????{UNFINISHED}"):  # eight characters: mkdtemp
        with contextlib.suppress(OSError):
            if time.time() - _last_written(unfinished) > STALE_SECONDS:
                _remove_unfinished(unfinished)


def _last_written(unfinished: Path) -> float:
    """Seconds since the epoch."""
    inside = _files_in(unfinished)
    return max(path.lstat().st_mtime for path in (unfinished, *inside))


def _remove_unfinished(unfinished: Path) -> None:
    """Remove a private folder with what it holds, or a file. A folder with anything else in it is not ours."""
    with contextlib.suppress(OSError):
        if unfinished.is_symlink() or not unfinished.is_dir():
            unfinished.unlink()
            return
        for path in _files_in(unfinished):
            path.unlink(missing_ok=True)
        unfinished.rmdir()


def _files_in(folder: Path) -> tuple[Path, ...]:
    """Of a private folder: the file, and the temporary one of the library that writes it."""
    return (*folder.glob(UNFINISHED_NAME), *folder.glob(".tmp*"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
