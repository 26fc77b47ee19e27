from __future__ import annotations

import hashlib
import json
import os

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kvos.cli.saved import Kept, SessionPlace, summary_of
from kvos.errors import SessionFileDamagedError


@pytest.fixture
def saved(talk, runtime, home):
    """A conversation that was saved as ``my talk``."""
    talk(["Hello", "/save my talk"])
    return runtime.get("main")


def test_list_says_what_there_is(call, saved):
    report = saved.report()
    header, row = call("sessions", "list").stdout.splitlines()
    assert header.split() == ["NAME", "KIND", "MODEL", "DTYPE", "MESSAGES", "TOKENS", "COMPUTED", "SIZE", "KEPT"]
    assert row.startswith("my talk")
    kind, _, dtype, messages, tokens, computed = row.split()[2:8]
    assert kind == "saved"
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


def test_drop_forgets_it(call, saved):
    assert "my talk is gone" in call("sessions", "drop", "my talk").stdout
    assert call("sessions", "show", "my talk").exit_code == 2
    assert call("sessions", "drop", "my talk").exit_code == 2


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


@pytest.mark.parametrize("tenant", ["t" * 150, "⛴" * 100, "x"])
def test_a_tenant_of_any_name_finds_its_sessions(call, runtime, tenant):
    runtime.session("s", messages={"role": "user", "content": "Hello"}, tenant=tenant).save("kept")
    assert "kept" in call("sessions", "list", "--tenant", tenant).stdout
    assert "Hello" in call("sessions", "show", "kept", "--tenant", tenant).stdout


def test_a_saved_name_comes_before_a_file_of_that_name(call, runtime, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = runtime.session("s", messages={"role": "user", "content": "saved by name"})
    session.save("a.kvos")
    assert "saved by name" in call("sessions", "show", "a.kvos").stdout
    session.append({"role": "user", "content": "saved as a file"})
    session.save(tmp_path / "a.kvos")
    assert "saved as a file" not in call("sessions", "show", "a.kvos").stdout
    assert "saved as a file" in call("sessions", "show", "./a.kvos").stdout


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".kvos", "\udcff", "~nobody-of-this-name/x.kvos"])
def test_a_name_that_nothing_can_have_is_said_to_be_unknown(call, saved, name):
    result = call("sessions", "show", name)
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True)


def test_what_is_no_regular_file_is_not_listed(call, saved, home, runtime):
    [folder] = (home / "sessions").iterdir()
    (folder / "dangling.kvos").symlink_to(folder / "nowhere")
    (folder / "folder.kvos").mkdir()
    os.mkfifo(folder / "pipe.kvos")
    result = call("sessions", "list")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 2)
    assert runtime.saved_sessions() == ("my talk",)


def with_header(path, text):
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    save_file({}, path, {"kvos": text, "kvos_digest": digest})


@pytest.mark.parametrize("text", ["[]", "{}", "null", "1", '{"format": 1}', "", "[" * 100_000])
def test_a_description_that_is_none_is_damage(call, saved, home, text):
    [folder] = (home / "sessions").iterdir()
    with_header(folder / "broken.kvos", text)
    output = call("sessions", "list").stdout
    assert "damaged" in output
    assert "my talk" in output
    assert call("sessions", "show", "broken").exit_code == 2


@pytest.mark.parametrize("value", [None, [], {}, 1.5, "x"])
@pytest.mark.parametrize("key", ["format", "manifest", "num_tokens", "num_computed", "transcript"])
def test_a_description_with_a_field_of_another_type_is_damage(saved, home, key, value):
    [path] = (home / "sessions").glob("*/*.kvos")
    with safe_open(path, framework="np") as file:
        header = json.loads(file.metadata()["kvos"])
    if key in header:
        header[key] = value
    else:
        header["manifest"] = json.dumps(json.loads(header["manifest"]) | {key: value})
    with_header(path, json.dumps(header))
    with pytest.raises(SessionFileDamagedError, match="talk"):
        summary_of(SessionPlace(path, Kept.SAVED))


def test_a_changed_header_is_refused(saved, home):
    [path] = (home / "sessions").glob("*/*.kvos")
    data = path.read_bytes()
    wrong = data.replace(b"Be brief.", b"Be rude!!")
    assert wrong != data
    path.write_bytes(wrong)
    with pytest.raises(SessionFileDamagedError, match="is not what kvos wrote"):
        summary_of(SessionPlace(path, Kept.SAVED))


def test_the_summary_is_the_manifest(saved, home):
    [path] = (home / "sessions").glob("*/*.kvos")
    found = summary_of(SessionPlace(path, Kept.SAVED))
    assert found.name == "my talk"
    assert (found.tokens, found.size) == (saved.report().tokens, path.stat().st_size)
    assert [message.text for message in found.messages] == [message["content"] for message in saved.messages]
    assert json.dumps([message.role for message in found.messages]) == '["system", "user", "assistant"]'
