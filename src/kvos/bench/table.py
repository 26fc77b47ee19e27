"""The figures of ``kvos bench decode`` for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from kvos.bench.decode import DecodeReport

__all__ = ["render"]


def render(report: DecodeReport) -> RenderableType:
    """Two tables: decode steps, and prefill."""
    where = f"{report.model}, {report.dtype}, {report.device}, {_threads(report.torch_threads)}"
    where += ", deterministic mode" if report.deterministic else ""
    steps = Table("sequences", "kvos ms", "plain ms", "speed-up", "outside the model", title=f"Decode step ({where})")
    for row in report.steps:
        steps.add_row(
            f"{row.sequences} of {row.tokens} tokens",
            f"{row.kvos_ms:.1f}",
            f"{row.plain_ms:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.overhead:.1%}",
        )
    prefill = Table("prompt", "kvos tokens/s", "plain tokens/s", "speed-up", title="Prefill")
    for prompt in report.prefill:
        prefill.add_row(
            f"{prompt.tokens} tokens",
            f"{prompt.kvos_tokens_per_s:.0f}",
            f"{prompt.plain_tokens_per_s:.0f}",
            f"{prompt.speed_up:.2f}x",
        )
    for table in (steps, prefill):
        for column in table.columns[1:]:
            column.justify = "right"
    note = (
        "Medians; plain Transformers with its own cache took turns with kvos in this run, and a speed-up of 1 means "
        "equally fast. Outside the model: the share of a step that kvos spends on its own bookkeeping and sampling."
    )
    return Group(steps, prefill, note)


def _threads(n: int) -> str:
    return "1 thread" if n == 1 else f"{n} threads"
