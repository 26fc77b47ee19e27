"""A converted model is the one that Transformers would have read from the GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvos.errors import UnsupportedModelError
from kvos.models.convert import convert_gguf
from kvos.models.progress import SilentProgress


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny_gguf, folder, SilentProgress())
    return folder


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Transformers reads GGUF with accelerate")
def test_every_weight_is_bit_equal_to_what_transformers_reads_from_the_gguf(converted: Path, tiny_gguf: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    expected = {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    ours = load_file(converted / "model.safetensors")
    assert set(ours) == set(expected)
    for name, value in expected.items():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], value), name


def test_tied_output_weights_are_stored_once_and_tied_again_on_load(converted: Path) -> None:
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  # no dict
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_untied_output_weights_are_kept(tmp_path: Path, tiny_writer) -> None:
    tiny_writer(tmp_path / "untied.gguf", tied=False)
    folder = tmp_path / "out"
    folder.mkdir()
    convert_gguf(tmp_path / "untied.gguf", folder, SilentProgress())
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_config_says_what_the_gguf_says(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["num_attention_heads"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 8
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert "quantization_config" not in config


def test_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("hello hello 12") == ["hello", "Ġhello", "Ġ", "1", "2"]
    assert tokenizer("<|im_start|>").input_ids == [1]
    text = "Zürich, 漢字 \U0001f642\r\n\tend"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "qwen2"}, "general.architecture"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre"),
        ({"extra": ("rope_freqs.weight",)}, "rope_freqs.weight"),
    ],
)
def test_what_was_not_tested_is_refused_by_name(changes: dict, named: str, tmp_path: Path, tiny_writer) -> None:
    tiny_writer(tmp_path / "other.gguf", **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        convert_gguf(tmp_path / "other.gguf", tmp_path, SilentProgress())


def test_converting_twice_gives_the_same_bytes(converted: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf, tmp_path, SilentProgress())
    for path in converted.iterdir():
        assert digest(tmp_path / path.name) == digest(path), path.name


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
