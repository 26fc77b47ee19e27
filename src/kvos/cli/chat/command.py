"""The options of ``kvos chat``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvos.cli.console import output_console, working
from kvos.cli.help_text import help_text
from kvos.cli.opening import open_model
from kvos.cli.options import (
    DEFAULT_MODEL,
    BlockSizeOption,
    DeviceOption,
    DTypeOption,
    ModelOption,
    settings,
)

__all__ = ["CHAT_HELP", "chat"]

CHAT_HELP = help_text(
    """
    A conversation in the terminal, on a cache that can be looked at.

    Under each reply stands what it cost: tokens reused from the cache, tokens computed, time to the first token.
    The default model is a very small one: it shows what the cache does, and its answers are often wrong.
    Lines that begin with a slash look inside and act: /fork, /undo, /save, /hibernate, /blocks, /stats; /help lists
    them. Finished turns go to the disk cache, so a conversation that was hibernated comes back in another process
    without being computed again.
    """,
    ("kvos chat", "with the default model"),
    ('kvos chat --system "You are a pirate."', "with a system message, which all sessions share"),
    ("kvos chat --name trip", "under a name of its own, for /hibernate"),
    ("kvos chat --resume trip", "go on with what /hibernate kept, in any later process"),
    ("kvos chat --load monday", "go on with what /save monday kept"),
    ("printf 'Hi!\\n/blocks\\n' | kvos chat", "from a pipe"),
)


def chat(
    model: ModelOption = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system message.")] = None,
    system_file: Annotated[
        Path | None,
        typer.Option("--system-file", metavar="FILE", exists=True, dir_okay=False, help="The same, from a file."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", "-n", metavar="NAME", help="What the session is called; main without.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", "-r", metavar="NAME", help="Go on with a hibernated session.", show_default=False),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            "--load", metavar="NAME", help="Go on with a saved session (a NAME with / or .kvos in it is a file)."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Longest reply, in tokens.")] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token; higher is more random.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens that make up this much.")
    ] = 0.9,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of the random numbers.")] = None,
    dtype: DTypeOption = None,
    device: DeviceOption = None,
    block_size: BlockSizeOption = None,
) -> None:
    """See ``CHAT_HELP``."""
    if system is not None and system_file is not None:
        raise typer.BadParameter("give either --system or --system-file")
    _check_beginning(load, resume, name, has_system=system is not None or system_file is not None)
    config = settings(dtype=dtype, device=device, block_size=block_size)
    text = system if system_file is None else system_file.read_text(encoding="utf-8").strip()
    with working("Loading PyTorch ..."):
        from kvos.cli.chat.lines import line_source
        from kvos.cli.chat.loop import ChatLoop
        from kvos.serving import SamplingParams
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with open_model(model, config) as runtime:
        runtime.check_chats()
        console = output_console()
        begin: dict[str, str | None] = {"load": load, "resume": resume, "system": text}
        ChatLoop(runtime, console, line_source(console), sampling=sampling, name=name or "main", **begin).run()


def _check_beginning(load: str | None, resume: str | None, name: str | None, *, has_system: bool) -> None:
    """Raises BadParameter if the options say two things about how the session begins."""
    if load is not None and resume is not None:
        raise typer.BadParameter("give either --load or --resume")
    if load is None and resume is None:
        return
    if has_system:
        raise typer.BadParameter("a session that goes on has its system message already; leave out --system")
    if name is not None:
        raise typer.BadParameter("a session that goes on keeps its name; leave out --name")
