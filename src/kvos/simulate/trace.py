"""Traces: which blocks each request's prompt consists of."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvos.errors import InvalidInputError
from kvos.simulate.chat_log import blocks_of_chat, is_chat

__all__ = ["Trace", "read_trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as paths through one tree of blocks. A block is its content and all that stands before it.

    Attributes:
        paths: per request the numbers of its blocks, first block first.
        parents: per block the number of the block before it; -1 for a first block. Smaller than its own number.
        depths: per block how many stand before it.
    """

    paths: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, requests: Iterable[Sequence[Hashable]]) -> Trace:
        """From what names each block, per request; equal ids after equal ids are the same block."""
        numbers: dict[tuple[int, Hashable], int] = {}
        parents: list[int] = []
        depths: list[int] = []
        paths = []
        for ids in requests:
            path: list[int] = []
            parent = -1
            for depth, content in enumerate(ids):
                number = numbers.setdefault((parent, content), len(parents))
                if number == len(parents):
                    parents.append(parent)
                    depths.append(depth)
                path.append(number)
                parent = number
            paths.append(tuple(path))
        return cls(tuple(paths), tuple(parents), tuple(depths))

    @property
    def asked(self) -> int:
        """Blocks of all requests together; the whole of every hit rate."""
        return sum(map(len, self.paths))


def read_trace(path: Path, block_tokens: int = 16) -> Trace:
    """Read a JSONL file: ``hash_ids`` in each line, or a chat request in each; other fields are skipped.

    Args:
        block_tokens: tokens per block of chat requests (``messages`` or ``prompt``); ``hash_ids`` are blocks already.

    Raises:
        InvalidInputError: it cannot be read, or a line is not such a request; names the file and the line.
    """
    if block_tokens < 1:
        raise InvalidInputError(f"blocks of {block_tokens} tokens cannot be; expected at least 1")
    requests: list[Sequence[Hashable]] = []
    kinds = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    request = _request(line, where)
                    kinds.add(is_chat(request))
                    if len(kinds) > 1:
                        raise InvalidInputError(f"{where}: hash_ids and chat requests in one file; expected either")
                    requests.append(
                        blocks_of_chat(request, block_tokens, where) if is_chat(request) else _hash_ids(request, where)
                    )
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read as a trace: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line_number = path.read_bytes()[: _offset(path)].count(b"\n") + 1
        raise InvalidInputError(f"{path}:{line_number}: not UTF-8 text; a block trace is JSONL") from error
    if not any(requests):
        expected = 'lines such as {"hash_ids": [1, 2]}, or {"messages": [...]} with a full block of text'
        raise InvalidInputError(f"{path}: no request with blocks; expected {expected}")
    return Trace.of(requests)


def _offset(path: Path) -> int:
    """Where the first byte that is not UTF-8 stands; decoding in pieces does not say."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _request(line: str, where: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidInputError(
            f"{where}: expected an object with hash_ids or messages, found {type(request).__name__}"
        )
    return request


def _hash_ids(request: dict[str, Any], where: str) -> list[int]:
    ids = request.get("hash_ids")
    if not isinstance(ids, list):
        raise InvalidInputError(
            f"{where}: expected hash_ids, a list of whole numbers, one for each block; or messages; or a prompt"
        )
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidInputError(f"{where}: hash_ids holds {str(item)[:40]!r}; expected whole numbers")
    return ids
