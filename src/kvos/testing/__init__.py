"""Public fakes: small real parts to test code against that uses kvos. Production code never imports this."""

from kvos.testing.clock import FakeClock
from kvos.testing.faults import FaultyEngine
from kvos.testing.file_faults import FileFaults, file_faults
from kvos.testing.models import toy_model, toy_tokenizer
from kvos.testing.tier_faults import FaultyTier, TierFault

__all__ = [
    "FakeClock",
    "FaultyEngine",
    "FaultyTier",
    "FileFaults",
    "TierFault",
    "file_faults",
    "toy_model",
    "toy_tokenizer",
]
