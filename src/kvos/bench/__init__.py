"""Measurements, each beside a yardstick that took turns with it in one run."""

from kvos.bench.codecs import CodecReport, CodecRow, bench_codecs, render_codecs
from kvos.bench.compaction import CompactionReport, CompactionRow, bench_compaction
from kvos.bench.decode import DecodeReport, PrefillRow, StepRow, bench_decode
from kvos.bench.resume import ResumeReport, bench_resume
from kvos.bench.table import render
from kvos.bench.tier_tables import render_compaction, render_resume, render_tiers
from kvos.bench.tiers import TiersReport, bench_tiers
from kvos.bench.workload import Turns

__all__ = [
    "CodecReport",
    "CodecRow",
    "CompactionReport",
    "CompactionRow",
    "DecodeReport",
    "PrefillRow",
    "ResumeReport",
    "StepRow",
    "TiersReport",
    "Turns",
    "bench_codecs",
    "bench_compaction",
    "bench_decode",
    "bench_resume",
    "bench_tiers",
    "render",
    "render_codecs",
    "render_compaction",
    "render_resume",
    "render_tiers",
]
