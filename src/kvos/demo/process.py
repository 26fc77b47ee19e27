"""The first process's side of the second one: start it, show what it does, end it whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvos.demo.evidence import Evidence
from kvos.demo.record import ColdStart, ReplyRecord, ResumeRecord, Scene
from kvos.demo.resume import ResumeJob, read_evidence
from kvos.demo.script import Question
from kvos.demo.show import Show
from kvos.demo.story import SavedStory
from kvos.demo.text import seconds, size, times
from kvos.errors import ServerError

__all__ = ["resume_elsewhere"]

PATIENCE_SECONDS = 10.0
"""For a process that was asked to end; then it is killed."""


@dataclass(slots=True)
class _Events:
    """The events of one process, in their order, with what each phase took."""

    process: subprocess.Popen[str]
    errors: Path
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def until(self, last: str) -> Iterator[dict[str, Any]]:
        """Events up to and including ``last``.

        Raises:
            ServerError: the process ended before.
        """
        for line in self.process.stdout or ():
            event: dict[str, Any] = json.loads(line)
            self.seen[event["event"]] = event
            yield event
            if event["event"] == last:
                return
        code = self.process.wait()
        said = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ServerError(
            f"the process that was to resume the session ended with exit code {code} before it was {last!r}: "
            f"{said[-1] if said else 'it said nothing'}"
        )


def resume_elsewhere(job: ResumeJob, saved: SavedStory, folder: Path, show: Show) -> tuple[ResumeRecord, Evidence]:
    """Run ``job`` in a new process and show it live.

    Raises:
        ServerError: it ended early; the text holds its last words.
    """
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job.as_dict()), encoding="utf-8")
    begin = time.perf_counter()
    with _process(job_file, folder / "stderr.txt") as events:
        with show.busy(f"Process {events.process.pid} starts, opens the model and loads the session"):
            for event in events.until("loaded"):
                if event["event"] == "started":
                    start_s = time.perf_counter() - begin
        show.note(_loaded(events, saved))
        reply = _reply(events, job, show)
        with show.busy(f"The same {reply.prompt_tokens:,} prompt tokens there, all computed") as progress:
            for event in events.until("cold"):
                if event["event"] == "prefill":
                    progress(event["done"], event["total"])
        with show.busy("Reading the replies' logits over the restored blocks"):
            done = list(events.until("done"))[-1]
        events.process.wait()
        record = ResumeRecord(
            pid=events.process.pid,
            saved_bytes=saved.path.stat().st_size,
            saved_tokens=saved.tokens,
            saved_computed_tokens=saved.computed,
            start_s=start_s,
            open_s=events.seen["opened"]["seconds"],
            load_s=events.seen["loaded"]["seconds"],
            reply=reply,
            cold=ColdStart(**events.seen["cold"]["cold"]),
        )
    show.note(_resumed(record))
    return record, read_evidence(Path(job.logits_file), done)


def _reply(events: _Events, job: ResumeJob, show: Show) -> ReplyRecord:
    with show.replies(Question(job.session, job.question)) as view:
        for event in events.until("replied"):
            if event["event"] == "text":
                view.text(0, event["text"])
            elif event["event"] == "prefill":
                view.prefill(0, event["done"], event["total"])
        data = events.seen["replied"]["reply"]
        record = ReplyRecord(**{**data, "scene": Scene(data["scene"]), "tokens": tuple(data["tokens"])})
        view.finish(0, record)
    return record


@contextmanager
def _process(job_file: Path, errors: Path) -> Iterator[_Events]:
    """A process that works on ``job_file``; it has ended when the block ends, well or not."""
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvos.demo", "--resume", str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            encoding="utf-8",
        )
    try:
        yield _Events(process, errors)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _loaded(events: _Events, saved: SavedStory) -> str:
    loaded = events.seen["loaded"]
    return (
        f"Process {events.process.pid} has read the file in {seconds(loaded['seconds'])}: {loaded['tokens']:,} of "
        f"{saved.tokens:,} tokens are computed already. (Opening the model took it "
        f"{seconds(events.seen['opened']['seconds'])}.)"
    )


def _resumed(record: ResumeRecord) -> str:
    reply, cold = record.reply, record.cold
    return (
        f"{reply.reused_tokens:,} tokens reused from the file ({size(record.saved_bytes)}). TTFT of the resumed turn: "
        f"{seconds(reply.ttft_s)}; computing everything takes {seconds(cold.ttft_s)} "
        f"({times(cold.ttft_s, reply.ttft_s)} faster; {times(cold.ttft_s, reply.ttft_s + record.load_s)} "
        "with the reading of the file counted in)."
    )
