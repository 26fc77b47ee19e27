"""An engine that fails when a test wants it to."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvos.engine import Engine, PackedBatch
from kvos.storage import BlockPool

__all__ = ["FaultyEngine"]


class FaultyEngine(Engine):
    """Another engine, but for chosen forward passes: those write garbage where KV was to go, and raise.

    Args:
        engine: the engine that does the work; closed with this one.
        fails: called with the number of the pass, from 1, and its batch; what it returns is raised, None for nothing.
    """

    def __init__(self, engine: Engine, fails: Callable[[int, PackedBatch], BaseException | None]) -> None:
        self.layout = engine.layout
        self.info = engine.info
        self.passes = 0
        self._engine = engine
        self._fails = fails
        self._pool: BlockPool | None = None

    def attach(self, pool: BlockPool) -> None:
        self._pool = pool
        self._engine.attach(pool)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self.passes += 1
        error = self._fails(self.passes, batch)
        if error is None:
            return self._engine.forward(batch)
        if self._pool is not None:
            self._scribble(self._pool, batch)
        raise error

    def _scribble(self, pool: BlockPool, batch: PackedBatch) -> None:
        for layer, spec in enumerate(self.layout.layers):
            garbage = torch.full(
                (len(batch.write_slots), spec.kv_heads, max(spec.k_dim, spec.v_dim)),
                float("nan"),
                dtype=self.layout.dtype,
                device=pool.device,
            )
            pool.write(layer, batch.write_slots, garbage[..., : spec.k_dim], garbage[..., : spec.v_dim])

    def identity(self) -> str:
        return self._engine.identity()

    def close(self) -> None:
        self._engine.close()
