"""The second process: its own runtime resumes a saved session and goes on with one turn.

It is told what to do in a file (``ResumeJob``) and answers with events, one JSON object a line on stdout::

    {"event": "started"}                               the interpreter and its imports are there
    {"event": "opened", "seconds": s}                  the model is open
    {"event": "loaded", "seconds": s, "tokens": n}     the session is open, n of its tokens computed
    {"event": "prefill", "done": n, "total": n}
    {"event": "text", "text": t}
    {"event": "replied", "reply": ReplyRecord}
    {"event": "cold", "cold": ColdStart}               the same prompt, where nothing is cached
    {"event": "done", "evidence": ...}                 its logits are in the file that the job names
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvos.demo.evidence import CheckedReply, Evidence, checked_reply, evidence_of
from kvos.demo.measure import cold_start
from kvos.demo.record import ReplyRecord, Scene
from kvos.runtime import Reply, Runtime, Session, open_runtime

__all__ = ["ResumeJob", "read_evidence", "resume"]

Emit = Callable[[dict[str, Any]], None]
LABEL = "resumed turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeJob:
    """What the second process does.

    Attributes:
        model, dtype: as ``kvos.open`` takes them.
        session_file: what to resume, under ``session``.
        replies: what the session has generated so far; the check covers them again, over restored blocks.
        logits_file: where the logits for the check go.
    """

    model: str
    dtype: str
    session_file: str
    session: str
    question: str
    max_tokens: int
    stop: tuple[str, ...]
    replies: tuple[CheckedReply, ...]
    logits_file: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ResumeJob:
        return cls(**{**data, "stop": tuple(data["stop"]), "replies": _replies(data["replies"])})


def resume(job: ResumeJob, emit: Emit) -> None:
    """Do the job; everything that is worth knowing goes to ``emit``."""
    emit({"event": "started"})
    begin = time.perf_counter()
    with open_runtime(job.model, dtype=job.dtype, disk_cache_bytes=0) as runtime:
        emit({"event": "opened", "seconds": time.perf_counter() - begin})
        begin = time.perf_counter()
        session = runtime.load(Path(job.session_file), name=job.session)
        report = session.report()
        computed = report.tokens - report.pending
        emit({"event": "loaded", "seconds": time.perf_counter() - begin, "tokens": computed})
        reply = _one_turn(session, job, emit)
        record = ReplyRecord.of(LABEL, session.name, Scene.RESUMED, job.question, reply)
        emit({"event": "replied", "reply": asdict(record)})
        ids = session.tokens.tolist()
        cold = cold_start(runtime, ids[: record.prompt_tokens], LABEL, _prefill(emit))
        emit({"event": "cold", "cold": asdict(cold)})
        replies = (*job.replies, checked_reply(ids, record.prompt_tokens, record.tokens))
        _hand_over(runtime, session, replies, job, emit)


def _one_turn(session: Session, job: ResumeJob, emit: Emit) -> Reply:
    session.append({"role": "user", "content": job.question})
    stream = session.generate(max_tokens=job.max_tokens, stop=job.stop, on_prefill=_prefill(emit))
    for text in stream:
        emit({"event": "text", "text": text})
    return stream.result()


def _prefill(emit: Emit) -> Callable[[int, int], None]:
    return lambda done, total: emit({"event": "prefill", "done": done, "total": total})


def _hand_over(
    runtime: Runtime, session: Session, replies: tuple[CheckedReply, ...], job: ResumeJob, emit: Emit
) -> None:
    evidence = evidence_of(runtime, session, f"{session.name}, resumed", replies)
    tensors = {"logits": evidence.logits.contiguous(), "ids": torch.tensor(evidence.ids)}
    save_file(tensors, job.logits_file)
    emit({"event": "done", "label": evidence.label, "replies": [asdict(reply) for reply in replies]})


def read_evidence(path: Path, done: dict[str, Any]) -> Evidence:
    """What the second process left in ``path`` and said in its last event."""
    tensors = load_file(path)
    ids = tuple(int(token) for token in tensors["ids"])
    return Evidence(done["label"], ids, _replies(done["replies"]), tensors["logits"])


def _replies(data: list[dict[str, Any]]) -> tuple[CheckedReply, ...]:
    return tuple(CheckedReply(one["start"], tuple(one["chosen"])) for one in data)
