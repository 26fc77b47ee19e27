"""``kvos simulate``: how many blocks would a pool have reused on a recorded trace?"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvos.cli.console import counted, output_console, working
from kvos.cli.help_text import help_text

__all__ = ["SIMULATE_HELP", "simulate"]

SIMULATE_HELP = help_text(
    """
    Replay a recorded trace without a model: what share of the blocks would a pool have reused?

    For each pool size the hit rates of an eviction policy, of LRU, of Belady's optimum, which knows the future, and of
    a cache without bounds. A trace is a JSONL file with one request a line, in the order of their coming: hash_ids
    holds one number per block of its prompt; equal numbers after equal numbers are a shared prefix. Or a line is a
    chat request: messages, or a prompt. No tokenizer is needed: four bytes of UTF-8 count as a token.
    """,
    ("kvos simulate trace.jsonl --blocks 1000,5000", "two pool sizes, with the policy expected-return"),
    ("kvos simulate trace.jsonl --blocks 5000 --policy lru", "the yardstick alone"),
    ("kvos simulate requests.jsonl --blocks 5000 --block-tokens 32", "a log of chat requests, in larger blocks"),
    ("kvos simulate trace.jsonl --blocks 5000 --json", "as data, with shares from 0 to 1"),
)


class PolicyChoice(StrEnum):
    """Names of the policies that a simulation can replay."""

    EXPECTED_RETURN = "expected-return"
    LRU = "lru"


def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A block trace, or a log of chat requests.", show_default=False)
    ],
    blocks: Annotated[
        str, typer.Option("--blocks", "-b", metavar="N[,N...]", help="Pool sizes, in blocks.", show_default=False)
    ],
    policy: Annotated[PolicyChoice, typer.Option("--policy", help="Which block leaves.")] = (
        PolicyChoice.EXPECTED_RETURN
    ),
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", metavar="N", min=1, help="Tokens per block of a log of chat requests.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
) -> None:
    """See ``SIMULATE_HELP``."""
    from kvos.simulate import read_trace
    from kvos.simulate import simulate as replay

    sizes = _sizes(blocks)
    with working(f"Replaying {trace} ..."):
        report = replay(read_trace(trace, block_tokens), sizes, policy.value)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("BLOCKS", *([] if policy is PolicyChoice.LRU else [policy.value.upper()]), "LRU", "OPTIMUM", "NO BOUNDS")
    for name in names:
        table.add_column(name, justify="right")
    for row in report.rows:
        rates = (row.policy, row.lru, row.optimum, report.ceiling)[-len(names) + 1 :]
        table.add_row(f"{row.blocks:,}", *(f"{rate:.1%}" for rate in rates))
    console = output_console()
    console.print(
        f"{counted(report.requests, 'request')}, {counted(report.asked, 'block')}, {report.distinct:,} of them "
        "different. Share of blocks that are hits:"
    )
    console.print(table)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or len(part) > 12 or int(part) == 0:
            raise typer.BadParameter(f"{part!r} is no pool size; expected whole numbers from 1, such as 1000,5000")
    return [int(part) for part in parts]
