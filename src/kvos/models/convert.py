"""From a GGUF file to the files that Transformers loads: safetensors in float32, config and tokenizer.

Only what was tested against the library's own loading: the ``llama`` architecture with a byte-level BPE of a known
pre-tokenizer. Anything else is refused by name. The format is described in ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from kvos.errors import UnsupportedModelError
from kvos.models.progress import Progress
from kvos.models.store import WEIGHTS_NAME

__all__ = ["convert_gguf"]

_WHOLE_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_CONTROL_TOKEN = 3


@dataclass(frozen=True, slots=True)
class _Gguf:
    """An open GGUF file, and its metadata by key."""

    path: Path
    reader: gguf.GGUFReader

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"{self.path.name} has no {key!r}; kvos can't convert it")
        return value

    def expect(self, key: str, allowed: tuple[str, ...]) -> None:
        value = self.get(key)
        if value not in allowed:
            raise UnsupportedModelError(f"{self.path.name} has {key} = {value!r}; kvos converts {', '.join(allowed)}")


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write the converted model into ``folder``, which exists and is empty.

    Values are stored as they dequantise, in float32. Tied output weights aren't stored twice. It takes about 10 s
    and 0.6 GB of memory for the default model; half the time goes into reading the vocabulary.

    Raises:
        UnsupportedModelError: another architecture, tokenizer or feature than those tested.
    """
    progress.begin(f"Reading {path.name}", None)
    source = _Gguf(path, gguf.GGUFReader(path))
    source.expect("general.architecture", ("llama",))
    source.expect("tokenizer.ggml.model", ("gpt2",))
    source.expect("tokenizer.ggml.pre", ("smollm",))
    config = _config(source)
    progress.begin("Converting weights", len(source.reader.tensors))
    tensors = _tensors(source, config, progress)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    _tokenizer(source, config).save_pretrained(folder)
    progress.begin("Writing weights", None)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / WEIGHTS_NAME)  # the library makes it private to the user
    progress.end()


def _config(source: _Gguf) -> LlamaConfig:
    heads = source.need("llama.attention.head_count")
    hidden = source.need("llama.embedding_length")
    head_dim = source.get("llama.rope.dimension_count", hidden // heads)
    for feature in ("llama.rope.scaling.type", "llama.expert_count", "llama.attention.key_length"):
        value = source.get(feature)
        if value not in (None, "none", 0, head_dim):
            raise UnsupportedModelError(f"{source.path.name} has {feature} = {value!r}; kvos can't convert that")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(source.need("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=source.need("llama.feed_forward_length"),
        num_hidden_layers=source.need("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=source.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=source.need("llama.context_length"),
        rms_norm_eps=source.need("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": source.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in source.reader.tensors),
        bos_token_id=source.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=source.need("tokenizer.ggml.eos_token_id"),
        pad_token_id=source.get("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _tensors(source: _Gguf, config: LlamaConfig, progress: Progress) -> dict[str, npt.NDArray[np.float32]]:
    tensors = {}
    for done, tensor in enumerate(source.reader.tensors):
        progress.update(done)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            values = _interleaved_to_halves(values, config.num_attention_heads)
        elif ".attn_k." in tensor.name:
            values = _interleaved_to_halves(values, config.num_key_value_heads or config.num_attention_heads)
        tensors[_library_name(tensor.name, source.path)] = np.ascontiguousarray(values)
    return tensors


def _library_name(name: str, path: Path) -> str:
    if name in _WHOLE_MODEL_NAMES:
        return _WHOLE_MODEL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedModelError(f"{path.name} has a tensor {name!r}, which kvos can't convert")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _interleaved_to_halves(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of each head: GGUF rotates rows (0, 1), (2, 3), ...; Transformers (0, d/2), (1, d/2 + 1), ..."""
    by_pair = weights.reshape(heads, -1, 2, weights.shape[1])  # [heads, head_dim / 2, 2, hidden]
    return by_pair.swapaxes(1, 2).reshape(weights.shape)


def _tokenizer(source: _Gguf, config: LlamaConfig) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose digits stand alone: what ggml calls ``smollm``."""
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    kinds: list[int] = source.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in source.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    core.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in controls])
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: source.get(f"tokenizer.ggml.{key}_token_id") for role, key in special.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=source.get("tokenizer.chat_template"),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[index] for role, index in ids.items() if index is not None},
    )
