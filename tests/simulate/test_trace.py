"""Traces from files: what is read, and how a bad line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvos.errors import InvalidInputError
from kvos.simulate import read_trace, simulate


def test_other_fields_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "hash_ids": [5, 6]}\n\n{"hash_ids": []}\n{"hash_ids": [5]}', encoding="utf-8")
    assert read_trace(file).paths == ((0, 1), (), (0,))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected an object"),
        (b"{}", "expected hash_ids"),
        (b'{"hash_ids": null}', "expected hash_ids"),
        (b'{"hash_ids": [1, "2"]}', "hash_ids holds '2'"),
        (b'{"hash_ids": [true]}', "hash_ids holds 'True'"),
        (b'{"hash_ids": [1.5]}', r"hash_ids holds '1\.5'"),
        (b'{"hash_ids": [1], "x": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b'{"hash_ids": [1]}\n' + line + b"\n")
    with pytest.raises(InvalidInputError, match=rf"trace\.jsonl:2: {reason}"):
        read_trace(file)


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"gone\.jsonl: cannot be read"):
        read_trace(tmp_path / "gone.jsonl")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidInputError, match=r"empty\.jsonl: no request with blocks"):
        read_trace(tmp_path / "empty.jsonl")


def test_a_size_or_a_policy_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1]}\n', encoding="utf-8")
    trace = read_trace(file)
    with pytest.raises(InvalidInputError, match="at least 1"):
        simulate(trace, [0])
    with pytest.raises(InvalidInputError, match="expected-return, lru"):
        simulate(trace, [1], "fifo")
