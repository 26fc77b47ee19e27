"""A chat that is typed by a list."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console

from kvos.cli.chat.lines import PipedLines
from kvos.cli.chat.loop import ChatLoop
from kvos.runtime import Runtime
from kvos.serving import SamplingParams


def talk_on(
    runtime: Runtime, lines: Iterable[str], *, max_tokens: int = 4, system: str | None = "Be brief.", **begin: str
) -> str:
    """What a chat on ``runtime`` with these lines prints. ``begin``: ``name``, ``load`` or ``resume``."""
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, force_terminal=False)
    sampling = SamplingParams(max_tokens=max_tokens)
    ChatLoop(runtime, console, PipedLines(console, lines), sampling=sampling, system=system, **begin).run()
    runtime.check_invariants()
    return out.getvalue()
