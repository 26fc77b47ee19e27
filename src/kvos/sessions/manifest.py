"""A session without its KV: enough to go on with it, if need be by computing everything again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvos.errors import SessionFileDamagedError
from kvos.sessions.messages import Message
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
    """

    name: str
    tenant: str
    num_tokens: int
    num_computed: int
    transcript: Transcript

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
        except (KeyError, TypeError, ValueError) as error:
            raise SessionFileDamagedError(f"the session's manifest cannot be read: {error!r}") from error
        manifest._check()
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
        spans, messages = self.transcript.spans, self.transcript.messages
        edges = [0, *(span.end for span in spans)]
        in_order = all(span.start == edge and span.end >= edge for span, edge in zip(spans, edges, strict=False))
        numbered = all(span.id == number for number, span in enumerate(spans))
        if not (in_order and numbered and edges[-1] == self.num_tokens and 0 <= self.num_computed <= self.num_tokens):
            raise SessionFileDamagedError("the session's spans do not cover its tokens")
        if messages and len(messages) != len(spans):
            raise SessionFileDamagedError("the session has another number of messages than of spans")
