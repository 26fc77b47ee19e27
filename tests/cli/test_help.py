from __future__ import annotations

import subprocess
import sys

import pytest

from kvos.config import subprocess_environment

COMMANDS = [
    [],
    ["chat"],
    ["demo"],
    ["verify"],
    ["simulate"],
    ["stats"],
    ["version"],
    ["bench"],
    ["bench", "codecs"],
    ["bench", "decode"],
    ["bench", "tiers"],
    ["bench", "resume"],
    ["bench", "compaction"],
    ["model"],
    ["model", "fetch"],
    ["model", "list"],
    ["model", "verify"],
    ["model", "remove"],
    ["sessions"],
    ["sessions", "list"],
    ["sessions", "show"],
    ["sessions", "save"],
    ["sessions", "load"],
    ["sessions", "drop"],
    ["cache"],
    ["cache", "show"],
    ["cache", "verify"],
    ["cache", "collect"],
    ["cache", "clear"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(call, words):
    result = call(*words, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"  {' '.join(['kvos', *words])}" in result.stdout


def test_help_comes_without_loading_torch():
    code = "import sys; from kvos.cli import app; app(['chat', '--help'], standalone_mode=False);"
    code += "sys.exit(bool({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_reading_stats_and_saved_sessions_does_not_load_torch(home):
    code = "import sys; from kvos.cli import app\n"
    code += "for words in (['stats'], ['sessions', 'list'], ['model', 'list'], ['cache'], ['cache', 'verify']):\n"
    code += "    app(words, standalone_mode=False)\n"
    code += "sys.exit(bool({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    environment = subprocess_environment(KVOS_HOME=str(home))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_bare_kvos_shows_the_help(call):
    assert "Usage" in call().output


def test_version_is_one_line(call):
    import kvos

    assert call("--version").stdout == f"kvos {kvos.__version__}\n"


def test_the_version_command_names_what_kvos_stands_on(call, home):
    lines = call("version").stdout.splitlines()
    assert lines[0].startswith("kvos ")
    assert any(line.startswith("torch 2.") for line in lines)
    assert lines[-1] == f"home {home}"


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "kvos", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("kvos ")
