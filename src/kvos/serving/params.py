"""How the next token is chosen, and when a reply ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvos.errors import InvalidInputError

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one reply; the names and meanings are those of Transformers' ``GenerationConfig``.

    Attributes:
        max_tokens: most tokens to generate; None for as many as the context has room for.
        temperature: 0 takes the most likely token (the default: the same input gives the same reply).
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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        _require("max_tokens", self.max_tokens, "at least 1", self.max_tokens is None or self.max_tokens >= 1)
        _require("temperature", self.temperature, "0 or more", 0 <= self.temperature < math.inf)
        _require("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1)
        _require("top_k", self.top_k, "0 or more", self.top_k >= 0)
        _require("min_p", self.min_p, "from 0 to 1", 0 <= self.min_p <= 1)
        _require("repetition_penalty", self.repetition_penalty, "above 0", 0 < self.repetition_penalty < math.inf)
        _require("stop", self.stop, "non-empty strings", all(isinstance(s, str) and s for s in self.stop))
        seed_fits = self.seed is None or 0 <= self.seed < 2**63
        _require("seed", self.seed, "from 0 to 2**63 - 1", seed_fits)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _require(name: str, value: object, expected: str, is_met: bool) -> None:  # noqa: FBT001 - private, read as a phrase
    if not is_met:
        raise InvalidInputError(f"{name} is {value!r}; it must be {expected}")
