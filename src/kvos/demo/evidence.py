"""What the cached runs chose and computed, kept for the check: token ids, and logits read over the cached blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvos.runtime import Runtime, Session

__all__ = ["CheckedReply", "Evidence", "checked_reply", "evidence_of"]


@dataclass(frozen=True, slots=True)
class CheckedReply:
    """What the cached run chose behind a session's first ``start`` tokens."""

    start: int
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """One session at its end.

    Attributes:
        label: for people.
        ids: its token ids, ``[tokens]``.
        replies: what it generated, in order.
        logits: ``[rows, vocab]`` behind each of ``rows``, computed over the cached blocks.
    """

    label: str
    ids: tuple[int, ...]
    replies: tuple[CheckedReply, ...]
    logits: torch.Tensor

    @property
    def rows(self) -> list[int]:
        return rows_of(self.replies)

    @property
    def chosen(self) -> list[int]:
        return [token for reply in self.replies for token in reply.chosen]


def rows_of(replies: Sequence[CheckedReply]) -> list[int]:
    """Token indices whose logits chose the replies' tokens: one before each."""
    return [row for reply in replies for row in range(reply.start - 1, reply.start - 1 + len(reply.chosen))]


def checked_reply(ids: Sequence[int], start: int, sampled: Sequence[int]) -> CheckedReply:
    """A reply as far as the session's ``ids`` can tell it apart.

    A stop string cuts tokens off the session. The first of those still has its logits (they are behind the last token
    that was kept); what came after it has none.
    """
    kept = 0
    while kept < len(sampled) and start + kept < len(ids) and ids[start + kept] == sampled[kept]:
        kept += 1
    return CheckedReply(start, tuple(sampled[: kept + 1]))


def evidence_of(runtime: Runtime, session: Session, label: str, replies: Sequence[CheckedReply]) -> Evidence:
    """Read the logits behind ``session``'s replies over its cached blocks. ``session`` stays as it is.

    A session of raw tokens with the same ids takes the published blocks, and computes from the first reply on: each
    of those rows sees the keys and values that the replies saw, those that decode steps wrote included.
    """
    ids = tuple(int(token) for token in session.tokens)
    rows = rows_of(replies)
    last = rows[-1] + 1
    reader = runtime.session(tenant=session.tenant)
    try:
        if rows[0]:
            reader.append_tokens(ids[: rows[0]])
        scored = reader.score(ids[rows[0] : last])
    finally:
        reader.close()
    wanted = torch.tensor([row - rows[0] for row in rows])
    return Evidence(label, ids[:last], tuple(replies), scored[wanted].cpu())
