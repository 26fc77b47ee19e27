"""What only the host tier does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvos.tiers.base import BlockBatch, Loaded, PayloadBytes, Stored
from kvos.tiers.codecs import LosslessCodec, RawCodec
from kvos.tiers.host import HostTier
from tiers.tier_suite import BLOCK_BYTES, LAYOUT, found, key_of, load, request, room_for, store


class Unreadable(LosslessCodec):
    """Decodes nothing any more."""

    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        return super().decode([bytes(block)[:-1] for block in encoded], out)


def test_what_does_not_decode_is_damage_once_and_then_a_miss() -> None:
    tier = HostTier(BLOCK_BYTES, room_for(4), Unreadable(LAYOUT))
    store(tier, 0, 1)
    assert found(tier, 0, 0) == [Loaded.DAMAGED, Loaded.DAMAGED]
    assert found(tier, 0) == [Loaded.MISS]
    assert tier.usage().blocks == 1
    tier.check_invariants()


def test_a_codec_makes_room_for_more() -> None:
    tier = HostTier(BLOCK_BYTES, room_for(1), LosslessCodec(LAYOUT))
    zeros = np.zeros((6, BLOCK_BYTES), np.uint8)
    assert tier.store(BlockBatch(request(range(6)), zeros)) == [Stored.STORED] * 6
    assert load(tier, request(range(6)))[0] == [Loaded.HIT] * 6
    assert tier.usage().used_bytes <= tier.usage().capacity_bytes < 8 * BLOCK_BYTES


def test_raw_is_an_arena_and_uses_what_the_blocks_take() -> None:
    tier = HostTier(BLOCK_BYTES, room_for(4), RawCodec())
    store(tier, 0, 1, 2)
    assert tier.usage().used_bytes == 3 * BLOCK_BYTES
    tier.check_invariants()


def test_after_close_nothing_is_there_and_nothing_is_taken() -> None:
    for codec in (None, LosslessCodec(LAYOUT)):
        tier = HostTier(BLOCK_BYTES, room_for(4), codec)
        store(tier, 0)
        tier.close()
        assert store(tier, 1) == [Stored.FAILED]
        assert found(tier, 0) == [Loaded.MISS]
        assert tier.contains([key_of(0)]) == [False]
        assert tier.usage().used_bytes == 0
        tier.drop([key_of(0)])
        tier.check_invariants()


def test_hits_are_counted_once_they_are_decoded() -> None:
    tier = HostTier(BLOCK_BYTES, room_for(4), LosslessCodec(LAYOUT))
    store(tier, 0)
    load(tier, request([0, 1]))
    counters = tier.usage().counters
    assert (counters["hits"], counters["misses"], counters["damaged"]) == (1, 1, 0)
