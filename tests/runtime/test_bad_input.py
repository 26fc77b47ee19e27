"""Whatever is wrong with a call is said by name, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvos
from kvos.errors import (
    ContextLengthExceededError,
    EngineContractError,
    InvalidConfigError,
    InvalidInputError,
    InvalidMessageError,
    InvalidTokenError,
    KvosError,
    SessionBusyError,
    SessionClosedError,
    SessionExistsError,
    SessionNotFoundError,
    UnsupportedModelError,
)
from kvos.testing import toy_model, toy_tokenizer
from serving.harness import some_ids

VOCAB = 259
NAMES = ["", " ", "\n", "a\nb", "a\tb", "a\x00b", "x" * 201, "\ud800", 5, b"x", True, ["a"], 1.5]
FILE_NAMES = [
    "", " ", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\nb", "a\x00b", ".hidden", "-x", "é", "x" * 121, "~x",
    "a" + " " * 118 + "b",
    None, 5, b"x", ["a"], True,
]  # fmt: skip


def picture(runtime: kvos.Runtime) -> list[Any]:
    """Everything that a refused call must leave as it is."""
    sessions = [
        (report, replace(handle.transcript, revision=0), handle.tokens.tolist())
        for report in runtime.sessions()
        for handle in [runtime.get(report.name)]
    ]
    return [sessions, runtime.stats(), runtime.saved_sessions()]


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


CALL = said(None, role="assistant", tool_calls=[1])

Call = Callable[[kvos.Runtime, kvos.Session, kvos.Session], object]
"""A call on the runtime, a session of messages, and one of raw tokens."""

CALLS: list[tuple[str, type[KvosError], Call]] = [
    # messages
    ("no messages", InvalidMessageError, lambda rt, chat, raw: chat.append([])),
    ("an unknown role", InvalidMessageError, lambda rt, chat, raw: chat.append({"role": "robot", "content": "x"})),
    ("null content", InvalidMessageError, lambda rt, chat, raw: chat.append(said(None))),
    ("no content", InvalidMessageError, lambda rt, chat, raw: chat.append({"role": "user"})),
    ("empty content", InvalidMessageError, lambda rt, chat, raw: chat.append(said(""))),
    ("content in parts", InvalidMessageError, lambda rt, chat, raw: chat.append(said([{"text": "x"}]))),
    ("a lone surrogate", InvalidMessageError, lambda rt, chat, raw: chat.append(said("a\ud800"))),
    ("a surrogate in a field", InvalidMessageError, lambda rt, chat, raw: chat.append(said("a", name="\ud800"))),
    ("a string", InvalidMessageError, lambda rt, chat, raw: chat.append("hello")),  # type: ignore[arg-type]
    ("a wrong one among good ones", InvalidMessageError, lambda rt, chat, raw: chat.append([said("x"), {}])),
    ("null content that the template joins", InvalidMessageError, lambda rt, chat, raw: chat.append(CALL)),
    ("an unknown kind", InvalidInputError, lambda rt, chat, raw: chat.append(said("x"), kind="poem")),
    ("a kind that is a list", InvalidInputError, lambda rt, chat, raw: chat.append(said("x"), kind=[])),  # type: ignore[arg-type]
    ("a version that is no text", InvalidInputError, lambda rt, chat, raw: chat.append(said("x"), version=5)),  # type: ignore[arg-type]
    ("a version with a surrogate", InvalidInputError, lambda rt, chat, raw: chat.append(said("x"), version="\ud800")),
    ("too long a message", ContextLengthExceededError, lambda rt, chat, raw: chat.append(said("x" * 400))),
    ("messages into raw tokens", InvalidInputError, lambda rt, chat, raw: raw.append(said("x"))),
    # token ids
    ("no tokens", InvalidInputError, lambda rt, chat, raw: raw.append_tokens([])),
    ("a negative id", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([5, -1])),
    ("an id outside the vocabulary", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([5, VOCAB])),
    ("an id of 33 bits", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([2**32 + 5])),
    ("an id of 70 bits", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([2**70])),
    ("floats", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([1.0, 2.0])),
    ("bools", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([True, False])),
    ("text as ids", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens("hello")),
    ("None as ids", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens(None)),
    ("None among ids", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([1, None])),
    ("a table of ids", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([[1, 2], [3, 4]])),
    ("ragged ids", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens([[1], [2, 3]])),
    ("one id that is no list", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens(5)),
    ("float tensors", InvalidTokenError, lambda rt, chat, raw: raw.append_tokens(torch.zeros(3))),
    ("too many ids", ContextLengthExceededError, lambda rt, chat, raw: raw.append_tokens(some_ids(400))),
    ("raw tokens into a chat", InvalidInputError, lambda rt, chat, raw: chat.append_tokens([5])),
    ("an unknown kind of raw tokens", InvalidInputError, lambda rt, chat, raw: raw.append_tokens([5], kind="poem")),
    ("a score of nothing", InvalidInputError, lambda rt, chat, raw: raw.score([])),
    ("a score of a negative id", InvalidTokenError, lambda rt, chat, raw: raw.score([-1])),
    ("a score of too much", ContextLengthExceededError, lambda rt, chat, raw: raw.score(some_ids(400))),
    ("a score in a chat", InvalidInputError, lambda rt, chat, raw: chat.score([5])),
    # replies
    ("no tokens wanted", InvalidInputError, lambda rt, chat, raw: chat.generate(max_tokens=0)),
    ("a negative number of tokens", InvalidInputError, lambda rt, chat, raw: chat.generate(max_tokens=-3)),
    ("true tokens", InvalidInputError, lambda rt, chat, raw: chat.generate(max_tokens=True)),
    ("a seed that is no whole number", InvalidInputError, lambda rt, chat, raw: chat.generate(seed=1.5)),
    ("a setting that does not exist", InvalidInputError, lambda rt, chat, raw: chat.generate(temprature=1)),
    ("settings twice", InvalidInputError, lambda rt, chat, raw: chat.generate(kvos.SamplingParams(), top_k=5)),
    ("settings that are a dict", InvalidInputError, lambda rt, chat, raw: chat.generate({"top_k": 5})),  # type: ignore[arg-type]
    ("a reply in an empty session", InvalidInputError, lambda rt, chat, raw: rt.get("empty").generate()),
    ("a prefill of an empty session", InvalidInputError, lambda rt, chat, raw: rt.get("empty").prefill()),
    # forks and truncation
    ("no children", InvalidInputError, lambda rt, chat, raw: chat.fork(0)),
    ("a negative number of children", InvalidInputError, lambda rt, chat, raw: chat.fork(-1)),
    ("half a child", InvalidInputError, lambda rt, chat, raw: chat.fork(1.5)),  # type: ignore[arg-type]
    ("true children", InvalidInputError, lambda rt, chat, raw: chat.fork(True)),
    ("too few names", InvalidInputError, lambda rt, chat, raw: chat.fork(2, names=["a"])),
    ("a string of names", InvalidInputError, lambda rt, chat, raw: chat.fork(2, names="ab")),
    ("a child whose name is taken", SessionExistsError, lambda rt, chat, raw: raw.fork(2, names=["fine", "chat"])),
    ("two children of one name", SessionExistsError, lambda rt, chat, raw: raw.fork(2, names=["twin", "twin"])),
    ("a child whose name has a newline", InvalidInputError, lambda rt, chat, raw: raw.fork(1, names=["a\nb"])),
    ("names that are a number", InvalidInputError, lambda rt, chat, raw: raw.fork(1, names=5)),  # type: ignore[arg-type]
    ("a truncation to nothing said", InvalidInputError, lambda rt, chat, raw: chat.truncate()),
    ("a truncation to both", InvalidInputError, lambda rt, chat, raw: chat.truncate(messages=1, tokens=1)),
    ("a negative number of messages", InvalidInputError, lambda rt, chat, raw: chat.truncate(messages=-1)),
    ("more messages than there are", InvalidInputError, lambda rt, chat, raw: chat.truncate(messages=3)),
    ("half a message", InvalidInputError, lambda rt, chat, raw: chat.truncate(messages=0.5)),  # type: ignore[arg-type]
    ("a true message", InvalidInputError, lambda rt, chat, raw: chat.truncate(messages=True)),
    ("more tokens than there are", InvalidInputError, lambda rt, chat, raw: raw.truncate(tokens=1000)),
    ("a negative number of kept tokens", InvalidInputError, lambda rt, chat, raw: raw.truncate(tokens=-1)),
    ("a cut inside a message", InvalidInputError, lambda rt, chat, raw: chat.truncate(tokens=3)),
    # names
    ("a name that is taken", SessionExistsError, lambda rt, chat, raw: rt.session("chat")),
    ("a session with bad messages", InvalidMessageError, lambda rt, chat, raw: rt.session("new", messages=[])),
    ("an unknown session", SessionNotFoundError, lambda rt, chat, raw: rt.get("nobody")),
    ("a session named by a list", InvalidInputError, lambda rt, chat, raw: rt.get([])),  # type: ignore[arg-type]
    ("a saved session that is not there", SessionNotFoundError, lambda rt, chat, raw: rt.load("nothing")),
    ("a file that is not there", SessionNotFoundError, lambda rt, chat, raw: rt.load(Path("/nowhere/x.kvos"))),
    ("a folder as a file", SessionNotFoundError, lambda rt, chat, raw: rt.load(Path("/"))),
    ("a file of a name that is too long", InvalidInputError, lambda rt, chat, raw: rt.load(Path("a" * 5000))),
    ("a file with a zero byte", InvalidInputError, lambda rt, chat, raw: rt.load(Path("a\0b"))),
    ("a file with a surrogate", InvalidInputError, lambda rt, chat, raw: rt.load(Path("a\ud800"))),
    ("a save to too long a name", InvalidInputError, lambda rt, chat, raw: raw.save(Path("a" * 5000))),
    ("a save to a zero byte", InvalidInputError, lambda rt, chat, raw: raw.save(Path("a\0b"))),
    ("a save to a surrogate", InvalidInputError, lambda rt, chat, raw: raw.save(Path("a\ud800"))),
    ("the end of one that is not there", SessionNotFoundError, lambda rt, chat, raw: rt.delete_saved("nothing")),
]  # fmt: skip


@pytest.fixture
def prepared(open_toy: Callable[..., kvos.Runtime]) -> tuple[kvos.Runtime, kvos.Session, kvos.Session]:
    runtime = open_toy(max_context_tokens=300)
    chat = runtime.session("chat", messages=[{"role": "system", "content": "s"}, said("u")])
    raw = runtime.session("raw")
    raw.append_tokens(some_ids(20))
    raw.prefill()
    runtime.session("empty")
    return runtime, chat, raw


@pytest.mark.parametrize(("name", "error", "call"), CALLS, ids=[name.replace(" ", "-") for name, _, _ in CALLS])
def test_a_wrong_call_raises_its_error_and_changes_nothing(
    prepared: tuple[kvos.Runtime, kvos.Session, kvos.Session], name: str, error: type[KvosError], call: Call
) -> None:
    before = picture(prepared[0])
    with pytest.raises(error) as caught:
        call(*prepared)
    assert str(caught.value)
    assert picture(prepared[0]) == before
    prepared[0].check_invariants()


def test_bad_names_of_sessions_and_tenants_are_refused(runtime: kvos.Runtime) -> None:
    before = picture(runtime)
    for name in NAMES:
        for call in (
            lambda name=name: runtime.session(name),
            lambda name=name: runtime.session("fine", tenant=name),
            lambda name=name: runtime.load("x", tenant=name),
            lambda name=name: runtime.saved_sessions(name),
            lambda name=name: runtime.delete_saved("x", name),
            lambda name=name: runtime.resume(name),
            lambda name=name: runtime.resume("x", tenant=name),
            lambda name=name: runtime.forget_hibernated("x", name),
            lambda name=name: runtime.hibernated_sessions(name),
        ):
            with pytest.raises(InvalidInputError, match="name"):
                call()
    with pytest.raises(InvalidInputError):
        runtime.session("fine", tenant=None)  # type: ignore[arg-type]
    assert picture(runtime) == before


def test_bad_names_of_saved_sessions_are_refused_and_nothing_is_written(runtime: kvos.Runtime, tmp_path: Path) -> None:
    session = runtime.session("s")
    session.append_tokens([5, 6])
    before = sorted(tmp_path.rglob("*"))
    for name in FILE_NAMES:
        for call in (
            lambda name=name: session.save(name),
            lambda name=name: runtime.load(name),
            lambda name=name: runtime.delete_saved(name),
            lambda name=name: runtime.resume(name),
            lambda name=name: runtime.forget_hibernated(name),
        ):
            with pytest.raises(InvalidInputError, match="name"):
                call()
    assert [path for path in sorted(tmp_path.rglob("*")) if "run" not in path.parts] == [
        path for path in before if "run" not in path.parts
    ]


def test_odd_names_that_are_allowed_work(runtime: kvos.Runtime) -> None:
    session = runtime.session("../x ⛴ " + "y" * 190, tenant="../" + "t" * 190)
    session.append_tokens([5, 6, 7])
    for name in ("a b.c_d-e", "a" * 120, "a" + " " * 60 + "b", "A", "x..", "1"):
        session.save(name)
        assert name in runtime.saved_sessions(session.tenant)
        assert runtime.load(name, name=f"again {name}", tenant=session.tenant).tokens.tolist() == [5, 6, 7]
    assert runtime.saved_sessions() == ()


def test_a_closed_session_says_so_to_every_verb(runtime: kvos.Runtime) -> None:
    session = runtime.session("gone", messages=said("x"))
    session.close()
    session.close()
    before = picture(runtime)
    for call in (
        lambda: session.append(said("x")),
        lambda: session.append_tokens([5]),
        lambda: session.score([5]),
        lambda: session.generate(),
        lambda: session.prefill(),
        lambda: session.fork(),
        lambda: session.truncate(messages=0),
        lambda: session.save("x"),
    ):
        with pytest.raises(SessionClosedError, match="gone"):
            call()
    assert picture(runtime) == before
    assert runtime.session("gone").report().tokens == 0


def test_a_busy_session_says_so_to_every_verb(runtime: kvos.Runtime) -> None:
    session = runtime.session("busy", messages=said("x"))
    with session.generate(ignore_eos=True):
        for call in (
            lambda: session.append(said("x")),
            lambda: session.append_tokens([5]),
            lambda: session.score([5]),
            lambda: session.generate(),
            lambda: session.prefill(),
            lambda: session.fork(),
            lambda: session.truncate(messages=0),
            lambda: session.save("x"),
        ):
            with pytest.raises(SessionBusyError, match="busy"):
                call()
    assert runtime.saved_sessions() == ()
    runtime.check_invariants()


def test_ids_of_many_types_are_token_ids(runtime: kvos.Runtime) -> None:
    session = runtime.session()
    for ids in ([5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8), torch.tensor([5, 6]), range(5, 7)):
        session.append_tokens(ids)
    assert session.tokens.tolist() == [5, 6] * 6


def test_a_copy_of_the_tokens_is_the_callers(runtime: kvos.Runtime) -> None:
    session = runtime.session()
    session.append_tokens([5, 6])
    session.tokens[:] = 9
    assert session.tokens.tolist() == [5, 6]


# -- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {"block_size": 7}, {"block_size": 0}, {"cache_bytes": 1}, {"cache_bytes": -1}, {"max_context_tokens": 0},
    {"max_running": 0}, {"dtype": "fp128"}, {"dtype": "fp32"}, {"blocksize": 8},
    {"cache_bytes": 4096, "block_size": 128},
])  # fmt: skip
def test_a_runtime_that_cannot_be_opened_leaves_the_model_as_it_was(settings: dict[str, Any], tmp_path: Path) -> None:
    model = toy_model(dtype=torch.float64)
    before = model.config._attn_implementation
    with pytest.raises(InvalidConfigError):
        kvos.open(model, tokenizer=toy_tokenizer(), home=tmp_path, **settings)
    assert model.config._attn_implementation == before


def test_a_tokenizer_that_cannot_be_used_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = toy_model(dtype=torch.float64)
    before = model.config._attn_implementation
    slow = type("Slow", (), {"is_fast": False, "eos_token_id": 2, "chat_template": None})()
    with pytest.raises(UnsupportedModelError, match="fast"):
        kvos.open(model, tokenizer=slow, home=tmp_path, cache_bytes=1 << 20)
    assert model.config._attn_implementation == before


def test_tokens_that_only_the_tokenizer_knows_are_refused_before_they_reach_anybody(tmp_path: Path) -> None:
    model = toy_model(vocab_size=200)
    with kvos.open(model, tokenizer=toy_tokenizer(), home=tmp_path, block_size=8) as runtime:
        raw, session = runtime.session("raw"), runtime.session("chat")
        raw.append_tokens([5, 6, 7])
        with pytest.raises(InvalidTokenError, match="vocabulary of 200"):
            session.append({"role": "user", "content": "hello"})
        assert session.report().tokens == 0
        assert raw.generate(max_tokens=3, ignore_eos=True).usage.generated_tokens == 3


def test_a_call_from_the_engine_thread_is_refused_instead_of_waiting_for_itself(runtime: kvos.Runtime) -> None:
    session = runtime.session()
    for call in (runtime.stats, session.report, lambda: session.append_tokens([5])):
        with pytest.raises(EngineContractError, match="its own engine thread"):
            runtime.inspect(lambda core, call=call: call())  # type: ignore[misc]
    assert runtime.stats().sessions == 1


def test_settings_are_given_once() -> None:
    with pytest.raises(InvalidConfigError, match="not both"):
        kvos.open(toy_model(), tokenizer=toy_tokenizer(), config=kvos.KvosConfig(), block_size=8)
