"""What a kept session says about itself, read from its file's header alone: no model, no keys and values, no torch.

A saved session's file holds its keys and values. A hibernated one's is of the same format without them: they are in
the lower tiers. The format is described in ``kvos.runtime.session_file``, which writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError, safe_open

from kvos.cli.console import short_dtype
from kvos.config import tenant_folder_name
from kvos.errors import InvalidInputError, SessionFileDamagedError, SessionNotFoundError

__all__ = [
    "Kept",
    "SavedMessage",
    "SavedSummary",
    "SessionPlace",
    "file_or_name",
    "find_session",
    "list_sessions",
    "summary_of",
]

SUFFIX = ".kvos"
FORMAT = 1


class Kept(StrEnum):
    """How a session is kept."""

    SAVED = "saved"
    HIBERNATED = "hibernated"


FOLDERS = {Kept.SAVED: "sessions", Kept.HIBERNATED: "hibernated"}


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """A kept session's file; whether it can be read is not known yet."""

    path: Path
    kind: Kept

    @property
    def name(self) -> str:
        """What it was saved or hibernated as."""
        return unquote(self.path.stem)


@dataclass(frozen=True, slots=True)
class SavedMessage:
    """One message, and how many tokens it takes."""

    role: str
    kind: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SavedSummary:
    """A kept session without its tokens and its KV.

    Attributes:
        name: what it was saved or hibernated as.
        tokens, computed: token ids, and how many of them have keys and values in the file.
        saved_at: seconds since the epoch.
        size: of the file, in bytes.
    """

    name: str
    kind: Kept
    tenant: str
    path: Path
    model: str
    dtype: str
    tokens: int
    computed: int
    messages: tuple[SavedMessage, ...]
    saved_at: float
    size: int


def list_sessions(home: Path, tenant: str, kind: Kept | None = None) -> tuple[SessionPlace, ...]:
    """Files of a tenant's sessions, newest first, of one kind or both; what is no regular file is left out."""
    found = []
    for one in _kinds(kind):
        for path in _folder(home, tenant, one).glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime, SessionPlace(path, one)))
    return tuple(place for _, place in sorted(found, key=lambda each: (each[0], each[1].path), reverse=True))


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


def find_session(name: str, home: Path, tenant: str, kind: Kept | None = None) -> SessionPlace:
    """The session that is kept as ``name``; or the file ``name``, if it is the path of one and no session's name.

    Raises:
        SessionNotFoundError: there is none; the text says which there are.
        InvalidInputError: there are two, a saved and a hibernated one, and ``kind`` does not say which.
    """
    file_name = quote(name, safe="", errors="surrogatepass") + SUFFIX
    places = [SessionPlace(_folder(home, tenant, one) / file_name, one) for one in _kinds(kind)]
    found = [place for place in places if _is_file(place.path)]
    if len(found) > 1:
        raise InvalidInputError(
            f"a saved and a hibernated session are called {name!r}; say which: --kind saved or --kind hibernated"
        )
    if not found and kind is not Kept.HIBERNATED and name.endswith(SUFFIX):
        path = file_or_name(name)
        found = [SessionPlace(path, Kept.SAVED)] if isinstance(path, Path) and _is_file(path) else []
    if not found:
        known = ", ".join(f"{one.name} ({one.kind})" for one in list_sessions(home, tenant, kind)) or "none"
        raise SessionNotFoundError(f"no {kind or 'saved or hibernated'} session is called {name!r}; there are: {known}")
    return found[0]


def _is_file(path: Path) -> bool:
    """A name that is too long for a file is nobody's."""
    try:
        return path.is_file()
    except OSError:
        return False


def _kinds(kind: Kept | None) -> tuple[Kept, ...]:
    return tuple(Kept) if kind is None else (kind,)


def summary_of(place: SessionPlace) -> SavedSummary:
    """Read the header. Whether the keys and values are whole is not checked; loading does that.

    Raises:
        SessionFileDamagedError: it is no session, or its header is not what was written.
    """
    path = place.path
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise SessionFileDamagedError(f"{path} cannot be read as a session: {error}") from error
    text = metadata.get("kvos", "")
    if hashlib.blake2b(text.encode(), digest_size=32).hexdigest() != metadata.get("kvos_digest"):
        raise SessionFileDamagedError(f"the description in {path} is not what kvos wrote")
    try:
        return _summary(place, json.loads(text))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SessionFileDamagedError(f"the description in {path} cannot be read: {error!r}") from error


def _summary(place: SessionPlace, header: dict[str, Any]) -> SavedSummary:
    path = place.path
    if header["format"] != FORMAT:
        raise SessionFileDamagedError(f"{path} has format {header['format']}; this kvos reads format {FORMAT}")
    manifest, status = json.loads(header["manifest"]), path.stat()
    return SavedSummary(
        name=place.name,
        kind=place.kind,
        tenant=_text(manifest["tenant"]),
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


def _folder(home: Path, tenant: str, kind: Kept) -> Path:
    return home / FOLDERS[kind] / tenant_folder_name(tenant)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value
