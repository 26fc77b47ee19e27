"""A folder to measure in, on the disk that the cache uses, and what runtimes there have in common."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from kvos.config import KvosConfig
from kvos.models.load import LoadedModel, load_model
from kvos.runtime import Runtime, open_runtime
from kvos.sequences import SequenceCache
from kvos.serving import EngineCore
from kvos.storage import KVLayout
from kvos.types import OwnerId, TokenIds

__all__ = ["Workplace", "empty_device", "invent_kv", "open_workplace", "random_tokens", "text_tokens"]


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


def random_tokens(runtime: Runtime, n: int, seed: int = 0) -> TokenIds:
    """``n`` token ids of the model, others for another seed, so that nothing is shared by chance."""
    vocabulary = runtime.inspect(lambda core: core.engine.info.vocab_size)
    return np.random.default_rng(seed).integers(0, vocabulary, n).astype(np.int32)


def text_tokens(runtime: Runtime, n: int) -> TokenIds:
    """The first ``n`` token ids of English text: the chapters of Python's own help."""
    ids: list[int] = []
    for chapter in topics.values():
        if len(ids) >= n:
            break
        ids += runtime.tokenizer(chapter, add_special_tokens=False)["input_ids"]
    return np.resize(np.array(ids, np.int32), n)


def empty_device(core: EngineCore) -> None:
    """Reclaim every block that no table holds. Engine thread."""
    manager = core.manager
    counts = manager.allocator.counts()
    free = counts.free + counts.cached + manager.pool.max_blocks - manager.pool.num_blocks
    manager.cancel(manager.reserve(free, OwnerId(0)))


def invent_kv(core: EngineCore, sequence: SequenceCache) -> None:
    """Make pending tokens computed, with made-up keys and values; those of all others are overwritten, too.

    Engine thread. For measurements that move or read bytes, whatever they are.
    """
    sequence.complete_write(sequence.prepare_write(sequence.num_pending))
    for segment in core.manager.pool.segments:
        for tensor in (*segment.keys, *segment.values):
            tensor.fill_(1)  # memory that was never written is not there yet
