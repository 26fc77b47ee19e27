"""Running a model over block tables: the small protocol, and the engines behind it."""

from kvos.engine.base import Engine, EngineInfo, PackedBatch
from kvos.engine.transformers_engine import TransformersEngine

__all__ = ["Engine", "EngineInfo", "PackedBatch", "TransformersEngine"]
