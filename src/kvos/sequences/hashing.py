"""Content addresses: a keyed, chained, cryptographic hash over the tokens of full blocks.

``address(block i) = H(key, address(block i - 1) | tokens of block i)``, and the address before the first block is the
root, which carries everything that makes keys and values differ for equal tokens: the model, the tenant, the numeric
and the exactness class. The key is secret, so nobody can compute an address of another tenant's text (BLAKE2b in keyed
mode, RFC 7693).
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import NewType, Protocol

from kvos.types import TokenIds

__all__ = ["BlockAddress", "BlockHasher", "Hasher", "PrefixRoot"]

BlockAddress = NewType("BlockAddress", bytes)

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PrefixRoot:
    """What must agree before two sequences may share a block.

    Attributes:
        model: identity of weights, config and RoPE.
        tenant: who may see the content.
        numeric_class: compute dtype and whatever else changes the bits.
        exactness: ``exact``, or the name of the approximation that some block below went through.
    """

    model: str
    tenant: str
    numeric_class: str
    exactness: str = "exact"


class Hasher(Protocol):
    """Turns a root and then block after block into addresses."""

    def root(self, root: PrefixRoot) -> BlockAddress: ...

    def chain(self, parent: BlockAddress, tokens: TokenIds) -> BlockAddress: ...


class BlockHasher:
    """The hasher that kvos uses: BLAKE2b with a 32-byte digest and a secret key of up to 64 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def root(self, root: PrefixRoot) -> BlockAddress:
        parts = (part.encode() for part in astuple(root))
        # Each part carries its length, so that no two roots run together into the same bytes.
        return self._digest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))

    def chain(self, parent: BlockAddress, tokens: TokenIds) -> BlockAddress:
        return self._digest(parent + tokens.astype("<i4", copy=False).tobytes())

    def _digest(self, data: bytes) -> BlockAddress:
        return BlockAddress(hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest())
