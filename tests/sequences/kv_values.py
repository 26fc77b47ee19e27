"""Recognisable KV: every element of a slot tells which tokens came before it, where it stands, and whose it is.

The value of an element is a whole number below 2**53, exact in float64::

    | 30 bits of a hash over the tenant and the whole prefix | 2 bits tenant | 10 bits position | 6 bits element |

so that a wrong share, a wrong copy or a wrong slot shows as a wrong number. Nothing here uses kvos's own slots,
hashes or positions; ``stored_kv`` reads the pool's tensors by block and offset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvos.storage import BlockPool, KVLayout, LayerSpec
from kvos.types import BlockIds

BLOCK_SIZE = 8
LAYOUT = KVLayout((LayerSpec(2, 3, 2), LayerSpec(1, 2, 4)), BLOCK_SIZE, torch.float64)

Codes = npt.NDArray[np.int64]


def extend_codes(codes: Codes, tenant: int, tokens: npt.NDArray[np.int32]) -> Codes:
    """Codes of the whole sequence: one per token, made of its tenant, all tokens before it, and itself."""
    grown = codes.tolist()
    for token in tokens.tolist():
        before = grown[-1] if grown else tenant
        digest = hashlib.blake2b(f"{before} {token}".encode(), digest_size=4).digest()
        grown.append(int.from_bytes(digest, "little") >> 2 << 2 | tenant)
    return np.array(grown, np.int64)


def codes_of(tenant: int, tokens: npt.NDArray[np.int32]) -> Codes:
    return _cached_codes(tenant, tuple(tokens.tolist()))


@cache
def _cached_codes(tenant: int, tokens: tuple[int, ...]) -> Codes:
    return extend_codes(np.array([], np.int64), tenant, np.array(tokens, np.int32))


def kv_of(layer: int, codes: Codes, positions: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[tokens, kv_heads, k_dim]`` and values ``[tokens, kv_heads, v_dim]`` for tokens with these codes."""
    spec = LAYOUT.layers[layer]
    base = (codes << 10 | positions) << 6 | layer << 5
    keys = base[:, None] + np.arange(spec.kv_heads * spec.k_dim)
    values = base[:, None] + 16 + np.arange(spec.kv_heads * spec.v_dim)
    return (
        torch.from_numpy(keys.astype(np.float64)).view(-1, spec.kv_heads, spec.k_dim),
        torch.from_numpy(values.astype(np.float64)).view(-1, spec.kv_heads, spec.v_dim),
    )


def tenants_in(stored: npt.NDArray[np.float64]) -> set[int]:
    """Whose content the non-zero elements are."""
    return set((stored[stored != 0].astype(np.int64) >> 16 & 3).tolist())


def stored_kv(pool: BlockPool, layer: int, table: BlockIds) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Keys and values of whole blocks ``[blocks * block_size, kv_heads, dim]``, straight from the segments."""
    keys = np.concatenate([segment.keys[layer].numpy() for segment in pool.segments])[table]
    values = np.concatenate([segment.values[layer].numpy() for segment in pool.segments])[table]
    return keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:])


def all_stored(pool: BlockPool, table: BlockIds) -> list[npt.NDArray[np.float64]]:
    """``stored_kv`` of every layer, keys and values in turn; nothing for no blocks."""
    if len(table) == 0:
        return []
    return [stored for layer in range(LAYOUT.num_layers) for stored in stored_kv(pool, layer, table)]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens with these codes, which fill ``blocks`` from the front; the first stands at ``position``."""

    blocks: BlockIds
    codes: Codes
    position: int = 0


def assert_stored(pool: BlockPool, runs: Iterable[Run]) -> None:
    """Every token of every run has the KV that a run of the model from scratch would have given it."""
    runs = [run for run in runs if len(run.codes)]
    if not runs:
        return
    blocks = np.concatenate([run.blocks[np.arange(len(run.codes)) // BLOCK_SIZE] for run in runs])
    offsets = np.concatenate([np.arange(len(run.codes)) % BLOCK_SIZE for run in runs])
    codes = np.concatenate([run.codes for run in runs])
    positions = np.concatenate([run.position + np.arange(len(run.codes)) for run in runs])
    for layer in range(LAYOUT.num_layers):
        everything = stored_kv(pool, layer, np.arange(pool.num_blocks))
        for stored, wanted in zip(everything, kv_of(layer, codes, positions), strict=True):
            np.testing.assert_array_equal(stored[blocks * BLOCK_SIZE + offsets], wanted.numpy())
