"""The public fakes: the toy model and its tokenizer."""

from __future__ import annotations

import torch

from kvos.testing import toy_model, toy_tokenizer


def test_the_vocabularies_match() -> None:
    assert len(toy_tokenizer()) == toy_model().config.vocab_size == 259


def test_any_text_round_trips_one_token_per_byte() -> None:
    tokenizer = toy_tokenizer()
    text = "Hällo,  wörld!\n\t🎉 it's <b>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_template_is_chatml_with_a_default_system_message() -> None:
    tokenizer = toy_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a toy.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == toy_model().config.eos_token_id


def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (toy_model(seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
