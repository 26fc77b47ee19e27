"""Replies and the turns that follow them: what the model said keeps its ids, and templates have the last word.

The toy model says what a test wants it to say; the cache below it is real, and each conversation ends with a look at
whether the next logits are those of a plain run.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvos.serving import FinishReason, WhyComputed
from kvos.sessions import CacheSession
from serving.harness import Bench
from sessions.chat import (
    AGAIN,
    CHATML,
    NO_GENERATION_PROMPT,
    STRIPS_THINKING,
    SYSTEM,
    TRIMS,
    USER,
    dated,
    merging_tokenizer,
    tokenizer_with,
    whole,
)

END = 2  # <|im_end|>


def ids_of(bench: Bench, text: str) -> list[int]:
    return list(bench.tokenizer(text)["input_ids"])


def letters(bench: Bench, text: str) -> list[int]:
    """One token for each letter, although the tokenizer would merge some."""
    return [token for letter in text for token in ids_of(bench, letter)]


def tokens(session: CacheSession) -> list[int]:
    return session.sequence.tokens().tolist()


def texts(bench: Bench, session: CacheSession) -> list[str]:
    held = session.sequence.tokens()
    return [bench.core._decode(held[span.start : span.end].tolist()) for span in session.transcript.spans]


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def messages(session: CacheSession) -> list[dict[str, Any]]:
    return [message.as_dict() for message in session.transcript.messages]


def start(template: str = CHATML, tokenizer: Any = None, **options: Any) -> tuple[Bench, CacheSession]:
    bench = Bench(tokenizer=tokenizer_with(template) if tokenizer is None else tokenizer, **options)
    session = bench.chat(SYSTEM, USER)
    return bench, session


def test_what_was_generated_keeps_its_ids_although_its_text_would_get_others() -> None:
    bench, session = start(tokenizer=merging_tokenizer())
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    said = [*letters(bench, "hello"), END]
    assert ids_of(bench, "hello") != letters(bench, "hello")
    bench.say(session, said)
    bench.handle(session).append(AGAIN)
    assert tokens(session) == prompt + said + ids_of(bench, "\n" + turn("user", AGAIN["content"]))
    assert tokens(session) != whole(bench.tokenizer, messages(session))
    assert bench.core._decode(tokens(session)) == bench.core._decode(whole(bench.tokenizer, messages(session)))
    usage = bench.reply(session, max_tokens=1).usage
    assert usage.reused_tokens == len(prompt) + len("hello")
    assert usage.why_computed is WhyComputed.NEW_TOKENS
    assert bench.count("history_rewritten") == 0
    bench.check(session)


def test_a_reply_is_a_span_from_its_header_to_its_end() -> None:
    bench, session = start()
    bench.say(session, [*ids_of(bench, "Five days."), END])
    assert texts(bench, session)[2] == "<|im_start|>assistant\nFive days.<|im_end|>"
    bench.handle(session).append(AGAIN)
    assert texts(bench, session) == [turn(m["role"], m["content"]) for m in messages(session)]
    assert messages(session)[2] == {"role": "assistant", "content": "Five days."}
    assert tokens(session) == whole(bench.tokenizer, messages(session))


def test_five_turns_compute_only_what_is_new() -> None:
    bench, session = start()
    seen = 0
    for number in range(5):
        finished = bench.say(session, [*ids_of(bench, f"Answer {number}."), END]).finished
        assert finished.usage.reused_tokens == seen
        seen = finished.usage.prompt_tokens + len(finished.tokens) - 1  # the end token goes through the model next time
        bench.handle(session).append(AGAIN)
    assert bench.count("history_rewritten") == 0
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    bench.check(session)


def test_thoughts_that_the_template_strips_are_given_up_and_the_reason_is_named() -> None:
    bench, session = start(STRIPS_THINKING)
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    bench.say(session, [*ids_of(bench, "<think>hm</think>Five days."), END])
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    assert "hm" in messages(session)[2]["content"]
    assert texts(bench, session)[2] == turn("assistant", "Five days.")
    assert bench.count("history_rewritten") == 1
    usage = bench.say(session, [*ids_of(bench, "Same."), END]).finished.usage
    assert usage.reused_tokens == len(prompt)
    assert usage.why_computed is WhyComputed.TEMPLATE_REWROTE_HISTORY
    bench.handle(session).append(USER)
    usage = bench.reply(session, max_tokens=1).usage
    assert usage.why_computed is WhyComputed.NEW_TOKENS
    assert bench.count("history_rewritten") == 1
    bench.check(session)


def test_a_prefill_that_computes_the_rewritten_turns_says_so_and_the_reply_after_it_does_not() -> None:
    bench, session = start(STRIPS_THINKING)
    bench.say(session, [*ids_of(bench, "<think>hm</think>Yes."), END])
    bench.handle(session).append(AGAIN)
    assert bench.compute(session).usage.why_computed is WhyComputed.TEMPLATE_REWROTE_HISTORY
    assert bench.reply(session, max_tokens=1).usage.why_computed is WhyComputed.NEW_TOKENS


def test_a_new_date_before_everything_leaves_only_what_is_before_it() -> None:
    bench, session = start(dated("12 March"))
    bench.compute(session)
    bench.tokenizer.chat_template = dated("13 March")
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    usage = bench.reply(session, max_tokens=1).usage
    assert usage.reused_tokens == len("Today is 1")
    assert usage.why_computed is WhyComputed.TEMPLATE_REWROTE_HISTORY
    assert bench.count("history_rewritten") == 1
    bench.check(session)


def test_a_template_that_changes_between_append_and_generate_is_noticed_too() -> None:
    bench, session = start(dated("12 March"))
    bench.compute(session)
    bench.tokenizer.chat_template = dated("13 March")
    usage = bench.reply(session, max_tokens=1, ignore_eos=True).usage
    assert usage.why_computed is WhyComputed.TEMPLATE_REWROTE_HISTORY
    assert usage.reused_tokens == len("Today is 1")
    assert bench.count("history_rewritten") == 1
    bench.check(session)


def test_a_space_that_the_template_trims_costs_the_tokens_from_there_on() -> None:
    bench, session = start(TRIMS)
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    bench.say(session, [*ids_of(bench, "Five days.  "), END])
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    usage = bench.reply(session, max_tokens=1).usage
    assert usage.reused_tokens == len(prompt) + len("Five days.")
    assert usage.why_computed is WhyComputed.TEMPLATE_REWROTE_HISTORY
    bench.check(session)


def test_a_template_that_only_trims_what_callers_send_rewrites_nothing() -> None:
    bench = Bench(tokenizer=tokenizer_with(TRIMS))
    session = bench.chat({"role": "user", "content": "  hi  "})
    bench.say(session, [*ids_of(bench, "Yes."), END])
    bench.handle(session).append(AGAIN)
    assert bench.count("history_rewritten") == 0
    assert tokens(session) == whole(bench.tokenizer, messages(session))


@pytest.mark.parametrize(("said", "stop", "content", "kept"), [
    ("hello", "ll", "he", []),  # inside the only token
    ("hello", "hell", "", []),
    ("xhello", "lo", "xhel", ["x"]),
    ("xxyy", "yy", "xx", ["x", "x"]),  # at a token's edge
    ("a STOP b", "STOP", "a ", ["a", " "]),
])  # fmt: skip
def test_a_stop_string_ends_the_reply_wherever_it_is(said: str, stop: str, content: str, kept: list[str]) -> None:
    bench, session = start(tokenizer=merging_tokenizer())
    held = tokens(session)
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    events = bench.say(session, ids_of(bench, said), stop=[stop])
    assert (events.finished.reason, events.finished.content, events.text) == (FinishReason.STOP, content, content)
    if not content:
        assert tokens(session) == held
        assert messages(session) == [SYSTEM, USER]
        return
    assert tokens(session) == prompt + [token for piece in kept for token in ids_of(bench, piece)]
    assert messages(session)[-1] == {"role": "assistant", "content": content}
    bench.handle(session).append(AGAIN)
    assert bench.core._decode(tokens(session)) == bench.core._decode(whole(bench.tokenizer, messages(session)))
    assert tokens(session)[: len(prompt)] == prompt
    assert texts(bench, session)[2] == turn("assistant", content)
    bench.check(session)


def test_an_end_token_that_the_template_does_not_use_is_taken_back() -> None:
    bench, session = start(eos=[0])
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    events = bench.say(session, [*ids_of(bench, "Five days."), 0])
    assert events.finished.reason is FinishReason.STOP
    assert events.finished.content == "Five days."
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    assert bench.reply(session, max_tokens=1).usage.reused_tokens == len(prompt) + len("Five days.")
    bench.check(session)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_turn_after_a_cancelled_reply_closes_it(steps: int) -> None:
    bench, session = start()
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    said = ids_of(bench, "Five days from now on")
    bench.engine.say(len(prompt), said)
    events = bench.generate(session)
    for _ in range(steps):
        bench.step()
    bench.core.cancel(events.request)
    assert events.finished.reason is FinishReason.CANCELLED
    assert tokens(session) == prompt + said[:steps]
    bench.handle(session).append(AGAIN)
    assert messages(session)[2] == {"role": "assistant", "content": "Five days from now on"[:steps]}
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    assert bench.count("history_rewritten") == 0
    bench.check(session)


def test_a_reply_cancelled_before_its_first_token_leaves_no_trace() -> None:
    bench, session = start()
    held, spans = tokens(session), session.transcript.spans
    events = bench.generate(session)
    bench.core.cancel(events.request)
    assert (tokens(session), session.transcript.spans) == (held, spans)
    assert messages(session) == [SYSTEM, USER]
    bench.check(session)


def test_a_reply_that_says_nothing_is_an_empty_message() -> None:
    bench, session = start()
    events = bench.say(session, [END])
    assert (events.finished.content, events.finished.reason, events.text) == ("", FinishReason.STOP, "")
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, [SYSTEM, USER, {"role": "assistant", "content": ""}, AGAIN])
    assert texts(bench, session)[2] == turn("assistant", "")
    bench.check(session)


def test_half_a_character_at_the_end_of_a_reply_keeps_its_id() -> None:
    bench, session = start()
    prompt = whole(bench.tokenizer, [SYSTEM, USER], prompt=True)
    half = ids_of(bench, "é")[:1]
    events = bench.say(session, [*ids_of(bench, "caf"), *half])
    assert events.finished.content == events.text == "caf\ufffd"
    bench.handle(session).append(AGAIN)
    assert tokens(session) == prompt + ids_of(bench, "caf") + half + ids_of(
        bench, "<|im_end|>\n" + turn("user", AGAIN["content"])
    )
    bench.check(session)


def test_a_special_token_in_a_reply_is_text_like_any_other() -> None:
    bench, session = start()
    bench.say(session, [*ids_of(bench, "a"), 1, *ids_of(bench, "b"), END])
    assert messages(session)[-1]["content"] == "a<|im_start|>b"
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    bench.check(session)


def test_a_template_without_a_generation_prompt_puts_the_header_in_later() -> None:
    bench, session = start(NO_GENERATION_PROMPT)
    held = tokens(session)
    bench.say(session, ids_of(bench, "Yes."))
    assert tokens(session) == held + ids_of(bench, "Yes.")
    bench.handle(session).append(AGAIN)
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    assert bench.count("history_rewritten") == 1
    bench.check(session)


def test_an_assistant_message_of_the_callers_own_takes_the_place_of_a_reply() -> None:
    bench, session = start()
    bench.compute(session)
    bench.handle(session).append([{"role": "assistant", "content": "Five."}, AGAIN])
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    assert bench.reply(session, max_tokens=1).usage.reused_tokens == len(whole(bench.tokenizer, [SYSTEM, USER]))
    bench.check(session)


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_truncated_conversation_goes_on_as_if_the_rest_had_never_been(keep: int) -> None:
    bench, session = start()
    bench.say(session, [*ids_of(bench, "Five days."), END])
    bench.handle(session).append(AGAIN)
    bench.compute(session)
    bench.handle(session).truncate(messages=keep)
    assert messages(session) == [SYSTEM, USER, {"role": "assistant", "content": "Five days."}][:keep]
    bench.handle(session).append({"role": "user", "content": "Something else."})
    assert tokens(session) == whole(bench.tokenizer, messages(session))
    bench.check(session)


def test_forks_of_a_conversation_go_their_own_ways() -> None:
    bench, session = start()
    bench.compute(session)
    children = bench.core.fork(session, [None, None])
    for number, child in enumerate(children):
        bench.say(child, [*ids_of(bench, f"Answer {number}."), END])
        bench.handle(child).append(AGAIN)
        assert tokens(child) == whole(bench.tokenizer, messages(child))
    bench.handle(session).append({"role": "user", "content": "And now?"})
    for each in (session, *children):
        bench.check(each)
    assert [m["content"] for m in messages(children[1])][2] == "Answer 1."
    assert len(messages(session)) == 3
