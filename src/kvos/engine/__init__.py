"""Running a model over block tables: the small protocol, and the engines behind it."""

from kvos.engine.base import Engine, EngineInfo, PackedBatch
from kvos.engine.dynamic_cache import DynamicCacheEngine
from kvos.engine.plan import context_slots
from kvos.engine.support import check_supported
from kvos.engine.transformers_engine import TransformersEngine

__all__ = [
    "DynamicCacheEngine",
    "Engine",
    "EngineInfo",
    "PackedBatch",
    "TransformersEngine",
    "check_supported",
    "context_slots",
]
