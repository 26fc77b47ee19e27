"""The default model and its tokenizer: real words, real merges, and replies that a plain run would give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvos
from kvos.config import KvosConfig
from kvos.models.store import model_folder
from kvos.serving import WhyComputed
from sessions.chat import AGAIN, ASSISTANT, SYSTEM, USER, Conversation, whole

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("smollm2-135m", KvosConfig.from_env().home)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runtime() -> Iterator[kvos.Runtime]:
    with kvos.open("smollm2-135m", dtype="fp32", kernels="generic", cache_bytes=64 << 20, offline=True) as opened:
        yield opened


CONVERSATIONS = [
    [USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, AGAIN], [USER, ASSISTANT, AGAIN],
    [SYSTEM, {"role": "user", "content": "  spaces  \n\n\tand\ttabs "}, ASSISTANT],
    [{"role": "user", "content": "Größe? 日本語 😀 <|im_end|> <|im_start|>system\n"}, ASSISTANT, USER],
    [SYSTEM, {"role": "user", "content": "1234567890 def f(x):\n    return x ** 2"}],
]  # fmt: skip


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("at_once", [True, False])
def test_tokens_are_those_of_the_whole_conversation(
    tokenizer: Any, messages: list[dict[str, Any]], at_once: bool
) -> None:
    talk = Conversation(tokenizer)
    for part in [messages] if at_once else [[message] for message in messages]:
        talk.append(*part)
    assert talk.tokens.tolist() == whole(tokenizer, messages)
    shown = talk.texts()
    assert "".join(shown) == tokenizer.decode(whole(tokenizer, messages), clean_up_tokenization_spaces=False)
    for message, text in zip(messages, shown, strict=True):
        assert text.endswith(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n")


def test_a_default_system_prompt_is_in_the_first_span(tokenizer: Any) -> None:
    talk = Conversation(tokenizer)
    talk.append(USER)
    (text,) = talk.texts()
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(f"<|im_start|>user\n{USER['content']}<|im_end|>\n")


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4))
def test_any_text_gets_the_ids_that_the_library_gives_it(tokenizer: Any, contents: list[str]) -> None:
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content}
        for number, content in enumerate(contents)
        if content.encode("utf-8", "ignore").decode() == content
    ]
    talk = Conversation(tokenizer)
    for message in messages:
        talk.append(message)
    if messages:
        assert talk.tokens.tolist() == whole(tokenizer, messages)


def test_a_greedy_reply_is_the_librarys(runtime: kvos.Runtime, plain: Any, tokenizer: Any) -> None:
    agent = runtime.session(messages=[SYSTEM, USER])
    reply = agent.generate(max_tokens=12)
    prompt = torch.tensor([whole(tokenizer, [SYSTEM, USER], prompt=True)])
    expected = plain.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=2)[0, prompt.shape[1] :]
    assert list(reply.result().tokens) == expected.tolist()
    agent.close()


def test_turn_after_turn_only_what_is_new_is_computed(runtime: kvos.Runtime) -> None:
    agent = runtime.session(messages=[SYSTEM, USER])
    first = agent.generate(max_tokens=10)
    held = first.usage.prompt_tokens + first.usage.generated_tokens - 1
    agent.append(AGAIN)
    second = agent.generate(max_tokens=10)
    assert second.usage.reused_tokens == held
    assert second.usage.why_computed is WhyComputed.NEW_TOKENS
    assert runtime.stats().counters["history_rewritten"] == 0
    runtime.check_invariants()
    agent.close()


def test_what_was_generated_keeps_its_ids_although_its_text_would_get_others(runtime: kvos.Runtime) -> None:
    """At a high temperature a model says things that nobody would tokenise like this."""
    agent = runtime.session(messages=[SYSTEM, USER])
    prompt = agent.tokens.tolist()
    result = agent.generate(max_tokens=25, temperature=3.0, seed=1).result()
    again = runtime.tokenizer(result.text, add_special_tokens=False)["input_ids"]
    said = list(result.tokens)
    assert again != said, "another seed is needed"
    agent.append(AGAIN)
    opened = len(prompt) + len(runtime.tokenizer("<|im_start|>assistant\n")["input_ids"])
    assert agent.tokens.tolist()[opened : opened + len(said)] == said
    assert runtime.stats().counters["history_rewritten"] == 0
    agent.close()


def test_a_forks_logits_are_those_of_a_plain_run(runtime: kvos.Runtime, plain: Any) -> None:
    agent = runtime.session(messages=[SYSTEM, USER])
    left, right = agent.fork(2)
    streams = [left.generate(max_tokens=6), right.generate(max_tokens=6, temperature=1.0, seed=3)]
    for session, stream in zip((left, right), streams, strict=True):
        stream.result()
        ids = session.tokens.tolist()
        twin = runtime.session()
        twin.append_tokens(ids)
        logits = twin.score([7])
        with torch.no_grad():
            expected = plain(torch.tensor([[*ids, 7]])).logits[0, -1:]
        assert (logits - expected).abs().max() < 1e-3  # float32 between chunk shapes: 7e-5 was measured
        twin.close()
    for session in (agent, left, right):
        session.close()
