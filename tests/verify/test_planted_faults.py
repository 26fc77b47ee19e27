"""Faults planted into the cache: the command must find each, and show it by a short history."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvos.residency import Residency, loads
from kvos.runtime import Runtime, archive
from kvos.sequences import BlockHasher, SequenceCache
from kvos.sequences.prefix_index import PrefixIndex
from kvos.serving import core as serving_core
from kvos.sessions import CacheSession
from kvos.storage import BlockAllocator, BlockPool
from kvos.tiers import BlockBatch, BlockRequest, Stored, Tier
from kvos.tiers.disk import DiskTier
from kvos.tiers.host import HostTier
from kvos.verify import VerifyReport

Verify = Callable[..., VerifyReport]
Patch = pytest.MonkeyPatch


def tail_shared_without_a_copy(patch: Patch) -> None:
    patch.setattr(SequenceCache, "_must_copy_tail", lambda self: False)
    patch.setattr(BlockAllocator, "check_writable", lambda self, blocks: None)
    patch.setattr(Runtime, "check_invariants", lambda self: None)


def positions_off_by_one_behind_a_prefix(patch: Patch) -> None:
    right = SequenceCache.positions
    patch.setattr(SequenceCache, "positions", lambda self, start=0, end=None: right(self, start, end) + (start > 8))


def weak_hash_without_confirmation(patch: Patch) -> None:
    strong = BlockHasher.chain
    patch.setattr(BlockHasher, "chain", lambda self, parent, tokens: strong(self, parent, tokens[:4]))
    patch.setattr(PrefixIndex, "_confirmed", staticmethod(lambda entry, root, parent, tokens: entry.parent is parent))
    patch.setattr(Runtime, "check_invariants", lambda self: None)


def slots_off_by_one_after_a_truncate(patch: Patch) -> None:
    right, truncate = SequenceCache._slots, SequenceCache.truncate

    def note(self: Any, num_tokens: int) -> None:
        truncate(self, num_tokens)
        self.was_truncated = True

    def slots(self: Any, start: int, end: int) -> np.ndarray:
        shift = int(getattr(self, "was_truncated", False) and start % self.block_size > 0)
        return right(self, start - shift, end - shift)

    patch.setattr(SequenceCache, "truncate", note)
    patch.setattr(SequenceCache, "_slots", slots)


def neighbours_block_tables_swapped(patch: Patch) -> None:
    right = serving_core.pack

    def pack(scheduled: Any) -> Any:
        batch = right(scheduled)
        if batch.num_sequences < 2:
            return batch
        tables = batch.block_tables.copy()
        tables[[0, 1]] = tables[[1, 0]]
        return replace(batch, block_tables=tables)

    patch.setattr(serving_core, "pack", pack)


def values_of_a_file_shifted(patch: Patch) -> None:
    right = archive._write_kv

    def write(core: Any, session: Any, saved: Any) -> None:
        right(core, session, replace(saved, values=[value.roll(1, dims=0) for value in saved.values]))

    patch.setattr(archive, "_write_kv", write)


def reference_leaked_by_a_fork(patch: Patch) -> None:
    right = SequenceCache.fork

    def fork(self: Any, *, label: str = "") -> SequenceCache:
        child = right(self, label=label)
        self._manager.allocator.retain(self.block_table()[-1:])
        return child

    patch.setattr(SequenceCache, "fork", fork)


def restored_blocks_lie_one_further(patch: Patch) -> None:
    right = loads.import_blocks
    patch.setattr(loads, "import_blocks", lambda pool, blocks, data: right(pool, (blocks + 1) % pool.num_blocks, data))


def _bytes_of_neighbours(patch: Patch, tier: type[Tier]) -> None:
    right = tier.load

    def load(self: Any, wanted: BlockRequest, out: np.ndarray) -> Any:
        results = right(self, wanted, out)
        out[:] = np.roll(out, 1, axis=0)
        return results

    patch.setattr(tier, "load", load)


def host_memory_gives_the_bytes_of_neighbours(patch: Patch) -> None:
    _bytes_of_neighbours(patch, HostTier)


def disk_gives_the_bytes_of_neighbours(patch: Patch) -> None:
    _bytes_of_neighbours(patch, DiskTier)


def disk_forgets_a_block_that_it_took(patch: Patch) -> None:
    right = DiskTier.store

    def store(self: Any, batch: BlockBatch) -> list[Stored]:
        results = right(self, batch)
        self.drop(batch.blocks.keys[:1])
        return results

    patch.setattr(DiskTier, "store", store)


def a_tier_stores_other_tokens_beside_a_block(patch: Patch) -> None:
    right = HostTier.store

    def store(self: Any, batch: BlockBatch) -> list[Stored]:
        blocks = replace(batch.blocks, tokens=batch.blocks.tokens[:, ::-1].copy())
        return right(self, replace(batch, blocks=blocks))

    patch.setattr(HostTier, "store", store)


def nothing_ever_comes_back(patch: Patch) -> None:
    patch.setattr(Residency, "begin_restore", lambda self, sequence: None)


def a_returning_session_has_its_tokens_reversed(patch: Patch) -> None:
    right = CacheSession.restore
    patch.setattr(
        CacheSession, "restore", lambda self, transcript, tokens: right(self, transcript, tokens[::-1].copy())
    )


def compaction_leaves_a_block_behind(patch: Patch) -> None:
    right = BlockPool.copy_blocks
    patch.setattr(BlockPool, "copy_blocks", lambda self, sources, targets: right(self, sources[:-1], targets[:-1]))


FAULTS = {
    tail_shared_without_a_copy: ("logits differ", "session"),
    positions_off_by_one_behind_a_prefix: ("logits differ", "session"),
    weak_hash_without_confirmation: ("", "session"),
    slots_off_by_one_after_a_truncate: ("", "truncate"),
    neighbours_block_tables_swapped: ("", "side by side"),
    values_of_a_file_shifted: ("logits differ", "saved file|move a copy"),
    reference_leaked_by_a_fork: ("contradicts itself", "fork"),
    restored_blocks_lie_one_further: ("", "hibernate|restart"),
    host_memory_gives_the_bytes_of_neighbours: ("differ", "hibernate|restart"),
    disk_gives_the_bytes_of_neighbours: ("differ", "hibernate|restart"),
    disk_forgets_a_block_that_it_took: ("stored below are lost", "restart"),
    a_tier_stores_other_tokens_beside_a_block: ("stored below are lost", "hibernate|restart"),
    nothing_ever_comes_back: ("stored below are lost", "restart"),
    a_returning_session_has_its_tokens_reversed: ("holds other tokens", "session"),
    compaction_leaves_a_block_behind: ("differ", "compact"),
}
"""How each is seen, and the operation without which it is not, as a pattern."""


NEED_MUCH = (
    weak_hash_without_confirmation,
    restored_blocks_lie_one_further,
    host_memory_gives_the_bytes_of_neighbours,
    a_tier_stores_other_tokens_beside_a_block,
)
"""Seen only where several things come together, of which some depend on timing: their histories stay longer."""

each_fault = pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
each_simple_fault = pytest.mark.parametrize(
    "plant", [plant for plant in FAULTS if plant not in NEED_MUCH], ids=lambda plant: plant.__name__
)


@each_fault
def test_a_planted_fault_is_found(plant: Callable[[Patch], None], verify_toy: Verify, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    report = verify_toy(rounds=30, seed=5, max_trials=0)
    assert not report.ok
    assert report.exit_code == 1
    assert report.mismatch is not None
    assert re.search(FAULTS[plant][0], report.mismatch.kind)


@each_simple_fault
def test_the_history_of_a_planted_fault_is_short(
    plant: Callable[[Patch], None], verify_toy: Verify, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    mismatch = verify_toy(rounds=30, seed=5, max_trials=50).mismatch
    assert mismatch is not None
    assert mismatch.shrunk
    assert len(mismatch.history) <= 6, mismatch.history
    assert re.search(FAULTS[plant][1], " ".join(mismatch.history))


@pytest.mark.parametrize(
    ("tier", "missing"),
    [(HostTier, "tokens restored from host memory"), (DiskTier, "tokens restored from disk")],
    ids=["host", "disk"],
)
def test_a_tier_that_is_never_asked_does_not_go_unnoticed(
    tier: type[Tier], missing: str, verify_toy: Verify, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tier, "contains", lambda self, keys: [False] * len(keys))
    report = verify_toy(rounds=20, seed=5, max_trials=0)
    if report.ok:
        assert missing in report.not_exercised
    else:
        assert report.mismatch is not None
        assert "lost" in report.mismatch.kind


def test_a_mismatch_is_seen_again_by_its_replay_command(verify_toy: Verify, monkeypatch: Patch) -> None:
    tail_shared_without_a_copy(monkeypatch)
    found = verify_toy(rounds=30, seed=2, max_trials=0).mismatch
    assert found is not None
    assert not found.shrunk
    rounds = found.round_number - found.first_round + 1
    again = verify_toy(rounds=rounds, first_round=found.first_round, seed=2, max_trials=0).mismatch
    assert again is not None
    assert (again.round_number, again.kind) == (found.round_number, found.kind)
