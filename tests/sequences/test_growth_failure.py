"""When the machine has no memory for another segment."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.errors import OutOfBlocksError
from kvos.sequences import BlockHasher, BlockManager, PrefixRoot, SequenceCache
from kvos.storage import BlockPool, KVLayout

ROOT = PrefixRoot("model", "tenant", "fp32")


class _NoMoreMemory(BlockPool):
    """A pool whose second segment finds no memory, as torch reports it."""

    def grow(self) -> int:
        if self.num_blocks:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().grow()


def _write(sequence: SequenceCache, first: int, n: int) -> None:
    sequence.append(np.arange(first, first + n, dtype=np.int32))
    sequence.complete_write(sequence.prepare_write(n))


def test_cached_blocks_are_reclaimed_and_then_the_named_error_comes(caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout.uniform(num_layers=1, kv_heads=1, head_dim=2, block_size=8)
    manager = BlockManager(_NoMoreMemory(layout, max_blocks=8, blocks_per_segment=4), BlockHasher(b"key"))
    closed = SequenceCache(manager, ROOT)
    _write(closed, 0, 16)
    closed.release()
    kept = SequenceCache(manager, ROOT)
    _write(kept, 100, 32)
    assert manager.counters["blocks_reclaimed"] == 2
    assert "no memory for another segment" in caplog.text
    with pytest.raises(OutOfBlocksError, match="asked for 1, 0 free, 0 cached, 4 held"):
        _write(kept, 200, 8)
    manager.check_invariants()
