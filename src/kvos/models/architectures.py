"""The architectures that were tested, with what each needs, and those that must be refused, with the reason.

The one table behind the checks at load, ``kvos models`` and docs/models.md. Facts only; no I/O, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "ARCHITECTURES",
    "DECLARED_ROPE_TYPES",
    "REFUSED",
    "TESTED_ROPE_TYPES",
    "Architecture",
    "Need",
    "Refused",
    "as_data",
    "as_markdown",
]


class Need(Enum):
    """What an architecture asks of an engine beyond causal attention with RoPE; the value says it for people."""

    SCALING = "its own scale of the scores"
    WINDOW = "sliding windows"
    SOFT_CAP = "a soft cap on the scores"
    SINKS = "attention sinks"
    LEARNED_POSITIONS = "a table of learned positions, which ends"
    PARTIAL_ROPE = "RoPE on a part of each head"
    NO_ROPE_LAYERS = "layers without RoPE"
    SEVERAL_ROPES = "two RoPEs, by layer type"
    EXPERTS = "a mixture of experts"
    LATENT = "keys and values of different sizes, expanded from a latent"
    DECLARED_LENGTH = "the session's declared length, for dynamic and longrope RoPE"
    LOST_KEYWORDS = "keywords that the model drops on their way to attention"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model type of Transformers that agrees with its own eager attention, whatever kvos does with its cache.

    Attributes:
        model_type: as in ``config.json``.
        title: what people call the family.
        needs: beyond causal attention with RoPE.
    """

    model_type: str
    title: str
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A model type that kvos cannot run exactly.

    Attributes:
        has: the feature that kvos lacks, as the error names it.
    """

    model_type: str
    has: str


ARCHITECTURES = {
    one.model_type: one
    for one in (
        Architecture("llama", "Llama, SmolLM2, TinyLlama, Vicuna", (Need.DECLARED_LENGTH,)),
        Architecture("olmo2", "OLMo 2"),
        Architecture("granite", "Granite 3", (Need.SCALING,)),
        Architecture("gpt_neox", "GPT-NeoX, Pythia", (Need.PARTIAL_ROPE,)),
        Architecture("gpt2", "GPT-2", (Need.SCALING, Need.LEARNED_POSITIONS)),
        Architecture("opt", "OPT", (Need.SCALING, Need.LEARNED_POSITIONS)),
        Architecture("mistral", "Mistral", (Need.WINDOW,)),
        Architecture("mixtral", "Mixtral", (Need.WINDOW, Need.EXPERTS)),
        Architecture("qwen2", "Qwen2, Qwen2.5", (Need.WINDOW,)),
        Architecture("qwen3", "Qwen3", (Need.WINDOW,)),
        Architecture("qwen3_moe", "Qwen3-MoE", (Need.WINDOW, Need.EXPERTS)),
        Architecture("phi3", "Phi-3, Phi-4", (Need.WINDOW, Need.DECLARED_LENGTH)),
        Architecture("starcoder2", "StarCoder2", (Need.WINDOW,)),
        Architecture("smollm3", "SmolLM3", (Need.WINDOW, Need.NO_ROPE_LAYERS)),
        Architecture("cohere2", "Command R7B, Command A", (Need.WINDOW, Need.NO_ROPE_LAYERS)),
        Architecture("gemma2", "Gemma 2", (Need.WINDOW, Need.SOFT_CAP, Need.SCALING)),
        Architecture("gemma3_text", "Gemma 3 (text)", (Need.WINDOW, Need.SCALING, Need.SEVERAL_ROPES)),
        Architecture("gpt_oss", "GPT-OSS", (Need.WINDOW, Need.SINKS, Need.EXPERTS)),
        Architecture("stablelm", "StableLM 2", (Need.PARTIAL_ROPE, Need.LOST_KEYWORDS)),
        Architecture("nemotron", "Nemotron, Minitron", (Need.PARTIAL_ROPE, Need.LOST_KEYWORDS)),
        Architecture("deepseek_v3", "DeepSeek-V3", (Need.LATENT, Need.SCALING, Need.EXPERTS)),
    )
}
"""By model type. ``tests/architectures`` runs every row."""

_NO_DISPATCH = "attention code that does not go through AttentionInterface"
_RECURRENT = "recurrent or state-space layers"
_ALIBI = "ALiBi position biases"
_HYBRID = "layers that cache something other than keys and values"

REFUSED = {
    one.model_type: one
    for one in (
        Refused("falcon", _NO_DISPATCH),
        Refused("gpt_neo", _NO_DISPATCH),
        Refused("bloom", _ALIBI),
        Refused("mpt", _ALIBI),
        Refused("mamba", _RECURRENT),
        Refused("mamba2", _RECURRENT),
        Refused("rwkv", _RECURRENT),
        Refused("jamba", _HYBRID),
        Refused("bamba", _HYBRID),
        Refused("lfm2", _HYBRID),
        Refused("qwen3_next", _HYBRID),
        Refused("falcon_h1", _HYBRID),
        Refused("diffllama", "differential attention (two calls a layer)"),
        Refused("llama4_text", "chunked attention"),
        Refused("t5", "encoder-decoder attention"),
        Refused("gemma3", "inputs other than text; its text model is gemma3_text"),
    )
}
"""By model type; what other types lack is found in their config, or by the probe and the self-test at load."""

TESTED_ROPE_TYPES = frozenset({"default", "linear", "yarn", "llama3"})
"""Position schemes where a key depends on its own position alone."""

DECLARED_ROPE_TYPES = frozenset({"dynamic", "longrope"})
"""Those whose frequencies depend on the length of the sequence: kvos takes the length that the session declared."""


def as_data() -> dict[str, list[dict[str, Any]]]:
    """Both tables as plain values."""
    return {
        "tested": [
            {"model_type": one.model_type, "title": one.title, "needs": [need.value for need in one.needs]}
            for one in ARCHITECTURES.values()
        ],
        "refused": [{"model_type": one.model_type, "has": one.has} for one in REFUSED.values()],
    }


def as_markdown() -> str:
    """Both tables, as docs/models.md holds them."""
    lines = ["| type | models | what kvos handles, beyond causal attention |", "|---|---|---|"]
    for one in ARCHITECTURES.values():
        lines.append(f"| `{one.model_type}` | {one.title} | {'; '.join(need.value for need in one.needs)} |")
    lines += ["", "| refused type | because it has |", "|---|---|"]
    lines += [f"| `{one.model_type}` | {one.has} |" for one in REFUSED.values()]
    return "\n".join(lines) + "\n"
