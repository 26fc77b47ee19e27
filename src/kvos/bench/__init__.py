"""Measurements, each beside plain Transformers with its own cache, or beside plain copies, in one run."""

from kvos.bench.codecs import CodecReport, CodecRow, bench_codecs, render_codecs
from kvos.bench.decode import DecodeReport, PrefillRow, StepRow, bench_decode
from kvos.bench.table import render

__all__ = [
    "CodecReport",
    "CodecRow",
    "DecodeReport",
    "PrefillRow",
    "StepRow",
    "bench_codecs",
    "bench_decode",
    "render",
    "render_codecs",
]
