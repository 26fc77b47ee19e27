"""Chat templates of many kinds, and tokenizers to use them with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvos.sessions import ChatRenderer, Message, Transcript, parse_messages
from kvos.testing import toy_tokenizer
from kvos.types import TokenIds

SYSTEM = {"role": "system", "content": "You answer for Tidewater Ferries."}
USER = {"role": "user", "content": "How long does a refund take?"}
ASSISTANT = {"role": "assistant", "content": "Five days."}
AGAIN = {"role": "user", "content": "And by card?"}

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Thoughts are shown in the last assistant message only, as reasoning models have it.
STRIPS_THINKING = (
    "{% for m in messages %}"
    "{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRIMS = CHATML.replace("m['content']", "m['content'] | trim")

# A lone system message is an error, and roles must alternate, as in some published templates.
NEEDS_A_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + CHATML
)

# The system message has no turn of its own: it stands inside the first user turn.
FOLDS_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% if rest | length == 0 %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% for m in rest %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if loop.first %}{{ s }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NO_GENERATION_PROMPT = CHATML.partition("{% if add_generation_prompt")[0]

TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] %}{{ '<tool_call>' + call['function']['name'] + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def dated(day: str) -> str:
    """A template that puts the date before everything."""
    return "{{ 'Today is " + day + ".\n' }}" + CHATML


def tokenizer_with(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(template: str = CHATML) -> PreTrainedTokenizerBase:
    """Bytes, and a few merges: ``he``, ``ll``, ``hell``, ``hello``, ``lo``, and two spaces as one token."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("l", "o"), ("Ġ", "Ġ")]
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def spaces_tokenizer(style: str) -> PreTrainedTokenizerBase:
    """As SentencePiece has it: spaces are part of words, and one is put before the text.

    ``first`` puts it before the whole text, ``always`` and ``prepend`` also behind each special token; none of the
    markers of the template is a special token but the one that ends a turn.
    """
    letters = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    merges = [("▁", "h"), ("▁", "<"), ("▁", "A"), ("h", "e"), ("▁", "F"), (".", "\n"), ("▁", "▁")]
    specials = ("<unk>", "<s>", "</s>")
    pieces = [*specials, *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>"))
    if style == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    return tokenizer


def whole(tokenizer: Any, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> list[int]:
    """What the library makes of the whole conversation at once."""
    encoded = tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=prompt)
    return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


class Conversation:
    """A renderer and what it has rendered, without a model: tokens as a session would hold them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer)
        self.transcript = Transcript()
        self.tokens: TokenIds = np.zeros(0, np.int32)

    def append(self, *messages: dict[str, Any]) -> None:
        extension = self.renderer.append(self.transcript, parse_messages(messages))
        self.tokens = np.concatenate([self.tokens[: extension.keep], extension.tokens])
        self.transcript = extension.transcript

    def texts(self) -> list[str]:
        """Each span's tokens as text."""
        return [
            self.tokenizer.decode(self.tokens[span.start : span.end], clean_up_tokenization_spaces=False)
            for span in self.transcript.spans
        ]

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.transcript.messages
