"""Running a model over block tables: the small protocol, and the engines behind it."""

from kvos.engine.base import Engine, EngineInfo, PackedBatch
from kvos.engine.dynamic_cache import DynamicCacheEngine
from kvos.engine.identity import weights_of
from kvos.engine.plan import context_slots
from kvos.engine.transformers_engine import TransformersEngine
from kvos.models.config_checks import check_supported

__all__ = [
    "DynamicCacheEngine",
    "Engine",
    "EngineInfo",
    "PackedBatch",
    "TransformersEngine",
    "check_supported",
    "context_slots",
    "weights_of",
]
