"""What counts as a message, and what a message keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvos.errors import InvalidMessageError
from kvos.sessions import parse_messages

CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def nested(depth: int) -> list[Any]:
    innermost: list[Any] = []
    for _ in range(depth):
        innermost = [innermost]
    return innermost


WRONG: list[tuple[Any, str]] = [
    ([], "empty"), ("hello", "str"), (None, "NoneType"), (5, "int"), (b"bytes", "message 0"), ([5], "message 0"),
    ([None], "message 0"), (["role"], "message 0"), ([[]], "message 0"), (({"role": "user"} for _ in ()), "generator"),
    ({}, "role None"), ({"content": "x"}, "role None"), ({"role": "robot", "content": "x"}, "robot"),
    ({"role": "System", "content": "x"}, "System"), ({"role": None, "content": "x"}, "None"),
    ({"role": ["user"], "content": "x"}, "role"), ({"role": {}, "content": "x"}, "role"),
    ({"role": "user"}, "null content"), ({"role": "user", "content": None}, "null content"),
    ({"role": "user", "content": None, "tool_calls": CALL}, "null content"),
    ({"role": "assistant", "content": None}, "null content"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "null content"),
    ({"role": "user", "content": ""}, "empty content"), ({"role": "user", "content": 5}, "int"),
    ({"role": "user", "content": b"x"}, "bytes"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "list"),
    ({"role": "user", "content": "a\ud800b"}, "Unicode"), ({"role": "user", "content": "\udfff"}, "Unicode"),
    ({"role": "user", "content": "x", "name": object()}, "JSON"),
    ({"role": "user", "content": "x", "n": float("nan")}, "JSON"),
    ({"role": "user", "content": "x", "name": "a\ud800"}, "Unicode"),
    ({"role": "user", "content": "x", "s": {1}}, "JSON"),
    ({"role": np.array(["user", "user"]), "content": "x"}, "role"), ({"role": 10**5000, "content": "x"}, "too large"),
    ({"role": "user", "content": np.array(["a", "b"])}, "ndarray"), ({"role": "user", "content": 10**5000}, "int"),
    ({"role": "assistant", "content": None, "tool_calls": np.array([1, 2])}, "JSON"),
    ({"role": "user", "content": "x", "n": 10**5000}, "JSON"),
    ({"role": "user", "content": "x", "deep": nested(100_000)}, "nested too deeply"),
    ([{"role": "user", "content": "fine"}, {"role": "user", "content": ""}], "message 1"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "says"), WRONG)
def test_what_is_no_message_is_refused_and_named(messages: Any, says: str) -> None:
    with pytest.raises(InvalidMessageError, match=says):
        parse_messages(messages)


def test_further_fields_are_kept_for_the_template() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": CALL, "name": "ferry ⛴"}
    (parsed,) = parse_messages(message)
    assert parsed.as_dict() == message
    assert parsed.has_tool_calls
    assert hash(parsed)


def test_a_message_does_not_follow_later_changes_of_the_callers_dict() -> None:
    call = {"function": {"name": "f"}}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    (parsed,) = parse_messages(message)
    call["function"]["name"] = "g"
    message["role"] = "user"
    assert parsed.as_dict()["tool_calls"][0]["function"]["name"] == "f"
    assert parsed.role == "assistant"


def test_one_message_is_a_list_of_one_and_tuples_are_lists() -> None:
    message = {"role": "user", "content": "x"}
    assert parse_messages(message) == parse_messages([message]) == parse_messages((message,))


def test_what_a_session_says_of_an_empty_reply_can_be_given_back_to_it() -> None:
    """The model may say nothing; a caller who sends the history back sends that, too."""
    assert parse_messages({"role": "assistant", "content": ""})[0].content == ""


def test_a_tool_may_find_nothing() -> None:
    assert parse_messages({"role": "tool", "content": ""})[0].content == ""
