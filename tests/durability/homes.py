"""A runtime over the toy model in float64 with a home of its own, and the plain model that its replies are compared to.

Forkable: nothing here starts a thread before a runtime is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import kvos
from kvos.policy.transfer import SpeedEstimate
from kvos.serving import EngineCore
from kvos.testing.models import toy_model, toy_tokenizer
from kvos.tiers import BlockKey
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.index import CATALOG_BYTES
from kvos.types import OwnerId
from serving.harness import assert_same_logits, plain_greedy

BLOCK = 8
BLOCK_BYTES = 3 * 2 * 2 * 16 * 8 * BLOCK
"""Layers, keys and values, heads, head size, float64."""

ROOMY = 1 << 30
SMALL = CATALOG_BYTES + 45 * (BLOCK_BYTES + 500)
"""Room for fewer blocks than a few sessions have."""


class Unmeasured(SpeedEstimate):
    """Never known: so blocks are always brought back, and never computed because that would be quicker."""

    def add(self, units: float, seconds: float) -> None:
        pass


@cache
def parts() -> tuple[Any, Any]:
    return toy_model(dtype=torch.float64), toy_tokenizer()


def open_home(home: Path, disk_bytes: int = ROOMY, **settings: Any) -> kvos.Runtime:
    """Blocks come back whenever they are there, whatever is quicker."""
    model, tokenizer = parts()
    chosen = {"block_size": BLOCK, "cache_bytes": 4 << 20, "kernels": "generic", "publish_stats": False} | settings
    runtime = kvos.open(model, tokenizer=tokenizer, home=home, disk_cache_bytes=disk_bytes, **chosen)
    runtime.inspect(lambda core: setattr(core.moves.residency, "prefill_speed", Unmeasured()))
    return runtime


def disk_tier(runtime: kvos.Runtime) -> DiskTier:
    tier = runtime.inspect(lambda core: core.moves.residency._levels[-1].tier)
    assert isinstance(tier, DiskTier)
    return tier


def tier_folder(home: Path) -> Path:
    """Where the only shape of blocks lies."""
    [folder] = (home / "blocks").iterdir()
    return folder


def keys_of(runtime: kvos.Runtime, name: str) -> list[BlockKey]:
    """Of the full blocks of an open session."""

    def addresses(core: EngineCore) -> list[BlockKey]:
        sequence = core.sessions.get(name).sequence
        return [BlockKey(address) for address in sequence.addresses(0, sequence.num_tokens // BLOCK)[1:]]

    return runtime.inspect(addresses)


def reclaim_everything(runtime: kvos.Runtime) -> None:
    """Nothing is in the pool any more but what somebody holds: the rest has to come from below."""

    def reclaim(core: EngineCore) -> None:
        counts = core.manager.allocator.counts()
        core.manager.allocator.release(core.manager.allocate(counts.free + counts.cached, OwnerId(99)))

    runtime.inspect(reclaim)


def blocks_there(runtime: kvos.Runtime, name: str) -> int:
    """How many full blocks of an open session the disk tier has, from its beginning on without a gap."""
    there = disk_tier(runtime).contains(keys_of(runtime, name))
    return next((n for n, found in enumerate(there) if not found), len(there))


def assert_goes_on_like_the_plain_model(session: kvos.Session, tokens: Sequence[int], n: int = 3) -> kvos.Reply:
    """``n`` tokens, each the plain model's, then its logits behind one more; the session grows by all of them."""
    reply = session.generate(max_tokens=n, ignore_eos=True).result()
    assert list(reply.tokens) == plain_greedy(tokens, n), "other tokens than the plain model's"
    written = session.tokens.tolist()
    assert written[: len(tokens)] == list(tokens)
    assert_same_logits(session.score([7]), [*written, 7])
    return reply


def sizes(folder: Path, patterns: Iterable[str]) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in folder.glob(pattern))


def assert_right_accounts(tier: DiskTier, folder: Path) -> None:
    """What the tier says it takes is what the files take, no more than it may, and nothing is unfinished."""
    tier.check_invariants()
    usage = tier.usage()
    packs, catalog = sizes(folder, ["*.pack"]), sizes(folder, ["catalog*"])
    assert packs <= usage.used_bytes <= usage.capacity_bytes
    assert packs + catalog <= usage.used_bytes, "the catalog takes no more than its estimate"
    assert not list(folder.glob("*.tmp"))
