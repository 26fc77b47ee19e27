"""Faults of what an architecture needs: windows, caps, sinks, declared lengths, bits."""

from __future__ import annotations

from mutation.faults import PlantedFault

__all__ = ["MODEL_FAULTS"]

AGREEMENT = "tests/architectures/test_agreement.py::test_a_prompt_in_one_piece_or_in_chunks"
DECODES = "tests/architectures/test_agreement.py::test_ragged_decodes_beside_a_prefill"
LENGTHS = ("tests/architectures/test_declared_length.py",)
BITS = ("tests/architectures/test_deterministic.py",)

MODEL_FAULTS = (
    PlantedFault(
        "a chunk's window is one token too wide",
        "engine/plan.py",
        "            hidden |= keys <= place - window\n",
        "            hidden |= keys < place - window\n",
        (f"{AGREEMENT}[fp64-mistral-33]",),
    ),
    PlantedFault(
        "a decode's window is one token too narrow",
        "engine/plan.py",
        "np.minimum(batch.context_lengths, window)",
        "np.minimum(batch.context_lengths, window - 1)",
        (f"{DECODES}[fp64-mistral]",),
    ),
    PlantedFault(
        "a chunk reads the context from one token too far on",
        "engine/plan.py",
        "        index = SlotIndex(pool, slots[first_seen:])\n",
        "        index = SlotIndex(pool, np.roll(slots, -1)[first_seen:])\n",
        (f"{AGREEMENT}[fp64-qwen2-16]",),
    ),
    PlantedFault(
        "the soft cap comes behind the mask",
        "engine/scores.py",
        "        scores = softcap * torch.tanh(scores / softcap)\n",
        "        scores = scores.clamp(-softcap, softcap)\n",
        (f"{AGREEMENT}[fp64-gemma2-16]",),
    ),
    PlantedFault(
        "sinks take no part in the softmax",
        "engine/scores.py",
        "    if sinks is None:\n        weights",
        "    if True:\n        weights",
        (f"{AGREEMENT}[fp64-gpt_oss-16]",),
    ),
    PlantedFault(
        "sessions of other declared lengths share blocks",
        "runtime/parts.py",
        "        if positions:\n",
        "        if False:\n",
        LENGTHS,
    ),
    PlantedFault(
        "all rows of a batch have the first sequence's declared length",
        "engine/transformers_engine.py",
        "    return np.repeat(lengths, np.diff(batch.query_starts))\n",
        "    return np.repeat(lengths[:1], batch.num_rows)\n",
        LENGTHS,
    ),
    PlantedFault(
        "the frequencies that ran last are part of a model's identity",
        "engine/identity.py",
        " if name not in moving}",
        "}",
        LENGTHS,
    ),
    PlantedFault(
        "batches are not filled up in deterministic mode",
        "engine/transformers_engine.py",
        "            batch = padded(batch)\n",
        "            pass\n",
        BITS,
    ),
    PlantedFault(
        "rows of a chunk share an attention call in deterministic mode",
        "engine/transformers_engine.py",
        "row_by_row=deterministic)",
        "row_by_row=False)",
        BITS,
    ),
    PlantedFault(
        "keys that were computed without promise of bits are used where bits are promised",
        "runtime/parts.py",
        "        if self.engine.arithmetic:\n",
        "        if False:\n",
        BITS,
    ),
)
