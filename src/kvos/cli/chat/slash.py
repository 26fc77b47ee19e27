"""What a line that begins with a slash does."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvos.cli.chat.inspect import show_block, show_blocks
from kvos.cli.chat.state import Chat
from kvos.cli.console import counted
from kvos.cli.saved import file_or_name
from kvos.cli.stats_view import stats_view
from kvos.errors import InvalidInputError

__all__ = ["SLASH_COMMANDS", "SlashCommand", "obey"]

ALIASES = {"exit": "quit", "bye": "quit"}

SNIPPET = 70
"""Characters of a message in a remark."""


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """One command. ``run`` gets the chat and the rest of the line.

    Attributes:
        argument: as help shows it; one that may be left out is in brackets.

    Raises: ``run`` raises KvosError or OSError; the chat goes on.
    """

    name: str
    argument: str
    about: str
    run: Callable[[Chat, str], None]


def obey(chat: Chat, line: str) -> None:
    """Run the command in ``line``.

    Raises:
        InvalidInputError: there is no such command, or its argument is missing.
        KvosError, OSError: the command's own.
    """
    name, _, argument = line[1:].partition(" ")
    name = ALIASES.get(name.lower(), name)
    found = [command for command in SLASH_COMMANDS if command.name == name.lower()]
    if not found:
        near = difflib.get_close_matches(name, [command.name for command in SLASH_COMMANDS], 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        raise InvalidInputError(f"there is no command /{name}; {hint} (a message may begin with //)")
    argument = argument.strip()
    if found[0].argument.isalpha() and not argument:
        raise InvalidInputError(f"/{name} needs an argument: /{name} {found[0].argument}")
    if not found[0].argument and argument:
        raise InvalidInputError(f"/{name} takes no argument, got {argument!r}")
    found[0].run(chat, argument)


def _fork(chat: Chat, name: str) -> None:
    parent = chat.session
    before = chat.runtime.stats().counters
    [child] = parent.fork(1, names=[name] if name else None)
    after, report = chat.runtime.stats().counters, child.report()
    copied = after["blocks_copied"] - before["blocks_copied"]
    chat.session = child
    blocks = f"{len(report.shared_blocks)} of its {counted(len(report.blocks), 'block')} shared, {copied} copied"
    back = f"You are in {child.name} now; /switch {parent.name} goes back."
    chat.note(f"{child.name} has the same past as {parent.name}: {blocks}. {back}")


def _new(chat: Chat, name: str) -> None:
    chat.session = chat.new_session(name or None)
    chat.note(f"{chat.session.name} is empty" + (" but for the system message." if chat.system else "."))


def _switch(chat: Chat, name: str) -> None:
    chat.session = chat.runtime.get(name)
    _recall(chat)


def _close(chat: Chat, name: str) -> None:
    session = chat.runtime.get(name)
    if session.name == chat.session.name:
        raise InvalidInputError(f"you are in {name}; /switch to another session first, or /quit")
    held = session.report()
    session.close()
    chat.note(f"{name} is closed; {counted(held.private_blocks, 'block')} that only it held given back.")


def _sessions(chat: Chat, _: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "SESSION", "FORKED FROM", "MESSAGES", "TOKENS", "BLOCKS", "SHARED"):
        table.add_column(column, justify="right" if column in ("MESSAGES", "TOKENS", "BLOCKS", "SHARED") else "left")
    for report in chat.runtime.sessions():
        here = report.name == chat.session.name
        numbers = (report.messages, report.tokens, len(report.blocks), len(report.shared_blocks))
        texts = (Text(report.name, "green" if here else ""), Text(report.parent or "", "dim"))
        table.add_row("*" if here else "", *texts, *map(str, numbers))
    chat.console.print(table)
    for how, names in (("saved", chat.runtime.saved_sessions()), ("hibernated", chat.runtime.hibernated_sessions())):
        if names:
            chat.note(f"{how}: {', '.join(names)}")


def _save(chat: Chat, name: str) -> None:
    target = file_or_name(name)
    if isinstance(target, Path) and not target.parent.is_dir():
        raise InvalidInputError(f"there is no folder {target.parent} to save into")
    chat.session.save(target)
    how = f"/load {name}" if isinstance(target, Path) else f"kvos chat --load {name}"
    chat.note(f"{chat.session.name} is saved, keys and values included; `{how}` goes on with it, in any process.")


def _load(chat: Chat, name: str) -> None:
    target = file_or_name(name)
    stem = target.stem if isinstance(target, Path) else target
    chat.session = chat.runtime.load(target, name=chat.free_name(stem))
    report = chat.session.report()
    ready = report.tokens - report.pending
    size = f"{counted(report.messages, 'message')}, {counted(report.tokens, 'token')}"
    chat.note(f"{report.name}: {size}, {ready} of them ready to be reused.")
    _recall(chat)


def _hibernate(chat: Chat, name: str) -> None:
    wish = name or chat.session.name
    if wish in chat.runtime.hibernated_sessions() and wish not in chat.own:
        raise InvalidInputError(
            f"another session is hibernated as {wish!r}: /hibernate NAME keeps this one under another name, and "
            f"`kvos sessions drop {wish}` forgets that one"
        )
    renamed = chat.session if wish == chat.session.name else chat.session.fork(1, names=[wish])[0]
    try:
        summary = renamed.hibernate()
    except BaseException:
        if renamed is not chat.session:
            renamed.close()
        raise
    if renamed is not chat.session:
        chat.session.close()  # it goes on under its new name
    chat.session = renamed
    chat.own.add(wish)
    below = f"{summary.safe} of its {counted(summary.wanted, 'full block')} are safe below the device"
    back = f"It comes back with your next message, or with `kvos chat --resume {shlex.quote(wish)}` in any process."
    chat.note(f"{wish} is hibernated, {below}. {back}")


def _resume(chat: Chat, name: str) -> None:
    chat.session = chat.runtime.resume(name)
    chat.own.add(name)
    report = chat.session.report()
    size = f"{counted(report.messages, 'message')}, {counted(report.tokens, 'token')}"
    chat.note(f"{report.name}: {size}; keys and values come back with your next message.")
    _recall(chat)


def _stats(chat: Chat, _: str) -> None:
    chat.console.print(stats_view(chat.runtime.stats().as_dict(), chat.console.width))


def _blocks(chat: Chat, which: str) -> None:
    if not which:
        show_blocks(chat)
    elif which.isdecimal():
        show_block(chat, int(which))
    else:
        raise InvalidInputError(f"{which!r} is not the number of a block; /blocks shows which there are")


def _undo(chat: Chat, _: str) -> None:
    messages = chat.session.messages
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        raise InvalidInputError("there is nothing to take back")
    chat.session.truncate(messages=asked[-1])
    chat.note(f"forgotten: {snippet(messages[asked[-1]]['content'])!r} and what followed; the rest is still cached.")


def _help(chat: Chat, _: str) -> None:
    table = Table.grid(padding=(0, 2))
    for command in SLASH_COMMANDS:
        table.add_row(Text(f"/{command.name} {command.argument}", "cyan"), command.about)
    chat.console.print(table)
    chat.note(
        'Anything else is a message. """ begins one of several lines, and """ ends it; // begins one with a slash. '
        "Ctrl-C ends a reply and keeps what there is; Ctrl-D leaves."
    )


def _quit(chat: Chat, _: str) -> None:
    chat.over = True


def _recall(chat: Chat) -> None:
    """Where the conversation was."""
    for message in chat.session.messages[-2:]:
        chat.note(f"  {message['role']}: {snippet(message['content'] or '')}")


def snippet(text: str, limit: int = SNIPPET) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


SLASH_COMMANDS = (
    SlashCommand("fork", "[NAME]", "go on in a copy that shares every block; the original stays as it is", _fork),
    SlashCommand("new", "[NAME]", "begin another session, with the same system message", _new),
    SlashCommand("switch", "NAME", "talk to another open session", _switch),
    SlashCommand("close", "NAME", "end another session and give its blocks back", _close),
    SlashCommand("sessions", "", "open sessions, and the names of saved and hibernated ones", _sessions),
    SlashCommand("save", "NAME", "keep this session on disk (a NAME with / or .kvos in it is a file)", _save),
    SlashCommand("load", "NAME", "go on with a saved session", _load),
    SlashCommand(
        "hibernate", "[NAME]", "leave the device for the disk cache; come back any time, also after quit", _hibernate
    ),
    SlashCommand("resume", "NAME", "go on with a hibernated session", _resume),
    SlashCommand("undo", "", "forget your last message and what followed", _undo),
    SlashCommand("blocks", "[N]", "which session holds which blocks; or what is in block N, and whose it is", _blocks),
    SlashCommand("stats", "", "tokens reused and computed, blocks by status, tiers and their speeds", _stats),
    SlashCommand("help", "", "this list", _help),
    SlashCommand("quit", "", "leave", _quit),
)
