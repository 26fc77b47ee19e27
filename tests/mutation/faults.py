"""The faults that are planted: one small, plausible mistake each, and the tests that must notice it.

To add one: name it as a sentence about the faulty code, give the file under ``src/kvos``, a text that occurs exactly
once in it, what replaces that text, and the smallest selection of test files that should fail. A fault that only a
running model shows belongs into ``session_faults.py``, one of lower tiers into ``tier_faults.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "PlantedFault"]

MACHINE = "tests/sequences/test_sequence_machine.py::TestSequenceMachine"
COLLIDING_MACHINE = "tests/sequences/test_sequence_machine.py::TestCollidingSequenceMachine"


@dataclass(frozen=True)
class PlantedFault:
    """``old`` occurs exactly once in ``src/kvos/<file>`` and becomes ``new``; then some of ``tests`` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = (MACHINE,)


REFERENCE_COUNT = (
    PlantedFault(
        "fork does not retain the blocks that it shares",
        "sequences/sequence.py",
        "        self._manager.allocator.retain(self._table.view())\n",
        "",
    ),
    PlantedFault(
        "adopt_prefix does not retain the blocks that it takes over",
        "sequences/sequence.py",
        "        self._manager.allocator.retain(blocks)\n",
        "",
    ),
    PlantedFault(
        "giving blocks back releases one too few",
        "sequences/sequence.py",
        "self._manager.allocator.release(surplus)",
        "self._manager.allocator.release(surplus[1:])",
    ),
    PlantedFault(
        "giving blocks back releases one too many",
        "sequences/sequence.py",
        "surplus = self._table.view(keep).copy()",
        "surplus = self._table.view(max(keep - 1, 0)).copy()",
    ),
    PlantedFault(
        "a duplicate is not given back when its canonical block is found",
        "sequences/sequence.py",
        "                allocator.release(np.array([block]))\n",
        "",
    ),
    PlantedFault(
        "the canonical block is not retained when it takes a duplicate's place",
        "sequences/sequence.py",
        "                allocator.retain(np.array([existing.block]))\n",
        "",
    ),
    PlantedFault(
        "a block named twice in one call is retained once",
        "storage/allocator.py",
        "np.add.at(self._ref_count, ids, 1)",
        "self._ref_count[ids] += 1",
        ("tests/storage/test_allocator_machine.py",),
    ),
    PlantedFault(
        "a released block is free while others still hold it",
        "storage/allocator.py",
        "unheld = ids[(self._ref_count[ids] == 0) & (self._busy[ids] == 0)]",
        "unheld = ids[(self._ref_count[ids] <= 1) & (self._busy[ids] == 0)]",
    ),
    PlantedFault(
        "a block in a transfer is free when its holder leaves",
        "storage/allocator.py",
        "unheld = ids[(self._ref_count[ids] == 0) & (self._busy[ids] == 0)]",
        "unheld = ids[self._ref_count[ids] == 0]",
    ),
)

COPY_ON_WRITE = (
    PlantedFault(
        "a shared tail is written in place",
        "sequences/sequence.py",
        "        return not self._manager.allocator.writable(self._table.view()[-1:])[0]\n",
        "        return False\n",
    ),
    PlantedFault(
        "the check before a write and the choice to copy both overlook other holders",
        "storage/allocator.py",
        "(self._ref_count[ids] == 1) & (self._busy",
        "(self._ref_count[ids] >= 1) & (self._busy",
    ),
    PlantedFault(
        "a published block is taken for writable",
        "storage/allocator.py",
        "(self._busy[ids] == 0) & ~self._published[ids]",
        "(self._busy[ids] == 0)",
    ),
    PlantedFault(
        "a block that a transfer reads is taken for writable",
        "storage/allocator.py",
        "== 1) & (self._busy[ids] == 0) &",
        "== 1) &",
    ),
    PlantedFault(
        "the copy of a tail misses its last slot",
        "sequences/sequence.py",
        "offsets = np.arange(self._num_computed % size, dtype=np.int64)",
        "offsets = np.arange(self._num_computed % size - 1, dtype=np.int64)",
    ),
    PlantedFault(
        "only the first layer is copied",
        "storage/pool.py",
        "        for layer in range(self.layout.num_layers):\n            self.write(",
        "        for layer in range(1):\n            self.write(",
    ),
    PlantedFault(
        "the copy is made and the table keeps the shared block",
        "sequences/sequence.py",
        "        self._table[last] = target\n        self._manager.allocator.release(np.array([source]))\n",
        "        self._manager.allocator.release(np.array([target]))\n",
    ),
)

HASH_CONFIRMATION = (
    PlantedFault(
        "a match is not confirmed on token ids",
        "sequences/prefix_index.py",
        " and np.array_equal(entry.tokens, tokens)",
        "",
        ("tests/sequences/test_sharing.py",),
    ),
    PlantedFault(
        "a match is not confirmed on its parent",
        "sequences/prefix_index.py",
        "return entry.parent is parent and entry.root",
        "return entry.root",
        (COLLIDING_MACHINE,),
    ),
    PlantedFault(
        "a match is not confirmed on its root",
        "sequences/prefix_index.py",
        "entry.root == root and ",
        "",
        (COLLIDING_MACHINE,),
    ),
    PlantedFault(
        "a match is not confirmed at all",
        "sequences/prefix_index.py",
        "if not self._confirmed(entry, root, parent, tokens):",
        "if False:",
        (COLLIDING_MACHINE,),
    ),
    PlantedFault(
        "the address leaves out the parent",
        "sequences/hashing.py",
        "self._digest(parent + tokens.astype",
        "self._digest(tokens.astype",
        ("tests/sequences/test_hashing.py",),
    ),
    PlantedFault(
        "the root leaves out the tenant",
        "sequences/hashing.py",
        "for part in astuple(root))",
        "for part in astuple(root) if part != root.tenant)",
    ),
)

SLOTS = (
    PlantedFault(
        "slots are off by one inside their block",
        "sequences/sequence.py",
        "* size + index % size\n",
        "* size + (index + 1) % size\n",
    ),
    PlantedFault(
        "slots lie in the wrong block of the table",
        "sequences/sequence.py",
        "self._table.view()[index // size]",
        "self._table.view()[::-1][index // size]",
    ),
    PlantedFault(
        "slots are counted from the start of the chunk",
        "sequences/sequence.py",
        "index = np.arange(start, end, dtype=np.int64)",
        "index = np.arange(0, end - start, dtype=np.int64)",
    ),
    PlantedFault(
        "a slot's content is off by one",
        "sequences/sequence.py",
        "index = int(places[0]) * self._manager.block_size + offset",
        "index = int(places[0]) * self._manager.block_size + offset - 1",
    ),
    PlantedFault(
        "a write over several segments mixes up its rows",
        "storage/pool.py",
        "self._index(ids[rows] - segment * size), self._index(rows)",
        "self._index(ids[rows] - segment * size), self._index(rows[::-1])",
    ),
    PlantedFault(
        "a write into one later segment lands in the first",
        "storage/pool.py",
        "yield self._segments[first], self._index(ids - first * size), None",
        "yield self._segments[0], self._index(ids - first * size), None",
    ),
)

POSITION = (
    PlantedFault(
        "positions are shifted by one",
        "sequences/sequence.py",
        "return np.arange(start, self.num_tokens if end is None else end, dtype=np.int64)",
        "return np.arange(start, self.num_tokens if end is None else end, dtype=np.int64) + 1",
    ),
    PlantedFault(
        "positions start anew with each chunk",
        "sequences/sequence.py",
        "return np.arange(start, self.num_tokens if end is None else end, dtype=np.int64)",
        "return np.arange((self.num_tokens if end is None else end) - start, dtype=np.int64)",
    ),
)

PUBLISHING = (
    PlantedFault(
        "a block is published before its write is complete",
        "sequences/sequence.py",
        "        self._plan = plan\n        return plan\n",
        "        self._plan = plan\n"
        "        computed, self._num_computed = self._num_computed, plan.end\n"
        "        self._publish(computed // self._manager.block_size)\n"
        "        self._num_computed = computed\n"
        "        return plan\n",
    ),
    PlantedFault(
        "an abandoned write counts as computed",
        "sequences/sequence.py",
        "        self._end_plan(plan)\n        self._trim_table()\n",
        "        self._end_plan(plan)\n        self._num_computed = plan.end\n",
    ),
    PlantedFault(
        "truncate keeps the addresses of the tokens that it drops",
        "sequences/sequence.py",
        "        del self._addresses[num_tokens // self._manager.block_size :]\n",
        "",
    ),
    PlantedFault(
        "truncate keeps what was computed",
        "sequences/sequence.py",
        "        self._num_computed = min(self._num_computed, num_tokens)\n        self._trim_table()\n",
        "",
    ),
    PlantedFault(
        "adopt_prefix keeps the partial tail that it should exchange",
        "sequences/sequence.py",
        "        self._num_computed = first * size\n        self._trim_table()\n",
        "        self._num_computed = first * size\n",
    ),
)

EVICTION_AND_SCRUBBING = (
    PlantedFault(
        "another owner's content is not scrubbed",
        "storage/allocator.py",
        "to_scrub = blocks[self._dirty[blocks] & (self._owner[blocks] != owner)]",
        "to_scrub = blocks[:0]",
    ),
    PlantedFault(
        "a claimed block is not scrubbed",
        "sequences/block_manager.py",
        "self._clean(self.allocator.claim(reservation, promised))",
        "self.allocator.claim(reservation, promised).blocks",
        ("tests/sequences/test_block_manager.py",),
    ),
    PlantedFault(
        "an idle moment marks blocks as scrubbed and does not scrub them",
        "sequences/block_manager.py",
        "        self._scrub(blocks)\n        self.allocator.mark",
        "        self.allocator.mark",
    ),
    PlantedFault(
        "a scrub leaves the values",
        "storage/pool.py",
        "for tensor in (*segment.keys, *segment.values):",
        "for tensor in segment.keys:",
    ),
    PlantedFault(
        "a block with published successors is evicted",
        "policy/order.py",
        "bool(self._present[block] and self._children[block] == 0 and removable[block])",
        "bool(self._present[block] and removable[block])",
    ),
    PlantedFault(
        "a block that somebody holds is evicted",
        "sequences/block_manager.py",
        "self.allocator.cached()",
        "self.allocator.cached() | True",
    ),
    PlantedFault(
        "a reclaimed block stays published",
        "storage/allocator.py",
        "        self._published[ids] = False\n",
        "",
    ),
    PlantedFault(
        "allocation does not take blocks out of the free queue",
        "storage/free_queue.py",
        "        self._head = (self._head + n) % len(self._ring)\n",
        "",
    ),
)

FAULTS = (
    *REFERENCE_COUNT,
    *COPY_ON_WRITE,
    *HASH_CONFIRMATION,
    *SLOTS,
    *POSITION,
    *PUBLISHING,
    *EVICTION_AND_SCRUBBING,
)
