"""What a saved session says about itself, read from its file's header alone: no model, no keys and values, no torch.

The format is described in ``kvos.runtime.session_file``, which writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError, safe_open

from kvos.cli.console import short_dtype
from kvos.config import tenant_folder_name
from kvos.errors import InvalidInputError, SessionFileDamagedError, SessionNotFoundError

__all__ = ["SavedMessage", "SavedSummary", "file_or_name", "find_saved", "list_saved", "summary_of"]

SUFFIX = ".kvos"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedMessage:
    """One message, and how many tokens it takes."""

    role: str
    kind: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SavedSummary:
    """A saved session without its tokens and its KV.

    Attributes:
        name: what it was saved as.
        tokens, computed: token ids, and how many of them have keys and values in the file.
        saved_at: seconds since the epoch.
        size: of the file, in bytes.
    """

    name: str
    path: Path
    model: str
    dtype: str
    tokens: int
    computed: int
    messages: tuple[SavedMessage, ...]
    saved_at: float
    size: int


def list_saved(home: Path, tenant: str) -> tuple[Path, ...]:
    """Files of a tenant's saved sessions, newest first; what is no regular file is left out."""
    found = []
    for path in _folder(home, tenant).glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, path))
    return tuple(path for _, path in sorted(found, reverse=True))


def file_or_name(text: str) -> str | Path:
    """What a person means who types this: a file, if there is a ``/`` in it or ``.kvos`` at its end; else a saved name.

    Raises:
        InvalidInputError: it is below the home folder of somebody whom this machine does not know.
    """
    if "/" not in text and not text.endswith(SUFFIX):
        return text
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidInputError(f"{text!r} is no path on this machine: {error}") from error


def find_saved(name: str, home: Path, tenant: str) -> Path:
    """The file of the session that was saved as ``name``; or ``name`` itself, if it is the path of a session file.

    Raises:
        SessionNotFoundError: there is none; the text says which there are.
    """
    named = _folder(home, tenant) / (quote(name, safe="", errors="surrogatepass") + SUFFIX)
    for path in (named, file_or_name(name) if name.endswith(SUFFIX) else named):
        with contextlib.suppress(OSError):  # a name that is too long for a file is nobody's
            if isinstance(path, Path) and path.is_file():
                return path
    known = ", ".join(saved_name(one) for one in list_saved(home, tenant)) or "none"
    raise SessionNotFoundError(f"no session is saved as {name!r}; saved are: {known}")


def saved_name(path: Path) -> str:
    """What the session in this file was saved as."""
    return unquote(path.stem)


def summary_of(path: Path) -> SavedSummary:
    """Read the header. Whether the keys and values are whole is not checked; loading does that.

    Raises:
        SessionFileDamagedError: it is no session, or its header is not what was written.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise SessionFileDamagedError(f"{path} cannot be read as a session: {error}") from error
    text = metadata.get("kvos", "")
    if hashlib.blake2b(text.encode(), digest_size=32).hexdigest() != metadata.get("kvos_digest"):
        raise SessionFileDamagedError(f"the description in {path} is not what kvos wrote")
    try:
        return _summary(path, json.loads(text))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SessionFileDamagedError(f"the description in {path} cannot be read: {error!r}") from error


def _summary(path: Path, header: dict[str, Any]) -> SavedSummary:
    if header["format"] != FORMAT:
        raise SessionFileDamagedError(f"{path} has format {header['format']}; this kvos reads format {FORMAT}")
    manifest, status = json.loads(header["manifest"]), path.stat()
    return SavedSummary(
        name=saved_name(path),
        path=path,
        model=_text(header["model_name"]),
        dtype=short_dtype(_text(header["numeric_class"])),
        tokens=_count(manifest["num_tokens"]),
        computed=_count(manifest["num_computed"]),
        messages=_messages(manifest["transcript"]),
        saved_at=status.st_mtime,
        size=status.st_size,
    )


def _messages(transcript: dict[str, Any]) -> tuple[SavedMessage, ...]:
    """One per span; a session of raw tokens has spans without text."""
    spans, messages = transcript["spans"], transcript["messages"]
    texts = [message["content"] or message["extra"] for message in messages] or ["(raw tokens)"] * len(spans)
    return tuple(
        SavedMessage(_text(span["role"]), _text(span["kind"]), _text(text), _count(span["end"] - span["start"]))
        for span, text in zip(spans, texts, strict=True)
    )


def _folder(home: Path, tenant: str) -> Path:
    return home / "sessions" / tenant_folder_name(tenant)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value
