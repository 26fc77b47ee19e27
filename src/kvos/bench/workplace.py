"""A folder to measure in, on the disk that the cache uses, and what runtimes there have in common."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvos.config import KvosConfig
from kvos.models.load import LoadedModel, load_model
from kvos.runtime import Runtime, open_runtime
from kvos.serving import EngineCore
from kvos.storage import KVLayout
from kvos.types import OwnerId, TokenIds

__all__ = ["Workplace", "empty_device", "open_workplace", "tokens_of"]

TEXT_SEED = 4


@dataclass(frozen=True, slots=True)
class Workplace:
    """A model and a home of its own: what is measured neither fills the user's cache nor finds anything there.

    Attributes:
        home: deleted at the end; on the same disk as the user's.
        source: the settings as they were given, with the user's home, where models lie.
    """

    loaded: LoadedModel
    home: Path
    source: KvosConfig
    layout: KVLayout

    def room(self, tokens: int) -> int:
        """Bytes of whole blocks for ``tokens`` tokens in one sequence."""
        return -(-tokens // self.layout.block_size) * self.layout.bytes_per_block

    def open(self, folder: str, **settings: Any) -> Runtime:
        """A runtime whose tiers lie in ``folder`` of this workplace. The model is lent to it: one at a time."""
        home = self.home / folder
        home.mkdir(exist_ok=True)
        kernels = home / "kernels"
        if not kernels.exists():
            (self.source.home / "kernels").mkdir(parents=True, exist_ok=True)
            kernels.symlink_to(self.source.home / "kernels")
        config = replace(self.source, home=home, publish_stats=False, **settings)
        return open_runtime(self.loaded.model, tokenizer=self.loaded.tokenizer, config=config)


@contextmanager
def open_workplace(model: str, config: KvosConfig) -> Iterator[Workplace]:
    """Load the model, and make a folder in ``config.home`` that is gone afterwards."""
    loaded = load_model(model, config=config)
    config.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=config.home) as folder:
        with open_runtime(
            loaded.model, tokenizer=loaded.tokenizer, config=replace(config, disk_cache_bytes=0)
        ) as first:
            layout = first.inspect(lambda core: core.manager.pool.layout)
        yield Workplace(loaded, Path(folder), config, layout)


def tokens_of(runtime: Runtime, n: int, seed: int = TEXT_SEED) -> TokenIds:
    """``n`` random token ids of the model, others for another seed, so that nothing is shared by chance."""
    vocabulary = runtime.inspect(lambda core: core.engine.info.vocab_size)
    return np.random.default_rng(seed).integers(0, vocabulary, n).astype(np.int32)


def empty_device(core: EngineCore) -> None:
    """Reclaim every block that no table holds. Engine thread."""
    manager = core.manager
    counts = manager.allocator.counts()
    free = counts.free + counts.cached + manager.pool.max_blocks - manager.pool.num_blocks
    manager.cancel(manager.reserve(free, OwnerId(0)))
