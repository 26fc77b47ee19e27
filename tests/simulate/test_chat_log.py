"""Logs of chat requests: which blocks are equal, and how a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvos.cli import app
from kvos.errors import InvalidInputError
from kvos.simulate import Trace, read_trace

SYSTEM = {"role": "system", "content": "You answer in few words. " * 10}


def trace_of(tmp_path: Path, *requests: dict[str, Any], block_tokens: int = 16) -> Trace:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return read_trace(file, block_tokens)


def shared(trace: Trace) -> int:
    """Blocks from the front that the first two requests have in common."""
    first, second = trace.paths[:2]
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_four_bytes_are_a_token_and_only_full_blocks_count(tmp_path: Path) -> None:
    # 130 bytes: two blocks of 16 tokens, or sixteen of two; "é" has two bytes
    for text in ("a" * 130, "é" * 65):
        assert len(trace_of(tmp_path, {"prompt": text}).paths[0]) == 2
        assert len(trace_of(tmp_path, {"prompt": text}, block_tokens=2).paths[0]) == 16


def test_the_next_turn_shares_what_came_before_it(tmp_path: Path) -> None:
    first = [SYSTEM, user("When does the ferry leave?")]
    second = [*first, {"role": "assistant", "content": "At nine. " * 20}, user("And back?")]
    trace = trace_of(tmp_path, {"messages": first}, {"messages": second})
    assert shared(trace) == len(trace.paths[0]) > 3


def test_another_text_at_the_front_shares_nothing(tmp_path: Path) -> None:
    later = {"role": "system", "content": "Today is Monday. " + SYSTEM["content"]}
    assert shared(trace_of(tmp_path, {"messages": [SYSTEM]}, {"messages": [later]})) == 0


def test_models_and_tool_sets_share_nothing(tmp_path: Path) -> None:
    assert shared(trace_of(tmp_path, {"model": "a", "messages": [SYSTEM]}, {"model": "b", "messages": [SYSTEM]})) == 0
    tools = [{"type": "function", "function": {"name": "find", "description": "Find a booking. " * 9}}]
    others = [{"type": "function", "function": {"name": "book", "description": "Book. " * 9}}]
    first, second = {"messages": [SYSTEM], "tools": tools}, {"messages": [SYSTEM], "tools": others}
    assert shared(trace_of(tmp_path, first, second)) == 0
    assert shared(trace_of(tmp_path, first, first)) == len(trace_of(tmp_path, first).paths[0])


def test_tool_calls_and_parts_of_content_are_part_of_the_prompt(tmp_path: Path) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}" * 50}}]
    parts = [{"type": "text", "text": "Look here. " * 10}]
    plain = {"messages": [SYSTEM, {"role": "assistant", "content": None}]}
    calling = {"messages": [SYSTEM, {"role": "assistant", "content": None, "tool_calls": calls}]}
    seeing = {"messages": [SYSTEM, {"role": "assistant", "content": parts}]}
    short, *longer = (len(path) for path in trace_of(tmp_path, plain, calling, seeing).paths)
    assert all(length > short for length in longer)


def test_a_line_of_a_batch_is_the_request_in_it(tmp_path: Path) -> None:
    request = {"messages": [SYSTEM]}
    trace = trace_of(tmp_path, request, {"custom_id": "1", "url": "/v1/chat/completions", "body": request})
    assert trace.paths[0] == trace.paths[1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": ["a"]}', "prompt is .*expected text"),
        ('{"messages": "hello"}', "messages is 'hello'; expected a list"),
        ('{"messages": ["hello"]}', "message 0 is 'hello'; expected an object with a role"),
        ('{"messages": [{"content": "x"}]}', "message 0 is .*expected an object with a role"),
        ('{"hash_ids": [1]}', "hash_ids and chat requests in one file"),
        ("{", "not JSON"),
        ("{}", "hash_ids and chat requests in one file"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=rf"log\.jsonl:2: {reason}"):
        read_trace(file)


def test_a_log_without_a_full_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no request with blocks"):
        trace_of(tmp_path, {"prompt": "short"})
    with pytest.raises(InvalidInputError, match="at least 1"):
        trace_of(tmp_path, {"prompt": "short"}, block_tokens=0)


def test_the_command_replays_a_log(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text((json.dumps({"prompt": "a" * 64 + "b" * 64}) + "\n") * 2, encoding="utf-8")
    done = CliRunner().invoke(app, ["simulate", str(file), "-b", "10", "--block-tokens", "8", "--json"])
    report = json.loads(done.stdout)
    # 128 bytes are four blocks of eight tokens; the second request finds them all
    assert (report["asked"], report["distinct"], report["ceiling"]) == (8, 4, 0.5)
    assert report["rows"][0]["policy"] == 0.5
