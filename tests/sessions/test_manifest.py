"""A manifest round-trips, and what contradicts itself is damage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvos.errors import SessionFileDamagedError
from kvos.sessions import Message, SessionManifest, Span, SpanKind, Transcript

SPANS = (
    Span(0, SpanKind.SYSTEM, "system", 0, 9, 12, "v1"),
    Span(1, SpanKind.USER, "user", 9, 9, 12),
    Span(2, SpanKind.TOOL_CALL, "assistant", 9, 20, 40),
)
MESSAGES = (Message("system", "sé"), Message("user", "⛴"), Message("assistant", None, '{"tool_calls": [1]}'))
TEXT = "text\n⛴" * 8
NESTED = 100_000
MANIFEST = SessionManifest("a/b ⛴", "tenant", 20, 16, Transcript(MESSAGES, SPANS, TEXT, revision=7))


def test_a_manifest_comes_back_as_it_was_but_for_the_revision() -> None:
    back = SessionManifest.from_json(MANIFEST.to_json())
    assert (back.name, back.tenant, back.num_tokens, back.num_computed) == ("a/b ⛴", "tenant", 20, 16)
    assert (back.transcript.messages, back.transcript.spans, back.transcript.text) == (MESSAGES, SPANS, TEXT)
    assert isinstance(back.transcript.spans[0].kind, SpanKind)


def test_an_empty_session_has_a_manifest() -> None:
    empty = SessionManifest("x", "t", 0, 0, Transcript())
    assert SessionManifest.from_json(empty.to_json()) == empty


def changed(path: str, value: Any) -> str:
    fields = json.loads(MANIFEST.to_json())
    place, *rest = path.split(".")
    target: Any = fields
    for step in rest:
        target = target[int(place) if place.isdigit() else place]
        place = step
    target[int(place) if place.isdigit() else place] = value
    return json.dumps(fields)


@pytest.mark.parametrize("text", [
    "", "null", "[]", "5", '"x"', "{}", "{", '{"version": 1}',
    changed("version", 2), changed("num_tokens", 21), changed("num_tokens", -1), changed("num_tokens", "20"),
    changed("num_computed", 21), changed("num_computed", -1), changed("num_computed", None),
    changed("num_computed", 1.5),
    changed("name", 5), changed("tenant", None), changed("surprise", 1),
    changed("transcript", None), changed("transcript", []), changed("transcript.spans", None),
    changed("transcript.spans.0.end", 8), changed("transcript.spans.0.start", 1), changed("transcript.spans.1.id", 2),
    changed("transcript.spans.0.kind", "poem"), changed("transcript.spans.0.extra", 1),
    changed("transcript.spans.2.end", 21),
    changed("transcript.spans.1.end", 8), changed("transcript.spans.0.end", "9"),
    changed("transcript.spans.2.text_end", 4000), changed("transcript.spans.0.text_end", -1),
    changed("transcript.messages", [{"role": "user", "content": "x"}]), changed("transcript.messages.0", 5),
    changed("transcript.messages.0.role", "robot"), changed("transcript.messages.0.content", 5),
    changed("transcript.messages.2.extra", "{"), changed("transcript.text", 5),
    changed("transcript.spans.0.version", []), changed("transcript.spans.0.version", {}),
    changed("transcript.messages.2.extra", '{"a": ' + "[" * NESTED + "]" * NESTED + "}"),
    "[" * NESTED, '{"a": ' * NESTED,
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_damaged(text: str) -> None:
    with pytest.raises(SessionFileDamagedError):
        SessionManifest.from_json(text)
