"""Chat requests as blocks, without a model: four bytes of UTF-8 count as a token, as in most English text.

What is compared are the bytes themselves, so which blocks are equal is exact; only their number is an estimate.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from typing import Any

from kvos.errors import InvalidInputError
from kvos.types import shown

__all__ = ["BYTES_PER_TOKEN", "blocks_of_chat", "is_chat"]

BYTES_PER_TOKEN = 4


def is_chat(request: dict[str, Any]) -> bool:
    """Whether a line of a log is a request of an OpenAI-style API, bare or as a line of a batch (``body``)."""
    body = request.get("body")
    return any(key in (body if isinstance(body, dict) else request) for key in ("messages", "prompt"))


def blocks_of_chat(request: dict[str, Any], block_tokens: int, where: str) -> list[Hashable]:
    """The full blocks of a request's prompt, first block first; a block is its bytes.

    Args:
        block_tokens: tokens per block. What is left behind the last full block isn't shared by anybody.
        where: file and line, for errors.

    Raises:
        InvalidInputError: messages or a prompt that are none.
    """
    body = request["body"] if isinstance(request.get("body"), dict) else request
    size = block_tokens * BYTES_PER_TOKEN
    data = "".join(_texts(body, where)).encode("utf-8", "surrogatepass")
    blocks: list[Hashable] = [data[start : start + size] for start in range(0, len(data) - size + 1, size)]
    if blocks:
        # Another model's blocks are others, whatever the text.
        blocks[0] = (str(body.get("model")), blocks[0])
    return blocks


def _texts(body: dict[str, Any], where: str) -> Iterator[str]:
    """The prompt piece by piece: tools first, as chat templates have them, then role and content of each message."""
    if "messages" not in body:
        prompt = body["prompt"]
        if not isinstance(prompt, str):
            raise InvalidInputError(f"{where}: prompt is {shown(prompt)}; expected text")
        yield prompt
        return
    messages = body["messages"]
    if not isinstance(messages, list):
        raise InvalidInputError(f"{where}: messages is {shown(messages)}; expected a list")
    if body.get("tools"):
        yield _as_text(body["tools"])
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInputError(f"{where}: message {number} is {shown(message)}; expected an object with a role")
        yield f"\n<{message['role']}>\n"
        content = message.get("content")
        if content is not None:
            yield content if isinstance(content, str) else _as_text(content)
        if message.get("tool_calls"):
            yield _as_text(message["tool_calls"])


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
