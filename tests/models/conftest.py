"""A tiny Llama as a GGUF file, made here: conversion and loading are tested without network and in moments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvos.models.catalogue import CatalogueModel

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 32, 4, 2, 2, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    """The printable stand-ins of byte-level BPE for the 256 bytes, in GPT-2's order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) for byte in kept] + [chr(256 + index) for index in range(len(moved))]


def write_tiny_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: tuple[str, ...] = (), tied: bool = True
) -> None:
    """A two-layer Llama with random weights, half of them quantised, ``extra`` tensors added."""
    random = np.random.default_rng(7)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll", "hell", "hello", "Ġhello"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ hello"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    _add_tensors(writer, random, len(tokens), extra if tied else (*extra, "output.weight"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, random: np.random.Generator, vocabulary: int, extra: tuple[str, ...]) -> None:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= dict.fromkeys(extra, (vocabulary, HIDDEN))
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32) * 0.2
        if "ffn" in name and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)


def entry_for(gguf_path: Path) -> CatalogueModel:
    """A catalogue entry whose expected file is ``gguf_path``."""
    return CatalogueModel(
        name="tiny",
        aliases=(),
        title="Tiny",
        licence="Apache-2.0",
        package="kvos-tiny-model",
        version="1.0",
        package_bytes=gguf_path.stat().st_size,
        gguf_name="tiny.gguf",
        gguf_sha256=hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        gguf_bytes=gguf_path.stat().st_size,
        converted_bytes=1 << 20,
    )


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def tiny_entry(tiny_gguf: Path) -> CatalogueModel:
    return entry_for(tiny_gguf)


@pytest.fixture(scope="session")
def tiny_writer() -> Callable[..., None]:
    return write_tiny_gguf
