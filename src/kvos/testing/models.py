"""A tiny Llama with random weights and a tokenizer of bytes: real Transformers objects, made at once, offline."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["TOY_CHAT_TEMPLATE", "TOY_VOCAB_SIZE", "toy_model", "toy_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOY_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a toy.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML; a conversation without a system message gets one, as many real templates do."""


def toy_model(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """A Llama of three layers, four query heads over two KV heads, head size 16, in eval mode.

    Weights depend on ``seed`` and the config alone (rounded from float32 to ``dtype``) and are wide enough for logits
    that differ clearly. The global random state is left as it was.

    Args:
        seed: of the weights.
        dtype: of weights and activations.
        overrides: any ``LlamaConfig`` argument; the vocabulary is that of ``toy_tokenizer`` unless overridden.
    """
    settings: dict[str, Any] = {
        "vocab_size": TOY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index("<|im_start|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
    cast: LlamaForCausalLM = model.to(dtype=dtype).eval()  # type: ignore[call-arg]
    return cast


def toy_tokenizer() -> PreTrainedTokenizerBase:
    """One token per UTF-8 byte plus the three special tokens of ChatML; round-trips any text; eos is ``<|im_end|>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TOY_CHAT_TEMPLATE
    return tokenizer
