"""``kvos stats``: counters of kvos processes on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvos.cli.console import human_seconds, output_console
from kvos.cli.help_text import help_text
from kvos.cli.processes import ProcessState, PublishedRuntime, read_published
from kvos.cli.stats_view import stats_view
from kvos.config import KvosConfig

__all__ = ["STATS_HELP", "stats"]

WATCH_SECONDS = 1.0

STATS_HELP = help_text(
    """
    What kvos processes on this machine reuse, compute and hold.

    Shows every process that runs now, or the one that ended last if none does. Each writes its counters every two
    seconds to KVOS_HOME, readable by its user alone; those of ended ones stay for a day.

    Sizes are in binary units (1 KiB = 1024 bytes), speeds in MB/s (1,000,000 bytes a second, of blocks as they lie on
    the device, so a codec's time counts, too). Speeds are averages in which the latest transfers weigh most.
    """,
    ("kvos stats", "once"),
    ("kvos stats --watch", "again and again, until Ctrl-C"),
    ("kvos stats --json", "as data: all processes, ended ones, too"),
)


def stats(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, until Ctrl-C.")] = False,
) -> None:
    """See ``STATS_HELP``."""
    home = KvosConfig.from_env().home
    if as_json and watch:
        raise typer.BadParameter("--json prints once; leave out --watch")
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in read_published(home)], indent=2))
        return
    console = output_console()
    if not watch:
        console.print(_view(read_published(home), home, console))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(_view(read_published(home), home, console), refresh=True)
            time.sleep(WATCH_SECONDS)


def _view(found: Sequence[PublishedRuntime], home: Path, console: Console) -> RenderableType:
    running = [one for one in found if one.state is ProcessState.RUNNING]
    shown = running or list(found[:1])
    if not shown:
        return Text(f"No kvos process has left counters in {home / 'run'}. Try `kvos chat`, and look again.", "none")
    parts: list[RenderableType] = []
    for one in shown:
        parts += [_headline(one), stats_view(one.stats, console.width), Text()]
    return Group(*parts[:-1])


def _headline(one: PublishedRuntime) -> Text:
    now = time.time()
    colour = "green" if one.state is ProcessState.RUNNING else "yellow"
    line = Text(f"process {one.pid}", "bold").append(f" {one.state.value}", f"bold {colour}")
    if one.command:
        line.append(f"  {one.command[:60]}", "none")
    if one.state is not ProcessState.RUNNING:
        line.append("  as it was at its end", "none")
    since = f"opened {human_seconds(now - one.opened)} ago, last change {human_seconds(now - one.updated)} ago"
    return line.append(f"  {since}", "dim")
