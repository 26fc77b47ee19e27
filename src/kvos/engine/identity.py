"""A digest of what a model computes: equal for equal weights and settings, on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedConfig

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


def model_identity(config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> str:
    """Hex digest (blake2b, 32 bytes) of the config's facts and of every weight's exact values.

    Values count, not their storage: weights that were widened without loss (bf16 or fp16 to fp32, fp32 to fp64) keep
    the identity, weights that were rounded are another model. Costs a pass over all weights, about a second per
    gigabyte and core.

    Args:
        config: of the model.
        weights: by name, tied ones once.
    """
    digest = hashlib.blake2b(json.dumps(_facts(config), sort_keys=True).encode(), digest_size=32)
    names = sorted(weights)
    with ThreadPoolExecutor(thread_name_prefix="kvos-identity") as pool:
        for name, value in zip(names, pool.map(lambda key: _value_digest(weights[key]), names), strict=True):
            digest.update(f"{name}{tuple(weights[name].shape)}".encode())
            digest.update(value)
    return digest.hexdigest()


def _facts(config: PreTrainedConfig) -> dict[str, Any]:
    facts = {name: getattr(config, name, None) for name in _FACTS}
    rope: Any = facts["rope_parameters"] or {}
    facts["rope_parameters"] = {key: value for key, value in rope.items() if value is not None}
    if rope.get("rope_type", "default") != "default":
        facts["max_position_embeddings"] = config.max_position_embeddings
    return facts


def _value_digest(weight: torch.Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for chunk in weight.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        narrow = chunk.to(device="cpu", dtype=torch.float32)
        lossless = chunk.dtype != torch.float64 or bool(torch.equal(narrow.double(), chunk.cpu()))
        exact = narrow if lossless else chunk.cpu()
        digest.update(exact.contiguous().numpy().data)
    return digest.digest()
