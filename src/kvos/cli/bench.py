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
        ("kvos bench codecs", "size, speed and error of what tiers write"),
    ),
    short_help="Measure, beside plain Transformers.",
    **HELP_SETTINGS,
)


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


@bench_app.command(
    help=help_text(
        """
        What the codecs of lower tiers make of real keys and values: size, speed, and what the lossy ones change.

        SIZE and speeds are of the bytes on the device. KV ERROR is the root mean square of what changed, LOGITS the
        largest change of a next token's logit, SAME REPLY how many greedy tokens come before the first other one.
        """,
        ("kvos bench codecs", "four texts of 512 tokens"),
        ("kvos bench codecs --dtype fp32 --json codecs.json", "in full precision, as data too"),
    )
)
def codecs(
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="Length of each text.")] = 512,
    texts: Annotated[int, typer.Option("--texts", min=1, max=50, metavar="N", help="How many texts.")] = 4,
    json_file: JsonOption = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    device: DeviceOption = None,
) -> None:
    """See help."""
    config = settings(dtype=dtype, device=device)
    with working("Loading PyTorch ..."):
        from kvos.bench import bench_codecs, render_codecs
        from kvos.models.progress import BarProgress
    progress = BarProgress()
    try:
        report = bench_codecs(
            model,
            tokens=tokens,
            texts=texts,
            config=config,
            progress=lambda what: progress.begin(f"Measuring: {what}", None),
        )
    finally:
        progress.end()
    write_json(json_file, report.as_dict())
    output_console().print(render_codecs(report))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"--sequences is {text!r}; expected numbers from 1 with commas between, such as 1,4,8")
    return numbers
