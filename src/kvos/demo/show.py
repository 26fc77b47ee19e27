"""What a person sees: scenes, notes, waiting, tables, the picture of the blocks, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvos.demo.live import LiveReplies, live_replies
from kvos.demo.record import CheckRecord, ColdStart, DemoRecord, GrowthPoint, ReplyRecord, SessionBlocks
from kvos.demo.script import Question
from kvos.demo.text import Pace, seconds, times

__all__ = ["Show"]

BAR_WIDTH = 24


class Show:
    """Prints to ``console``; where that is no terminal, plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def scene(self, title: str, explanation: str) -> None:
        self._console.print()
        self._console.print(Rule(Text(title, style="bold"), align="left", characters=self._cell("─", "-")))
        self._say(explanation, style="dim")

    def note(self, text: str) -> None:
        self._say(text)

    @contextmanager
    def busy(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """Something takes a moment. Yields what takes ``(done, total)``, for those who know how far they are."""
        if not self._console.is_terminal:
            self.note(f"... {label}")
            pace = Pace()
            yield lambda done, total: self.note(f"... {done:,} of {total:,}") if pace.is_due() else None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(BAR_WIDTH), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as progress:
            task = progress.add_task(label, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def replies(self, *questions: Question) -> LiveReplies:
        return live_replies(self._console, questions)

    def blocks(self, tables: Sequence[SessionBlocks], block_size: int) -> None:
        """One row of cells per session, one cell per block."""
        shared, own, partial = self._cell("▓", "="), self._cell("█", "#"), self._cell("▒", "-")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for table in tables:
            cells = Text()
            for number, is_shared in enumerate(table.shared, start=1):
                is_partial = number == len(table.shared) and table.tail_tokens < block_size
                cell = partial if is_partial else shared if is_shared else own
                cells.append(cell, style="green" if is_shared else "yellow")
            grid.add_row(Text(table.session, style="bold"), cells)
            grid.add_row("", Text(_block_numbers(table, block_size), style="dim"))
        self._console.print(grid)
        legend = f"{shared} shared with another session   {own} private   {partial} last block, not yet full"
        self._say(f"One cell is a block of {block_size} tokens: {legend}", style="dim")

    def growth(self, points: Sequence[GrowthPoint]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("history", "with the cache", "without", "faster"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("without, drawn", no_wrap=True)
        longest = max((point.recompute_s for point in points), default=0.0)
        for point in points:
            bar = self._cell("█", "#") * max(1, round(BAR_WIDTH * point.recompute_s / longest))
            table.add_row(
                f"{point.history_tokens:,} tokens",
                seconds(point.decode_s),
                seconds(point.recompute_s),
                times(point.recompute_s, point.decode_s),
                Text(bar, style="red"),
            )
        self._console.print(table)

    def summary(self, record: DemoRecord) -> None:
        """Every reply in one table."""
        self._console.print()
        title = f"All replies: {record.model}, {record.dtype}, {record.device}; the demo took {seconds(record.total_s)}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("reply", no_wrap=True)
        for name in ("prompt", "reused", "computed", "TTFT", "TTFT cold", "faster", "per token"):
            table.add_column(name, justify="right", no_wrap=True)
        cold = {one.of: one for one in (*record.cold, record.resume.cold)}
        for reply in (*record.replies, record.resume.reply):
            table.add_row(*_reply_row(reply, cold.get(reply.label)))
        self._console.print(table)

    def verdict(self, check: CheckRecord) -> None:
        """The one line that counts; red if the answer is no."""
        self._say(_verdict(check), style="bold green" if check.ok else "bold red")

    def parts(self, check: CheckRecord) -> None:
        """One line per session that did not equal its recompute."""
        for part in check.parts:
            if not part.ok:
                self._console.print(
                    f"  {part.label}: {part.different} of {part.tokens} tokens differ, "
                    f"largest logit difference {part.largest_difference:.3g}",
                    style="red",
                    markup=False,
                )

    def _say(self, text: str, style: str = "") -> None:
        """Wrapped in a terminal; elsewhere one line, however long."""
        wrap = not self._console.is_terminal
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)

    def _cell(self, symbol: str, plain: str) -> str:
        return plain if self._console.options.ascii_only else symbol


def _block_numbers(table: SessionBlocks, block_size: int) -> str:
    tail = "" if table.tail_tokens >= block_size else f", the last one holds {table.tail_tokens} of {block_size} tokens"
    return f"{len(table.shared)} blocks: {table.shared_blocks} shared, {table.private_blocks} private{tail}"


def _reply_row(reply: ReplyRecord, cold: ColdStart | None) -> tuple[str, ...]:
    return (
        reply.label,
        f"{reply.prompt_tokens:,}",
        f"{reply.reused_tokens:,}",
        f"{reply.computed_tokens:,}",
        seconds(reply.ttft_s),
        seconds(cold.ttft_s) if cold else "",
        times(cold.ttft_s, reply.ttft_s) if cold else "",
        seconds(reply.tpot_s),
    )


def _verdict(check: CheckRecord) -> str:
    tokens = sum(part.tokens for part in check.parts)
    skipped = sum(part.skipped for part in check.parts)
    different = sum(part.different for part in check.parts)
    answer = "Every reuse equalled a recompute" if check.ok else "NOT every reuse equalled a recompute"
    return (
        f"{answer}: {tokens - skipped - different:,} of {tokens - skipped:,} tokens the same "
        f"({skipped:,} too close to call), largest difference of {check.logits_compared:,} logits "
        f"{check.largest_difference:.2g} (noise floor {check.noise_floor:.2g}, limit {check.limit:.2g})."
    )
