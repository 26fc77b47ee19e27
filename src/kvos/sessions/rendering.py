"""From messages to tokens, by the model's own chat template, which is the authority.

Tokens that a session holds stay as they are wherever the newly rendered text agrees with the text they stand for; only
the rest is tokenised. So what the model generated keeps its ids, although tokenising its text again might give others.
Where a template rewrites earlier turns, the tokens up to the change are kept, and the extension says so.

Runs on the caller's thread: templates and tokenisers are slow, and not ours.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvos.errors import InvalidInputError, InvalidMessageError, SessionBusyError, UnsupportedModelError
from kvos.sessions.messages import Message
from kvos.sessions.spans import Span, SpanKind, Transcript, kind_of
from kvos.types import TokenIds

__all__ = ["ChatRenderer", "Extension", "Tokenizer"]

MARKS = ("\u241e", "\u241f")
"""Characters that stand for a message's content while its end is looked for: one that the content does not end with."""


class Tokenizer(Protocol):
    """What kvos needs of a Transformers tokenizer."""

    is_fast: bool
    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def __call__(self, text: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Extension:
    """How to get from a session's tokens to the tokens of a longer conversation.

    Attributes:
        keep: held tokens that stay, from the front.
        tokens: what follows them; it may begin with ids that are held already.
        transcript: the conversation afterwards.
        revision: of the transcript that this was made from; it is void if the session has changed since.
        rewritten: the text of earlier turns changed, so that held tokens may have to go.
    """

    keep: int
    tokens: TokenIds
    transcript: Transcript
    revision: int
    rewritten: bool = False


class ChatRenderer:
    """Renders with one tokenizer and its chat template. Any thread.

    Raises:
        UnsupportedModelError: the tokenizer cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.is_fast:
            raise UnsupportedModelError("the tokenizer gives no character offsets; kvos needs a fast tokenizer")
        self._tokenizer = tokenizer
        # Tokenizers change their truncation state inside a call, so two threads must not be in one.
        self._lock = threading.Lock()

    def check_template(self) -> None:
        """Raises UnsupportedModelError if the tokenizer has no chat template."""
        if self._tokenizer.chat_template is None:
            raise UnsupportedModelError(
                "the model's tokenizer has no chat template: put a chat_template.jinja into its folder, set one on the "
                "tokenizer, or work with raw tokens (append_tokens)"
            )

    def append(
        self,
        held: Transcript,
        messages: Sequence[Message],
        *,
        kind: SpanKind | None = None,
        version: str | None = None,
    ) -> Extension:
        """Add messages, one span each.

        Raises:
            InvalidMessageError: the chat template refuses the conversation.
            InvalidInputError: the session holds raw tokens.
            SessionBusyError: a reply is being generated.
            UnsupportedModelError: the tokenizer has no chat template.
        """
        _check_chat(held)
        everything = (*held.messages, *messages)
        text = self._render(everything)
        ends = self._message_ends(everything, text, held)
        kinds = [(kind or kind_of(message), message.role, version) for message in messages]
        return self._extend(held, everything, text, ends, kinds)

    def open_reply(self, held: Transcript) -> Extension:
        """Add the template's generation prompt as an assistant span that is still open (without a message).

        Raises:
            InvalidInputError: the session is empty, or holds raw tokens.
            InvalidMessageError, SessionBusyError, UnsupportedModelError: as for ``append``.
        """
        _check_chat(held)
        if not held.messages:
            raise InvalidInputError("the session is empty; append a message first")
        text = self._render(held.messages, add_generation_prompt=True)
        ends = [*self._message_ends(held.messages, self._render(held.messages), held), len(text)]
        return self._extend(held, held.messages, text, ends, [(SpanKind.ASSISTANT, "assistant", None)])

    def _extend(
        self,
        held: Transcript,
        messages: tuple[Message, ...],
        text: str,
        ends: list[int],
        new_spans: list[tuple[SpanKind, str, str | None]],
    ) -> Extension:
        keep, kept_text = _agreement(held, text)
        ids, starts = self._tokenize_behind(text, kept_text, held)
        labels = [(span.kind, span.role, span.version) for span in held.spans] + new_spans
        spans: list[Span] = []
        for number, ((kind, role, version), end) in enumerate(zip(labels, ends, strict=True)):
            start = spans[-1].end if spans else 0
            if number < len(held.spans) and end <= kept_text and held.spans[number].text_end <= kept_text:
                spans.append(held.spans[number])
                continue
            # A token belongs to the message in which it starts.
            last = keep + int(np.searchsorted(starts, end - kept_text))
            spans.append(Span(number, kind, role, start, max(start, last), end, version))
        spans[-1] = replace(spans[-1], end=keep + len(ids), text_end=len(text))
        return Extension(
            keep=keep,
            tokens=ids,
            transcript=Transcript(messages, tuple(spans), text, held.revision),
            revision=held.revision,
            rewritten=keep < held.num_tokens,
        )

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        self.check_template()
        try:
            text = self._tokenizer.apply_chat_template(
                [message.as_dict() for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is somebody's program, and may fail in any way
            what = str(error) or type(error).__name__
            raise InvalidMessageError(f"the model's chat template refuses this conversation: {what}") from error
        return str(text)

    def _message_ends(self, messages: Sequence[Message], text: str, held: Transcript) -> list[int]:
        """Characters up to the end of each message in ``text``; what is settled in ``held`` is not rendered again."""
        agreed = _agreement(held, text)[1]
        ends = [span.text_end for span in held.spans[:-1] if span.text_end <= agreed]
        for number in range(len(ends), len(messages) - 1):
            ends.append(max(self._message_end(messages, number, text), ends[-1] if ends else 0))
        return [*ends, len(text)] if messages else []

    def _message_end(self, messages: Sequence[Message], number: int, text: str) -> int:
        """Where message ``number`` ends: by rendering up to it, or by where another text in its place would end.

        Most templates are prefix-stable: the rendering of the first messages is a prefix of the whole one, and its
        length is the answer. Where it is not (a template that marks the last message), the end is found by exchange::

            whole    <user>Hi<end> <bot>Hello!<end> <user>Bye<end>
            marked   <user>Hi<end> <bot>\u241e<end> <user>Bye<end>     the content of message 1 exchanged
                                           ^ from here on both are equal: the body of message 1 ends here

        and ``<end>``, which stands behind the last message's body, too, is counted to the message.
        """
        part = self._render_if_possible(messages[: number + 1])
        if part is not None and text.startswith(part):
            return len(part)
        last = len(messages) - 1
        body, last_body = self._body_end(messages, number, text), self._body_end(messages, last, text)
        closing = text[last_body:]  # what a template puts behind each message
        return body + len(closing) if text.startswith(closing, body) else body

    def _body_end(self, messages: Sequence[Message], number: int, text: str) -> int:
        """Where the content and tool calls of a message end: from there on, another message there changes nothing."""
        message = messages[number]
        mark = next(mark for mark in MARKS if not (message.content or "").rstrip().endswith(mark))
        other = Message(message.role, mark) if message.has_tool_calls else replace(message, content=mark)
        marked = self._render_if_possible([*messages[:number], other, *messages[number + 1 :]])
        return 0 if marked is None else len(text) - _common_suffix(text, marked)

    def _render_if_possible(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._render(messages)
        except InvalidMessageError:
            return None

    def _tokenize_behind(self, text: str, kept: int, held: Transcript) -> tuple[TokenIds, TokenIds]:
        """Ids of ``text`` from character ``kept`` on, and where each starts, counted from there (ascending).

        The last message that is kept is tokenised along, and its ids are dropped: some tokenizers put a space before
        whatever comes first. Where a token would reach over ``kept``, the rest is tokenised by itself.
        """
        context = max((span.text_end for span in held.spans if span.text_end < kept), default=0)
        ids, starts, ends = self._tokenize(text[context:])
        starts, ends = starts + context - kept, ends + context - kept
        first = int(np.searchsorted(starts, 0))
        if first and int(ends[first - 1]) > 0:
            ids, starts, _ = self._tokenize(text[kept:])
            return ids, starts
        return ids[first:], starts[first:]

    def _tokenize(self, text: str) -> tuple[TokenIds, TokenIds, TokenIds]:
        """Token ids, and the characters of ``text`` at which each starts and ends (ascending)."""
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], np.int32)
        offsets = np.array(encoded["offset_mapping"], np.int32).reshape(-1, 2)
        starts, ends = np.maximum.accumulate(offsets, axis=0).T
        return ids, starts, ends


def _check_chat(held: Transcript) -> None:
    if held.spans and not held.messages:
        raise InvalidInputError("this session holds raw tokens; chat messages cannot be mixed with them")
    if len(held.spans) > len(held.messages):
        raise SessionBusyError("a reply is being generated on this session; wait for it or cancel it")


def _agreement(held: Transcript, text: str) -> tuple[int, int]:
    """Tokens and characters of ``held`` that ``text`` begins with, at the latest span boundary."""
    for span in reversed(held.spans):
        if text.startswith(held.text[: span.text_end]):
            return span.end, span.text_end
    return 0, 0


def _common_suffix(first: str, second: str) -> int:
    """Characters at the end that the two have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.endswith(second[len(second) - middle :]):
            low = middle
        else:
            high = middle - 1
    return low
