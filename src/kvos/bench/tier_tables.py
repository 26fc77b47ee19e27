"""The figures of ``kvos bench tiers``, ``resume`` and ``compaction`` for people, each beside what is to be reached."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from kvos.bench.compaction import CompactionReport
from kvos.bench.resume import READS_ALLOWED, ResumeReport
from kvos.bench.tiers import TiersReport
from kvos.bench.workload import WorkloadRow

__all__ = ["render_compaction", "render_resume", "render_tiers"]


def render_tiers(report: TiersReport) -> RenderableType:
    """Two tables: speeds there and back, and sessions on a small pool."""
    where = f"{report.model}, {report.dtype}, {report.device}, torch threads: {report.torch_threads}"
    moves = _table(f"Blocks there and back, raw ({where})", "tier", "down MB/s", "plain", "up MB/s", "plain", "ratio")
    for move in report.moves:
        moves.add_row(
            f"{move.tier}, {move.megabytes:.0f} MB",
            f"{move.down_mb_s:.0f}",
            f"{move.plain_down_mb_s:.0f}",
            f"{move.up_mb_s:.0f}",
            f"{move.plain_up_mb_s:.0f}",
            f"{move.ratio:.2f} (0.8)",
        )
    loads = _table(
        "Sessions that take turns, with more KV than the pool", "memory", "computed", "wall", "longest added wait"
    )
    for row, most in zip(report.workloads, ((1.05, 1.25), (1.0, 1.05)), strict=False):
        _add_workload(loads, row, *most)
    note = (
        "Medians; both sides took turns in this run, and in brackets is what is to be reached. Plain: one gather or "
        "scatter per layer for host memory; for disk the same files without checksums and index, read with a cold page "
        "cache. Computed: tokens that went through the model, beside those of the other side."
    )
    return Group(moves, loads, note)


def _add_workload(table: Table, row: WorkloadRow, most_computed: float, most_wall: float) -> None:
    table.add_row(
        f"{row.memory}\n[dim]beside {row.other}[/dim]",
        f"{row.computed_tokens:,.0f} of {row.tokens:,}\n{row.computed_ratio:.2f}x (at most {most_computed})",
        f"{row.wall_s:.1f} s\n{row.wall_ratio:.2f}x (at most {most_wall})",
        f"{row.longest_added_wait_s:.2f} s\n[dim]deadline {row.deadline_s:.1f} s[/dim]",
    )


def render_resume(report: ResumeReport) -> RenderableType:
    """One table: times to the first token."""
    where = f"{report.model}, {report.dtype}, {report.device}"
    table = _table(f"First token of a session of {report.tokens:,} tokens ({where})", "session", "ms", "beside resumed")
    for name, seconds in (
        ("resumed from disk in a new process", report.resumed_s),
        ("warm, on the device", report.warm_s),
        ("computed again", report.computed_s),
        (f"allowed: warm + {READS_ALLOWED} x reading", report.allowed_s),
    ):
        table.add_row(name, f"{1000 * seconds:.0f}", f"{seconds / report.resumed_s:.2f}x")
    note = (
        f"Medians of {report.processes} new processes, the model open and the files out of the page cache. "
        f"{report.restored_tokens:,} tokens came back from {report.stored_bytes / 1e6:.1f} MB ({report.codec}), read "
        f"at {report.read_bytes_per_s / 1e6:.0f} MB/s in {1000 * report.read_s:.0f} ms. Beyond a warm turn, resuming "
        f"took {report.excess:.1f} times that (at most {READS_ALLOWED}), and is {report.speed_up:.0f} times as fast as "
        "computing it again (about 30 is expected)."
    )
    return Group(table, note)


def render_compaction(report: CompactionReport) -> RenderableType:
    """One table: decode steps over scattered and compact tables."""
    where = f"{report.model}, {report.dtype}, {report.device}, torch threads: {report.torch_threads}"
    table = _table(
        f"Decode step ({where})", "history", "scattered ms", "compact ms", "attention saved", "moving ms", "pays after"
    )
    for row in report.rows:
        pays = "never" if row.steps_to_pay is None else f"{row.steps_to_pay:.0f} steps"
        table.add_row(
            f"{row.tokens:,} tokens, {row.runs} runs of {row.blocks} blocks",
            f"{row.scattered_ms:.1f}",
            f"{row.compact_ms:.1f}",
            f"{row.attention_gain:.1%}",
            f"{row.compaction_ms:.1f}",
            pays,
        )
    note = (
        "Medians; scattered and compact tables took turns in this run. Attention saved: of the time that a step takes "
        "longer than one behind a few tokens."
    )
    return Group(table, note)


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
