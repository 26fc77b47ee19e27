"""``kvos bench``: what it costs, beside plain Transformers."""

from __future__ import annotations

from typing import Annotated

import typer

from kvos.cli.console import output_console, working, write_json
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.cli.options import DEFAULT_MODEL, DeviceOption, DTypeOption, JsonOption, ModelOption, settings

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help=help_text(
        "Measurements on this machine, each beside plain Transformers with its own cache, in one run.",
        ("kvos bench decode", "step time at 1, 4 and 8 sequences, and prefill speed"),
    ),
    short_help="Measure, beside plain Transformers.",
    **HELP_SETTINGS,
)


@bench_app.callback()
def group() -> None:
    """Makes ``decode`` a command of a group, though it is the only one."""


@bench_app.command(
    help=help_text(
        "Time per decode step and prefill speed, with kvos and with plain Transformers.",
        ("kvos bench decode", "1, 4 and 8 sequences of 600 tokens"),
        ("kvos bench decode --sequences 1,16 --tokens 2000", "other sizes"),
    )
)
def decode(
    sequences: Annotated[str, typer.Option("--sequences", metavar="N,N", help="Sequences in a step.")] = "1,4,8",
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="History of each, in tokens.")] = 600,
    json_file: JsonOption = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    device: DeviceOption = None,
) -> None:
    """See help."""
    numbers, config = _numbers(sequences), settings(dtype=dtype, device=device)
    with working("Loading PyTorch ..."):
        from kvos.bench import bench_decode, render
        from kvos.models.progress import BarProgress
    progress = BarProgress()
    try:
        report = bench_decode(
            model,
            sequences=numbers,
            tokens=tokens,
            config=config,
            progress=lambda what: progress.begin(f"Measuring: {what}", None),
        )
    finally:
        progress.end()
    write_json(json_file, report.as_dict())
    output_console().print(render(report))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"--sequences is {text!r}; expected numbers from 1 with commas between, such as 1,4,8")
    return numbers
