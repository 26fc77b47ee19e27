from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kvos.cli.failures import KvosGroup
from kvos.config import subprocess_environment
from kvos.errors import EngineStoppedError, SessionNotFoundError

FAILURES = {
    "client": (SessionNotFoundError("no session [x] is there"), 2),
    "server": (EngineStoppedError("the engine thread has ended"), 3),
    "disk": (OSError(28, "No space left on device", "/somewhere"), 3),
}


def invoke(error: BaseException, *words: str):
    app = typer.Typer(cls=KvosGroup, pretty_exceptions_enable=False)

    @app.callback()
    def options(debug: bool = False) -> None: ...

    @app.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(app, [*words, "fail"])


@pytest.mark.parametrize(("error", "code"), FAILURES.values(), ids=FAILURES)
def test_an_error_is_one_paragraph_and_an_exit_code(error, code):
    result = invoke(error)
    assert result.exit_code == code
    assert result.stderr == f"kvos: {error}\n"
    assert result.stdout == ""


def test_debug_shows_where_it_came_from():
    result = invoke(FAILURES["client"][0], "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "raise error" in result.stderr


def test_an_error_cannot_steer_the_terminal():
    assert "\x1b" not in invoke(SessionNotFoundError("evil \x1b[2J name")).stderr


def test_ctrl_c_is_quiet():
    result = invoke(KeyboardInterrupt())
    assert (result.exit_code, result.output) == (130, "")


def test_a_bug_keeps_its_traceback():
    assert isinstance(invoke(ZeroDivisionError()).exception, ZeroDivisionError)


def test_a_reader_that_has_gone_is_no_news(home):
    environment = subprocess_environment(KVOS_HOME=str(home))
    command = [sys.executable, "-m", "kvos", "version"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("sessions", "show", "nothing"), 2, "no saved or hibernated session is called 'nothing'"),
        (("sessions", "drop", "nothing", "--kind", "saved"), 2, "no saved session is called 'nothing'"),
        (("sessions", "load", "/nowhere.kvos"), 2, "does not exist"),
        (("cache", "verify", "gpt-5"), 2, "no folder of the disk cache and no model in it is called 'gpt-5'"),
        (("model", "verify"), 2, "is not on this machine"),
        (("model", "remove", "gpt-5"), 2, "the catalogue has no model 'gpt-5'"),
        (("model", "fetch", "--from", "/nowhere.whl"), 3, "/nowhere.whl"),
        (("chat", "--model", "/nowhere"), 2, "/nowhere"),
        (("chat", "--block-size", "17"), 2, "block_size is 17"),
        (("chat", "--system", "a", "--load", "b"), 2, "leave out --system"),
        (("chat", "--resume", "a", "--load", "b"), 2, "give either --load or --resume"),
        (("chat", "--temperature", "-1"), 2, "temperature is -1.0; it must be 0 or more"),
        (("stats", "--json", "--watch"), 2, "leave out --watch"),
        (("verify", "--json", "/nowhere/figures.json"), 2, "there is no folder /nowhere"),
        (("bench", "decode", "--sequences", "1,x"), 2, "--sequences is '1,x'"),
        (("bench", "decode", "--sequences", "0"), 2, "expected numbers from 1"),
        (("sing",), 2, "No such command"),
    ],
)
def test_what_a_person_can_get_wrong(call, words, code, text):
    result = call(*words)
    assert result.exit_code == code
    assert text in " ".join(result.stderr.split())


def test_a_bad_setting_in_the_environment_is_named(call, monkeypatch):
    monkeypatch.setenv("KVOS_DTYPE", "fp8")
    result = call("model", "list")
    assert result.exit_code == 2
    assert "dtype is 'fp8'" in result.stderr
