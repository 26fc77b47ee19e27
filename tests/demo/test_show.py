from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvos.demo.live import live_replies
from kvos.demo.record import ReplyRecord, Scene, SessionBlocks
from kvos.demo.script import Question, default_script
from kvos.demo.show import Show
from kvos.demo.text import printable, seconds, size, times

RECORD = ReplyRecord(
    label="turn 1",
    session="a",
    scene=Scene.TURN,
    question="Why?",
    text="Because.",
    tokens=(1, 2),
    prompt_tokens=20,
    reused_tokens=16,
    shared_tokens=0,
    computed_tokens=4,
    generated_tokens=2,
    why_computed="new",
    ttft_s=0.082,
    tpot_s=0.031,
)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=100, force_terminal=terminal, color_system=None), output


@pytest.mark.parametrize("terminal", [True, False])
def test_replies_side_by_side_are_all_shown_with_what_they_cost(terminal: bool) -> None:
    where, output = console(terminal=terminal)
    with live_replies(where, [Question("a", "Why?"), Question("b", "How?")]) as view:
        view.prefill(0, 4, 4)
        view.text(0, "Be")
        view.text(1, "Like this.")
        view.text(0, "cause.")
        view.finish(0, RECORD)
        view.finish(1, RECORD)
    text = output.getvalue()
    for part in ("Why?", "How?", "Because.", "Like this.", "16 tokens reused", "TTFT 82 ms"):
        assert part in text


def test_a_long_reply_comes_in_lines_that_lose_nothing() -> None:
    where, output = console(terminal=False)
    words = " ".join(f"word{number}" for number in range(60))
    with live_replies(where, [Question("a", "Why?")]) as view:
        for i in range(0, len(words), 7):
            view.text(0, words[i : i + 7])
        view.finish(0, RECORD)
    said = [line.partition("| ")[2] for line in output.getvalue().splitlines()][1:-1]
    assert len(said) > 1
    assert " ".join(said) == words


def test_a_word_without_spaces_is_cut_and_loses_nothing() -> None:
    where, output = console(terminal=False)
    word = "".join(str(number % 10) for number in range(500))
    with live_replies(where, [Question("a", "Why?")]) as view:
        view.text(0, word)
        view.finish(0, RECORD)
    said = [line.partition("| ")[2] for line in output.getvalue().splitlines()][1:-1]
    assert "".join(said) == word


def test_a_models_words_do_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07c\nd") == "a\ufffd[2Jb\ufffd\ufffdc\nd"


def test_the_picture_has_one_cell_per_block() -> None:
    where, output = console(terminal=False)
    Show(where).blocks([SessionBlocks("a", (True, True, False, False), 3)], block_size=16)
    assert "▓▓█▒" in output.getvalue()
    assert "4 blocks: 2 shared, 2 private, the last one holds 3 of 16 tokens" in output.getvalue()


def test_the_picture_does_without_unicode() -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    Show(Console(file=output, width=100)).blocks([SessionBlocks("a", (True, False, False), 3)], block_size=16)
    output.flush()
    assert b"=#-" in raw.getvalue()


@pytest.mark.parametrize(
    ("value", "text"), [(0.0042, "4.2 ms"), (0.031, "31 ms"), (0.9994, "999 ms"), (3.414, "3.41 s"), (143.4, "143 s")]
)
def test_seconds_are_readable(value: float, text: str) -> None:
    assert seconds(value) == text


def test_sizes_and_factors_are_readable() -> None:
    assert size(78_123_456) == "78.1 MB"
    assert size(46_080) == "46.1 kB"
    assert times(3.4, 0.08) == "42x"
    assert times(3.0, 2.0) == "1.5x"
    assert times(1.0, 0.0) == ""


def test_the_story_has_a_long_prompt_and_names_that_differ() -> None:
    script = default_script()
    assert 900 < len(script.system.split()) < 1400
    assert len(script.turns) in (3, 4)
    assert len(script.sub_agents) == 3
    names = [script.supervisor, script.second_customer.name, *(agent.name for agent in script.sub_agents)]
    assert len(set(names)) == len(names)
