from __future__ import annotations

import json

import pytest

from kvos.cli.saved import summary_of
from kvos.errors import SessionFileDamagedError


@pytest.fixture
def saved(talk, runtime, home):
    """A conversation that was saved as ``my talk``."""
    talk(["Hello", "/save my talk"])
    return runtime.get("main")


def test_list_says_what_there_is(call, saved):
    report = saved.report()
    header, row = call("sessions", "list").stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "DTYPE", "MESSAGES", "TOKENS", "COMPUTED", "SIZE", "SAVED"]
    assert row.startswith("my talk")
    dtype, messages, tokens, computed = row.split()[3:7]
    assert (dtype, messages) == ("fp32", str(report.messages))
    assert (tokens, computed) == (str(report.tokens), str(report.tokens - report.pending))


def test_list_of_nothing_says_how_to_save(call, home):
    assert "/save NAME" in call("sessions", "list").stdout


def test_show_says_who_said_what_in_how_many_tokens(call, saved):
    output = call("sessions", "show", "my talk").stdout
    for span, message in zip(saved.transcript.spans, saved.messages, strict=True):
        row = next(line for line in output.splitlines() if line.startswith(f"{message['role']} "))
        assert row.split()[1] == str(span.num_tokens)
    assert "Be brief." in output
    assert "3 messages" in output


def test_a_long_message_takes_no_room_from_the_columns_beside_it(call, talk):
    talk(["Tell me everything. " * 60, "/save long"])
    header, *rows = call("sessions", "show", "long").stdout.splitlines()[3:]
    assert header.split() == ["ROLE", "TOKENS", "TEXT"]
    assert [row.split()[0] for row in rows] == ["system", "user", "assistant"]
    assert rows[1].rstrip().endswith("…")


def test_show_takes_a_file_too(call, talk, tmp_path):
    talk(["Hello", f"/save {tmp_path / 'x.kvos'}"])
    assert "Hello" in call("sessions", "show", str(tmp_path / "x.kvos"), "--full").stdout


def test_remove_forgets_it(call, saved):
    assert "my talk is removed" in call("sessions", "remove", "my talk").stdout
    assert call("sessions", "show", "my talk").exit_code == 2
    assert call("sessions", "remove", "my talk").exit_code == 2


def test_another_tenants_sessions_are_not_there(call, saved):
    assert call("sessions", "show", "my talk", "--tenant", "other").exit_code == 2


def test_raw_tokens_have_no_text(call, runtime):
    session = runtime.session("raw")
    session.append_tokens([5, 6, 7])
    session.prefill()
    session.save("raw")
    assert "(raw tokens)" in call("sessions", "show", "raw").stdout


def test_a_damaged_file_is_named_and_does_not_hide_the_others(call, saved, home):
    folder = next((home / "sessions").iterdir())
    (folder / "broken.kvos").write_bytes(b"nothing of the kind")
    output = call("sessions", "list").stdout
    assert "damaged" in output
    assert "my talk" in output
    result = call("sessions", "show", "broken")
    assert (result.exit_code, "cannot be read as a session" in " ".join(result.stderr.split())) == (2, True)


def test_a_changed_header_is_refused(saved, home):
    [path] = (home / "sessions").glob("*/*.kvos")
    data = path.read_bytes()
    wrong = data.replace(b"Be brief.", b"Be rude!!")
    assert wrong != data
    path.write_bytes(wrong)
    with pytest.raises(SessionFileDamagedError, match="is not what kvos wrote"):
        summary_of(path)


def test_the_summary_is_the_manifest(saved, home):
    [path] = (home / "sessions").glob("*/*.kvos")
    found = summary_of(path)
    assert found.name == "my talk"
    assert (found.tokens, found.size) == (saved.report().tokens, path.stat().st_size)
    assert [message.text for message in found.messages] == [message["content"] for message in saved.messages]
    assert json.dumps([message.role for message in found.messages]) == '["system", "user", "assistant"]'
