"""Running many sequences at once: requests, batching, sampling, and the engine thread."""

from kvos.serving.batch import StepBudget
from kvos.serving.core import EngineCore
from kvos.serving.params import SamplingParams
from kvos.serving.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    RequestId,
    TextDelta,
    Usage,
    WhyComputed,
)
from kvos.serving.thread import EngineThread

__all__ = [
    "EngineCore",
    "EngineThread",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "PrefillProgress",
    "RequestId",
    "SamplingParams",
    "StepBudget",
    "TextDelta",
    "Usage",
    "WhyComputed",
]
