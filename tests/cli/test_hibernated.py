"""Conversations that leave the device and come back in another process: ``kvos chat`` and ``kvos sessions``."""

from __future__ import annotations

import re

import pytest

from cli.talking import talk_on
from kvos.errors import SessionNotFoundError

STORY = "The agent reads a whole file, calls a tool, and waits for the answer. " * 4


@pytest.fixture
def away(open_kept, home):
    """The messages of a conversation that an ended process hibernated as ``trip``."""
    runtime = open_kept()
    talk_on(runtime, [STORY, "/hibernate"], name="trip")
    messages = runtime.get("trip").messages
    runtime.close()
    return messages


def test_hibernate_says_what_is_safe_and_how_to_come_back(open_kept):
    runtime = open_kept()
    output = talk_on(runtime, [STORY, "/hibernate", "And then?"], name="trip")
    # every full block of what was computed: all tokens but the reply's last
    tokens = runtime.get("trip").report().tokens
    [safe, wanted] = map(int, re.findall(r"(\d+) of its (\d+) full blocks are safe", output)[0])
    assert safe == wanted
    assert 8 * safe < tokens
    assert "kvos chat --resume trip" in output
    assert runtime.hibernated_sessions() == ("trip",)


def test_another_process_goes_on_without_computing_it_again(open_kept, away):
    runtime = open_kept()
    output = talk_on(runtime, ["And then?"], resume="trip")
    assert runtime.get("trip").messages[: len(away)] == away
    [(reused, restored)] = re.findall(r"reused (\d+), .*\((\d+) from below the device\)", output)
    assert int(reused) >= int(restored) > 8 * 8
    assert "trip> And then?" in output


def test_resume_inside_a_chat(open_kept, away):
    output = talk_on(open_kept(), ["/sessions", "/resume trip", "And then?"])
    assert "hibernated: trip" in output
    assert "trip: 3 messages" in output
    assert "from below the device" in output


def test_resuming_what_is_not_there_says_so(open_kept):
    runtime = open_kept()
    with pytest.raises(SessionNotFoundError, match="no session is hibernated as 'nobody'; hibernated are: none"):
        talk_on(runtime, [], resume="nobody")


def test_a_hibernated_conversation_is_not_replaced_by_another_of_its_name(open_kept, away):
    runtime = open_kept()
    output = talk_on(runtime, ["Something else", "/hibernate", "/hibernate other", "And?"], name="trip")
    assert "another session is hibernated as 'trip'" in output
    assert "other is hibernated" in output
    assert "other> And?" in output
    assert [report.name for report in runtime.sessions()] == ["other"]
    assert runtime.hibernated_sessions() == ("other", "trip")
    runtime.get("other").close()
    assert runtime.resume("trip").messages == away


def test_one_that_was_resumed_may_be_hibernated_again(open_kept, away):
    runtime = open_kept()
    output = talk_on(runtime, ["And then?", "/hibernate", "More", "/hibernate"], resume="trip")
    assert output.count("trip is hibernated") == 2
    assert len(open_kept().resume("trip").messages) == len(away) + 4


def test_a_name_that_no_file_can_have_leaves_the_chat_as_it_was(open_kept):
    runtime = open_kept()
    output = talk_on(runtime, [STORY, "/hibernate a/b", "Go on"])
    assert "cannot be the name of a saved session" in output
    assert "main> Go on" in output
    assert [report.name for report in runtime.sessions()] == ["main"]


def test_turns_of_a_fork_with_a_name_go_below_like_its_parents(open_kept):
    runtime = open_kept()
    talk_on(runtime, ["/fork idea", STORY])
    told = runtime.get("idea").messages
    again = open_kept()
    session = again.session("later", messages=told[:-1])
    usage = session.generate(max_tokens=2).result().usage
    assert usage.restored_tokens > len(STORY)


# -- kvos sessions ---------------------------------------------------------------------------------------------------


def test_list_shows_both_kinds(call, open_kept, away):
    talk_on(open_kept(), ["Hello", "/save monday"])
    rows = [line.split() for line in call("sessions", "list").stdout.splitlines()]
    assert {(row[0], row[1]) for row in rows[1:]} == {("trip", "hibernated"), ("monday", "saved")}
    only = call("sessions", "list", "--kind", "hibernated").stdout
    assert "monday" not in only
    trip = next(line for line in only.splitlines() if line.startswith("trip"))
    assert re.search(r"LlamaForCausalLM +fp32 +3 +\d+ +in cache", trip)


def test_show_says_who_said_what_in_a_hibernated_one(call, away):
    output = call("sessions", "show", "trip").stdout
    assert "hibernated" in output.splitlines()[0]
    assert "The agent reads" in output
    assert "3 messages" in output


def test_drop_forgets_a_hibernated_one(call, away, open_kept):
    assert "hibernated session trip is gone" in call("sessions", "drop", "trip").stdout
    assert open_kept().hibernated_sessions() == ()


def test_a_name_that_is_both_is_not_guessed(call, away, open_kept):
    talk_on(open_kept(), ["Hello", "/save trip"])
    for command in ("show", "drop"):
        result = call("sessions", command, "trip")
        assert (result.exit_code, "--kind hibernated" in " ".join(result.stderr.split())) == (2, True)
    assert call("sessions", "drop", "trip", "--kind", "hibernated").exit_code == 0
    assert "saved" in call("sessions", "show", "trip").stdout.splitlines()[0]


def test_a_hibernated_session_can_be_taken_elsewhere(call, away, open_kept, tmp_path):
    path = tmp_path / "trip.kvos"
    assert call("sessions", "save", "trip", str(path)).exit_code == 0
    refused = call("sessions", "save", "trip", str(path))
    assert (refused.exit_code, "exists already" in refused.stderr) == (2, True)
    loaded = call("sessions", "load", str(path), "--as", "from there")
    assert "from there is saved" in loaded.stdout
    runtime = open_kept()
    session = runtime.load("from there")
    assert session.messages == away
    session.append({"role": "user", "content": "And?"})
    assert session.generate(max_tokens=2).result().usage.restored_tokens > 0, "here its blocks are still known"


def test_a_saved_session_is_taken_along_with_keys_and_values(call, talk, runtime, tmp_path):
    talk(["Hello", "/save monday"])
    path = tmp_path / "x.kvos"
    assert call("sessions", "save", "monday", str(path)).exit_code == 0
    refused = call("sessions", "load", str(path), "--as", "monday")
    assert (refused.exit_code, "saved as 'monday' already" in " ".join(refused.stderr.split())) == (2, True)
    assert call("sessions", "load", str(path), "--tenant", "other").exit_code == 2
    assert call("sessions", "load", str(path)).exit_code == 0
    back = runtime.load("x")
    assert back.messages == runtime.get("main").messages
    assert back.report().pending == runtime.get("main").report().pending == 1


def test_keys_and_values_that_are_damaged_are_left_behind_with_a_word(call, talk, runtime, home, tmp_path):
    talk(["Hello", "/save monday"])
    (kept,) = (home / "sessions").glob("*/*.kvos")
    data = bytearray(kept.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # behind safetensors' header: k.0
    kept.write_bytes(data)
    result = call("sessions", "save", "monday", str(tmp_path / "x.kvos"))
    assert result.exit_code == 0
    assert "damaged: they are left out" in " ".join(result.stderr.split())
    call("sessions", "load", str(tmp_path / "x.kvos"))
    assert runtime.load("x").messages == runtime.get("main").messages


@pytest.mark.parametrize(
    "options",
    [["--load", "a", "--resume", "b"], ["--resume", "b", "--system", "x"], ["--resume", "b", "--name", "c"]],
)
def test_options_that_contradict_each_other_are_refused_before_the_model_is_opened(call, options):
    result = call("chat", "--model", "/nowhere", *options)
    assert result.exit_code == 2
    assert "/nowhere" not in result.output
