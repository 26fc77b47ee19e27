"""A runtime on the toy model, a chat that is typed by a list, and ``kvos`` as a call, all under a home of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import kvos
from cli.talking import talk_on
from kvos.cli import app
from kvos.runtime import Runtime
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
    return partial(talk_on, runtime)


@pytest.fixture
def open_kept(home: Path) -> Iterator[Callable[[], Runtime]]:
    """Opens a runtime with a disk tier; the one before it is closed, as if its process had ended."""
    opened: list[Runtime] = []

    def open_one() -> Runtime:
        for runtime in opened:
            runtime.close()
        settings = {"block_size": 8, "kernels": "generic", "cache_bytes": 4 << 20, "disk_cache_bytes": 64 << 20}
        opened.append(kvos.open(toy_model(), tokenizer=toy_tokenizer(), **settings))
        return opened[-1]

    yield open_one
    for runtime in opened:
        runtime.close()
