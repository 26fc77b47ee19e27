"""One piece of work on a session: what was asked, how far it is, and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

import torch

from kvos.residency import Restore, RestoreEnd
from kvos.serving.reply_text import ReplyText
from kvos.serving.sampler import SamplingState
from kvos.sessions.session import CacheSession
from kvos.storage import Reservation

__all__ = [
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "PrefillProgress",
    "Request",
    "RequestId",
    "TextDelta",
    "Usage",
    "WhyComputed",
]

RequestId = NewType("RequestId", int)


class FinishReason(Enum):
    """Why a reply ended."""

    STOP = "stop"
    """The model ended it, or a stop string was found."""
    LENGTH = "length"
    """``max_tokens`` or the end of the context was reached."""
    CANCELLED = "cancelled"
    """The caller did not want more; what there was is kept."""


class WhyComputed(Enum):
    """Why tokens of a prompt were computed and not taken from the cache."""

    NOTHING = "everything was cached; at most the last token was computed again, for its logits"
    NEW_TOKENS = "no full block of this tenant held these tokens behind this prefix"
    EVICTED = "blocks with these tokens were cached, and were reclaimed when the pool was full"
    SAVED_KV_UNUSABLE = (
        "the keys and values in the saved session were damaged, or computed otherwise: in another dtype or mode, under "
        "another config, for another declared length"
    )
    TIER_LATE = "a lower tier holds blocks with these tokens, and had not brought them by the deadline"
    TIER_FAILED = "a lower tier held blocks with these tokens that could not be read, were damaged, or had just gone"
    TIER_OFF = "a lower tier holds blocks with these tokens, and is left alone for now: it kept failing, or hangs"
    COMPUTING_IS_FASTER = "a lower tier holds blocks with these tokens, and computing them was expected to be faster"
    TEMPLATE_REWROTE_HISTORY = "the chat template changed the text of earlier turns, so what followed had to go"


RESTORES_THAT_ENDED_EARLY = {
    RestoreEnd.LATE: WhyComputed.TIER_LATE,
    RestoreEnd.FAILED: WhyComputed.TIER_FAILED,
    RestoreEnd.MISSING: WhyComputed.TIER_FAILED,
    RestoreEnd.SWITCHED_OFF: WhyComputed.TIER_OFF,
    RestoreEnd.NOT_WORTH_IT: WhyComputed.COMPUTING_IS_FASTER,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost.

    Attributes:
        prompt_tokens: tokens in front of the first generated one.
        reused_tokens: of those, how many had their KV in blocks already; ``prompt = reused + computed``, unless it
            was cancelled before its prompt was computed.
        shared_tokens: of the reused ones, how many came from other sessions' (or earlier) blocks by content.
        restored_tokens: of the reused ones, how many came back from a lower tier for this request.
        computed_tokens: of the prompt, how many went through the model.
        generated_tokens: sampled tokens, an end-of-sequence token included.
        why_computed: why not more was reused.
        ttft_s: seconds from the call to the first token (for a prefill: to its end).
        total_s: seconds from the call to the end.
    """

    prompt_tokens: int
    reused_tokens: int
    shared_tokens: int
    computed_tokens: int
    generated_tokens: int
    why_computed: WhyComputed
    ttft_s: float
    total_s: float
    restored_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Seconds per generated token after the first; 0 if there was only one."""
        return (self.total_s - self.ttft_s) / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that may be shown now, and the tokens since the last delta."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well.

    Attributes:
        content: the reply's whole text; empty for a prefill.
        logits: ``[tokens, vocab]`` for a request that asked for them.
    """

    content: str
    tokens: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that ended by an error; the session is usable, a partial reply is kept."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far the prompt is: ``done`` of ``total`` tokens that must be computed. Sent per chunk, before any text."""

    done: int
    total: int


Event = TextDelta | PrefillProgress | Finished | Failed


@dataclass(slots=True, eq=False)
class Request:
    """Engine thread only; what a caller sees are the events that go to ``sink``.

    Attributes:
        first_row: the first token that had to go through the model.
        next_row: the next one. Below ``sequence.num_computed`` it is computed without
            writing, for its logits.
        logits_from: first token whose logits are wanted; None for those of the last token alone.
        uncounted: prompt tokens that the session held already and that no counter takes as reused.
        lost_to_template: held tokens that had to go because the template rewrote them.
        met_eviction: what had to be computed had been cached once.
        saved_kv_unusable: what had to be computed was in the file that the session was loaded from.
        reply: the text so far, if this generates; ``sampling`` likewise.
        scored: logits of the wanted rows so far.
        restore: what it waits for from lower tiers; None if it waits for nothing. ``restore_end`` is how that ended.
        restored: tokens that came from there.
        deserted: the caller could not take an event; nobody listens any more.
    """

    id: RequestId
    session: CacheSession
    sink: Callable[[Event], None]
    next_row: int = 0
    first_row: int = 0
    logits_from: int | None = None
    reply: ReplyText | None = None
    sampling: SamplingState | None = None
    eos_ids: frozenset[int] = frozenset()
    reservation: Reservation | None = None
    lost_to_template: int = 0
    met_eviction: bool = False
    saved_kv_unusable: bool = False
    scored: list[torch.Tensor] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    uncounted: int = 0
    reused: int = 0
    shared: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    restore: Restore | None = None
    restore_end: RestoreEnd | None = None
    restored: int = 0
    deserted: bool = False

    @property
    def rows_left(self) -> int:
        """Tokens that must go through the model before the next logits."""
        return self.session.sequence.num_tokens - self.next_row

    @property
    def is_decoding(self) -> bool:
        return bool(self.generated)

    def skip_rows(self, gained: int) -> None:
        """``gained`` tokens of the prompt have KV now and need not be computed."""
        sequence = self.session.sequence
        self.reused += gained
        next_row = min(sequence.num_computed, sequence.num_tokens - 1)
        if self.logits_from is not None:  # rows whose logits are wanted are computed, cached or not
            next_row = min(next_row, max(self.next_row, self.logits_from))
        self.next_row = next_row

    def usage(self) -> Usage:
        now = time.perf_counter()
        why = WhyComputed.NEW_TOKENS
        if self.reused == self.prompt_tokens:
            why = WhyComputed.NOTHING
        elif self.lost_to_template:
            why = WhyComputed.TEMPLATE_REWROTE_HISTORY
        elif self.saved_kv_unusable:
            why = WhyComputed.SAVED_KV_UNUSABLE
        elif self.restore_end in RESTORES_THAT_ENDED_EARLY:
            why = RESTORES_THAT_ENDED_EARLY[self.restore_end]
        elif self.met_eviction:
            why = WhyComputed.EVICTED
        return Usage(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused,
            shared_tokens=self.shared,
            computed_tokens=max(0, min(self.next_row, self.prompt_tokens) - self.reused),
            generated_tokens=len(self.generated),
            why_computed=why,
            ttft_s=(now if self.first_token is None else self.first_token) - self.started,
            total_s=now - self.started,
            restored_tokens=self.restored,
        )
