"""The second process: what is left of it when things go wrong."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from kvos.config import subprocess_environment
from kvos.demo import Script, run_demo
from kvos.demo.process import resume_elsewhere
from kvos.demo.resume import ResumeJob
from kvos.demo.show import Show
from kvos.demo.story import SavedStory
from kvos.errors import InvalidInputError, ServerError

PATIENCE_S = 60


def test_a_second_process_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    job = ResumeJob(
        model=str(tmp_path / "no-model"),
        dtype="fp32",
        session_file=str(tmp_path / "x.kvos"),
        session="x",
        question="Who?",
        max_tokens=1,
        stop=(),
        replies=(),
        logits_file=str(tmp_path / "x.safetensors"),
    )
    saved = SavedStory(tmp_path / "x.kvos", 0, 0, ())
    with pytest.raises(ServerError, match=r"exit code 1 .*'loaded': ModelNotAvailableError: .*no-model"):
        resume_elsewhere(job, saved, tmp_path, Show(Console(file=io.StringIO())))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_early_it_leaves_no_process_and_no_file(
    toy_folder: Path, toy_script: Script, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = subprocess_environment(
        TMPDIR=str(temporary), KVOS_HOME=str(tmp_path / "home"), PYTHONPATH=":".join(filter(None, sys.path))
    )
    helper = Path(__file__).with_name("demo_process.py")
    demo = subprocess.Popen(
        [sys.executable, "-u", str(helper), str(toy_folder), json.dumps(asdict(toy_script))],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        second = _second_process(demo)
        demo.send_signal(number)
        assert demo.wait(PATIENCE_S) == code
    finally:
        demo.kill()
        demo.wait()
        if demo.stdout is not None:
            demo.stdout.close()
    assert _has_ended(second)
    assert list(temporary.iterdir()) == []


def _second_process(demo: subprocess.Popen[str]) -> int:
    """The number of the second process, as soon as it is announced."""
    for line in demo.stdout or ():
        found = re.search(r"Process (\d+) starts", line)
        if found:
            return int(found[1])
    raise RuntimeError("the demo ended before it started a second process")


def _has_ended(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_figures_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nowhere"):
        run_demo("no-model", json_path=tmp_path / "nowhere" / "demo.json")
