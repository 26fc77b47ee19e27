"""What a disk tier's folder says of itself to people: a small file beside the packs. No tier depends on it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["About", "read_about", "write_about"]

NAME = "about.json"
MOST_MODELS = 16
"""Models of one shape are few; those that were not seen for longest are forgotten."""


@dataclass(frozen=True, slots=True)
class About:
    """Whose blocks lie in a folder, and how they are written.

    Attributes:
        models: that have used the folder, the latest first. Models whose KV has one shape share it.
        dtype: of keys and values, by torch's name.
        block_size: tokens per block.
        bytes_per_block: as they lie on the device.
        format: version of the records.
        pid, process_started: the process that opened it last, and when that began (seconds since the epoch), so that a
            later process of that number is not taken for it.
    """

    models: tuple[str, ...]
    dtype: str
    block_size: int
    layers: int
    bytes_per_block: int
    codec: str
    format: int
    pid: int
    process_started: float


def write_about(folder: Path, about: About) -> None:
    """Write it, atomically; models that stand there already are kept. For the process that holds the folder's lock.

    Raises:
        OSError: it cannot be written; what was there is as before.
    """
    known = read_about(folder)
    models = dict.fromkeys((*about.models, *(known.models if known else ())))
    whole = replace(about, models=tuple(models)[:MOST_MODELS])
    unfinished = folder / f"{NAME}.new"
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(whole), indent=2) + "\n")
        unfinished.replace(folder / NAME)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def read_about(folder: Path) -> About | None:
    """What ``write_about`` wrote; None if that is missing, or not what it should be."""
    try:
        return _parse(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _parse(found: dict[str, Any]) -> About:
    models: Sequence[Any] = found["models"]
    return About(
        models=tuple(_a(str, model) for model in models),
        dtype=_a(str, found["dtype"]),
        codec=_a(str, found["codec"]),
        block_size=_a(int, found["block_size"]),
        layers=_a(int, found["layers"]),
        bytes_per_block=_a(int, found["bytes_per_block"]),
        format=_a(int, found["format"]),
        pid=_a(int, found["pid"]),
        process_started=float(found["process_started"]),
    )


def _a(kind: type[Any], value: object) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value
