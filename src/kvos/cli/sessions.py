"""``kvos sessions``: what was saved. Reads the headers of the files, no model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvos.cli.console import human_bytes, human_seconds, output_console, printable
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.cli.saved import SavedSummary, find_saved, list_saved, saved_name, summary_of
from kvos.config import KvosConfig
from kvos.errors import SessionFileDamagedError

__all__ = ["sessions_app"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it was saved as; or a .kvos file.", show_default=False)]
Tenant = Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Whose sessions.")]
DEFAULT_TENANT = "default"

sessions_app = typer.Typer(
    help=help_text(
        "Saved sessions: list, show, remove.\n\nA saved session holds a conversation and its keys and values, in one "
        "file; whoever loads it goes on without computing the past again.",
        ("kvos sessions list", "what is saved"),
        ("kvos sessions show monday", "who said what, and how many tokens each message takes"),
        ("kvos chat --load monday", "go on with it"),
    ),
    short_help="List, show and remove saved sessions.",
    **HELP_SETTINGS,
)


@sessions_app.command(
    "list", help=help_text("What is saved, newest first.", ("kvos sessions list", "name, model, size, age"))
)
def list_command(tenant: Tenant = DEFAULT_TENANT) -> None:
    """See help."""
    home, console = KvosConfig.from_env().home, output_console()
    files = list_saved(home, tenant)
    if not files:
        console.print(f"No sessions are saved in {home}. In kvos chat, /save NAME keeps one.", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NAME", "MODEL", "DTYPE", "MESSAGES", "TOKENS", "COMPUTED", "SIZE", "SAVED"):
        table.add_column(column, justify="right" if column in ("MESSAGES", "TOKENS", "COMPUTED", "SIZE") else "left")
    for path in files:
        table.add_row(*_row(path))
    console.print(table)


def _row(path: Path) -> tuple[Text | str, ...]:
    try:
        found = summary_of(path)
    except SessionFileDamagedError:
        return (Text(saved_name(path)), Text("damaged; `kvos sessions show` says more", "red"))
    numbers = (str(len(found.messages)), f"{found.tokens:,}", f"{found.computed:,}", human_bytes(found.size))
    return (Text(found.name), Text(found.model), found.dtype, *numbers, _age(found))


@sessions_app.command(
    help=help_text(
        "A saved session's messages with their tokens.",
        ("kvos sessions show monday", "one that was saved by name"),
        ("kvos sessions show ./handover.kvos --full", "a file, with every message whole"),
    )
)
def show(
    name: Name,
    full: Annotated[bool, typer.Option("--full", help="Whole messages, not their beginnings.")] = False,
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """See help."""
    found = summary_of(find_saved(name, KvosConfig.from_env().home, tenant))
    console = output_console()
    console.print(Text(found.name, "bold").append(f"  {found.model} in {found.dtype}, saved {_age(found)}", "none"))
    console.print(Text(f"{found.path}, {human_bytes(found.size)}", "dim"), soft_wrap=True)
    ready = f"{found.computed:,} of {found.tokens:,} tokens have keys and values"
    console.print(Text(f"{len(found.messages)} messages, {ready}; the rest is computed when it is needed", "dim"))
    _print_messages(console, found, full)


def _print_messages(console: Console, found: SavedSummary, full: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ROLE", no_wrap=True)
    table.add_column("TOKENS", justify="right", no_wrap=True)
    table.add_column("TEXT", overflow="fold")
    roles = [m.role if m.kind == m.role else f"{m.role} ({m.kind})" for m in found.messages]
    # A column that may not wrap would take its room from the others, so a line that is too long is cut here.
    room = console.width - max(map(len, ["ROLE", *roles])) - len("TOKENS") - 8
    for role, message in zip(roles, found.messages, strict=True):
        text = Text(printable(message.text))
        if not full:
            text = Text(" ".join(text.plain.split()))
            text.truncate(max(10, room), overflow="ellipsis")
        table.add_row(role, f"{message.tokens:,}", text)
    console.print(table)


@sessions_app.command(
    help=help_text("Delete a saved session's file.", ("kvos sessions remove monday", "cannot be undone"))
)
def remove(name: Name, tenant: Tenant = DEFAULT_TENANT) -> None:
    """See help."""
    path = find_saved(name, KvosConfig.from_env().home, tenant)
    path.unlink()
    output_console().print(Text(f"{saved_name(path)} is removed ({path})"), soft_wrap=True)


def _age(found: SavedSummary) -> str:
    return f"{human_seconds(max(0.0, time.time() - found.saved_at))} ago"
