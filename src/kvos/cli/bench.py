"""``kvos bench``: what it costs and saves, beside a yardstick in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvos.cli.console import output_console, working, write_json
from kvos.cli.help_text import HELP_SETTINGS, help_text
from kvos.cli.options import DEFAULT_MODEL, DeviceOption, DTypeOption, JsonOption, ModelOption, settings

__all__ = ["bench_app"]

LOADING = "Loading PyTorch ..."

bench_app = typer.Typer(
    help=help_text(
        "Measurements on this machine, each beside a yardstick that takes turns with it in one run: plain "
        "Transformers, plain copies and files, or the same work with other memory.",
        ("kvos bench decode", "step time at 1, 4 and 8 sequences, and prefill speed"),
        ("kvos bench codecs", "size, speed and error of what tiers write"),
        ("kvos bench tiers", "host memory and disk: speed, and what they save"),
        ("kvos bench resume", "first token of a session resumed in a new process"),
        ("kvos bench compaction", "what blocks next to each other buy"),
    ),
    short_help="Measure speed, tiers and resuming, beside yardsticks.",
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
    numbers, config = _numbers(sequences, "--sequences"), settings(dtype=dtype, device=device)
    with working(LOADING):
        from kvos.bench import bench_decode, render
    with _progress() as tell:
        report = bench_decode(model, sequences=numbers, tokens=tokens, config=config, progress=tell)
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
    with working(LOADING):
        from kvos.bench import bench_codecs, render_codecs
    with _progress() as tell:
        report = bench_codecs(model, tokens=tokens, texts=texts, config=config, progress=tell)
    write_json(json_file, report.as_dict())
    output_console().print(render_codecs(report))


@bench_app.command(
    help=help_text(
        """How fast blocks move to host memory and disk and back, beside plain copies and files; and sessions that
        take turns on a pool a quarter the size of their KV: with a disk tier beside a pool with room for all, and with
        a disk at a twentieth of its speed beside none.

        Takes two or three minutes, and a few hundred MB in a folder of its own in KVOS_HOME.""",
        ("kvos bench tiers", "the figures of the documentation, here"),
        ("kvos bench tiers --rounds 1", "a quick look"),
    )
)
def tiers(
    tokens: Annotated[int, typer.Option("--tokens", min=16, metavar="N", help="How many move at once.")] = 4096,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, metavar="N", help="Of each pair.", show_default="7, workloads 3")
    ] = None,
    json_file: JsonOption = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    device: DeviceOption = None,
) -> None:
    """See help."""
    config = settings(dtype=dtype, device=device)
    with working(LOADING):
        from kvos.bench import bench_tiers, render_tiers
    with _progress() as tell:
        report = bench_tiers(model, tokens=tokens, rounds=rounds, config=config, progress=tell)
    write_json(json_file, report.as_dict())
    output_console().print(render_tiers(report))


@bench_app.command(
    help=help_text(
        """Time to the first token of a session that was hibernated and is resumed from disk in a new process, with the
        model open and the files out of the page cache; beside the same turn on a warm session, and beside computing it
        all again.

        Takes about a minute.""",
        ("kvos bench resume", "a session of 2,000 tokens, three new processes"),
        ("kvos bench resume --tokens 6000", "a longer one"),
    )
)
def resume(
    tokens: Annotated[int, typer.Option("--tokens", min=16, metavar="N", help="Of the session.")] = 2000,
    processes: Annotated[int, typer.Option("--processes", min=1, metavar="N", help="New processes.")] = 3,
    json_file: JsonOption = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    device: DeviceOption = None,
) -> None:
    """See help."""
    config = settings(dtype=dtype, device=device)
    with working(LOADING):
        from kvos.bench import bench_resume, render_resume
    with _progress() as tell:
        report = bench_resume(model, tokens=tokens, processes=processes, config=config, progress=tell)
    write_json(json_file, report.as_dict())
    output_console().print(render_resume(report))


@bench_app.command(
    help=help_text(
        """Time of a decode step over a table whose blocks lie in random order, and over the same table after
        compaction; and how many steps it takes until the moving has paid.""",
        ("kvos bench compaction", "histories of 1,024 and 4,096 tokens"),
        ("kvos bench compaction --tokens 8000", "another length"),
    )
)
def compaction(
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,N", help="Lengths of the history.")] = "1024,4096",
    json_file: JsonOption = None,
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    device: DeviceOption = None,
) -> None:
    """See help."""
    numbers, config = _numbers(tokens, "--tokens"), settings(dtype=dtype, device=device)
    with working(LOADING):
        from kvos.bench import bench_compaction, render_compaction
    with _progress() as tell:
        report = bench_compaction(model, tokens=numbers, config=config, progress=tell)
    write_json(json_file, report.as_dict())
    output_console().print(render_compaction(report))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is being measured."""
    from kvos.models.progress import BarProgress

    progress = BarProgress()
    try:
        yield lambda what: progress.begin(f"Measuring: {what}", None)
    finally:
        progress.end()


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{option} is {text!r}; expected numbers from 1 with commas between, such as 1,4,8")
    return numbers
