"""Faults of what an architecture needs: windows, caps, sinks, declared lengths, bits."""

from __future__ import annotations

from mutation.faults import PlantedFault

__all__ = ["MODEL_FAULTS"]

AGREEMENT = "tests/architectures/test_agreement.py::test_a_prompt_in_one_piece_or_in_chunks"
DECODES = "tests/architectures/test_agreement.py::test_ragged_decodes_beside_a_prefill"
LENGTHS = ("tests/architectures/test_declared_length.py",)
BITS = ("tests/architectures/test_deterministic.py",)

REFUSED = ("tests/architectures/test_refused.py",)
SCRUBBING = ("tests/sequences/test_block_manager.py",)

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
        "the soft cap cuts off instead of bending",
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
        "        if name not in moving and buffer.dim() > 0",
        "        if buffer.dim() > 0",
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
    PlantedFault(
        "activations have one call for all rows in deterministic mode",
        "engine/transformers_engine.py",
        "row_by_row() if deterministic else nullcontext()",
        "nullcontext()",
        BITS,
    ),
    PlantedFault(
        "a mask of another window than the call's goes unseen",
        "engine/attention.py",
        "attention_mask is not None and attention_mask.window != sliding_window",
        "False",
        REFUSED,
    ),
    PlantedFault(
        "a layer may ask for something else than when the model was opened",
        "engine/attention.py",
        "        if not self._layers[layer].agrees(call):\n",
        "        if False:\n",
        REFUSED,
    ),
    PlantedFault(
        "a model with hooks runs the short trial",
        "engine/transformers_engine.py",
        " or is_changed_by_hand(model)\n",
        "\n",
        REFUSED,
    ),
    PlantedFault(
        "other rows of logits than were asked for go unseen",
        "engine/transformers_engine.py",
        "        if output.logits.shape[1] != len(batch.logit_rows):\n",
        "        if False:\n",
        REFUSED,
    ),
    PlantedFault(
        "a soft cap on the logits is no part of a model's identity",
        "engine/identity.py",
        "if key not in _CHANGES_NO_RESULT}",
        'if key not in _CHANGES_NO_RESULT and key != "final_logit_softcapping"}',
        ("tests/engine/test_identity.py",),
    ),
    PlantedFault(
        "a saved session forgets its declared length",
        "runtime/archive.py",
        "is as good.\n        max_tokens=declared if declared != parts.limits.declared or "
        "core.engine.position_class(declared) else",
        "is as good.\n        max_tokens=declared if declared != parts.limits.declared else",
        LENGTHS,
    ),
    PlantedFault(
        "the size of the pool decides on the declared length",
        "runtime/runtime.py",
        "    return SessionLimits(longest, engine.info.vocab_size, declared)\n",
        "    return SessionLimits(longest, engine.info.vocab_size)\n",
        LENGTHS,
    ),
    PlantedFault(
        "blocks whose scrubbing failed stay held",
        "sequences/block_manager.py",
        "            self.allocator.give_back(allocation)\n",
        "",
        SCRUBBING,
    ),
    PlantedFault(
        "blocks whose scrubbing failed count as their new owner's",
        "storage/allocator.py",
        "        self._owner[allocation.to_scrub] = NOBODY\n",
        "",
        SCRUBBING,
    ),
)
