"""Scattered blocks are moved next to each other, and nobody who reads through a table or the index can tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvos.errors import AllocateNonFreeBlockError, BlockStateError, InvalidConfigError, UseAfterFreeError
from kvos.sequences import Compactor, SequenceCache
from sequences.bench import ALICE, BLOCK_SIZE, BOB, Bench, tokens_from
from sequences.kv_values import all_stored


def scattered(bench: Bench, blocks: int, first: int = 0) -> tuple[SequenceCache, SequenceCache]:
    """Two sequences that grew block by block in turn, so that no two blocks of either are neighbours."""
    one, other = bench.open(), bench.open(owner=BOB)
    for i in range(blocks):
        for sequence in (one, other):
            sequence.append(tokens_from(first + i * BLOCK_SIZE, BLOCK_SIZE))
            bench.compute(sequence)
    assert bench.manager.num_runs(one.block_table()) == blocks
    return one, other


def room_in(bench: Bench, blocks: int) -> None:
    """All memory that the pool may take, so that free runs are as long as its segments."""
    bench.manager.allocator.release(bench.manager.allocate(blocks, ALICE))


@pytest.fixture
def bench() -> Bench:
    bench = Bench(32, blocks_per_segment=16)
    room_in(bench, 32)
    return bench


def differences(sequence: SequenceCache) -> list[int]:
    return np.diff(sequence.block_table()).tolist()


def test_a_scattered_sequence_becomes_one_run_with_the_same_bits(bench: Bench) -> None:
    one, other = scattered(bench, 6)
    before = all_stored(bench.pool, one.block_table())
    assert bench.manager.compact(one.id) == 6
    assert differences(one) == [1] * 5
    assert bench.manager.num_runs(one.block_table()) == 1
    for old, new in zip(before, all_stored(bench.pool, one.block_table()), strict=True):
        np.testing.assert_array_equal(old, new)
    bench.check(one, other)


def test_a_compact_sequence_stays_where_it_is(bench: Bench) -> None:
    sequence = bench.computed(tokens_from(0, 40))
    before = bench.state(sequence)
    assert bench.manager.compact(sequence.id) == 0
    assert bench.state(sequence) == before


def test_forks_still_share_after_one_of_them_was_compacted(bench: Bench) -> None:
    one, _ = scattered(bench, 5)
    child = one.fork()
    grandchild = child.fork()
    child.append(tokens_from(900, 5))
    bench.compute(child)
    assert bench.manager.compact(child.id) == 6
    assert one.block_table().tolist() == grandchild.block_table().tolist() == child.block_table()[:5].tolist()
    assert [block.ref_count for block in bench.manager.allocator.blocks(one.block_table())] == [3] * 5
    bench.check(one, child, grandchild)


def test_moved_blocks_are_still_found_and_survive_their_sequence(bench: Bench) -> None:
    one, _ = scattered(bench, 5)
    bench.manager.compact(one.id)
    table = one.block_table().tolist()
    one.release()
    again = bench.open(tokens_from(0, 5 * BLOCK_SIZE))
    assert again.adopt_prefix() == 5 * BLOCK_SIZE
    assert again.block_table().tolist() == table
    bench.check(again)


def test_a_compacted_sequence_goes_on(bench: Bench) -> None:
    one, other = scattered(bench, 4)
    one.append(tokens_from(500, 3))
    bench.compute(one)
    assert bench.manager.compact(one.id)
    one.append(tokens_from(503, 20))
    bench.compute(one)
    one.truncate(18)
    one.append(tokens_from(700, 9))
    bench.compute(one)
    bench.check(one, other)


def test_without_one_long_run_the_longest_ones_are_used() -> None:
    bench = Bench(16, blocks_per_segment=4)
    one, other = scattered(bench, 6)  # all that is left is one segment
    assert bench.manager.compact(one.id) == 0  # nothing is free yet, and compaction takes no memory
    room_in(bench, 4)
    assert bench.manager.compact(one.id) == 4
    assert bench.manager.num_runs(one.block_table()) == 3
    bench.check(one, other)


def test_without_free_blocks_nothing_happens(bench: Bench) -> None:
    one, other = scattered(bench, 16)
    assert bench.manager.allocator.num_free == 0
    before = bench.state(one, other)
    assert bench.manager.compact(one.id) == 0
    assert bench.state(one, other) == before


def test_an_open_write_of_any_holder_forbids_a_move(bench: Bench) -> None:
    one, _ = scattered(bench, 5)
    child = one.fork()
    child.append(tokens_from(900, 5))
    plan = child.prepare_write(5)
    before = bench.state(one, child)
    with pytest.raises(BlockStateError, match="open write"):
        bench.manager.compact(one.id)
    assert Compactor(clock=lambda: 0.0).run(bench.manager) > 0, "the other tenant's table is as scattered, and free"
    assert bench.state(one, child)[2:] != before[2:]
    assert [one.block_table().tolist(), child.block_table().tolist()] == [before[3][0][1], before[3][1][1]]  # type: ignore[index]
    bench.fill(child, plan)
    child.complete_write(plan)
    bench.check(one, child)


def test_busy_blocks_are_refused_and_passed_over(bench: Bench) -> None:
    one, other = scattered(bench, 5)
    other.release()
    bench.manager.allocator.begin_use(one.block_table()[2:3])
    before = bench.state(one)
    with pytest.raises(BlockStateError, match="in use"):
        bench.manager.compact(one.id)
    assert Compactor(clock=lambda: 0.0).run(bench.manager) == 0
    assert bench.state(one) == before
    bench.manager.allocator.end_use(one.block_table()[2:3])
    assert Compactor(clock=lambda: 0.0).run(bench.manager) == 5


def test_reserved_blocks_are_no_target(bench: Bench) -> None:
    one, other = scattered(bench, 5)
    reservation = bench.manager.reserve(bench.manager.allocator.num_free - 5, ALICE)
    bench.manager.compact(one.id)
    one.append(tokens_from(40, 40))
    bench.compute(one, reservation=reservation)
    bench.manager.cancel(reservation)
    bench.check(one, other)


def test_only_held_blocks_move_and_only_to_free_ones(bench: Bench) -> None:
    one, other = scattered(bench, 3)
    free = bench.manager.allocator.free_spans()[0][:1]
    before = bench.state(one, other)
    with pytest.raises(AllocateNonFreeBlockError):
        bench.manager.move(one.block_table()[:1], other.block_table()[:1])
    with pytest.raises(UseAfterFreeError):
        bench.manager.move(free, free + 1)
    assert bench.state(one, other) == before


def test_a_failed_copy_leaves_tables_alone_and_nothing_readable(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets were half written with Alice's content while Bob owned them last."""
    one, other = scattered(bench, 5)
    tables = one.block_table().tolist(), other.block_table().tolist()
    bench.manager.allocator.release(bench.manager.allocate(bench.manager.allocator.num_free, BOB))
    write = bench.pool.write

    def fail_in_layer_1(layer: int, slots: np.ndarray, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer == 1:
            raise torch.OutOfMemoryError("no memory")
        write(layer, slots, key, value)

    monkeypatch.setattr(bench.pool, "write", fail_in_layer_1)
    with pytest.raises(torch.OutOfMemoryError):
        bench.manager.compact(one.id)
    assert (one.block_table().tolist(), other.block_table().tolist()) == tables
    bench.check(one, other)
    blocks = bench.manager.allocate(bench.manager.allocator.num_free, BOB)
    assert all((stored == 0).all() for stored in all_stored(bench.pool, blocks))


def test_what_was_moved_away_is_scrubbed_before_another_tenant_gets_it(bench: Bench) -> None:
    one, _ = scattered(bench, 5)
    left = one.block_table().copy()
    bench.manager.compact(one.id)
    assert set(left.tolist()) <= set(bench.manager.allocator.dirty_free(100).tolist())
    taken = bench.manager.allocate(bench.manager.allocator.num_free, BOB)
    assert all((stored == 0).all() for stored in all_stored(bench.pool, left))
    bench.manager.allocator.release(taken)
    bench.check(one)


# -- when ------------------------------------------------------------------------------------------------------------


def test_two_looks_are_at_least_the_interval_apart(bench: Bench) -> None:
    scattered(bench, 6)
    now = 100.0
    compactor = Compactor(min_interval=5.0, clock=lambda: now)
    assert compactor.run(bench.manager) == 6
    now = 104.9
    assert compactor.run(bench.manager) == 0
    now = 105.0
    assert compactor.run(bench.manager) == 6
    now = 200.0
    assert compactor.run(bench.manager) == 0, "both are in one run"
    assert (bench.manager.counters["compactions"], bench.manager.counters["blocks_compacted"]) == (2, 12)


def test_the_most_scattered_table_comes_first(bench: Bench) -> None:
    one, _ = scattered(bench, 5)
    one.append(tokens_from(40, 24))
    bench.compute(one)
    _, worse = scattered(bench, 4, first=5000)
    assert Compactor(clock=lambda: 0.0, min_runs=4).run(bench.manager) in (4, 5)
    assert bench.manager.num_runs(one.block_table()) > 1
    bench.check(one, worse)


@pytest.mark.parametrize(("threshold", "min_runs", "moved"), [(0.25, 4, 4), (1.0, 4, 0), (0.25, 5, 0), (0.99, 4, 4)])
def test_a_table_passes_by_runs_per_block_and_by_runs(
    bench: Bench, threshold: float, min_runs: int, moved: int
) -> None:
    scattered(bench, 4)
    compactor = Compactor(threshold=threshold, min_runs=min_runs, clock=lambda: 0.0)
    assert compactor.run(bench.manager) == moved


@pytest.mark.parametrize("options", [{"threshold": 1.5}, {"min_runs": 1}, {"min_interval": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidConfigError):
        Compactor(**options)  # type: ignore[arg-type]
