"""A session that was saved goes on as if it had never been away; what can't be used is computed again."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvos
from kvos.errors import (
    ContextLengthExceededError,
    OutOfBlocksError,
    SessionExistsError,
    SessionFileDamagedError,
    SessionFileMismatchError,
    SessionNotFoundError,
)
from kvos.runtime.session_file import read_session, write_session
from kvos.serving import WhyComputed
from kvos.sessions import SavedSession
from serving.harness import assert_same_logits, plain_greedy, some_ids

Open = Callable[..., kvos.Runtime]
TALK = [{"role": "system", "content": "You answer for Tidewater Ferries ⛴."}, {"role": "user", "content": "How long?"}]


def raw(runtime: kvos.Runtime, n: int = 30, name: str = "raw") -> kvos.Session:
    session = runtime.session(name)
    session.append_tokens(some_ids(n))
    session.prefill()
    return session


def assert_same(loaded: kvos.Session, original: kvos.Session) -> None:
    assert replace(loaded.transcript, revision=0) == replace(original.transcript, revision=0)
    assert loaded.tokens.tolist() == original.tokens.tolist()
    assert loaded.messages == original.messages


@pytest.mark.parametrize("sizes", [(8, 8), (16, 32), (32, 16), (8, 64)])
def test_a_conversation_goes_on_in_another_runtime_with_another_block_size(
    open_toy: Open, sizes: tuple[int, int]
) -> None:
    first = open_toy(block_size=sizes[0])
    session = first.session("support", messages=TALK)
    session.generate(max_tokens=20, ignore_eos=True).result()
    session.append({"role": "user", "content": "And then?"}, version="v2")
    computed = session.report().tokens - session.report().pending
    session.save("monday")
    second = open_toy(block_size=sizes[1])
    assert second.saved_sessions() == ("monday",)
    loaded = second.load("monday")
    assert loaded.name == "monday"
    assert_same(loaded, session)
    reply = loaded.generate(max_tokens=8, ignore_eos=True)
    prompt = [*session.tokens.tolist(), *first.tokenizer("<|im_start|>assistant\n")["input_ids"]]
    assert list(reply.result().tokens) == plain_greedy(prompt, 8)
    assert reply.usage.reused_tokens == computed
    second.check_invariants()


def test_nothing_is_computed_for_what_was_saved(open_toy: Open) -> None:
    raw(open_toy(), 30).save("x")
    runtime = open_toy()
    loaded = runtime.load("x")
    logits = loaded.score([7])
    assert_same_logits(logits, [*some_ids(30), 7])
    assert runtime.stats().counters["tokens_computed"] == 1


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 40])
@pytest.mark.parametrize("computed", [False, True])
def test_sessions_of_any_length_and_state_come_back(open_toy: Open, tokens: int, computed: bool) -> None:
    runtime = open_toy()
    session = runtime.session("s")
    if tokens:
        session.append_tokens(some_ids(tokens))
        if computed:
            session.prefill()
    session.save("s")
    loaded = open_toy().load("s")
    assert_same(loaded, session)
    assert loaded.report().pending == session.report().pending
    assert_same_logits(loaded.score([7]), [*some_ids(tokens), 7])


def test_what_the_pool_has_already_is_shared_and_not_written_again(open_toy: Open) -> None:
    runtime = open_toy()
    session = raw(runtime, 40)
    session.save("x")
    allocated = runtime.stats().counters["blocks_allocated"]
    first, second = runtime.load("x", name="a"), runtime.load("x", name="b")
    assert runtime.stats().counters["blocks_allocated"] == allocated
    assert first.report().blocks == second.report().blocks == session.report().blocks
    assert_same_logits(second.score([7]), [*some_ids(40), 7])


def test_loaded_blocks_are_shared_with_those_who_come_later(open_toy: Open) -> None:
    raw(open_toy(), 40).save("x")
    runtime = open_toy()
    loaded = runtime.load("x")
    late = runtime.session()
    late.append_tokens([*some_ids(40)[:35], 9, 9, 9])
    assert late.prefill().shared_tokens == 32
    assert late.report().blocks[:4] == loaded.report().blocks[:4]
    assert_same_logits(late.score([7]), [*some_ids(40)[:35], 9, 9, 9, 7])


def test_a_file_of_one_tenant_is_refused_to_another(open_toy: Open, tmp_path: Path) -> None:
    runtime = open_toy()
    raw(runtime, 40).save(tmp_path / "x.kvos")
    before = runtime.stats()
    with pytest.raises(SessionFileMismatchError, match=r"tenant 'default'.*tenant 'other'"):
        runtime.load(tmp_path / "x.kvos", tenant="other")
    assert runtime.stats() == before
    assert [session.name for session in runtime.sessions()] == ["raw"]


def test_each_tenant_has_its_own_names(open_toy: Open) -> None:
    runtime = open_toy()
    for tenant, n in (("a", 5), ("b", 6)):
        session = runtime.session(tenant=tenant)
        session.append_tokens(some_ids(n))
        session.save("same")
    assert runtime.load("same", name="x", tenant="a").report().tokens == 5
    assert runtime.load("same", name="y", tenant="b").report().tokens == 6
    with pytest.raises(SessionNotFoundError, match="none"):
        runtime.load("same")
    runtime.delete_saved("same", "a")
    assert (runtime.saved_sessions("a"), runtime.saved_sessions("b")) == ((), ("same",))


def test_saving_again_takes_the_place_of_what_was_there(open_toy: Open) -> None:
    runtime = open_toy()
    session = raw(runtime, 10)
    session.save("x")
    session.append_tokens([9])
    session.save("x")
    assert runtime.load("x").tokens.tolist() == [*some_ids(10), 9]
    runtime.delete_saved("x")
    assert runtime.saved_sessions() == ()
    with pytest.raises(SessionNotFoundError):
        runtime.load("x", name="y")


def test_files_are_for_their_owner_alone_and_nothing_else_is_left(open_toy: Open, tmp_path: Path) -> None:
    runtime = open_toy()
    session = raw(runtime, 10)
    for _ in range(3):
        session.save("x")
    (folder,) = (tmp_path / "home" / "sessions").iterdir()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.name == "x.kvos"


def test_a_path_is_a_file_anywhere_and_its_stem_the_name(open_toy: Open, tmp_path: Path) -> None:
    runtime = open_toy()
    session = raw(runtime, 10)
    target = tmp_path / "deep" / "folder" / "tuesday.kvos"
    session.save(target)
    assert runtime.saved_sessions() == ()
    assert runtime.load(target).name == "tuesday"
    assert runtime.load(target, name="other").name == "other"


def test_what_cannot_be_opened_opens_nothing(open_toy: Open) -> None:
    runtime = open_toy()
    raw(runtime, 60, "taken").save("x")
    for refusing, error, name in (
        (open_toy(seed=1), SessionFileMismatchError, "y"),
        (open_toy(max_context_tokens=50), ContextLengthExceededError, "y"),
        (runtime, SessionExistsError, "taken"),
    ):
        before = (refusing.sessions(), refusing.stats())
        with pytest.raises(error):
            refusing.load("x", name=name)
        assert (refusing.sessions(), refusing.stats()) == before
    small = open_toy(cache_bytes=10 * 8 * 1536)
    holder = small.session("holder")
    holder.score(some_ids(40, 1))
    small.inspect(lambda core: core.sessions.get("holder").begin())  # in use, so it can't be asked to leave
    before_reports = small.sessions()
    with pytest.raises(OutOfBlocksError, match="holder"):
        small.load("x")
    assert small.sessions() == before_reports
    assert small.stats().blocks.reserved == 0
    small.check_invariants()
    small.inspect(lambda core: core.sessions.get("holder").end())
    assert small.load("x").report().tokens == 60
    assert holder.report().swapped_out


def test_another_models_session_is_refused_and_both_are_named(open_toy: Open) -> None:
    raw(open_toy(), 10).save("x")
    other = open_toy(seed=1)
    with pytest.raises(SessionFileMismatchError, match=r"LlamaForCausalLM.*LlamaForCausalLM"):
        other.load("x")


def test_keys_and_values_of_another_dtype_are_computed_again(open_toy: Open, caplog: pytest.LogCaptureFixture) -> None:
    """In float64 the toy model has the float32 weights, widened: the same model, but other numbers in its cache."""
    raw(open_toy(dtype=torch.float32, kernels="generic"), 30).save("x")
    loaded = open_toy().load("x")
    assert loaded.report().pending == 30
    assert "saved in float32, this runtime computes in float64" in caplog.text
    usage = loaded.prefill()
    assert (usage.computed_tokens, usage.why_computed) == (30, WhyComputed.SAVED_KV_UNUSABLE)
    assert_same_logits(loaded.score([7]), [*some_ids(30), 7])


def changed(tmp_path: Path, runtime: kvos.Runtime, change: Callable[[SavedSession], SavedSession]) -> Path:
    """A saved session of 30 tokens that was tampered with before its digests were made."""
    raw(runtime, 30, "victim").save(tmp_path / "good.kvos")
    runtime.get("victim").close()
    write_session(tmp_path / "bad.kvos", change(read_session(tmp_path / "good.kvos")))
    return tmp_path / "bad.kvos"


@pytest.mark.parametrize("change", [
    lambda saved: replace(saved, values=[value[:, :, :8].contiguous() for value in saved.values]),
    lambda saved: replace(saved, keys=[key[:10].contiguous() for key in saved.keys]),
    lambda saved: replace(saved, keys=saved.keys[:2], values=saved.values[:2]),
    lambda saved: replace(saved, keys=[key.float() for key in saved.keys]),
    lambda saved: replace(saved, values=[value.float() for value in saved.values]),
])  # fmt: skip
def test_keys_and_values_of_a_wrong_shape_are_computed_again(
    open_toy: Open, tmp_path: Path, change: Callable[[SavedSession], SavedSession]
) -> None:
    path = changed(tmp_path, open_toy(), change)
    loaded = open_toy().load(path)
    assert loaded.report().pending == 30
    assert_same_logits(loaded.score([7]), [*some_ids(30), 7])


@pytest.mark.parametrize("change", [
    lambda saved: replace(saved, tokens=saved.tokens[:20]),
    lambda saved: replace(saved, tokens=saved.tokens + 300),
    lambda saved: replace(saved, tokens=-saved.tokens),
    lambda saved: replace(saved, manifest=replace(saved.manifest, num_computed=31)),
    lambda saved: replace(saved, manifest=replace(saved.manifest, num_tokens=31)),
])  # fmt: skip
def test_a_description_that_does_not_fit_its_tokens_is_refused(
    open_toy: Open, tmp_path: Path, change: Callable[[SavedSession], SavedSession]
) -> None:
    path = changed(tmp_path, open_toy(), change)
    runtime = open_toy()
    with pytest.raises(SessionFileDamagedError):
        runtime.load(path)
    assert runtime.sessions() == ()


def test_versions_kinds_and_tool_messages_come_back(open_toy: Open) -> None:
    def open_with_tools() -> kvos.Runtime:
        runtime = open_toy()
        runtime.tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] + ':' + (m['content'] or m['tool_calls'] | tojson) + '<|im_end|>' }}"
            "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        )
        return runtime

    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "é"}}]}
    first = open_with_tools()
    session = first.session("tools")
    session.append({"role": "system", "content": "s"}, kind="tools", version="1.0")
    session.append([{"role": "user", "content": "u"}, call, {"role": "tool", "content": "t", "tool_call_id": "7"}])
    session.prefill()
    session.save("tools")
    second = open_with_tools()
    loaded = second.load("tools")
    assert_same(loaded, session)
    assert loaded.messages[2] == call
    assert loaded.version_blocks().keys() == {"1.0"}
    assert loaded.tool_blocks().keys() == {0, 2, 3}
    loaded.append({"role": "user", "content": "more"})
    assert loaded.transcript.spans[:4] == session.transcript.spans


def test_a_fork_that_was_saved_does_not_need_its_parent(open_toy: Open) -> None:
    runtime = open_toy()
    parent = raw(runtime, 30)
    (child,) = parent.fork(1, names=["child"])
    child.append_tokens([4, 5, 6])
    child.prefill()
    child.save("child")
    parent.close()
    child.close()
    loaded = open_toy().load("child")
    assert_same_logits(loaded.score([7]), [*some_ids(30), 4, 5, 6, 7])


def test_raw_tokens_behind_a_raw_reply_are_saved_and_loaded(open_toy: Open) -> None:
    runtime = open_toy()
    session = raw(runtime)
    session.generate(max_tokens=6, ignore_eos=True).result()
    session.append_tokens(some_ids(5))
    session.save("raw")
    loaded = runtime.load("raw", name="again")
    assert_same(loaded, session)
    runtime.check_invariants()
