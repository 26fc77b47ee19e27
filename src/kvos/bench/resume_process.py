"""The new process of ``kvos bench resume``: told in a file what to do, it prints what it measured as a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from kvos.bench.files import drop_from_page_cache, read_seconds
from kvos.bench.workplace import random_tokens
from kvos.config import KvosConfig
from kvos.models.load import load_model
from kvos.runtime import Session, open_runtime

__all__ = ["ResumeJob", "Resumed", "resume"]

TURN_TOKENS = 16
WARM_UP_TOKENS = 64
REPEATS = 3
SEEDS_PER_PROCESS = 100


@dataclass(frozen=True, slots=True)
class ResumeJob:
    """What to resume, and where.

    Attributes:
        settings: a ``KvosConfig`` as JSON has it; its home is where models lie.
        home: where the session was hibernated.
        packs: files that hold its blocks.
        number: of this process, so that each adds other tokens.
    """

    model: str
    settings: dict[str, Any]
    home: str
    session: str
    packs: list[str]
    number: int

    @classmethod
    def of(
        cls, model: str, config: KvosConfig, home: Path, session: str, packs: Sequence[str], number: int
    ) -> ResumeJob:
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        return cls(model, settings, str(home), session, list(packs), number)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What one process measured; see ``ResumeReport``."""

    resumed_s: float
    restored_tokens: int
    warm_s: float
    computed_s: float
    read_bytes_per_s: float


def resume(job: ResumeJob) -> Resumed:
    """Do the job, once the model is open and has computed something else."""
    config = KvosConfig(**job.settings)
    loaded = load_model(job.model, config=config)
    config = replace(config, home=Path(job.home), publish_stats=False)
    with open_runtime(loaded.model, tokenizer=loaded.tokenizer, config=config) as runtime:
        seed = SEEDS_PER_PROCESS * (job.number + 1)
        _turn(runtime.session(), random_tokens(runtime, WARM_UP_TOKENS, seed))
        drop_from_page_cache(config.home)
        begin = time.perf_counter()
        session = runtime.resume(job.session)
        restored = _turn(session, random_tokens(runtime, TURN_TOKENS, seed + 1))
        resumed_s = time.perf_counter() - begin
        warm = []
        for i in range(REPEATS):
            begin = time.perf_counter()
            _turn(runtime.get(job.session), random_tokens(runtime, TURN_TOKENS, seed + 2 + i))
            warm.append(time.perf_counter() - begin)
        cold = runtime.session(tenant="elsewhere")  # other addresses: nothing of it is cached
        begin = time.perf_counter()
        _turn(cold, session.tokens)
        computed_s = time.perf_counter() - begin
        return Resumed(resumed_s, restored, median(warm), computed_s, _read_speed(job))


def _turn(session: Session, tokens: Any) -> int:
    """New tokens and the first one of a reply; returns how many came back from a lower tier."""
    session.append_tokens(tokens)
    return session.generate(max_tokens=1, ignore_eos=True).usage.restored_tokens


def _read_speed(job: ResumeJob) -> float:
    folder = Path(job.home)
    packs = [Path(pack) for pack in job.packs]
    seconds = []
    for _ in range(REPEATS):
        drop_from_page_cache(folder)
        seconds.append(read_seconds(packs))
    return sum(pack.stat().st_size for pack in packs) / median(seconds)


if __name__ == "__main__":
    told = ResumeJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write(json.dumps(asdict(resume(told))) + "\n")
