"""What the demo found out, as data: what the tables show and what ``--json`` writes.

Keys of the JSON (all times in seconds, all sizes in tokens unless the name says bytes or blocks)::

    kvos, model, dtype, block_size, bytes_per_token, device, total_s, ok
    replies    one per reply: label, session, scene, question, text, tokens, prompt_tokens, reused_tokens,
               shared_tokens, computed_tokens, generated_tokens, why_computed, ttft_s, tpot_s
    cold       the same prompts where nothing is cached: of (a label), prompt_tokens, reused_tokens, computed_tokens,
               ttft_s
    forks      children, fork_s, blocks_allocated_at_fork, blocks_copied_at_fork, blocks_allocated, blocks_copied,
               parent_full_blocks, full_blocks_copied
    blocks     one per open session after the forks: session, shared_blocks, private_blocks, tail_tokens,
               shared (one boolean per block of its table)
    growth     history_tokens, decode_s (with the cache), recompute_s (all of it through the plain model)
    resume     pid, saved_bytes, saved_tokens, saved_computed_tokens, start_s, open_s, load_s, reply, cold
    check      sequences, tokens_checked, tokens_compared, tokens_skipped, tokens_different, logits_compared,
               largest_difference, noise_floor, noise_pairs, limit, ok, parts (label, tokens, largest_difference, ok)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvos.runtime import Reply

__all__ = [
    "CheckPart",
    "CheckRecord",
    "ColdStart",
    "DemoRecord",
    "ForkRecord",
    "GrowthPoint",
    "ReplyRecord",
    "ResumeRecord",
    "Scene",
    "SessionBlocks",
]


class Scene(StrEnum):
    """Where in the story a reply belongs."""

    TURN = "turn"
    SECOND_SESSION = "second session"
    FORK = "fork"
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True)
class ReplyRecord:
    """One reply and what it cost; ``label`` names it in tables."""

    label: str
    session: str
    scene: Scene
    question: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    shared_tokens: int
    computed_tokens: int
    generated_tokens: int
    why_computed: str
    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, label: str, session: str, scene: Scene, question: str, reply: Reply) -> ReplyRecord:
        usage = reply.usage
        return cls(
            label=label,
            session=session,
            scene=scene,
            question=question,
            text=reply.text,
            tokens=reply.tokens,
            prompt_tokens=usage.prompt_tokens,
            reused_tokens=usage.reused_tokens,
            shared_tokens=usage.shared_tokens,
            computed_tokens=usage.computed_tokens,
            generated_tokens=usage.generated_tokens,
            why_computed=usage.why_computed.value,
            ttft_s=usage.ttft_s,
            tpot_s=usage.tpot_s,
        )


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The prompt of a reply again, where nothing of it is cached; ``of`` says which."""

    of: str
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class ForkRecord:
    """What making the forks cost, and what their work cost.

    Attributes:
        blocks_allocated_at_fork, blocks_copied_at_fork: by the fork itself.
        blocks_allocated, blocks_copied: by fork and work; a copied block is a partial tail.
        parent_full_blocks: blocks of the parent that were full when it forked.
        full_blocks_copied: of those, counted per child, how many a child does not hold by the same id.
    """

    children: int
    fork_s: float
    blocks_allocated_at_fork: int
    blocks_copied_at_fork: int
    blocks_allocated: int
    blocks_copied: int
    parent_full_blocks: int
    full_blocks_copied: int


@dataclass(frozen=True, slots=True)
class SessionBlocks:
    """A session's block table: which of its blocks others hold too, and how full the last one is."""

    session: str
    shared: tuple[bool, ...]
    tail_tokens: int

    @property
    def shared_blocks(self) -> int:
        return sum(self.shared)

    @property
    def private_blocks(self) -> int:
        return len(self.shared) - self.shared_blocks

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shared_blocks": self.shared_blocks, "private_blocks": self.private_blocks}


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """What one token costs behind ``history_tokens`` tokens."""

    history_tokens: int
    decode_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """The next turn in another process.

    Attributes:
        start_s: from starting the process to its first word: the interpreter and its imports.
        open_s: opening the model there; with ``start_s`` the price of any new process, cache or not.
        load_s: reading and checking the saved session.
    """

    pid: int
    saved_bytes: int
    saved_tokens: int
    saved_computed_tokens: int
    start_s: float
    open_s: float
    load_s: float
    reply: ReplyRecord
    cold: ColdStart


@dataclass(frozen=True, slots=True)
class CheckPart:
    """One session's replies against the model without a cache."""

    label: str
    tokens: int
    skipped: int
    different: int
    largest_difference: float
    ok: bool


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """Whether every reuse equalled a recompute.

    Attributes:
        tokens_compared: where the reference's two best tokens are further apart than ``limit``.
        noise_floor: the largest difference between runs without a cache that differ only in their shape.
        limit: of a logit's difference.
    """

    parts: tuple[CheckPart, ...]
    sequences: int
    logits_compared: int
    largest_difference: float
    noise_floor: float
    noise_pairs: int
    limit: float

    @property
    def ok(self) -> bool:
        return bool(self.parts) and all(part.ok for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        checked, skipped = sum(p.tokens for p in self.parts), sum(p.skipped for p in self.parts)
        return {
            **asdict(self),
            "ok": self.ok,
            "tokens_checked": checked,
            "tokens_compared": checked - skipped,
            "tokens_skipped": skipped,
            "tokens_different": sum(part.different for part in self.parts),
        }


@dataclass(frozen=True, slots=True)
class DemoRecord:
    """Everything; ``as_dict`` is what the JSON holds."""

    kvos: str
    model: str
    dtype: str
    block_size: int
    bytes_per_token: int
    device: str
    replies: tuple[ReplyRecord, ...]
    cold: tuple[ColdStart, ...]
    forks: ForkRecord
    blocks: tuple[SessionBlocks, ...]
    growth: tuple[GrowthPoint, ...]
    resume: ResumeRecord
    check: CheckRecord
    total_s: float

    @property
    def ok(self) -> bool:
        return self.check.ok

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["blocks"] = [one.as_dict() for one in self.blocks]
        plain["check"] = self.check.as_dict()
        return {**plain, "ok": self.ok}
