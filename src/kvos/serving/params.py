"""How the next token is chosen, and when a reply ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

from kvos.errors import InvalidInputError
from kvos.types import shown

__all__ = ["SamplingParams"]

SMALLEST_TEMPERATURE = 1e-6
"""Below this, logits divided by it leave the range of float32, and nothing but the likeliest token is ever drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one reply; the names and meanings are those of Transformers' ``GenerationConfig``.

    Attributes:
        max_tokens: most tokens to generate; None for as many as the context has room for.
        temperature: 0 takes the most likely token (the default: the same input gives the same reply), and so does
            anything below 1e-6.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep this many tokens; 0 for all.
        min_p: keep tokens at least this likely, relative to the likeliest.
        repetition_penalty: divides the scores of tokens that occurred before; 1 for none.
        stop: strings that end the reply; they are not part of it.
        seed: of this reply's random numbers; None for a new one each time.
        ignore_eos: go on after an end-of-sequence token, for measurements.

    Raises:
        InvalidInputError: a value outside its range; the text names it.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, lowest in (("max_tokens", 1), ("top_k", 0), ("seed", 0)):
            self._whole_number(name, lowest)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            self._number(name)
        _require("temperature", self.temperature, "0 or more", 0 <= self.temperature < math.inf)
        _require("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1)
        _require("min_p", self.min_p, "from 0 to 1", 0 <= self.min_p <= 1)
        _require("repetition_penalty", self.repetition_penalty, "above 0", 0 < self.repetition_penalty < math.inf)
        for name in ("max_tokens", "top_k", "seed"):
            number = getattr(self, name)
            _require(name, number, "below 2**63", number is None or number < 2**63)
        _require("ignore_eos", self.ignore_eos, "True or False", isinstance(self.ignore_eos, bool))
        _require("stop", self.stop, "non-empty strings", isinstance(self.stop, Iterable))
        listed = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _require("stop", self.stop, "non-empty strings", all(isinstance(text, str) and text for text in listed))
        object.__setattr__(self, "stop", listed)

    def _whole_number(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if value is None and name != "top_k":
            return
        try:
            number = operator.index(value)
        except TypeError:
            number = lowest - 1
        is_whole = number >= lowest and not isinstance(value, bool)
        _require(name, value, f"a whole number of at least {lowest}", is_whole)
        object.__setattr__(self, name, number)

    def _number(self, name: str) -> None:
        value = getattr(self, name)
        _require(name, value, "a number", isinstance(value, Real) and not isinstance(value, bool))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        object.__setattr__(self, name, number)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE


def _require(name: str, value: object, expected: str, is_met: bool) -> None:  # noqa: FBT001 - private, read as a phrase
    if not is_met:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be {expected}")
