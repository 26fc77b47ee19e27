"""Random histories: pure functions of (seed, round), so that a round can be played again by its number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvos.types import TokenIds
from kvos.verify.operations import (
    ChatTurn,
    Close,
    Compact,
    Extend,
    Fork,
    Generate,
    Hibernate,
    Left,
    Load,
    Migrate,
    Open,
    Operation,
    Prewarm,
    Probe,
    Restart,
    Save,
    SideBySide,
    Truncate,
    Twin,
)

__all__ = ["MESSAGES", "SYSTEM_PROMPTS", "history", "salted_tokens", "text_tokens"]

OPERATIONS_PER_ROUND = 11
TEXTS = 3
SALTS = 5
"""Few of both, so that different sessions meet in equal content."""
LONGEST_TEXT = 512

SYSTEM_PROMPTS = ("You answer in one short sentence.", "You are a helpful librarian.")
MESSAGES = ("Name a color.", "What is two plus three?", "Say hello to Ada.", "Which river flows through Paris?")


def history(seed: int, number: int) -> tuple[Operation, ...]:
    """Round ``number`` of ``seed``; the first operation opens a session, the last looks at all and closes them."""
    rng = np.random.default_rng([seed, number])
    names = list(_MAKERS)
    weights = np.array([_MAKERS[name][0] for name in names], np.float64)
    drawn = rng.choice(len(names), size=OPERATIONS_PER_ROUND - 2, p=weights / weights.sum())
    body = [_MAKERS[names[int(i)]][1](rng) for i in drawn]
    body.insert(_int(rng, len(body) // 2, len(body)), _DUE[number % len(_DUE)](rng))
    return (_open(rng), *body, Probe(_int(rng, 0, SALTS), close=True))


def text_tokens(seed: int, text: int, n: int, vocab_size: int) -> TokenIds:
    """The first ``n`` random token ids of a text, ``[n]``; longer ones begin with shorter ones."""
    rng = np.random.default_rng([seed, 1, text])
    return rng.integers(0, vocab_size, LONGEST_TEXT, dtype=np.int32)[:n]


def salted_tokens(seed: int, salt: int, n: int, vocab_size: int) -> TokenIds:
    """``[n]`` random token ids, the same for the same salt."""
    rng = np.random.default_rng([seed, 2, salt])
    return rng.integers(0, vocab_size, LONGEST_TEXT, dtype=np.int32)[:n]


def _int(rng: np.random.Generator, low: int, high: int) -> int:
    """From ``low`` to ``high - 1``."""
    return int(rng.integers(low, high))


def _any(rng: np.random.Generator) -> int:
    return _int(rng, 0, 60)  # 60 is divisible by every small number of sessions: no preference


def _some(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(_any(rng) for _ in range(_int(rng, 1, 5)))


def _silent(rng: np.random.Generator, tokens: int) -> int:
    """Often none, else all but a few: logits of many rows cost a reference run, rows in silence do not."""
    return 0 if rng.random() < 0.4 else max(0, tokens - _int(rng, 1, 9))


def _open(rng: np.random.Generator) -> Operation:
    tokens = _int(rng, 8, 44)
    return Open(_int(rng, 0, TEXTS), tokens, _silent(rng, tokens))


def _twin(rng: np.random.Generator) -> Operation:
    keep = 1000 if rng.random() < 0.4 else _int(rng, 100, 1000)
    return Twin(_any(rng), keep, _int(rng, 0, SALTS), _int(rng, 1, 7))


def _extend(rng: np.random.Generator) -> Operation:
    tokens = _int(rng, 1, 16)
    return Extend(_any(rng), _int(rng, 0, SALTS), tokens, _silent(rng, tokens))


def _side_by_side(rng: np.random.Generator) -> Operation:
    sessions = tuple(_any(rng) for _ in range(_int(rng, 2, 6)))
    pieces = tuple(1 if rng.random() < 0.7 else _int(rng, 2, 6) for _ in range(_int(rng, 2, 4)))
    return SideBySide(sessions, _int(rng, 0, SALTS), pieces)


def _generate(rng: np.random.Generator) -> Operation:
    return Generate(_some(rng), _int(rng, 1, 8))


def _hibernate(rng: np.random.Generator) -> Operation:
    """Sooner or later everywhere, but seldom where nothing comes back from a tier."""
    places = list(Left)
    weights = np.array([0.3 if place in (Left.DEVICE, Left.NOWHERE) else 1.0 for place in places])
    return Hibernate(_some(rng), places[int(rng.choice(len(places), p=weights / weights.sum()))])


def _restart(rng: np.random.Generator) -> Operation:
    return Restart(_some(rng), 0 if rng.random() < 0.6 else _int(rng, 1, 3), bool(rng.random() < 0.5))


_MAKERS: dict[str, tuple[float, Callable[[np.random.Generator], Operation]]] = {
    "open": (2, _open),
    "twin": (3, _twin),
    "extend": (3, _extend),
    "side by side": (2, _side_by_side),
    "generate": (2, _generate),
    "chat": (1.5, lambda rng: ChatTurn(_any(rng), _int(rng, 0, len(MESSAGES)), _int(rng, 2, 7))),
    "fork": (3, lambda rng: Fork(_any(rng), _int(rng, 1, 3))),
    "truncate": (3, lambda rng: Truncate(_any(rng), _int(rng, 50, 1000))),
    "close": (1.5, lambda rng: Close(_any(rng))),
    "save": (1, lambda rng: Save(_any(rng))),
    "load": (1.5, lambda rng: Load(_any(rng))),
    "migrate": (0.7, lambda rng: Migrate(_any(rng), _int(rng, 0, SALTS), _int(rng, 1, 4))),
    "hibernate": (3, _hibernate),
    "prewarm": (1, lambda rng: Prewarm(_some(rng))),
    "restart": (0.5, _restart),
    "compact": (1, lambda rng: Compact(_some(rng), _int(rng, 1, 6))),
}
"""Relative frequency and maker of each operation."""

_DUE: tuple[Callable[[np.random.Generator], Operation], ...] = (
    lambda rng: Hibernate(_some(rng), Left.HOST),
    lambda rng: Restart(_some(rng), step=0, warm=True),
    lambda rng: Compact(_some(rng), _int(rng, 1, 6)),
    lambda rng: Hibernate(_some(rng), Left.DISK),
    lambda rng: Restart(_some(rng), step=_int(rng, 1, 3), warm=False),
)
"""One in each round, in turn: what takes long, and must not be left to chance."""
