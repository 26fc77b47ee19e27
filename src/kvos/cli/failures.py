"""What a person sees when something goes wrong, and the exit code.

=====  ==============================================================
0      all is well
1      the command's own verdict is no (``kvos verify`` found a mismatch)
2      the caller can fix it: wrong usage, or a ``ClientError``
3      kvos or its machine is at fault: a ``ServerError``, or the disk
130    Ctrl-C
141    whoever read the output has gone (``kvos stats | head``)
=====  ==============================================================

Any other exception is a bug in kvos and shows its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from kvos.cli.console import error_console, printable
from kvos.errors import ClientError, KvosError

__all__ = ["CLIENT_ERROR", "INTERRUPTED", "PIPE_CLOSED", "SERVER_ERROR", "KvosGroup", "quiet_libraries", "show_error"]

CLIENT_ERROR, SERVER_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 3, 130, 141


class KvosGroup(TyperGroup):
    """The root of all commands: turns errors into one paragraph on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _mute_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except (KvosError, OSError) as error:
            if ctx.params.get("debug"):
                error_console().print_exception()
            else:
                show_error(error)
            raise typer.Exit(CLIENT_ERROR if isinstance(error, ClientError) else SERVER_ERROR) from None


def show_error(error: BaseException) -> None:
    """One paragraph on stderr."""
    console = error_console()
    text = printable(str(error)) or type(error).__name__
    console.print("[bold red]kvos:[/bold red] ", end="")
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def quiet_libraries() -> None:
    """Keep off the screen what torch and Transformers say to their callers' authors about their next versions."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|transformers)\b")


def _mute_stdout() -> None:
    """Let what is still in stdout's buffer go nowhere, so that the interpreter's end is quiet, too."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
