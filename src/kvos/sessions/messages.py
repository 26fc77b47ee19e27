"""Chat messages as callers send them: checked, then frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvos.errors import InvalidMessageError
from kvos.types import shown

__all__ = ["ROLES", "Message", "MessageInput", "parse_messages"]

ROLES = ("system", "user", "assistant", "tool")

MAY_BE_EMPTY = ("assistant", "tool")
"""A model may say nothing, a tool may find nothing, and callers send back what there was."""

MessageInput = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""One message, or a list of them, as dicts with ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: one of ``ROLES``.
        content: text; None only for an assistant's message that carries tool calls.
        extra: further fields (``tool_calls``, ``name``, ``tool_call_id``) as canonical JSON, for the chat template.
    """

    role: str
    content: str | None
    extra: str = "{}"

    @property
    def has_tool_calls(self) -> bool:
        return bool(json.loads(self.extra).get("tool_calls"))

    def as_dict(self) -> dict[str, Any]:
        """What a chat template takes."""
        return {"role": self.role, "content": self.content, **json.loads(self.extra)}


def parse_messages(messages: MessageInput) -> tuple[Message, ...]:
    """Check and freeze.

    Raises:
        InvalidMessageError: the list is empty, a role is unknown, content is null or not text, or empty and not an
            assistant's.
    """
    listed: object = [messages] if isinstance(messages, Mapping) else messages
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise InvalidMessageError(f"expected a message or a list of messages, got {type(messages).__name__}")
    if len(listed) == 0:
        raise InvalidMessageError("the list of messages is empty")
    return tuple(_parse(number, message) for number, message in enumerate(listed))


def _parse(number: int, message: Mapping[str, Any]) -> Message:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise InvalidMessageError(f"{where} is a {type(message).__name__}; expected a dict with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidMessageError(f"{where} has the role {shown(role)}; expected one of {', '.join(ROLES)}")
    content = message.get("content")
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    where = f"{where} ({role})"
    packed = _pack(where, extra)
    if content is None and not (role == "assistant" and extra.get("tool_calls")):
        raise InvalidMessageError(f"{where} has null content; only an assistant's tool calls may")
    if content is not None:
        _check_text(where, content)
    if content == "" and role not in MAY_BE_EMPTY:
        raise InvalidMessageError(f"{where} has empty content")
    return Message(str(role), content, packed)


def _pack(where: str, extra: dict[Any, Any]) -> str:
    try:
        packed = json.dumps(extra, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise InvalidMessageError(f"{where} has a field that is nested too deeply; make it flatter") from error
    except (TypeError, ValueError) as error:
        raise InvalidMessageError(f"{where} has a field that is not JSON: {error}") from error
    _check_text(where, packed)
    return packed


def _check_text(where: str, content: object) -> None:
    if not isinstance(content, str):
        raise InvalidMessageError(f"{where} has content of type {type(content).__name__}; expected text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessageError(f"{where} has text that is not valid Unicode: {error}") from error
