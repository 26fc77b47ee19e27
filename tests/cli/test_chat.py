from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvos.cli.chat.loop import ChatLoop
from kvos.errors import SessionNotFoundError
from kvos.serving import SamplingParams


def usage_of(output: str) -> list[tuple[int, int, int]]:
    """(reused, computed, prompt) of every reply."""
    found = re.findall(r"reused (\d+), computed (\d+) of (\d+) tokens", output)
    return [(int(reused), int(computed), int(prompt)) for reused, computed, prompt in found]


def test_the_reply_is_what_the_session_would_say(talk, runtime):
    output = talk(["Hello"], max_tokens=8)
    session = runtime.session(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    )
    text = session.generate(max_tokens=8).result().text
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    assert f"main> Hello\n{shown}" in output.replace("\r", "")


def test_a_second_turn_reuses_the_first(talk):
    (reused_1, computed_1, prompt_1), (reused_2, computed_2, prompt_2) = usage_of(talk(["Hello", "And now?"]))
    assert (reused_1, computed_1) == (0, prompt_1)
    assert reused_2 >= prompt_1
    assert reused_2 + computed_2 == prompt_2


def test_a_fork_is_a_session_of_its_own(talk, runtime):
    output = talk(["Hello", "/fork idea", "What if?", "/switch main", "/sessions"])
    assert "idea> What if?" in output
    assert "idea has the same past as main" in output
    reports = {report.name: report for report in runtime.sessions()}
    assert reports["main"].messages == 3
    assert reports["idea"].messages == 5
    assert reports["idea"].parent == "main"
    assert re.search(r"\* +main", output)


def test_commands_without_an_argument_refuse_one_and_saving_makes_no_folders(talk, tmp_path):
    output = talk(["/stats please", f"/save {tmp_path}/none/x.kvos", "/exit", "never read"])
    assert "/stats takes no argument, got 'please'" in output
    assert "there is no folder" in output
    assert not (tmp_path / "none").exists()
    assert "never read" not in output


def test_a_new_session_shares_the_system_message(talk):
    output = talk(["Hello", "/new other", "Hello"], system="A system message that fills more than one block.")
    assert "from blocks that another session computed" in output


def test_undo_takes_the_last_exchange_back(talk, runtime):
    output = talk(["Hello", "Second", "/undo", "/undo", "/undo"])
    assert [message["role"] for message in runtime.get("main").messages] == ["system"]
    assert "forgotten: 'Second'" in output
    assert "there is nothing to take back" in output


def test_what_was_saved_is_there_again(talk, runtime):
    talk(["Hello", "/save monday"])
    said = runtime.get("main").messages
    runtime.get("main").close()
    output = talk(["Go on"], load="monday")
    assert output.count("monday>") == 1
    assert runtime.get("monday").messages[: len(said)] == said
    [(reused, computed, prompt)] = usage_of(output)
    assert reused > computed
    assert reused + computed == prompt


def test_loading_twice_gives_the_second_another_name(talk, runtime):
    output = talk(["Hello", "/save monday", "/load monday", "/load monday"])
    assert {report.name for report in runtime.sessions()} == {"main", "monday", "monday-2"}
    assert "assistant:" in output


def test_a_session_can_be_saved_to_a_file(talk, tmp_path):
    path = tmp_path / "handover.kvos"
    output = talk(["Hello", f"/save {path}", f"/load {path}"])
    assert path.is_file()
    assert "handover: 3 messages" in output


@pytest.mark.parametrize("name", ["../elsewhere", "here.kvos", "./here"])
def test_what_was_saved_as_a_file_is_loaded_as_one(talk, runtime, tmp_path, monkeypatch, name):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    talk(["Hello", f"/save {name}"])
    said = runtime.get("main").messages
    assert runtime.saved_sessions() == ()
    talk(["/quit"], load=name)
    assert runtime.get(Path(name).stem).messages == said


def test_loading_what_is_not_there_fails_at_once(talk):
    with pytest.raises(SessionNotFoundError):
        talk([], load="nothing")


def test_an_error_does_not_end_the_chat(talk):
    output = talk(["/switch nowhere", "/blocks x", "/fork main", "/frok", "/save", "Hello"])
    assert "no open session is named 'nowhere'" in output
    assert "'x' is not the number of a block" in output
    assert "a session named 'main' is open already" in output
    assert "did you mean /fork?" in output
    assert "/save needs an argument: /save NAME" in output
    assert len(usage_of(output)) == 1


def test_a_message_that_does_not_fit_is_taken_back(talk, runtime):
    output = talk(["x" * 5000, "Hello"])
    assert "the context is 4096" in output
    assert [message["content"] for message in runtime.get("main").messages][1] == "Hello"


def test_a_message_may_have_several_lines_or_begin_with_a_slash(talk, runtime):
    talk(['"""first', "second", '"""', "//etc/hosts", '"""one"""'])
    asked = [message["content"] for message in runtime.get("main").messages if message["role"] == "user"]
    assert asked == ["first\nsecond", "/etc/hosts", "one"]


def test_empty_lines_are_nothing(talk):
    assert usage_of(talk(["", "   "])) == []


def test_close_gives_the_blocks_back(talk, runtime):
    output = talk(["Hello", "/fork a", "/close a", "/switch main", "/close a"])
    assert "you are in a" in output
    assert [report.name for report in runtime.sessions()] == ["main"]


def test_quit_ends_it(talk):
    output = talk(["/quit", "Hello"])
    assert usage_of(output) == []
    assert output.endswith("0 tokens reused, 0 computed.\n")


def test_help_lists_every_command(talk):
    output = talk(["/help"])
    for name in (
        "fork",
        "new",
        "switch",
        "close",
        "sessions",
        "save",
        "load",
        "hibernate",
        "resume",
        "undo",
        "blocks",
        "stats",
        "help",
        "quit",
    ):
        assert f"/{name}" in output


def test_stats_explain_each_counter(talk):
    output = talk(["Hello", "/stats"])
    assert re.search(r"tokens_generated +4 +tokens that were sampled", output)


class Keys:
    """Types lines; presses Ctrl-C where the list says so."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str | None:
        if not self.lines:
            return None
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


class InterruptedOutput(io.StringIO):
    """Ctrl-C arrives when so many characters of the reply are on the screen."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left: int | None = None
        self.after = after

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.left is not None:
            self.left -= written
            if self.left <= 0:
                self.left = None
                raise KeyboardInterrupt
        return written


def chat_on(runtime, out: io.StringIO, keys: Keys, max_tokens: int) -> None:
    console = Console(file=out, width=100, highlight=False, force_terminal=False)
    ChatLoop(runtime, console, keys, sampling=SamplingParams(max_tokens=max_tokens)).run()


def test_ctrl_c_at_the_prompt_does_not_leave(runtime):
    out = io.StringIO()
    chat_on(runtime, out, Keys(KeyboardInterrupt, "Hello"), max_tokens=3)
    assert "Ctrl-D or /quit leaves." in out.getvalue()
    assert len(usage_of(out.getvalue())) == 1


def test_ctrl_c_cancels_the_reply_and_keeps_what_there_is(runtime):
    out = InterruptedOutput(after=5)

    class Armed(Keys):
        def __call__(self, prompt: str) -> str | None:
            line = super().__call__(prompt)
            out.left = out.after if line == "Talk" else None
            return line

    chat_on(runtime, out, Armed("Talk", "Go on"), max_tokens=200)
    first, second = out.getvalue().split("cancelled; what there is stays", 1)
    assert usage_of(first)
    messages = runtime.get("main").messages
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert 0 < len(messages[1]["content"]) < 200
    assert usage_of(second)[0][0] > usage_of(first)[0][2]
    assert runtime.stats().counters["requests_cancelled"] == 1
    runtime.check_invariants()


@pytest.mark.parametrize(("words", "shown"), [(100, True), (1, False)])
def test_a_long_prompt_has_a_bar_on_a_terminal(runtime, words, shown):
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    ChatLoop(runtime, console, Keys("word " * words), sampling=SamplingParams(max_tokens=2)).run()
    assert ("computing" in out.getvalue()) is shown


def test_the_reply_is_safe_for_the_terminal(runtime):
    out = io.StringIO()
    chat_on(runtime, out, Keys("Say something"), max_tokens=300)  # random weights: random bytes
    assert not set(out.getvalue()) & {chr(code) for code in range(32) if chr(code) not in "\n\t"}
