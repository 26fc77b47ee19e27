"""A runtime on the toy model, a chat that is typed by a list, and ``kvos`` as a call, all under a home of their own."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import kvos
from kvos.cli import app
from kvos.cli.chat.lines import PipedLines
from kvos.cli.chat.loop import ChatLoop
from kvos.runtime import Runtime
from kvos.serving import SamplingParams
from kvos.testing.models import toy_model, toy_tokenizer

Kvos = Callable[..., Result]
Talk = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVOS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def call(home: Path) -> Kvos:
    """``call("stats", "--json")``: the command's result."""
    return lambda *words: CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})


@pytest.fixture
def runtime(home: Path) -> Iterator[Runtime]:
    with kvos.open(toy_model(), tokenizer=toy_tokenizer(), block_size=8, kernels="generic", cache_bytes=4 << 20) as one:
        yield one


@pytest.fixture
def talk(runtime: Runtime) -> Talk:
    """``talk(["Hello", "/blocks"])``: what a chat with these lines prints."""

    def say(
        lines: Iterable[str], *, max_tokens: int = 4, system: str | None = "Be brief.", load: str | None = None
    ) -> str:
        out = io.StringIO()
        console = Console(file=out, width=100, highlight=False, force_terminal=False)
        sampling = SamplingParams(max_tokens=max_tokens)
        ChatLoop(runtime, console, PipedLines(console, lines), sampling=sampling, system=system, load=load).run()
        runtime.check_invariants()
        return out.getvalue()

    return say
