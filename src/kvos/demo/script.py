"""The story as data: who asks what, in which order, and at which lengths of history a token is timed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

__all__ = ["Question", "Script", "default_script"]


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody asks, and the name of the session that answers it."""

    name: str
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One conversation and what grows out of it.

    Attributes:
        system: the prompt that every session of the story begins with.
        supervisor: name of the session that answers ``turns``, and ``resumed_turn`` in another process.
        second_customer: asked in a session of its own that sends the same ``system``.
        sub_agents: forks of the supervisor, one question each.
        max_tokens: most tokens of a reply.
        stop: strings that end a reply.
        histories: tokens of history behind which one token more is timed, as far as the model's context goes.
    """

    system: str
    supervisor: str
    turns: tuple[str, ...]
    second_customer: Question
    sub_agents: tuple[Question, ...]
    resumed_turn: str
    max_tokens: int
    stop: tuple[str, ...]
    histories: tuple[int, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any], system: str) -> Script:
        """``data`` has the fields by their names, but for ``system``."""
        return cls(
            system=system,
            supervisor=data["supervisor"],
            turns=tuple(data["turns"]),
            second_customer=Question(**data["second_customer"]),
            sub_agents=tuple(Question(**one) for one in data["sub_agents"]),
            resumed_turn=data["resumed_turn"],
            max_tokens=data["max_tokens"],
            stop=tuple(data["stop"]),
            histories=tuple(data["histories"]),
        )


def default_script() -> Script:
    """A lamp shop's customer service: a policy of about 1,300 tokens, four turns, three assistants."""
    here = files("kvos.demo")
    policy = (here / "policy.md").read_text(encoding="utf-8").strip()
    return Script.from_json(json.loads((here / "story.json").read_text(encoding="utf-8")), policy)
