"""How soon a session answers that a new process resumes from disk, beside a warm one and one computed again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvos.bench.resume_process import Resumed, ResumeJob
from kvos.bench.workplace import Workplace, open_workplace, text_tokens
from kvos.config import KvosConfig
from kvos.errors import InvalidInputError, ServerError
from kvos.runtime import DEFAULT_MODEL

__all__ = ["ResumeReport", "bench_resume"]

SESSION = "resumed"
FOLDER = "resume"
ROUNDS = 3
PATIENCE_S = 600.0
READS_ALLOWED = 1.5
"""What a resume may take beside a warm first token: so many times the time of reading its bytes."""


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What ``kvos bench resume`` found: medians over new processes, in seconds.

    Attributes:
        stored_bytes: of the session's blocks on disk.
        resumed_s: from ``Runtime.resume`` to the first token of the next reply, files not in the page cache.
        restored_tokens: of the prompt, how many came back from disk.
        warm_s: the same turn on a session that is on the device.
        computed_s: the same prompt where nothing is cached.
        read_bytes_per_s: the same files read from end to end, not in the page cache either.
        excess: of the time that resuming took beyond a warm turn, how many times the reading of its bytes; median over
            processes.
    """

    model: str
    dtype: str
    device: str
    tokens: int
    codec: str
    processes: int
    stored_bytes: int
    restored_tokens: int
    resumed_s: float
    warm_s: float
    computed_s: float
    read_bytes_per_s: float
    excess: float

    @property
    def read_s(self) -> float:
        return self.stored_bytes / self.read_bytes_per_s

    @property
    def allowed_s(self) -> float:
        return self.warm_s + READS_ALLOWED * self.read_s

    @property
    def speed_up(self) -> float:
        return self.computed_s / self.resumed_s

    def as_dict(self) -> dict[str, Any]:
        derived = {"read_s": self.read_s, "allowed_s": self.allowed_s, "speed_up": self.speed_up}
        return {**asdict(self), **derived}


def bench_resume(
    model: str = DEFAULT_MODEL,
    *,
    tokens: int = 2000,
    processes: int = ROUNDS,
    config: KvosConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ResumeReport:
    """Hibernate a session of ``tokens`` tokens here, and resume it in new processes, one after the other.

    Raises:
        InvalidInputError: fewer than one block's tokens, no process, or no disk tier in the settings.
        ServerError: a process ended early; the text holds its last words.
    """
    config = KvosConfig.from_env() if config is None else config
    if tokens < config.block_size or processes < 1:
        raise InvalidInputError(f"expected at least {config.block_size} tokens and one process")
    if config.disk_cache_bytes == 0:
        raise InvalidInputError("disk_cache_bytes is 0, so there is no disk to resume from")
    progress("loading the model")
    with open_workplace(model, config) as place:
        progress(f"computing and hibernating a session of {tokens} tokens")
        packs = _hibernate(place, tokens)
        done = []
        for number in range(processes):
            progress(f"resuming it in a new process, {number + 1} of {processes}")
            job = ResumeJob.of(model, config, place.home / FOLDER, SESSION, packs, number)
            done.append(_resume_elsewhere(job, place.home / f"job-{number}.json"))
        return _report(place, tokens, sum(Path(pack).stat().st_size for pack in packs), done)


def _hibernate(place: Workplace, tokens: int) -> list[str]:
    """Returns the files that hold the session's blocks."""
    with place.open(FOLDER) as runtime:
        session = runtime.session(SESSION)
        session.append_tokens(text_tokens(runtime, tokens))
        session.prefill()
        summary = session.hibernate()
        if summary.safe < tokens // place.layout.block_size:
            raise ServerError(f"the disk took {summary.safe} of {summary.wanted} blocks; the log says why")
    return [str(path) for path in (place.home / FOLDER).rglob("*.pack")]


def _resume_elsewhere(job: ResumeJob, job_file: Path) -> Resumed:
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "kvos.bench.resume_process", str(job_file)]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
    if process.returncode:
        said = process.stderr.strip().splitlines()
        raise ServerError(
            f"the process that was to resume the session ended with exit code {process.returncode}: "
            f"{said[-1] if said else 'it said nothing'}"
        )
    return Resumed(**json.loads(process.stdout.splitlines()[-1]))


def _report(place: Workplace, tokens: int, stored: int, done: Sequence[Resumed]) -> ResumeReport:
    return ResumeReport(
        model=place.loaded.name,
        dtype=str(place.loaded.dtype).removeprefix("torch."),
        device=str(place.loaded.device),
        tokens=tokens,
        codec=place.source.disk_codec,
        processes=len(done),
        stored_bytes=stored,
        restored_tokens=min(one.restored_tokens for one in done),
        resumed_s=median(one.resumed_s for one in done),
        warm_s=median(one.warm_s for one in done),
        computed_s=median(one.computed_s for one in done),
        read_bytes_per_s=median(one.read_bytes_per_s for one in done),
        excess=median((one.resumed_s - one.warm_s) * one.read_bytes_per_s / stored for one in done),
    )
