"""Layer 2, logical: which blocks, in which order, hold which tokens. Knows no roles, prompts, tools."""

from kvos.sequences.block_manager import BlockManager, Holder
from kvos.sequences.compaction import Compactor
from kvos.sequences.hashing import BlockAddress, BlockHasher, Hasher, PrefixRoot
from kvos.sequences.prefix_index import IndexEntry, PrefixIndex
from kvos.sequences.sequence import SequenceCache, SlotContent, WritePlan

__all__ = [
    "BlockAddress",
    "BlockHasher",
    "BlockManager",
    "Compactor",
    "Hasher",
    "Holder",
    "IndexEntry",
    "PrefixIndex",
    "PrefixRoot",
    "SequenceCache",
    "SlotContent",
    "WritePlan",
]
