"""``kvos verify``: promise 1 as a command."""

from __future__ import annotations

from typing import Annotated

import typer

from kvos.cli.console import output_console, working, write_json
from kvos.cli.help_text import help_text
from kvos.cli.options import DEFAULT_MODEL, DeviceOption, DTypeOption, JsonOption, ModelOption, settings

__all__ = ["VERIFY_HELP", "verify"]

VERIFY_HELP = help_text(
    """
    Is every cache hit equal to a recompute?

    Runs random histories (append, fork, truncate, share, save and load; hibernate, and come back from host memory and
    disk; restart, with another block size too; compaction) and compares the logits with a run of the same token ids
    without any cache. In fp64 they must agree to 1e-6; in a working dtype within the noise that the
    model itself shows without a cache, which is measured first.
    """,
    ("kvos verify", "a quick look, in the dtype that kvos would choose"),
    ("kvos verify --dtype fp64 --rounds 200", "the logic alone, thoroughly"),
    ("kvos verify --bitwise --dtype bf16", "in deterministic mode, to the bit"),
    (
        "kvos verify --model FOLDER --behind 5000",
        "behind a window of 4,096 tokens: rounds play on short sequences else",
    ),
    ("kvos verify --seed 17 --round 42 --rounds 1", "round 42 of seed 17 again"),
    after="Exit code 1 means a mismatch; seed, round and the shortest history that shows it are printed.",
)


def verify(
    model: ModelOption = DEFAULT_MODEL,
    dtype: DTypeOption = None,
    rounds: Annotated[int, typer.Option("--rounds", "-n", min=1, metavar="N", help="Random histories.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of the histories.")] = 0,
    first_round: Annotated[int, typer.Option("--round", min=0, metavar="N", help="Begin with this round.")] = 0,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="In deterministic mode: every hit equals a recompute to the bit.")
    ] = False,
    behind: Annotated[
        int,
        typer.Option("--behind", min=0, metavar="N", help="Tokens that come first: past a window, a RoPE's boundary."),
    ] = 0,
    json_file: JsonOption = None,
    device: DeviceOption = None,
) -> None:
    """See ``VERIFY_HELP``."""
    config = settings(dtype=dtype, device=device)
    with working("Loading PyTorch ..."):
        from kvos.models.progress import BarProgress
        from kvos.verify import render_report, run_verify
    report = run_verify(
        model,
        config=config,
        rounds=rounds,
        seed=seed,
        first_round=first_round,
        progress=BarProgress(),
        bitwise=bitwise,
        behind=behind,
    )
    write_json(json_file, report.as_dict())
    output_console().print(render_report(report))
    raise typer.Exit(report.exit_code)
