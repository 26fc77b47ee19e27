from __future__ import annotations

import pytest

from kvos.cli.console import counted, human_bytes, human_seconds, printable, short_dtype


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (46080, "45.0 KiB"),
        (98_362_432, "93.8 MiB"),
        (4 << 30, "4.0 GiB"),
    ],
)
def test_bytes_are_in_binary_units(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0854, "85 ms"), (1.24, "1.2 s"), (61, "61 s"), (180, "3 min"), (5 * 3600, "5 h"), (72 * 3600, "3 days")],
)
def test_durations_are_short(seconds, text):
    assert human_seconds(seconds) == text


def test_one_is_singular():
    assert [counted(n, "block") for n in (0, 1, 1200)] == ["0 blocks", "1 block", "1,200 blocks"]


def test_control_characters_cannot_steer_the_terminal():
    assert printable("a\x1b[2J\tb\nc\x07\x9b\x7fé") == "a\ufffd[2J\tb\nc\ufffd\ufffd\ufffdé"


def test_dtypes_have_the_names_that_options_take():
    assert [short_dtype(name) for name in ("bfloat16", "float64", "int8")] == ["bf16", "fp64", "int8"]
