"""Reading a reply, leaving it early, and the end of a runtime while somebody reads."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvos
from kvos.errors import EngineStoppedError, SessionBusyError, SessionClosedError
from kvos.serving import FinishReason
from kvos.sessions import SessionState
from kvos.testing import toy_model, toy_tokenizer
from serving.harness import assert_same_logits, plain_greedy, some_ids

USER = {"role": "user", "content": "hello"}


def raw(runtime: kvos.Runtime, n: int = 12, name: str | None = None) -> kvos.Session:
    session = runtime.session(name)
    session.append_tokens(some_ids(n))
    return session


def check(session: kvos.Session) -> None:
    """The next logits are those of a plain run."""
    (twin,) = session.fork(1)
    ids = twin.tokens.tolist()
    assert_same_logits(twin.score([7]), [*ids, 7])
    twin.close()


def test_streamed_text_is_the_text_of_the_result(runtime: kvos.Runtime) -> None:
    session = runtime.session(messages=USER)
    reply = session.generate(max_tokens=30, ignore_eos=True)
    text = "".join(reply)
    result = reply.result()
    assert text == result.text == str(result) == session.messages[-1]["content"]
    assert result.usage == reply.usage
    assert len(result.tokens) == 30
    assert result.finish_reason is FinishReason.LENGTH
    assert list(reply) == []


def test_waiting_for_the_end_leaves_the_text_to_be_read(runtime: kvos.Runtime) -> None:
    reply = raw(runtime).generate(max_tokens=12, ignore_eos=True)
    first = next(iter(reply.deltas()))
    assert first.text
    reply = raw(runtime).generate(max_tokens=12, ignore_eos=True)
    assert reply.usage.generated_tokens == 12
    assert "".join(reply) == reply.result().text != ""
    assert list(reply) == []


def test_deltas_carry_the_tokens_of_the_text(runtime: kvos.Runtime) -> None:
    session = raw(runtime)
    reply = session.generate(max_tokens=20, ignore_eos=True)
    tokens = [token for delta in reply.deltas() for token in delta.tokens]
    assert tokens == list(reply.result().tokens)[: len(tokens)]
    assert len(tokens) > 10


def test_a_reply_goes_on_while_nobody_reads(runtime: kvos.Runtime) -> None:
    replies = [raw(runtime, 5 + n).generate(max_tokens=8, ignore_eos=True) for n in range(3)]
    for n, reply in reversed(list(enumerate(replies))):
        assert list(reply.result().tokens) == plain_greedy(some_ids(5 + n), 8)


@pytest.mark.parametrize("leave", ["break", "deltas", "with", "error", "cancel"])
def test_leaving_a_reply_early_cancels_it_and_frees_the_session(runtime: kvos.Runtime, leave: str) -> None:
    session = raw(runtime)
    reply = session.generate(ignore_eos=True)
    if leave == "break":
        for _ in reply:
            break
    elif leave == "deltas":
        for _ in reply.deltas():
            break
    elif leave == "with":
        with reply:
            next(iter(reply))
    elif leave == "error":
        with pytest.raises(ZeroDivisionError), reply:
            raise ZeroDivisionError
    else:
        reply.cancel()
        reply.cancel()
    result = reply.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert session.tokens.tolist() == some_ids(12) + list(result.tokens)
    assert list(result.tokens) == plain_greedy(some_ids(12), len(result.tokens))
    session.append_tokens([5])
    check(session)
    reply.cancel()
    runtime.check_invariants()


def test_right_behind_a_cancellation_the_session_takes_the_next_message(runtime: kvos.Runtime) -> None:
    session = runtime.session(messages=USER)
    for turn in range(10):
        session.generate(ignore_eos=True).cancel()
        session.append({"role": "user", "content": f"And {turn}?"})
    assert [message["content"] for message in session.messages if message["role"] == "user"][1:] == [
        f"And {turn}?" for turn in range(10)
    ]
    runtime.check_invariants()


def test_a_generator_that_is_dropped_half_read_cancels_its_reply(runtime: kvos.Runtime) -> None:
    session = raw(runtime)
    texts = iter(session.generate(ignore_eos=True))
    next(texts)
    del texts
    session.append_tokens([5])
    check(session)


def test_a_second_reply_on_a_busy_session_is_an_error_and_the_first_goes_on(runtime: kvos.Runtime) -> None:
    session = raw(runtime, name="busy")
    first = session.generate(max_tokens=40, ignore_eos=True)
    with pytest.raises(SessionBusyError, match="busy"):
        session.generate()
    assert list(first.result().tokens) == plain_greedy(some_ids(12), 40)
    assert len(session.generate(max_tokens=2, ignore_eos=True).result().tokens) == 2


def interrupt_soon(after_s: float = 0.15) -> None:
    threading.Timer(after_s, signal.raise_signal, [signal.SIGINT]).start()


def test_ctrl_c_while_waiting_cancels_the_reply(runtime: kvos.Runtime) -> None:
    session = raw(runtime)
    reply = session.generate(ignore_eos=True)
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        reply.result()
    assert reply.result().finish_reason is FinishReason.CANCELLED
    session.append_tokens([5])
    check(session)


def test_ctrl_c_during_a_prefill_keeps_what_was_computed(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy(prefill_chunk_tokens=4)
    session = raw(runtime, 2000)
    done: list[int] = []

    def interrupt(now: int, total: int) -> None:
        done.append(now)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(on_progress=interrupt)
    assert done[:5] == [4, 8, 12, 16, 20]
    assert session.report().state is SessionState.IDLE
    pending = session.report().pending
    assert 0 < pending <= 2000 - 20
    session.truncate(tokens=2000 - pending + 3)
    check(session)


def test_progress_is_told_on_the_readers_thread(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy(prefill_chunk_tokens=10)
    session = raw(runtime, 35)
    told: list[tuple[int, int, str]] = []
    session.prefill(on_progress=lambda done, total: told.append((done, total, threading.current_thread().name)))
    me = threading.current_thread().name
    assert told == [(10, 35, me), (20, 35, me), (30, 35, me), (35, 35, me)]
    assert session.prefill().reused_tokens == 35


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closing_fails_whoever_waits_and_hangs_nobody(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy()
    sessions = [raw(runtime, 10 + n) for n in range(3)]
    replies = [session.generate(ignore_eos=True) for session in sessions]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(reply.result) for reply in replies]
        next(iter(raw(runtime).generate(max_tokens=3, ignore_eos=True)))
        runtime.close()
        for future in waiting:
            with pytest.raises(EngineStoppedError, match="closed"):
                future.result(timeout=20)
    for reply in replies:
        reply.cancel()
        with pytest.raises(EngineStoppedError):
            list(reply)


def test_a_prefill_whose_session_is_closed_meanwhile_says_so(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy(prefill_chunk_tokens=8, max_batch_tokens=8, max_running=4)
    session = runtime.session()
    session.append_tokens(some_ids(2000))
    usage: list[kvos.Usage] = []
    with pytest.raises(SessionClosedError):
        session.prefill(on_progress=lambda done, total: session.close())
    other = runtime.session()
    other.append_tokens(some_ids(2000, 1))
    reply = other.generate(max_tokens=5, on_prefill=lambda done, total: reply.cancel())
    usage.append(reply.usage)
    assert 0 < usage[0].computed_tokens == other.report().tokens - other.report().pending < 2000


def test_a_stream_that_nobody_holds_is_cancelled(runtime: kvos.Runtime) -> None:
    session = raw(runtime)
    stream = session.generate(max_tokens=3000, ignore_eos=True)
    del stream
    gc.collect()
    session.append_tokens([5])  # it is free again
    assert session.report().tokens < 3000
    assert runtime.stats().counters["requests_cancelled"] == 1


def test_a_child_process_is_told_that_the_runtime_lives_elsewhere(runtime: kvos.Runtime) -> None:
    session = raw(runtime)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            session.report()
        except EngineStoppedError as error:
            said = str(error)
        with contextlib.suppress(BaseException):
            runtime.close()
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "another one in this process" in os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert session.generate(max_tokens=2, ignore_eos=True).usage.generated_tokens == 2


def test_an_interrupted_close_can_be_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_model()
    before = model.config._attn_implementation
    runtime = kvos.open(model, tokenizer=toy_tokenizer(), home=tmp_path)
    thread = runtime._parts.thread
    stop = thread.stop

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.close()
    monkeypatch.setattr(thread, "stop", stop)
    runtime.close()
    assert model.config._attn_implementation == before


def test_closing_twice_and_from_several_threads_is_one_close(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy()
    session = raw(runtime)
    session.generate(ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(runtime.close) for _ in range(4)]:
            future.result(timeout=20)
    runtime.close()
    session.close()
    assert session.transcript.num_tokens >= 12
    assert "raw" not in repr(session)


CALLS_AFTER_THE_END: list[Callable[[kvos.Runtime, kvos.Session], Any]] = [
    lambda runtime, session: runtime.session(),
    lambda runtime, session: runtime.stats(),
    lambda runtime, session: runtime.sessions(),
    lambda runtime, session: runtime.blocks(),
    lambda runtime, session: runtime.get("x"),
    lambda runtime, session: runtime.check_invariants(),
    lambda runtime, session: session.tokens,
    lambda runtime, session: session.report(),
    lambda runtime, session: session.append_tokens([5]),
    lambda runtime, session: session.generate(),
    lambda runtime, session: session.prefill(),
    lambda runtime, session: session.score([5]),
    lambda runtime, session: session.fork(),
    lambda runtime, session: session.truncate(tokens=1),
    lambda runtime, session: session.save("x"),
]


def test_after_the_end_every_call_says_so(open_toy: Callable[..., kvos.Runtime]) -> None:
    runtime = open_toy()
    session = raw(runtime)
    runtime.close()
    for call in CALLS_AFTER_THE_END:
        with pytest.raises(EngineStoppedError, match="closed"):
            call(runtime, session)


@pytest.mark.parametrize("training", [False, True])
def test_the_callers_model_is_afterwards_as_it_was(tmp_path: Path, training: bool) -> None:
    model = toy_model(dtype=torch.float64).train(training)
    ids = torch.tensor([some_ids(30)])
    with torch.no_grad():
        before = model(ids).logits
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    modules = [(name, type(module), module.forward) for name, module in model.named_modules()]
    attention = model.config._attn_implementation
    with kvos.open(model, tokenizer=toy_tokenizer(), home=tmp_path, cache_bytes=1 << 20) as runtime:
        raw(runtime).generate(ignore_eos=True)  # still running at the end
    assert model.config._attn_implementation == attention
    assert model.training == training
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert [(name, type(module), module.forward) for name, module in model.named_modules()] == modules
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_a_step_that_breaks_inside_kvos_fails_its_callers_and_the_runtime_lives_on(
    runtime: kvos.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = raw(runtime)
    core = runtime.inspect(lambda core: core)
    real = core._complete

    def once(scheduled: Any) -> None:
        monkeypatch.setattr(core, "_complete", real)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(core, "_complete", once)
    with pytest.raises(ZeroDivisionError):
        session.generate(max_tokens=3).result()
    assert "a step of the engine failed" in caplog.text
    session.close()
    other = raw(runtime, 9)
    assert list(other.generate(max_tokens=3, ignore_eos=True).result().tokens) == plain_greedy(some_ids(9), 3)
    runtime.check_invariants()


def test_a_runtime_that_nobody_closed_ends_with_its_last_reference(tmp_path: Path) -> None:
    import gc

    runtime = kvos.open(toy_model(dtype=torch.float64), tokenizer=toy_tokenizer(), home=tmp_path, cache_bytes=1 << 20)
    name = "kvos-engine"
    before = sum(thread.name == name for thread in threading.enumerate())
    raw(runtime).generate(max_tokens=2).result()
    del runtime
    gc.collect()
    deadline = time.monotonic() + 20
    while sum(thread.name == name for thread in threading.enumerate()) >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(thread.name == name for thread in threading.enumerate()) < before
