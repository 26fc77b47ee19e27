"""The outcome of a verification: as data, and as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvos.verify.compare import FP64_TOLERANCE, NOISE_FACTOR, Tally

__all__ = ["DEFAULT_ROUNDS", "Mismatch", "VerifyReport", "render_report"]

DEFAULT_ROUNDS = 20
"""So many rounds exercise everything, whatever the seed; if not, something that histories are for does not happen."""

EXERCISED = {
    "tokens restored from host memory": ("counters", "tokens_from_host"),
    "tokens restored from disk": ("counters", "tokens_from_disk"),
    "tables compacted": ("counters", "compactions"),
    "sessions hibernated": ("operations", "Hibernate"),
    "sessions that left for want of room": ("counters", "sessions_left"),
    "restarts": ("operations", "Restart"),
    "of them with another block size": ("operations", "restarts with another block size"),
    "tokens restored after a restart": ("operations", "tokens restored after a restart"),
}
"""What is below the device, and where each is counted."""

SHOWN_COUNTERS = (
    "requests",
    "tokens_computed",
    "tokens_reused",
    "tokens_shared",
    "full_hits",
    "forks",
    "blocks_copied",
    "blocks_deduplicated",
    "blocks_reclaimed",
    "blocks_scrubbed",
    "segments_added",
)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A fault, and the shortest history that shows it.

    Attributes:
        kind, text: what was wrong; after shrinking, as the shortest history shows it.
        round_number: the round that showed it first.
        first_round: play from here to ``round_number`` on one runtime; an earlier round than that one where the
            fault needs what earlier rounds had left in the cache.
        history: operations in order.
        shrunk: whether the history was made shorter and shows the fault by itself; if not, the fault did not come
            again on a fresh runtime, and it may depend on timing.
    """

    kind: str
    text: str
    round_number: int
    first_round: int
    history: tuple[str, ...]
    shrunk: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``run_verify`` found.

    Attributes:
        rounds: how many were asked for; ``rounds_done`` how many were compared.
        floor: noise floor, in logits; ``floor_pairs`` pairs of cache-free runs of ``floor_sequences`` sequences.
        limit: in logits, or in float64 as a share of the largest logit.
        operations: how often each kind of operation did something.
        counters: of all runtimes together, see ``kvos.counters.COUNTERS``; and what was read from each tier.
        interrupted: Ctrl-C ended it early.
        behind: tokens that sessions began with.
        bitwise: compared to the bit, in deterministic mode; there is no floor then.
    """

    model: str
    dtype: str
    seed: int
    rounds: int
    rounds_done: int
    tally: Tally
    floor: float
    floor_pairs: int
    floor_sequences: int
    limit: float
    operations: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    mismatch: Mismatch | None = None
    interrupted: bool = False
    bitwise: bool = False
    behind: int = 0

    @property
    def ok(self) -> bool:
        """No mismatch in what was compared."""
        return self.mismatch is None

    @property
    def exercised(self) -> dict[str, int]:
        """How often what is below the device was exercised, by what it is."""
        return {what: getattr(self, where).get(name, 0) for what, (where, name) in EXERCISED.items()}

    @property
    def not_exercised(self) -> tuple[str, ...]:
        """What never happened although there were rounds enough: nothing was shown about it."""
        if self.rounds_done < DEFAULT_ROUNDS:
            return ()
        return tuple(what for what, count in self.exercised.items() if count == 0)

    @property
    def exit_code(self) -> int:
        """What the command returns: 0, 1 for a mismatch, 130 after Ctrl-C."""
        if not self.ok:
            return 1
        return 130 if self.interrupted else 0

    @property
    def replay(self) -> str | None:
        """The command that plays the rounds of the mismatch again."""
        if self.mismatch is None:
            return None
        first, rounds = self.mismatch.first_round, self.mismatch.round_number - self.mismatch.first_round + 1
        where = f"--model {self.model} --dtype {self.dtype}" + (" --bitwise" if self.bitwise else "")
        where += f" --behind {self.behind}" if self.behind else ""
        return f"kvos verify {where} --seed {self.seed} --round {first} --rounds {rounds}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self) | {"operations": dict(self.operations), "counters": dict(self.counters)}
        return plain | {"ok": self.ok, "not_exercised": self.not_exercised, "replay": self.replay}


def render_report(report: VerifyReport) -> RenderableType:
    """The report for a terminal; print it with a rich console."""
    parts: list[RenderableType] = [_figures(report), Text()]
    if report.mismatch is not None:
        parts += _mismatch_lines(report, report.mismatch)
    elif report.interrupted:
        parts.append(Text(f"Interrupted; no mismatch in the {report.rounds_done} rounds that were verified.", "yellow"))
    else:
        parts.append(Text(f"Every hit equalled a recompute in {report.rounds_done} rounds.", "green"))
    if report.not_exercised:
        listed = ", ".join(report.not_exercised)
        parts.append(Text(f"That says nothing about what never happened in these rounds: {listed}.", "yellow"))
    return Group(*parts)


def _figures(report: VerifyReport) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    tally, exact = report.tally, report.dtype == "fp64"
    table.add_row("model", f"{report.model}, {report.dtype}, seed {report.seed}")
    table.add_row("rounds", f"{report.rounds_done} of {report.rounds} in {report.seconds:.0f} s")
    table.add_row(
        "largest difference",
        f"{tally.largest_difference:.3g} logits, {tally.largest_relative:.2g} of the largest logit "
        f"({tally.logit_rows} rows of logits)",
    )
    if report.bitwise:
        table.add_row("limit", "none: every bit of every logit is compared with kvos without a cache")
    else:
        table.add_row(
            "noise floor",
            f"{report.floor:.3g} logits over {report.floor_pairs} pairs of runs without cache, "
            f"of {report.floor_sequences} sequences",
        )
        floors = f"{report.limit:.3g} logits, {NOISE_FACTOR:g} floors"
        table.add_row("limit", f"{FP64_TOLERANCE:g} of the largest logit" if exact else floors)
    table.add_row(
        "generated tokens", f"{tally.tokens_compared} compared, {tally.tokens_skipped} skipped as too close to call"
    )
    table.add_row("operations", _listed(dict(sorted(report.operations.items()))))
    table.add_row("below the device", _listed(report.exercised))
    table.add_row("cache", _listed({name: report.counters.get(name, 0) for name in SHOWN_COUNTERS}))
    return table


def _mismatch_lines(report: VerifyReport, mismatch: Mismatch) -> list[RenderableType]:
    title = "Shortest history that shows it" if mismatch.shrunk else "History (the fault did not come again on its own)"
    lines = [
        Text(f"MISMATCH in round {mismatch.round_number}, seed {report.seed}: {mismatch.kind}", "bold red"),
        Text(mismatch.text),
        Text(f"{title}:"),
        *(Text(f"  {number}. {operation}") for number, operation in enumerate(mismatch.history, 1)),
        Text(f"Again: {report.replay}"),
    ]
    return list(lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())
