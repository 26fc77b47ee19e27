"""A session without its KV: enough to go on with it, if need be by computing everything again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvos.errors import SessionFileDamagedError
from kvos.sessions.messages import Message, parse_messages
from kvos.sessions.spans import Span, SpanKind, Transcript

__all__ = ["SessionManifest"]

MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True)
class SessionManifest:
    """What a session is, but for its token ids and their KV.

    Attributes:
        name: of the session when it was saved.
        num_tokens: token ids that belong to it.
        num_computed: of those, how many have KV beside it.
        max_tokens: the length that it declared; None for as long as its runtime allows.
    """

    name: str
    tenant: str
    num_tokens: int
    num_computed: int
    transcript: Transcript
    max_tokens: int | None = None

    def to_json(self) -> str:
        fields = asdict(self)
        del fields["transcript"]["revision"]
        return json.dumps({"version": MANIFEST_VERSION, **fields}, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SessionManifest:
        """The pair of ``to_json``.

        Raises:
            SessionFileDamagedError: not a manifest, or one that contradicts itself.
        """
        try:
            manifest = cls._parse(json.loads(text))
            manifest._check()
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise SessionFileDamagedError(f"the session's manifest cannot be read: {error!r}") from error
        return manifest

    @classmethod
    def _parse(cls, fields: dict[str, Any]) -> SessionManifest:
        if fields.pop("version") != MANIFEST_VERSION:
            raise ValueError(f"this kvos reads manifests of version {MANIFEST_VERSION}")
        transcript = fields.pop("transcript")
        spans = tuple(Span(**{**span, "kind": SpanKind(span["kind"])}) for span in transcript["spans"])
        messages = tuple(Message(**message) for message in transcript["messages"])
        return cls(**fields, transcript=Transcript(messages, spans, transcript["text"]))

    def _check(self) -> None:
        """Raises ValueError if the parts have the wrong types or contradict each other."""
        transcript = self.transcript
        spans = transcript.spans
        edges = [0, *(span.end for span in spans)]
        text_edges = [0, *(span.text_end for span in spans)]
        texts = (self.name, self.tenant, transcript.text, *(span.role for span in spans))
        numbers = (self.num_computed, self.num_tokens, *edges, *text_edges)
        rules = (
            (all(isinstance(text, str) for text in texts), "a text is not a text"),
            (all(span.version is None or isinstance(span.version, str) for span in spans), "a version is not a text"),
            (all(type(number) is int for number in numbers), "a count is not a whole number"),
            (self.max_tokens is None or type(self.max_tokens) is int, "a limit is not a whole number"),
            (all(span.start == edge <= span.end for span, edge in zip(spans, edges, strict=False)), "gaps"),
            (all(span.id == number for number, span in enumerate(spans)), "spans out of order"),
            (edges[-1] == self.num_tokens, "the spans do not cover the tokens"),
            (0 <= self.num_computed <= self.num_tokens, "more computed tokens than tokens"),
            (self.max_tokens is None or self.max_tokens >= max(1, self.num_tokens), "more tokens than it may hold"),
            (text_edges == sorted(text_edges) and text_edges[-1] <= len(transcript.text), "spans beyond the text"),
            (len(transcript.messages) in (0, len(spans)), "another number of messages than of spans"),
        )
        for holds, problem in rules:
            if not holds:
                raise ValueError(problem)
        if transcript.messages:
            parse_messages([message.as_dict() for message in transcript.messages])
