"""A digest of what a model computes: equal for equal weights and settings, on any machine."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvos.engine.rope import length_dependent_modules

__all__ = ["model_identity"]

_FACTS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rope_parameters",
)
"""Config entries that change results. Names, file formats, token ids and defaults of generation do not."""

_CHUNK_ELEMENTS = 1 << 22
_HASHERS = 4


def model_identity(model: PreTrainedModel) -> str:
    """Hex digest (blake2b, 32 bytes) of the config's facts, the modules' numbers, and every tensor's exact values.

    Tensors are weights and buffers (RoPE's frequencies are one); numbers are what modules hold as floats (the scale of
    the scores, a norm's epsilon). What code does otherwise, in hooks or other classes, it does not see.

    Values count, not their storage: weights that were widened without loss (bf16 or fp16 to fp32, fp32 to fp64) keep
    the identity, weights that were rounded are another model. Costs a pass over all weights, about a second per
    gigabyte and core.
    """
    lengths = length_dependent_modules(model)
    moving = {f"{name}.inv_freq" for name, module in model.named_modules() if module in lengths}  # by what ran last
    buffers = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in moving}
    weights = {**dict(model.named_parameters()), **buffers}  # tied ones once
    facts = json.dumps([_facts(model.config), _numbers(model)], sort_keys=True)
    digest = hashlib.blake2b(facts.encode(), digest_size=32)
    pending: deque[tuple[str, Future[bytes]]] = deque()
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="kvos-identity") as hashers:
        for name in sorted(weights):
            label = f"{name}{tuple(weights[name].shape)}"
            # Only hashing leaves this thread: a thread that runs PyTorch brings an OpenMP team of its own along.
            pending.append((label, hashers.submit(_hash, _exact_chunks(weights[name]))))
            if len(pending) > _HASHERS:
                _add(digest, *pending.popleft())
        for label, value in pending:
            _add(digest, label, value)
    return digest.hexdigest()


def _add(digest: Any, label: str, value: Future[bytes]) -> None:
    digest.update(label.encode())
    digest.update(value.result())


def _facts(config: PreTrainedConfig) -> dict[str, Any]:
    facts = {name: getattr(config, name, None) for name in _FACTS}
    rope: Any = facts["rope_parameters"] or {}
    facts["rope_parameters"] = {key: value for key, value in rope.items() if value is not None}
    if rope.get("rope_type", "default") != "default":
        facts["max_position_embeddings"] = config.max_position_embeddings
    return facts


def _numbers(model: PreTrainedModel) -> dict[str, float]:
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is float
    }


def _exact_chunks(weight: torch.Tensor) -> list[npt.NDArray[Any]]:
    """The values in float32 where that is exact, else in float64; views of the weight where nothing is converted."""
    chunks = []
    for chunk in weight.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        narrow = chunk.to(device="cpu", dtype=torch.float32)
        lossless = chunk.dtype != torch.float64 or bool(torch.equal(narrow.double(), chunk.cpu()))
        chunks.append((narrow if lossless else chunk.cpu()).contiguous().numpy())
    return chunks


def _hash(chunks: list[npt.NDArray[Any]]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for chunk in chunks:
        digest.update(chunk.data)
    return digest.digest()
