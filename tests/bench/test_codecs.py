"""The codecs' report over a toy model: what is exact changes nothing, and fewer bits change more."""

from __future__ import annotations

from pathlib import Path

from kvos.bench import bench_codecs, render_codecs
from kvos.config import KvosConfig
from kvos.testing.models import toy_model, toy_tokenizer


def test_exact_codecs_change_nothing_and_fewer_bits_more(tmp_path: Path) -> None:
    config = KvosConfig(home=tmp_path, dtype="fp32", cache_bytes=8 << 20, block_size=8)
    toy = toy_model()
    toy.save_pretrained(tmp_path / "toy")
    toy_tokenizer().save_pretrained(tmp_path / "toy")
    report = bench_codecs(str(tmp_path / "toy"), tokens=60, texts=2, config=config)
    raw, lossless, int8, int4 = report.rows
    assert report.tokens == 2 * 56  # whole blocks of 8
    assert raw.bytes_per_token == report.bytes_per_token
    for row in (raw, lossless):
        assert (row.kv_error, row.same_tokens) == (0, report.reply_tokens)
        assert row.logit_error < 1e-3 * report.logit_spread
    assert 0 < int8.kv_error < 0.02 < int4.kv_error < 0.2
    assert int8.logit_error < int4.logit_error
    assert int4.bytes_per_token < int8.bytes_per_token < lossless.bytes_per_token
    assert len(render_codecs(report).rows) == 4
