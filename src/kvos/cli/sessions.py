"""``kvos sessions``: what was saved and what was hibernated. Reads the headers of the files, no model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvos.cli.console import counted, error_console, human_bytes, human_seconds, output_console, printable, working
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.cli.saved import Kept, SavedSummary, SessionPlace, find_session, list_sessions, summary_of
from kvos.config import KvosConfig, tenant_folder_name
from kvos.errors import InvalidInputError, SessionExistsError, SessionFileDamagedError, SessionFileMismatchError

__all__ = ["sessions_app"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is kept as; or a .kvos file.", show_default=False)]
Tenant = Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Whose sessions.")]
Kind = Annotated[Kept | None, typer.Option("--kind", help="Only these; needed if a name is both.", show_default=False)]
DEFAULT_TENANT = "default"

sessions_app = typer.Typer(
    help=help_text(
        """
        Sessions that are kept: list, show, save to a file, load from one, drop.

        A [bold]saved[/bold] session is one file with its conversation and its keys and values; whoever loads it goes on
        without computing the past again. A [bold]hibernated[/bold] one is a conversation whose keys and values are in
        the disk cache (kvos cache); what is no longer there is computed again.
        """,
        ("kvos sessions list", "what is kept"),
        ("kvos sessions show monday", "who said what, and how many tokens each message takes"),
        ("kvos chat --load monday", "go on with a saved one"),
        ("kvos chat --resume main", "go on with a hibernated one"),
    ),
    short_help="List, show, save, load and drop kept sessions.",
    **HELP_SETTINGS,
)


@sessions_app.command(
    "list",
    help=help_text(
        "What is kept, newest first. COMPUTED counts the tokens whose keys and values are in the file; those of a "
        "hibernated session are in the disk cache.",
        ("kvos sessions list", "name, kind, model, size, age"),
        ("kvos sessions list --kind hibernated", "only what was hibernated"),
    ),
)
def list_command(tenant: Tenant = DEFAULT_TENANT, kind: Kind = None) -> None:
    """See help."""
    home, console = KvosConfig.from_env().home, output_console()
    places = list_sessions(home, tenant, kind)
    if not places:
        how = "In kvos chat, /save NAME and /hibernate keep one."
        console.print(f"No {kind or 'saved or hibernated'} sessions are in {home}. {how}", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NAME", "KIND", "MODEL", "DTYPE", "MESSAGES", "TOKENS", "COMPUTED", "SIZE", "KEPT"):
        table.add_column(column, justify="right" if column in ("MESSAGES", "TOKENS", "COMPUTED", "SIZE") else "left")
    for place in places:
        table.add_row(*_row(place))
    console.print(table)


def _row(place: SessionPlace) -> tuple[Text | str, ...]:
    try:
        found = summary_of(place)
    except SessionFileDamagedError:
        return Text(place.name), place.kind.value, Text("damaged; `kvos sessions show` says more", "red")
    computed = f"{found.computed:,}" if found.kind is Kept.SAVED else "in cache"
    numbers = (str(len(found.messages)), f"{found.tokens:,}", computed, human_bytes(found.size))
    return Text(found.name), found.kind.value, Text(found.model), found.dtype, *numbers, _age(found)


@sessions_app.command(
    help=help_text(
        "A kept session's messages with their tokens.",
        ("kvos sessions show monday", "one that was saved or hibernated by name"),
        ("kvos sessions show ./handover.kvos --full", "a file, with every message whole"),
    )
)
def show(
    name: Name,
    full: Annotated[bool, typer.Option("--full", help="Whole messages, not their beginnings.")] = False,
    tenant: Tenant = DEFAULT_TENANT,
    kind: Kind = None,
) -> None:
    """See help."""
    found = summary_of(find_session(name, KvosConfig.from_env().home, tenant, kind))
    console = output_console()
    what = f"  {found.model} in {found.dtype}, {found.kind} {_age(found)}"
    console.print(Text(found.name, "bold").append(what, "none"))
    console.print(Text(f"{found.path}, {human_bytes(found.size)}", "dim"), soft_wrap=True)
    if found.kind is Kept.SAVED:
        ready = f"{found.computed:,} of {found.tokens:,} tokens have keys and values; the rest is computed when needed"
    else:
        ready = f"{counted(found.tokens, 'token')}; what the disk cache does not have of them is computed when needed"
    console.print(Text(f"{counted(len(found.messages), 'message')}, {ready}", "dim"), soft_wrap=True)
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
    help=help_text(
        """
        Write a kept session to a file that you can take elsewhere; it stays kept, too. Every byte is checked.

        A hibernated session's file holds its messages and tokens, and whoever loads it computes them. To take keys and
        values along, resume it and save it from there.
        """,
        ("kvos sessions save monday handover.kvos", "go on with it there: kvos chat --load ./handover.kvos"),
    )
)
def save(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Must not exist yet.", show_default=False)],
    tenant: Tenant = DEFAULT_TENANT,
    kind: Kind = None,
) -> None:
    """See help."""
    place = find_session(name, KvosConfig.from_env().home, tenant, kind)
    if file.exists() or file.is_symlink():
        raise InvalidInputError(f"{file} exists already; choose another name, or remove it first")
    if not file.absolute().parent.is_dir():
        raise InvalidInputError(f"there is no folder {file.absolute().parent} to save into")
    with working("Checking ..."):
        from kvos.runtime.session_file import read_session, write_session

        session = read_session(place.path)
        write_session(file, session)
    _warn(session.kv_problem)
    output_console().print(Text(f"{place.name} is saved to {file}, {human_bytes(file.stat().st_size)}"), soft_wrap=True)


@sessions_app.command(
    help=help_text(
        """
        Take a session's file in, to be found by its name. Every byte is checked.

        Load only files that you trust as much as your own prompts.
        """,
        ("kvos sessions load handover.kvos", "then: kvos chat --load handover"),
        ("kvos sessions load handover.kvos --as monday", "under another name"),
    )
)
def load(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, show_default=False)],
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="By default the file's.", show_default=False)
    ] = None,
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """See help."""
    home, wish = KvosConfig.from_env().home, file.stem if name is None else name
    if any(one.name == wish for one in list_sessions(home, tenant, Kept.SAVED)):
        raise SessionExistsError(f"a session is saved as {wish!r} already; choose another name with --as, or drop it")
    with working("Checking ..."):
        from kvos.runtime.session_file import FileSessionStore, read_session

        session = read_session(file)
        if session.manifest.tenant != tenant:
            raise SessionFileMismatchError(
                f"{file} belongs to tenant {session.manifest.tenant!r}, and this load is for {tenant!r}; if that is "
                f"meant, load it with --tenant {session.manifest.tenant}"
            )
        FileSessionStore(home / "sessions" / tenant_folder_name(tenant)).put(wish, session)
    _warn(session.kv_problem)
    output_console().print(Text(f"{wish} is saved; `kvos chat --load {wish}` goes on with it"), soft_wrap=True)


def _warn(problem: str | None) -> None:
    if problem is not None:
        error_console().print(Text(f"{problem}: they are left out, and computed again when needed", "yellow"))


@sessions_app.command(
    help=help_text(
        "Delete a kept session. The blocks of a hibernated one stay in the disk cache as long as there is room.",
        ("kvos sessions drop monday", "cannot be undone"),
        ("kvos sessions drop main --kind hibernated", "if a saved one has the same name"),
    )
)
def drop(name: Name, tenant: Tenant = DEFAULT_TENANT, kind: Kind = None) -> None:
    """See help."""
    place = find_session(name, KvosConfig.from_env().home, tenant, kind)
    place.path.unlink()
    output_console().print(Text(f"the {place.kind} session {place.name} is gone ({place.path})"), soft_wrap=True)


def _age(found: SavedSummary) -> str:
    return f"{human_seconds(max(0.0, time.time() - found.saved_at))} ago"
