"""Addresses: equal for equal content behind equal roots, and for nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from kvos.sequences import BlockAddress, BlockHasher, PrefixRoot

ROOT = PrefixRoot(model="m", tenant="t", numeric_class="fp32")
TOKENS = np.array([1, 2, 70000], np.int32)


def test_an_address_is_a_keyed_blake2b_over_the_parent_and_little_endian_tokens() -> None:
    parent = BlockAddress(bytes(range(32)))
    data = parent + b"\x01\0\0\0" + b"\x02\0\0\0" + b"\x70\x11\x01\0"
    assert BlockHasher(b"key").chain(parent, TOKENS) == hashlib.blake2b(data, digest_size=32, key=b"key").digest()


def test_equal_keys_give_equal_addresses() -> None:
    first, second = BlockHasher(b"key"), BlockHasher(b"key")
    assert first.chain(first.root(ROOT), TOKENS) == second.chain(second.root(ROOT), TOKENS)


def test_another_key_gives_another_address() -> None:
    parent = BlockHasher(b"key").root(ROOT)
    assert BlockHasher(b"key").chain(parent, TOKENS) != BlockHasher(b"other").chain(parent, TOKENS)
    assert BlockHasher(b"key").root(ROOT) != BlockHasher(b"other").root(ROOT)


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 70001], [2, 1, 70000], [1, 2, 70000, 0]])
def test_other_tokens_give_another_address(tokens: list[int]) -> None:
    hasher = BlockHasher(b"key")
    parent = hasher.root(ROOT)
    assert hasher.chain(parent, np.array(tokens, np.int32)) != hasher.chain(parent, TOKENS)


def test_equal_tokens_behind_another_parent_have_another_address() -> None:
    hasher = BlockHasher(b"key")
    first = hasher.chain(hasher.root(ROOT), TOKENS)
    assert hasher.chain(first, TOKENS) != first


@pytest.mark.parametrize("part", ["model", "tenant", "numeric_class", "exactness"])
def test_every_part_of_the_root_counts(part: str) -> None:
    hasher = BlockHasher(b"key")
    assert hasher.root(replace(ROOT, **{part: "other"})) != hasher.root(ROOT)


def test_the_parts_of_a_root_do_not_run_together() -> None:
    hasher = BlockHasher(b"key")
    assert hasher.root(PrefixRoot("ab", "c", "d")) != hasher.root(PrefixRoot("a", "bc", "d"))


def test_a_root_is_exact_unless_it_says_otherwise() -> None:
    assert PrefixRoot("m", "t", "n") == PrefixRoot("m", "t", "n", "exact")
