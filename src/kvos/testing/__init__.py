"""Public fakes: small real parts to test code against that uses kvos. Production code never imports this."""

from kvos.testing.faults import FaultyEngine
from kvos.testing.models import toy_model, toy_tokenizer

__all__ = ["FaultyEngine", "toy_model", "toy_tokenizer"]
