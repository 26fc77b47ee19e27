"""Layer 1, physical: tensors, blocks, free and used, reference counts. Knows no tokens, sequences, or agents."""

from kvos.storage.allocator import Allocation, BlockAllocator, BlockCounts, Reservation
from kvos.storage.block import BlockStatus, CacheBlock
from kvos.storage.layout import BLOCK_SIZES, KVLayout, LayerSpec
from kvos.storage.pool import BlockPool, Segment
from kvos.storage.transfer import export_blocks, import_blocks

__all__ = [
    "BLOCK_SIZES",
    "Allocation",
    "BlockAllocator",
    "BlockCounts",
    "BlockPool",
    "BlockStatus",
    "CacheBlock",
    "KVLayout",
    "LayerSpec",
    "Reservation",
    "Segment",
    "export_blocks",
    "import_blocks",
]
