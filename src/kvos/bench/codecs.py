"""What each codec makes of a real model's keys and values: size, speed, and what the lossy ones change.

The lossy ones are judged by what the model says behind keys and values that went through them: how far its logits are
from those behind the exact ones, and how long a greedy reply stays the same. The texts are the longest
of Python's own help pages: prose and code, on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from rich.table import Table

from kvos.config import CODECS, KvosConfig
from kvos.models.load import load_model
from kvos.runtime import DEFAULT_MODEL, Runtime, Session, open_runtime
from kvos.runtime.lower_tiers import make_codec
from kvos.serving import EngineCore
from kvos.storage import export_blocks, import_blocks
from kvos.tiers import Codec, PayloadBytes

__all__ = ["CodecReport", "CodecRow", "bench_codecs", "render_codecs"]

ROUNDS = 5
REPLY_TOKENS = 64
CHARACTERS_PER_TOKEN = 8
"""More than tokens have, so that there is enough."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec.

    Attributes:
        bytes_per_token: encoded; the whole cache of a token has ``CodecReport.bytes_per_token``.
        encode_mb_s, decode_mb_s: of bytes before encoding, medians over rounds; one thread.
        kv_error: root mean square of what changed in keys and values, over that of the values themselves.
        logit_error: largest difference of the next token's logits.
        same_tokens: tokens of a greedy reply before the first that differs, summed over the texts.
    """

    codec: str
    lossless: bool
    bytes_per_token: float
    encode_mb_s: float
    decode_mb_s: float
    kv_error: float
    logit_error: float
    same_tokens: int


@dataclass(frozen=True, slots=True)
class CodecReport:
    """All codecs, over the same blocks.

    Attributes:
        tokens: of all texts together, in whole blocks.
        logit_spread: standard deviation of the exact logits, to read ``logit_error`` by.
        reply_tokens: length of all replies together.
    """

    model: str
    dtype: str
    tokens: int
    bytes_per_token: int
    logit_spread: float
    reply_tokens: int
    rows: tuple[CodecRow, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_codecs(
    model: str = DEFAULT_MODEL,
    *,
    tokens: int = 512,
    texts: int = 4,
    config: KvosConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CodecReport:
    """Measure; takes a minute on two CPU cores.

    Args:
        tokens: length of each text, cut to whole blocks.
        texts: how many.
    """
    config = replace(KvosConfig.from_env() if config is None else config, disk_cache_bytes=0, host_cache_bytes=0)
    progress("loading the model")
    loaded = load_model(model, config=config)
    with open_runtime(loaded.model, tokenizer=loaded.tokenizer, config=config) as runtime:
        prompts = [_prompt(runtime, tokens, number) for number in range(texts)]
        progress("exact replies")
        exact = [_Exact.of(runtime, prompt) for prompt in prompts]
        layout = runtime.inspect(lambda core: core.manager.pool.layout)
        rows = []
        for name in CODECS:
            progress(f"codec {name}")
            rows.append(_row(runtime, name, make_codec(name, layout), exact))
        return CodecReport(
            runtime.model_name,
            str(layout.dtype).removeprefix("torch."),
            sum(len(prompt) for prompt in prompts),
            layout.bytes_per_token,
            float(torch.stack([one.logits for one in exact]).std(1).mean()),
            sum(len(one.reply) for one in exact),
            tuple(rows),
        )


@dataclass(frozen=True, slots=True)
class _Exact:
    """A text without any codec: its blocks' bytes, the next logits, and a greedy reply."""

    prompt: list[int]
    data: PayloadBytes
    logits: torch.Tensor
    reply: list[int]

    @classmethod
    def of(cls, runtime: Runtime, prompt: list[int]) -> _Exact:
        with closing(runtime.session()) as session:
            session.append_tokens(prompt)
            session.prefill()
            data = runtime.inspect(lambda core: export_blocks(core.manager.pool, _table(core, session)))
            logits, reply = _goes_on(session)
        return cls(prompt, data, logits, reply)


def _row(runtime: Runtime, name: str, codec: Codec, exact: Sequence[_Exact]) -> CodecRow:
    data = np.concatenate([one.data for one in exact])
    encode_s, decode_s = [], []
    out = np.empty_like(data)
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        encoded = codec.encode(data)
        encode_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        codec.decode(encoded, out)
        decode_s.append(time.perf_counter() - begun)
    changed = [_behind(runtime, one, codec) for one in exact]
    dtype = runtime.inspect(lambda core: core.manager.pool.layout.dtype)
    was, now = (torch.from_numpy(side).view(dtype).double() for side in (data, out))
    return CodecRow(
        name,
        codec.lossless,
        sum(map(len, encoded)) / sum(len(one.prompt) for one in exact),
        data.nbytes / float(np.median(encode_s)) / 1e6,
        data.nbytes / float(np.median(decode_s)) / 1e6,
        float((was - now).square().mean().sqrt() / was.square().mean().sqrt()),
        max(float((logits - one.logits).abs().max()) for one, (logits, _) in zip(exact, changed, strict=True)),
        sum(_common(reply, one.reply) for one, (_, reply) in zip(exact, changed, strict=True)),
    )


def _behind(runtime: Runtime, exact: _Exact, codec: Codec) -> tuple[torch.Tensor, list[int]]:
    """Logits and reply behind blocks whose content went through ``codec``."""
    out = np.empty_like(exact.data)
    codec.decode(codec.encode(exact.data), out)
    # A tenant of its own, so that no exact block is shared, and this content with nobody.
    with closing(runtime.session(tenant=f"codec {codec.name}")) as session:
        session.append_tokens(exact.prompt)
        session.prefill()
        runtime.inspect(lambda core: import_blocks(core.manager.pool, _table(core, session), out))
        return _goes_on(session)


def _goes_on(session: Session) -> tuple[torch.Tensor, list[int]]:
    """Logits ``[vocab]`` and the greedy reply behind one more token, which attends to everything before it."""
    logits = session.score(session.tokens[:1])[-1]
    reply = session.generate(max_tokens=REPLY_TOKENS, ignore_eos=True).result()
    return logits, list(reply.tokens)


def _table(core: EngineCore, session: Session) -> Any:
    return core.sessions.get(session.name).sequence.block_table().copy()


def _prompt(runtime: Runtime, tokens: int, number: int) -> list[int]:
    size = runtime.config.block_size
    whole = max(size, min(tokens, runtime.max_context_tokens // 2) // size * size)
    name = sorted(topics, key=lambda name: len(topics[name]))[-1 - number % len(topics)]
    ids = runtime.tokenizer(topics[name][: CHARACTERS_PER_TOKEN * whole], add_special_tokens=False)["input_ids"]
    return [int(ids[i % len(ids)]) for i in range(whole)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def render_codecs(report: CodecReport) -> Table:
    """The report for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("CODEC", "SIZE", "ENCODES", "DECODES", "KV ERROR", "LOGITS", "SAME REPLY"):
        table.add_column(name, justify="left" if name == "CODEC" else "right")
    for row in report.rows:
        table.add_row(
            row.codec,
            f"{row.bytes_per_token / report.bytes_per_token:.1%}",
            f"{row.encode_mb_s:,.0f} MB/s",
            f"{row.decode_mb_s:,.0f} MB/s",
            f"{row.kv_error:.2%}" if not row.lossless else "0",
            f"{row.logit_error:.3f}",
            f"{row.same_tokens} of {report.reply_tokens}",
        )
    table.caption = (
        f"{report.model}, {report.dtype}, {report.tokens:,} tokens; logits have a spread of {report.logit_spread:.2f}"
    )
    return table
