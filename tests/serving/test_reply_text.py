"""A reply's text against a naive oracle that decodes everything again after each token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvos.serving.reply_text import ReplyText
from kvos.testing import toy_tokenizer

VOCABULARY = [
    b"a", b"b", b"ab", b"ba ", b"aab", b" ", b"", b"\n", "é".encode(), "€".encode()[:1], "€".encode()[1:2],
    "€".encode()[2:], "😀".encode()[:2], "😀".encode()[2:], b"a\xe2", b"\x82\xacb", b"\xff", b"\xc3", "\ufffd".encode(),
]  # fmt: skip
tokens_lists = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=25)
stop_lists = st.lists(
    st.sampled_from(["a", "ab", "bb", "aba", "b a", "aabb", "€", "é", "€b", "\n\n", "😀a"]), max_size=3
)


def decode(ids: Sequence[int]) -> str:
    return b"".join(VOCABULARY[i] for i in ids).decode("utf-8", "replace")


def whole_text(ids: Sequence[int]) -> str:
    """What is sure already: a replacement character at the end may still become something else."""
    return decode(ids).rstrip("\ufffd")


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    places = [text.find(stop) for stop in stops if stop in text]
    return min(places) if places else None


@given(tokens_lists, stop_lists)
def test_what_is_streamed_is_the_content_and_the_content_is_the_text_before_the_first_stop(
    ids: list[int], stops: list[str]
) -> None:
    reply = ReplyText(decode, stops)
    shown: list[str] = []
    end = None
    used: list[int] = []
    for token in ids:
        used.append(token)
        shown.append(reply.push(token))
        end = first_stop(whole_text(used), stops)
        assert reply.stopped == (end is not None)
        if reply.stopped:
            break
    shown.append(reply.finish())
    everything = decode(used)
    if end is None:
        end = first_stop(everything, stops)  # a replacement character at the very end may complete a stop string
    assert reply.content == everything[:end]
    assert "".join(shown) == reply.content
    assert not any(stop in reply.content for stop in stops)


@given(tokens_lists, stop_lists)
def test_what_is_shown_stays_true_whatever_comes_next(ids: list[int], stops: list[str]) -> None:
    reply, shown, moments = ReplyText(decode, stops), "", []
    for token in ids:
        shown += reply.push(token)
        moments.append(shown)
        if reply.stopped:
            break
    reply.finish()
    for moment in moments:
        assert reply.content.startswith(moment)
        assert not any(stop in moment for stop in stops)


@given(tokens_lists, st.lists(st.sampled_from(["ab", "zz", "é", "bb"]), max_size=2))
def test_text_that_can_begin_no_stop_string_is_shown_at_once(ids: list[int], stops: list[str]) -> None:
    reply, shown = ReplyText(decode, stops), ""
    for number, token in enumerate(ids):
        shown += reply.push(token)
        if reply.stopped:
            return
        whole = whole_text(ids[: number + 1])
        if len(decode(ids[: number + 1])) == len(whole):
            held_back = len(whole) - len(shown)
            assert held_back <= max((len(stop) - 1 for stop in stops), default=0)


@given(tokens_lists, stop_lists)
def test_the_kept_tokens_stand_for_the_kept_text(ids: list[int], stops: list[str]) -> None:
    reply = ReplyText(decode, stops)
    used = []
    for token in ids:
        used.append(token)
        reply.push(token)
        if reply.stopped:
            break
    reply.finish()
    tokens, text = reply.kept()
    assert decode(used[:tokens]) == text
    assert reply.content.startswith(text)
    boundaries = [n for n in range(len(used) + 1) if decode(used[:n]) == whole_text(used[:n])]
    if not reply.stopped:
        boundaries.append(len(used))
    assert len(text) == max(len(decode(used[:n])) for n in boundaries if len(decode(used[:n])) <= len(reply.content))


def test_a_stop_string_inside_a_token_cuts_the_text_but_keeps_only_whole_tokens() -> None:
    pieces = ["He", "llo wor", "ld"]
    reply = ReplyText(lambda ids: "".join(pieces[i] for i in ids), ["o w"])
    assert [reply.push(0), reply.push(1)] == ["He", "ll"]
    assert reply.stopped
    assert reply.content == "Hell"
    assert reply.kept() == (1, "He")


def test_the_beginning_of_a_stop_string_is_held_back_and_shown_when_it_was_none() -> None:
    pieces = ["x", "<", "/", "s", ">"]
    reply = ReplyText(lambda ids: "".join(pieces[i] for i in ids), ["</s>"])
    assert [reply.push(i) for i in (0, 1, 2, 0)] == ["x", "", "", "</x"]
    assert [reply.push(i) for i in (1, 2, 3)] == ["", "", ""]
    assert reply.finish() == "</s"
    assert reply.content == "x</x</s"


@pytest.mark.parametrize("text", ["é", "€uro", "😀", "a😀b", "日本語"])
def test_a_character_over_several_tokens_comes_whole(text: str) -> None:
    tokenizer = toy_tokenizer()
    reply = ReplyText(lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    shown = [reply.push(token) for token in tokenizer(text)["input_ids"]]
    assert [piece for piece in shown if piece] == list(text)


def test_bytes_that_are_no_character_are_shown_at_the_end() -> None:
    reply = ReplyText(decode)
    assert reply.push(0) == "a"
    assert reply.push(VOCABULARY.index(b"\xff")) == ""
    assert reply.finish() == "\ufffd"
    assert reply.kept() == (2, "a\ufffd")
