"""``kvos cache``: the disk cache, looked after without a model."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvos.cli.bars import share_bar
from kvos.cli.cache_folders import CacheFolder, chosen_folders
from kvos.cli.console import counted, human_bytes, human_seconds, output_console
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.config import KvosConfig
from kvos.errors import InvalidConfigError
from kvos.models.progress import BarProgress
from kvos.tiers.disk.upkeep import Damage, FolderUpkeep, locked_folder

__all__ = ["cache_app"]

DAMAGED = 1
"""Exit code of ``verify`` when a block is not what was written."""

MOST_LISTED = 50
"""Damaged blocks that are named one by one."""

Which = Annotated[
    str | None,
    typer.Argument(metavar="[WHICH]", help="A model's name or a folder's beginning; all without.", show_default=False),
]

cache_app = typer.Typer(
    help=help_text(
        """
        The blocks on disk: what is there, is it whole, give room back.

        Blocks of finished turns are kept in KVOS_HOME/blocks, so that sessions come back after they left the device,
        also in another process; one folder for each shape of blocks, together within KVOS_DISK_CACHE_BYTES (4 GiB; 0
        switches the disk cache off). All of it can be computed again. No model is loaded here.
        """,
        ("kvos cache", "what is there; also while kvos runs"),
        ("kvos cache verify", "read every block, name damaged ones"),
        ("kvos cache collect", "give back the room of dropped blocks"),
        ("kvos cache clear smollm2-135m", "forget one model's blocks"),
    ),
    short_help="Show, verify, collect and clear the blocks on disk.",
    invoke_without_command=True,
    **{**HELP_SETTINGS, "no_args_is_help": False},
)


@cache_app.callback()
def bare(context: typer.Context) -> None:
    """Without a subcommand: show."""
    if context.invoked_subcommand is None:
        show()


@cache_app.command(
    help=help_text(
        """
        What the disk cache holds: size, blocks, whose they are, how old, how often they were used.

        Only reads, and works while a process uses the cache; what that did in its last moments may be missing. HITS are
        loads of the blocks that are there now, over all processes.
        """,
        ("kvos cache show", "everything"),
        ("kvos cache show --json", "as data; bytes, and seconds since the epoch"),
    )
)
def show(
    which: Which = None, as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False
) -> None:
    """See help."""
    config, console = KvosConfig.from_env(), output_console()
    folders = chosen_folders(which, config.home)
    if as_json:
        data = {"capacity_bytes": config.disk_cache_bytes, "folders": [one.as_dict() for one in folders]}
        typer.echo(json.dumps(data, indent=2))
        return
    place = config.home / "blocks"
    limit = f"at most {human_bytes(config.disk_cache_bytes)}" if config.disk_cache_bytes else "switched off"
    if not folders:
        console.print(f"No blocks are kept in {place} ({limit}). Sessions with a name put them there.", soft_wrap=True)
        return
    total = human_bytes(sum(one.survey.used_bytes for one in folders))
    console.print(f"{place}: {total} in {counted(len(folders), 'folder')}; {limit}", soft_wrap=True)
    for one in folders:
        console.print()
        _print_folder(console, one, config.disk_cache_bytes)


def _print_folder(console: Console, one: CacheFolder, capacity: int) -> None:
    found, about, now = one.survey, one.about, time.time()
    head = Text(one.name, "bold").append(f"  {one.title}", "none")
    if about is not None:
        head.append(f", {about.layers} layers, {about.block_size} tokens a block, codec {about.codec}")
    console.print(head, soft_wrap=True)
    share = found.used_bytes / capacity if capacity else 1.0
    line = share_bar(share, console.width)
    line.append(f" {share:.1%}, " if capacity else " ", "bold")
    line.append(f"{human_bytes(found.used_bytes)} in {counted(found.blocks, 'block')}")
    if about is not None:
        line.append(f" ({found.blocks * about.block_size:,} tokens)")
    console.print(line.append(f", {counted(found.packs, 'file')}"), soft_wrap=True)
    if found.oldest is not None and found.newest is not None:
        ages = f"oldest written {human_seconds(max(0, now - found.oldest))} ago, newest "
        ages += f"{human_seconds(max(0, now - found.newest))} ago"
        console.print(f"{ages}; {counted(found.hits, 'hit')} on {counted(found.blocks_hit, 'block')}", soft_wrap=True)
    if found.dead_bytes:
        console.print(f"{human_bytes(found.dead_bytes)} belong to dropped blocks; `kvos cache collect` gives them back")
    if found.lost_blocks:
        console.print(f"{counted(found.lost_blocks, 'block')} in files that are missing or too short", style="yellow")
    if found.problem:
        text = f"the catalog cannot be read ({found.problem}); whoever opens it next, as `kvos cache verify` does, "
        console.print(Text(text + "rebuilds it from the files", "yellow"), soft_wrap=True)
    if one.opened_by is not None:
        command = f", {one.opened_by_command[:60]}" if one.opened_by_command else ""
        console.print(Text(f"opened by process {one.opened_by}, which runs{command}", "dim"), soft_wrap=True)


@cache_app.command(
    help=help_text(
        """
        Read every block, and compare it with its checksum. Damaged ones are named and dropped.

        A block that was dropped is computed again when it is wanted; nothing else is lost. Exit code 1 if anything was
        damaged. Ctrl-C leaves the cache as sound as it was. A kvos process that starts meanwhile does without its disk
        cache.
        """,
        ("kvos cache verify", "everything; as fast as the disk reads"),
        ("kvos cache verify smollm2-135m", "one model's folders"),
    )
)
def verify(which: Which = None) -> None:
    """See help."""
    folders = chosen_folders(which, KvosConfig.from_env().home)
    console, damaged = output_console(), False
    with _locked(folders):
        for one in folders:
            blocks, found = _verify(one)
            damaged = damaged or bool(found)
            verdict = f"{len(found):,} damaged:" if found else "all of it whole"
            console.print(f"{one.name}  {one.title}: {counted(blocks, 'block')}, {verdict}", soft_wrap=True)
            _print_damages(console, found)
    if not folders:
        console.print("There is nothing on disk to verify.")
    if damaged:
        raise typer.Exit(DAMAGED)


def _verify(one: CacheFolder) -> tuple[int, list[Damage]]:
    progress = BarProgress()
    progress.begin(f"Verifying {one.name}", max(1, one.survey.used_bytes))
    try:
        return FolderUpkeep(one.path).verify(progress.update)
    except sqlite3.Error as error:
        raise OSError(f"the disk cache {one.path} cannot be opened: {error}; `kvos cache clear` empties it") from error
    finally:
        progress.end()


def _print_damages(console: Console, found: Sequence[Damage]) -> None:
    for damage in found[:MOST_LISTED]:
        console.print(Text(f"  {damage.where}: {damage.what}", "red"), soft_wrap=True)
    if len(found) > MOST_LISTED:
        console.print(f"  and {len(found) - MOST_LISTED:,} more")


@cache_app.command(
    help=help_text(
        """
        Give back the room of dropped blocks, and bring the cache within KVOS_DISK_CACHE_BYTES.

        A running process does this by itself when it needs room; this is for when you do. Folders not written for
        longest give room first, and in a folder the least recently used blocks.
        """,
        ("kvos cache collect", "within the limit that is set"),
        ("KVOS_DISK_CACHE_BYTES=1GiB kvos cache collect", "shrink it to 1 GiB, this once"),
    )
)
def collect(which: Which = None) -> None:
    """See help."""
    config, console = KvosConfig.from_env(), output_console()
    if config.disk_cache_bytes == 0:
        raise InvalidConfigError(
            "the disk cache is switched off (KVOS_DISK_CACHE_BYTES=0), so it has no limit to be brought within; "
            "`kvos cache clear` removes what is there"
        )
    folders = chosen_folders(which, config.home)
    with _locked(folders):
        left = config.disk_cache_bytes
        for one in sorted(folders, key=lambda one: one.survey.newest or 0.0, reverse=True):
            try:
                freed, evicted = FolderUpkeep(one.path).collect(left)
            except sqlite3.Error as error:
                raise OSError(f"the disk cache {one.path} cannot be opened: {error}") from error
            left = max(0, left - max(0, one.survey.used_bytes - freed))
            what = f"{human_bytes(freed)} given back, {counted(evicted, 'block')} dropped for the limit"
            console.print(f"{one.name}  {one.title}: {what}", soft_wrap=True)
    if not folders:
        console.print("There is nothing on disk to collect.")


@cache_app.command(
    help=help_text(
        """
        Delete blocks from disk: everything, or one model's. Asks first.

        Sessions stay, saved and hibernated ones, too; a hibernated one computes its past again when it is resumed.
        Models whose blocks have the same shape share a folder, and lose theirs together.
        """,
        ("kvos cache clear", "everything"),
        ("kvos cache clear smollm2-135m --yes", "the folders of one model, without being asked"),
    )
)
def clear(which: Which = None, yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False) -> None:
    """See help."""
    folders = chosen_folders(which, KvosConfig.from_env().home)
    console = output_console()
    if not folders:
        console.print("There is nothing on disk to clear.")
        return
    for one in folders:
        size = f"{human_bytes(one.survey.used_bytes)} in {counted(one.survey.blocks, 'block')}"
        console.print(f"{one.name}  {one.title}: {size}", soft_wrap=True)
    if not yes:
        with _locked(folders):  # who is refused is not asked; and while a person thinks, others may have the cache
            pass
        typer.confirm("Delete them?", abort=True)
    with _locked(folders):
        for one in folders:
            FolderUpkeep(one.path).clear()
    console.print("Cleared.")


@contextmanager
def _locked(folders: Sequence[CacheFolder]) -> Iterator[None]:
    """All of them or none, so that nothing was done where one is refused."""
    with ExitStack() as locks:
        for one in folders:
            locks.enter_context(locked_folder(one.path))
        yield
