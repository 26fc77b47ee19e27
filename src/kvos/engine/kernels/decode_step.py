"""From a batch to the compiled decode kernel: its arrays, made once per forward, and its call, once per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvos.engine.base import PackedBatch
from kvos.engine.kernels.object_code import Geometry, load_decode
from kvos.engine.kernels.task import TASK_FIELDS, TILE, partial_floats, work_floats
from kvos.engine.kernels.threads import WorkerThreads
from kvos.storage import BlockPool, KVLayout

__all__ = ["NumbaDecode", "NumbaDecodeStep"]

_AT = {name: index for index, name in enumerate(TASK_FIELDS)}
_QUERY, _OUT, _SEGMENTS = _AT["query"], _AT["out"], _AT["key_segments"]
_SCALE = _AT["scale"]


class NumbaDecode:
    """The compiled kernel for one model; compiles when made.

    Args:
        layout: float32, equal layers.
        heads: query heads.
        threads: PyTorch's pool; None runs on the calling thread alone.
        folder: where compiled code is kept; None keeps none.
    """

    def __init__(self, layout: KVLayout, heads: int, threads: WorkerThreads | None, folder: Path | None) -> None:
        spec = layout.layers[0]
        self.heads = heads
        self.spec = spec
        self.threads = threads
        self._code = load_decode(Geometry(spec.kv_heads, heads // spec.kv_heads, spec.k_dim, spec.v_dim), folder)
        self._pool: BlockPool | None = None
        self._bases = np.empty((0, 0, 0), dtype=np.int64)

    def bases(self, pool: BlockPool) -> npt.NDArray[np.int64]:
        """Addresses ``[keys or values, layers, segments]`` of the pool's tensors; kept until the pool grows."""
        if self._pool is not pool or self._bases.shape[2] != len(pool.segments):
            pairs = [(segment.keys, segment.values) for segment in pool.segments]
            addresses = [[[tensor.data_ptr() for tensor in kv] for kv in pair] for pair in pairs]
            self._bases = np.ascontiguousarray(np.array(addresses, dtype=np.int64).transpose(1, 2, 0))
            self._pool = pool
        return self._bases

    def run(self, task: npt.NDArray[np.int64]) -> None:
        """Run a task; the interpreter lock is released meanwhile."""
        if self.threads is None:
            self._code.call(task.ctypes.data)
        else:
            self.threads.run(self._code.address, task.ctypes.data)


class NumbaDecodeStep:
    """One forward's decodes; holds every array that the task points to.

    Args:
        kernel: of the model.
        batch: checked; all its rows are stored here, those of chunks included.
        pool: where keys and values live.
        sequences: which sequences of the batch have one row.
    """

    def __init__(
        self, kernel: NumbaDecode, batch: PackedBatch, pool: BlockPool, sequences: npt.NDArray[np.int64]
    ) -> None:
        self._kernel = kernel
        self._bases = kernel.bases(pool)
        lengths = np.ascontiguousarray(batch.context_lengths[sequences])
        tiles = -(-lengths // TILE)
        first_items = np.concatenate(([0], np.cumsum(tiles)))
        items = int(first_items[-1])
        workers = 1 if kernel.threads is None else torch.get_num_threads()
        arrays: dict[str, npt.NDArray[Any]] = {
            "write_rows": batch.write_rows,
            "write_slots": batch.write_slots,
            "decode_rows": batch.query_starts[sequences],
            "lengths": lengths,
            "tables": batch.block_tables[sequences],
            "first_items": first_items,
            "item_sequences": np.repeat(np.arange(len(sequences)), tiles),
        }
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        partials = items * kernel.heads * partial_floats(kernel.spec.v_dim)
        self._scratch = torch.empty(
            partials + workers * work_floats(kernel.heads, kernel.spec.k_dim)
        )  # aligned to lines
        sizes = {
            "partials": self._scratch.data_ptr(),
            "work": self._scratch.data_ptr() + 4 * partials,
            "slots_per_segment": pool.blocks_per_segment * pool.layout.block_size,
            "block_size": pool.layout.block_size,
            "writes": len(batch.write_rows),
            "sequences": len(sequences),
            "table_width": batch.block_tables.shape[1],
            "items": items,
        }
        if kernel.threads is not None:
            sizes["thread_number"] = kernel.threads.thread_number
            sizes["thread_count"] = kernel.threads.thread_count
            sizes["barrier"] = kernel.threads.barrier
        addresses = {name: array.ctypes.data for name, array in self._arrays.items()}
        known = sizes | addresses
        self._task = np.array([known.get(name, 0) for name in TASK_FIELDS], dtype=np.int64)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Store all rows of the batch, then fill the decode rows of ``out``.

        Args:
            layer: whose slots.
            queries: ``[rows, heads, k_dim]``; keys and values likewise with the KV heads. Head elements are neighbours.
            scale: of the scores.
            out: ``[rows, heads, v_dim]``, contiguous.
        """
        task, place = self._task, _QUERY
        for tensor in (queries, keys, values):
            row, head, element = tensor.stride()
            if element != 1:
                raise ValueError("the decode kernel needs the elements of a head side by side")
            task[place : place + 3] = tensor.data_ptr(), 4 * row, 4 * head
            place += 3
        task[_OUT] = out.data_ptr()
        at = self._bases.ctypes.data
        layers, segments = self._bases.shape[1:]
        task[_SEGMENTS] = at + 8 * segments * layer
        task[_SEGMENTS + 1] = at + 8 * segments * (layers + layer)
        task[_SCALE:].view(np.float32)[0] = scale
        self._kernel.run(task)
