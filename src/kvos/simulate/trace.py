"""Block traces: which blocks each request's prompt consists of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvos.errors import InvalidInputError

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
    def of(cls, requests: Iterable[Sequence[int]]) -> Trace:
        """From hash ids per request; equal ids after equal ids are the same block."""
        numbers: dict[tuple[int, int], int] = {}
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


def read_trace(path: Path) -> Trace:
    """Read a JSONL file with ``hash_ids`` in each line; other fields and empty lines are skipped.

    Raises:
        InvalidInputError: it cannot be read, or a line is not such a request; names the file and the line.
    """
    requests = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_hash_ids(line, f"{path}:{number}"))
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read as a block trace: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line_number = path.read_bytes()[: _offset(path)].count(b"\n") + 1
        raise InvalidInputError(f"{path}:{line_number}: not UTF-8 text; a block trace is JSONL") from error
    if not any(requests):
        raise InvalidInputError(f"{path}: no request with blocks; expected lines such as " + '{"hash_ids": [1, 2]}')
    return Trace.of(requests)


def _offset(path: Path) -> int:
    """Where the first byte that is not UTF-8 stands; decoding in pieces does not say."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _hash_ids(line: str, where: str) -> list[int]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidInputError(f"{where}: expected an object with hash_ids, found {type(request).__name__}")
    ids = request.get("hash_ids")
    if not isinstance(ids, list):
        raise InvalidInputError(f"{where}: expected hash_ids, a list of whole numbers, one for each block")
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidInputError(f"{where}: hash_ids holds {str(item)[:40]!r}; expected whole numbers")
    return ids
