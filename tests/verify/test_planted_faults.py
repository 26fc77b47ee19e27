"""Faults planted into the cache: the command must find each, and show it by a short history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvos.runtime import Runtime, archive
from kvos.sequences import BlockHasher, SequenceCache
from kvos.sequences.prefix_index import PrefixIndex
from kvos.serving import core as serving_core
from kvos.storage import BlockAllocator
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


FAULTS = {
    tail_shared_without_a_copy: ("logits differ", "session"),
    positions_off_by_one_behind_a_prefix: ("logits differ", "session"),
    weak_hash_without_confirmation: ("", "session"),
    slots_off_by_one_after_a_truncate: ("", "truncate"),
    neighbours_block_tables_swapped: ("", "side by side"),
    values_of_a_file_shifted: ("logits differ", "saved file"),
    reference_leaked_by_a_fork: ("contradicts itself", "fork"),
}
"""How each is seen, and a word of the operation without which it is not."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_and_its_history_is_short(
    plant: Callable[[Patch], None], verify_toy: Verify, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    report = verify_toy(rounds=30, seed=5, max_trials=40)
    assert not report.ok
    assert report.exit_code == 1
    mismatch = report.mismatch
    assert mismatch is not None
    kind, operation = FAULTS[plant]
    assert kind in mismatch.kind
    assert mismatch.shrunk
    assert len(mismatch.history) <= 4, mismatch.history
    assert operation in " ".join(mismatch.history)


def test_a_mismatch_is_seen_again_by_its_replay_command(verify_toy: Verify, monkeypatch: Patch) -> None:
    tail_shared_without_a_copy(monkeypatch)
    found = verify_toy(rounds=30, seed=2, max_trials=0).mismatch
    assert found is not None
    assert not found.shrunk
    rounds = found.round_number - found.first_round + 1
    again = verify_toy(rounds=rounds, first_round=found.first_round, seed=2, max_trials=0).mismatch
    assert again is not None
    assert (again.round_number, again.kind) == (found.round_number, found.kind)
