"""Faults of spans, forks of sessions, saved files, and the loop that batches, with a running model to show them."""

from __future__ import annotations

from mutation.faults import PlantedFault

__all__ = ["SESSION_FAULTS"]

MACHINE = ("tests/serving/test_session_machine.py",)
BATCHING = ("tests/serving/test_core_batching.py",)
FAILURES = ("tests/serving/test_core_failures.py",)
CONVERSATION = ("tests/sessions/test_conversation.py",)
RENDERING = ("tests/sessions/test_rendering.py",)
MAPS = ("tests/sessions/test_maps.py",)
SAVE_LOAD = ("tests/runtime/test_save_load.py",)
DAMAGE = ("tests/runtime/test_session_file_damage.py",)

SEEN_BY_THE_MODEL = (
    PlantedFault(
        "a fork does not retain its blocks, and a real model reads what others wrote there",
        "sequences/sequence.py",
        "        self._manager.allocator.retain(self._table.view())\n",
        "",
        MACHINE,
    ),
    PlantedFault(
        "a shared tail is written in place, although the check before a write is blind, too",
        "storage/allocator.py",
        "(self._ref_count[ids] == 1) & (self._busy",
        "(self._ref_count[ids] >= 1) & (self._busy",
        BATCHING,
    ),
    PlantedFault(
        "the copy of a shared tail misses its last slot, which the model reads",
        "sequences/sequence.py",
        "offsets = np.arange(self._num_computed % size, dtype=np.int64)",
        "offsets = np.arange(self._num_computed % size - 1, dtype=np.int64)",
        MACHINE,
    ),
    PlantedFault(
        "positions start anew with each chunk, and RoPE sees it",
        "sequences/sequence.py",
        "return np.arange(start, self.num_tokens if end is None else end, dtype=np.int64)",
        "return np.arange((self.num_tokens if end is None else end) - start, dtype=np.int64)",
        MACHINE,
    ),
    PlantedFault(
        "slots of a chunk lie one further inside their blocks",
        "sequences/sequence.py",
        "* size + index % size\n",
        "* size + (index + 1) % size\n",
        MACHINE,
    ),
    PlantedFault(
        "truncate leaves the addresses of other tokens, and nobody finds the new ones",
        "sequences/sequence.py",
        "        del self._addresses[num_tokens // self._manager.block_size :]\n",
        "",
        BATCHING,
    ),
    PlantedFault(
        "tenants share their root",
        "runtime/parts.py",
        "PrefixRoot(model=model, tenant=tenant,",
        'PrefixRoot(model=model, tenant="",',
        MACHINE,
    ),
)

BATCHES = (
    PlantedFault(
        "the rows that are written are counted from the start of the batch",
        "serving/batch.py",
        "write_rows=_joined([first + np.arange(p.start - i.start, i.num_rows) for first, i, p in plans]),",
        "write_rows=_joined([np.arange(p.start - i.start, i.num_rows) for first, i, p in plans]),",
        BATCHING,
    ),
    PlantedFault(
        "a chunk sees the whole prompt of which it is a part",
        "serving/batch.py",
        "context_lengths=np.array([item.end for item in scheduled], np.int64)",
        "context_lengths=np.array([len(s.block_table()) * s.block_size for s in sequences], np.int64)",
        MACHINE,
    ),
    PlantedFault(
        "each reply gets its neighbour's logits",
        "serving/core.py",
        "                rows.append(mine.stop - 1)\n",
        "                rows.append(mine.stop - 1 if not rows else mine.stop - 2)\n",
        BATCHING,
    ),
    PlantedFault(
        "known logits are used for other tokens than those they stood behind",
        "serving/known_logits.py",
        "return known[1] if known is not None and known[0] == sequence.revision else None",
        "return known[1] if known is not None else None",
        MACHINE,
    ),
    PlantedFault(
        "a fork inherits logits that its parent has outgrown",
        "serving/known_logits.py",
        "        logits = self.get(parent)\n",
        "        logits = self._known.get(parent.id, (0, None))[1]\n",
        BATCHING,
    ),
    PlantedFault(
        "scores of what another one published meanwhile are left out",
        "serving/request.py",
        "next_row = min(next_row, max(self.next_row, self.logits_from))",
        "next_row = min(next_row, max(next_row, self.logits_from))",
        BATCHING,
    ),
    PlantedFault(
        "prefill goes before those who decode",
        "serving/core.py",
        "key=lambda request: not request.is_decoding)",
        "key=lambda request: request.is_decoding)",
        BATCHING,
    ),
    PlantedFault(
        "a full hit writes its last token again",
        "serving/core.py",
        "writes = end - max(start, sequence.num_computed)",
        "writes = end - start",
        BATCHING,
    ),
)

ENDINGS = (
    PlantedFault(
        "blocks that were promised to a cancelled request are never given back",
        "serving/core.py",
        "            self.manager.cancel(request.reservation)\n",
        "",
        FAILURES,
    ),
    PlantedFault(
        "a failed step counts as computed",
        "serving/core.py",
        "item.request.session.sequence.abandon_write(item.plan)",
        "item.request.session.sequence.complete_write(item.plan)",
        FAILURES,
    ),
    PlantedFault(
        "a refused reply leaves its session busy",
        "serving/core.py",
        "        except BaseException:\n            undo()\n            raise\n        request.lost",
        "        except BaseException:\n            raise\n        request.lost",
        FAILURES,
    ),
    PlantedFault(
        "the token after a stop string stays in the sequence",
        "serving/core.py",
        "        if not reply.stopped:\n",
        "        if True:\n",
        CONVERSATION,
    ),
    PlantedFault(
        "the beginning of a stop string is shown",
        "serving/reply_text.py",
        "            end -= self._possible_stop(end)\n",
        "            pass\n",
        ("tests/serving/test_reply_text.py",),
    ),
    PlantedFault(
        "half a character is shown",
        "serving/reply_text.py",
        "        self._accept(text[: len(text) - open_marks])\n",
        "        self._accept(text)\n",
        ("tests/serving/test_reply_text.py",),
    ),
    PlantedFault(
        "a seeded reply draws from everybody's random numbers",
        "serving/sampler.py",
        "generator=states[row].generator))",
        "generator=states[0].generator))",
        ("tests/serving/test_sampler.py",),
    ),
    PlantedFault(
        "closing an old handle removes the new session of that name",
        "sessions/registry.py",
        "if self._sessions.get(session.id) is session:",
        "if session.id in self._sessions:",
        ("tests/sessions/test_registry.py",),
    ),
)

SPANS = (
    PlantedFault(
        "a token at a boundary belongs to the message before",
        "sessions/rendering.py",
        "np.searchsorted(starts, end - kept_text))",
        'np.searchsorted(starts, end - kept_text, side="right"))',
        RENDERING,
    ),
    PlantedFault(
        "held tokens are kept although the text before them changed",
        "sessions/rendering.py",
        "        if text.startswith(held.text[: span.text_end]):\n",
        "        if text[span.text_end - 1 : span.text_end] == held.text[span.text_end - 1 : span.text_end]:\n",
        CONVERSATION,
    ),
    PlantedFault(
        "what is appended is tokenised without what stands before it",
        "sessions/rendering.py",
        "context = max((span.text_end for span in held.spans if span.text_end < kept), default=0)",
        "context = kept",
        RENDERING,
    ),
    PlantedFault(
        "what the model generated is tokenised again",
        "sessions/rendering.py",
        "            return span.end, span.text_end\n",
        "            return (span.end, span.text_end) if span.kind is not SpanKind.ASSISTANT else (0, 0)\n",
        CONVERSATION,
    ),
    PlantedFault(
        "a rewritten history is not counted",
        "sessions/session.py",
        "        self._lost_tokens += lost\n",
        "",
        CONVERSATION,
    ),
    PlantedFault(
        "the last slot of a span's part in a block is left out",
        "sessions/session.py",
        "first - i * size, last - i * size))",
        "first - i * size, last - i * size - 1))",
        MAPS,
    ),
    PlantedFault(
        "the reverse map shows tokens that are not computed",
        "sessions/session.py",
        "        last = min(first + size, self.sequence.num_computed)\n",
        "        last = first + size\n",
        MAPS,
    ),
)

FILES = (
    PlantedFault(
        "keys and values are loaded one slot late",
        "runtime/archive.py",
        "rows = torch.from_numpy(np.arange(plan.start, plan.end))",
        "rows = torch.from_numpy(np.maximum(np.arange(plan.start, plan.end) - 1, 0))",
        SAVE_LOAD,
    ),
    PlantedFault(
        "values are not checked on load",
        "runtime/session_file.py",
        "        if name not in tensors or _digest(tensors[name]) != digest:\n",
        '        if name not in tensors or (name[0] != "v" and _digest(tensors[name]) != digest):\n',
        DAMAGE,
    ),
    PlantedFault(
        "the tokens are not checked on load",
        "runtime/session_file.py",
        '"tokens" not in tensors or _digest(tensors["tokens"]) != digests["tokens"]:',
        '"tokens" not in tensors:',
        DAMAGE,
    ),
    PlantedFault(
        "a file is written in place",
        "runtime/session_file.py",
        "        save_file(tensors, unfinished, metadata)\n",
        "        save_file(tensors, path, metadata)\n",
        DAMAGE,
    ),
    PlantedFault(
        "another dtype's keys and values are used",
        "runtime/archive.py",
        "    if saved.numeric_class != numeric_class:\n",
        "    if False:\n",
        SAVE_LOAD,
    ),
)

SESSION_FAULTS = (*SEEN_BY_THE_MODEL, *BATCHES, *ENDINGS, *SPANS, *FILES)
