"""A digest of what a model computes: equal for equal weights and settings, on any machine with the same library."""

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
from kvos.models.config_checks import rope_types

__all__ = ["model_identity", "weights_of"]

_CHANGES_NO_RESULT = frozenset(
    {
        "_name_or_path",
        "activation_dropout",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "bos_token_id",
        "classifier_dropout",
        "dropout",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "init_std",
        "initializer_range",
        "label2id",
        "layerdrop",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "task_specific_params",
        "tokenizer_class",
        "transformers_version",
        "use_cache",
    }
)
"""Config entries that say how to use or to train a model, not what it computes. Every other entry counts: one that is
new in a library, or in an architecture, must not go unseen, and one that counts needlessly costs a miss at most."""

_STATE = frozenset(
    {
        "attention_dropout",
        "dropout",
        "gradient_checkpointing",
        "max_seq_len_cached",
        "original_max_seq_len",
        "p",
        "padding_idx",
        "training",
    }
)
"""Numbers of modules that change with their use, or matter for training only."""

_CHUNK_ELEMENTS = 1 << 22
_HASHERS = 4


def model_identity(model: PreTrainedModel) -> str:
    """Two hex digests with a dot between: of every tensor's exact values, and of the config and the modules' numbers.

    Tensors are weights and buffers (RoPE's frequencies are one); numbers are what modules hold beside them (the scale
    of the scores, a norm's epsilon, a window). What code does otherwise, in hooks or other classes, it does not see.
    The first says which model it is (``weights_of``); the second may change with a version of the library, which adds
    entries to configs: then keys and values are computed again.

    Values count, not their storage: weights that were widened without loss (bf16 or fp16 to fp32, fp32 to fp64) keep
    the identity, weights that were rounded are another model. Costs a pass over all weights, about a second per
    gigabyte and core.
    """
    lengths = length_dependent_modules(model)
    moving = {f"{name}.inv_freq" for name, module in model.named_modules() if module in lengths}  # by what ran last
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in moving and buffer.dim() > 0  # single numbers are rounded to the dtype; modules hold them, too
    }
    weights = {**dict(model.named_parameters()), **buffers}  # tied ones once
    facts = json.dumps([_facts(model.config), _numbers(model)], sort_keys=True, default=str)
    digest = hashlib.blake2b(model.config.model_type.encode(), digest_size=32)
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
    return f"{digest.hexdigest()}.{hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}"


def weights_of(identity: str) -> str:
    """The part of a model's identity that stands for its type and its weights."""
    return identity.partition(".")[0]


def _add(digest: Any, label: str, value: Future[bytes]) -> None:
    digest.update(label.encode())
    digest.update(value.result())


def _facts(config: PreTrainedConfig) -> dict[str, Any]:
    everything = config.to_dict()
    facts = {key: _known(value) for key, value in everything.items() if key not in _CHANGES_NO_RESULT}
    if rope_types(config) != {"default"}:
        facts["max_position_embeddings"] = everything.get("max_position_embeddings")
    return {key: value for key, value in facts.items() if value is not None}


def _known(value: Any) -> Any:
    """Without entries that say nothing: a library adds them when it reads a config."""
    if isinstance(value, dict):
        return {str(key): _known(part) for key, part in value.items() if part is not None}
    return value


def _numbers(model: PreTrainedModel) -> dict[str, float]:
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (bool, int, float) and key not in _STATE and not key.startswith("_")
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
