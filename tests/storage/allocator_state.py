"""Everything that a BlockAllocator remembers, as one value that can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvos.storage import BlockAllocator
from kvos.types import BlockIds


def ids(*blocks: int) -> BlockIds:
    return np.array(blocks, np.int64)


def full_state(allocator: BlockAllocator) -> dict[str, object]:
    """Status, counts, flags, owners, free queue and reservations; the next reservation's number is left out."""
    state: dict[str, object] = {
        name: value.tolist() for name, value in vars(allocator).items() if isinstance(value, np.ndarray)
    }
    assert len(state) == 7, "a new array: is it covered here?"
    state["free queue"] = allocator._free.to_array().tolist()
    state["reservations"] = {key: blocks.tolist() for key, blocks in allocator._reservations.items()}
    return state


@contextmanager
def raises_and_changes_nothing(
    allocator: BlockAllocator, error: type[Exception], match: str | None = None
) -> Iterator[None]:
    """The body raises exactly ``error``, and the allocator is afterwards what it was before."""
    before = full_state(allocator)
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert full_state(allocator) == before
    allocator.check_invariants()
