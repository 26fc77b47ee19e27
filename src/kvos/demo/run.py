"""``kvos demo``: the whole story, its record and its verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

import kvos
from kvos.config import KvosConfig
from kvos.demo.check import check
from kvos.demo.evidence import Evidence
from kvos.demo.measure import growth_lengths, growth_points
from kvos.demo.process import resume_elsewhere
from kvos.demo.record import CheckRecord, DemoRecord, GrowthPoint
from kvos.demo.resume import ResumeJob
from kvos.demo.script import Script, default_script
from kvos.demo.show import Show
from kvos.demo.story import SavedStory, Story
from kvos.demo.text import size
from kvos.errors import InvalidInputError
from kvos.models.catalogue import find
from kvos.models.load import LoadedModel, load_model
from kvos.models.store import model_folder
from kvos.runtime import DEFAULT_MODEL, Runtime, open_runtime

__all__ = ["play", "run_demo"]

PIPED_WIDTH = 120
"""Columns where there is no terminal to ask."""


def run_demo(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    dtype: str = "auto",
    json_path: str | os.PathLike[str] | None = None,
    script: Script | None = None,
    console: Console | None = None,
    open_runtime: Callable[..., Runtime] = open_runtime,
) -> int:
    """Play the story, check it, and show both; returns the exit code: 0 if every reuse equalled a recompute, else 1.

    Takes memory for two copies of the model. Its session file lies in a temporary folder; that, and the second
    process, are gone when this returns or raises, Ctrl-C included.

    Args:
        model: a name, a folder or a hub id, for a second process has to open it, too.
        dtype: as ``KvosConfig.dtype``.
        json_path: also write the record there, atomically; its keys are in ``kvos.demo.record``.
        script: another story.
        console: where to show it; by default stdout.
        open_runtime: opens the first process's runtime; for tests.

    Raises:
        InvalidInputError: ``json_path`` is not in a folder.
        ModelNotAvailableError, UnsupportedModelError: as ``kvos.open``.
        ServerError: the second process ended early.
    """
    target = None if json_path is None else _target(Path(json_path))
    show = Show(console or _console())
    with _terminable():
        record = play(os.fspath(model), dtype, script or default_script(), show, open_runtime)
    show.summary(record)
    if target is not None:
        _write_json(target, record.as_dict())
        show.note(f"Written to {target}")
    show.parts(record.check)
    show.verdict(record.check)
    return 0 if record.ok else 1


def play(
    model: str, dtype: str, script: Script, show: Show, open_runtime: Callable[..., Runtime] = open_runtime
) -> DemoRecord:
    """All scenes and the check. Raises: as ``run_demo``."""
    begin = time.perf_counter()
    config = KvosConfig.from_env(dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="kvos-demo-") as name:
        folder = Path(name)
        with show.busy(f"Opening {model}") if _is_here(model, config) else contextlib.nullcontext():
            runtime = open_runtime(model, dtype=dtype, disk_cache_bytes=0)
        with runtime:
            show.note(_what_runs(runtime))
            story = Story(runtime, script, show)
            supervisor = story.conversation()
            with show.busy("Opening a second, plain copy of the model"):
                plain = load_model(model, config=config)
            growth = _growth(story, plain, supervisor.tokens.tolist())
            saved = story.save(supervisor, folder / "supervisor.kvos")
            stats = runtime.stats()
        show.note(f"Process {os.getpid()} has closed its runtime, and with it every block.")
        job = _job(model, dtype, script, saved, folder)
        resume, evidence = resume_elsewhere(job, saved, folder, show)
    story.evidence.append(evidence)
    checked = _check(plain, story.evidence, show, story.runtime.max_context_tokens)
    return DemoRecord(
        kvos=kvos.__version__,
        model=stats.model,
        dtype=stats.dtype,
        block_size=stats.block_size,
        bytes_per_token=stats.bytes_per_token,
        device=str(plain.device),
        replies=tuple(story.replies),
        cold=tuple(story.cold),
        forks=story.fork_record(),
        blocks=story.blocks,
        growth=growth,
        resume=resume,
        check=checked,
        total_s=time.perf_counter() - begin,
    )


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the stack, as Ctrl-C does, so that the second process and the files go, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_here(model: str, config: KvosConfig) -> bool:
    """Whether opening ``model`` fetches nothing; else its own progress bar is shown."""
    entry = find(model)
    return entry is None or model_folder(entry.name, config.home).is_dir()


def _what_runs(runtime: Runtime) -> str:
    stats = runtime.stats()
    return (
        f"{stats.model} in {stats.dtype}: blocks of {stats.block_size} tokens, {size(stats.bytes_per_token)} a token. "
        "(A very small model chooses the words; what this shows is the memory under it.)"
    )


def _growth(story: Story, plain: LoadedModel, ids: list[int]) -> tuple[GrowthPoint, ...]:
    story.show.scene(
        "4  One more token at growing history",
        "With the cache a step reads the history's keys and values; without, all of it runs through the model again.",
    )
    points: list[GrowthPoint] = []
    wanted = growth_lengths(story.script.histories, story.runtime.max_context_tokens)
    with story.show.busy("Timing one token, with the cache and without") as progress:
        progress(0, len(wanted))
        for point in growth_points(story.runtime, plain.model, ids, wanted):
            points.append(point)
            progress(len(points), len(wanted))
    story.show.growth(points)
    return tuple(points)


def _job(model: str, dtype: str, script: Script, saved: SavedStory, folder: Path) -> ResumeJob:
    return ResumeJob(
        model=model,
        dtype=dtype,
        session_file=str(saved.path),
        session=script.supervisor,
        question=script.resumed_turn,
        max_tokens=script.max_tokens,
        stop=script.stop,
        replies=saved.replies,
        logits_file=str(folder / "logits.safetensors"),
    )


def _check(plain: LoadedModel, evidence: list[Evidence], show: Show, max_tokens: int) -> CheckRecord:
    show.scene(
        "6  The check: was every reuse equal to a recompute?",
        "The same token ids go through a plain copy of the model without any cache; logits and tokens are compared.",
    )
    with show.busy("Running without a cache") as progress:
        return check(plain.model, evidence, progress, max_tokens)


def _target(path: Path) -> Path:
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidInputError(f"cannot write the figures to {path}: expected a file in a folder that exists")
    return path.absolute()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    """The whole file or none of it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
