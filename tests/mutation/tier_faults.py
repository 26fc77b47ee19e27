"""Faults of what comes back from lower tiers, of restarts, and of blocks that are moved."""

from __future__ import annotations

from mutation.faults import PlantedFault

__all__ = ["TIER_FAULTS"]

CONFORMANCE = ("tests/tiers/test_conformance.py",)
RESTORE = ("tests/residency/test_restore.py",)
VERIFY = ("tests/verify/test_run.py::test_random_histories_equal_runs_without_a_cache",)
EXERCISED = ("tests/verify/test_run.py::test_a_default_run_exercises_all_that_is_below_the_device",)

RESTORED = (
    PlantedFault(
        "blocks come back in reverse order",
        "residency/loads.py",
        "plan.slots[::size] // size, data)",
        "(plan.slots[::size] // size)[::-1], data)",
        VERIFY,
    ),
    PlantedFault(
        "a block that was damaged in its tier is taken all the same",
        "residency/loads.py",
        "if result is not Loaded.HIT), len(results))",
        "if result not in (Loaded.HIT, Loaded.DAMAGED)), len(results))",
        RESTORE,
    ),
    PlantedFault(
        "blocks that another request has brought meanwhile are written again behind themselves",
        "residency/loads.py",
        "piece.data[skip:good]",
        "piece.data[:good]",
        RESTORE,
    ),
    PlantedFault(
        "a request computes without waiting for what was sent for",
        "residency/loads.py",
        "            elif self._clock() < restore.deadline:\n",
        "            elif False:\n",
        EXERCISED,
    ),
    PlantedFault(
        "nothing is ever found below",
        "residency/loads.py",
        "        if not runs:\n",
        "        if True:\n",
        EXERCISED,
    ),
)

TIERS = (
    PlantedFault(
        "host memory does not compare tokens",
        "tiers/host.py",
        "return self.parent == wanted.parents[row] and self.tokens == wanted.tokens[row].tobytes()",
        "return self.parent == wanted.parents[row]",
        CONFORMANCE,
    ),
    PlantedFault(
        "host memory gives another block's bytes",
        "tiers/host.py",
        "slots = [entry.slot for entry in found.values()]",
        "slots = [entry.slot for entry in found.values()][::-1]",
        VERIFY,
    ),
    PlantedFault(
        "host memory gives another block's bytes where they are encoded",
        "tiers/host.py",
        "out[row : row + 1])[0]",
        "out[max(0, row - 1) : max(1, row)])[0]",
        VERIFY,
    ),
    PlantedFault(
        "the disk does not compare tokens",
        "tiers/disk/tier.py",
        "data[1].parent == wanted.parents[row] and np.array_equal(data[1].tokens, wanted.tokens[row])",
        "data[1].parent == wanted.parents[row]",
        CONFORMANCE,
    ),
    PlantedFault(
        "the disk gives another block's bytes",
        "tiers/disk/tier.py",
        "[row for row, _ in good], out)",
        "[row for row, _ in good][::-1], out)",
        VERIFY,
    ),
)

MOVED = (
    PlantedFault(
        "compaction copies all blocks but the last",
        "sequences/block_manager.py",
        "            self.pool.copy_blocks(sources, targets)\n",
        "            self.pool.copy_blocks(sources[:-1], targets[:-1])\n",
        VERIFY,
    ),
    PlantedFault(
        "a table is not told where its blocks have gone",
        "sequences/block_manager.py",
        "            holder.moved(where)\n",
        "            pass\n",
        VERIFY,
    ),
    PlantedFault(
        "whether a tail is copied is asked only after whoever shared it may have left",
        "sequences/sequence.py",
        "        if copies_tail:\n",
        "        if self._must_copy_tail():\n",
        ("tests/sequences/test_fork.py",),
    ),
)

RESTARTED = (
    PlantedFault(
        "addresses change with every restart",
        "runtime/runtime.py",
        "BlockHasher(secret or secrets.token_bytes(32))",
        "BlockHasher(secrets.token_bytes(32))",
        VERIFY,
    ),
    PlantedFault(
        "a session that is resumed has its tokens in reverse",
        "runtime/archive.py",
        "session.restore(saved.manifest.transcript, saved.tokens)\n    except",
        "session.restore(saved.manifest.transcript, saved.tokens[::-1])\n    except",
        VERIFY,
    ),
)

TIER_FAULTS = (*RESTORED, *TIERS, *MOVED, *RESTARTED)
