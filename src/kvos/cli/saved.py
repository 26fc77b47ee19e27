"""What a saved session says about itself, read from its file's header alone: no model, no keys and values, no torch.

The format is described in ``kvos.runtime.session_file``, which writes it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError, safe_open

from kvos.cli.console import short_dtype
from kvos.errors import SessionFileDamagedError, SessionNotFoundError

__all__ = ["SavedMessage", "SavedSummary", "find_saved", "list_saved", "summary_of"]

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
    """Files of a tenant's saved sessions, newest first."""
    files = _folder(home, tenant).glob(f"*{SUFFIX}")
    return tuple(sorted(files, key=lambda path: path.stat().st_mtime, reverse=True))


def find_saved(name: str, home: Path, tenant: str) -> Path:
    """The file of the session that was saved as ``name``; or ``name`` itself, if it is the path of a session file.

    Raises:
        SessionNotFoundError: there is none; the text says which there are.
    """
    path = Path(name).expanduser() if name.endswith(SUFFIX) else _folder(home, tenant) / (quote(name, safe="") + SUFFIX)
    if not path.is_file():
        known = ", ".join(saved_name(one) for one in list_saved(home, tenant)) or "none"
        raise SessionNotFoundError(f"no session is saved as {name!r}; saved are: {known}")
    return path


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
    header: dict[str, Any] = json.loads(text)
    if header["format"] != FORMAT:
        raise SessionFileDamagedError(f"{path} has format {header['format']}; this kvos reads format {FORMAT}")
    manifest, status = json.loads(header["manifest"]), path.stat()
    return SavedSummary(
        name=saved_name(path),
        path=path,
        model=header["model_name"],
        dtype=short_dtype(header["numeric_class"]),
        tokens=manifest["num_tokens"],
        computed=manifest["num_computed"],
        messages=_messages(manifest["transcript"]),
        saved_at=status.st_mtime,
        size=status.st_size,
    )


def _messages(transcript: dict[str, Any]) -> tuple[SavedMessage, ...]:
    """One per span; a session of raw tokens has spans without text."""
    spans, messages = transcript["spans"], transcript["messages"]
    texts = [message["content"] or message["extra"] for message in messages] or ["(raw tokens)"] * len(spans)
    return tuple(
        SavedMessage(span["role"], span["kind"], text, span["end"] - span["start"])
        for span, text in zip(spans, texts, strict=True)
    )


def _folder(home: Path, tenant: str) -> Path:
    return home / "sessions" / tenant.encode().hex()
