"""The whole of a verification: load the model twice, play round after round, compare, and shrink what went wrong."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvos.config import KvosConfig
from kvos.errors import InvalidInputError
from kvos.models.dtypes import short_name
from kvos.models.load import load_model
from kvos.models.progress import Progress, SilentProgress
from kvos.runtime import DEFAULT_MODEL
from kvos.verify.compare import Judge
from kvos.verify.histories import history
from kvos.verify.observed import Fault
from kvos.verify.operations import Operation
from kvos.verify.player import Player
from kvos.verify.reference import FreshRuns, NoiseFloor, Reference
from kvos.verify.report import DEFAULT_ROUNDS, Mismatch, VerifyReport
from kvos.verify.shrink import MAX_TRIALS, shrink
from kvos.verify.stage import Stage
from kvos.verify.workplace import Workplace, group_of

__all__ = ["DEFAULT_ROUNDS", "run_verify"]


def run_verify(
    model: str | os.PathLike[str] | Any = DEFAULT_MODEL,
    *,
    tokenizer: Any = None,
    config: KvosConfig | None = None,
    rounds: int = DEFAULT_ROUNDS,
    seed: int = 0,
    first_round: int = 0,
    progress: Progress | None = None,
    max_trials: int = MAX_TRIALS,
    bitwise: bool = False,
    behind: int = 0,
) -> VerifyReport:
    """Play random histories and compare every logit and token with runs without any cache.

    Takes memory for two copies of the model. Stops at the first mismatch, and at Ctrl-C with what was verified so far.

    Args:
        model: a name, a folder, a hub id, or a Transformers model object with its ``tokenizer``.
        config: dtype, device, home and threads are taken from here; by default from the environment.
        rounds: how many, from ``first_round`` on.
        seed: of the histories and their token ids; 0 or more.
        progress: told of every round.
        behind: tokens of text that sessions begin with, so that rounds play behind windows and RoPE's boundaries.
        bitwise: run in deterministic mode, and compare with fresh runs of kvos without a cache, to the bit.
        max_trials: histories that are tried to find the shortest one that shows a mismatch; 0 for none.

    Raises:
        InvalidInputError: a negative number, or no room in the model's context ``behind`` so many tokens.
        ModelNotAvailableError, UnsupportedModelError: as ``kvos.open``.
    """
    _check_numbers(rounds=rounds, first_round=first_round, seed=seed, max_trials=max_trials, behind=behind)
    chosen = KvosConfig.from_env() if config is None else config
    spec, given = (model, None) if isinstance(model, str | os.PathLike) else (None, model)
    loaded = load_model(spec, config=chosen, model=given, tokenizer=tokenizer)
    chosen = replace(chosen, deterministic=bitwise or chosen.deterministic)
    workplace = Workplace(loaded.model, loaded.tokenizer, chosen, behind)
    plain = copy.deepcopy(loaded.model)  # an engine changes the model object while it is open
    longest = workplace.max_tokens
    judge = Judge(FreshRuns(plain, longest, chosen) if bitwise else Reference(plain, longest))
    verification = _Verification(workplace, judge, seed, max_trials)
    started = time.perf_counter()
    verification.run(range(first_round, first_round + rounds), progress or SilentProgress())
    return VerifyReport(
        model=loaded.name if spec is None else str(spec),
        dtype=short_name(loaded.dtype).value,
        seed=seed,
        rounds=rounds,
        rounds_done=verification.rounds_done,
        tally=judge.tally,
        bitwise=bitwise,
        behind=behind,
        **_figures_of(judge.floor),
        limit=judge.limit,
        operations=verification.operations,
        counters=verification.counters,
        seconds=time.perf_counter() - started,
        mismatch=verification.mismatch,
        interrupted=verification.interrupted,
    )


def _check_numbers(*, rounds: int, **others: int) -> None:
    if rounds < 1 or min(others.values()) < 0:
        given = ", ".join(f"{name} {number}" for name, number in others.items())
        raise InvalidInputError(f"rounds is {rounds}, {given}; expected at least 1 round, and nothing negative")


def _figures_of(floor: NoiseFloor | None) -> dict[str, Any]:
    if floor is None:
        return {"floor": 0.0, "floor_pairs": 0, "floor_sequences": 0}
    return {"floor": floor.value, "floor_pairs": floor.pairs, "floor_sequences": floor.sequences}


@dataclass(slots=True)
class _Verification:
    """One run over many rounds; the results are its public attributes."""

    workplace: Workplace
    judge: Judge
    seed: int
    max_trials: int
    rounds_done: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    mismatch: Mismatch | None = None
    interrupted: bool = False

    def run(self, numbers: range, progress: Progress) -> None:
        """All rounds, one group after another, until one shows a fault."""
        progress.begin("verifying", len(numbers))
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(group_of(number), []).append(number)
        try:
            for group, members in groups.items():
                found = self._run_group(group, members, progress)
                if found is not None:
                    self._explain(group, members[0], *found, progress)
                    return
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            progress.end()

    def _run_group(self, group: int, numbers: Sequence[int], progress: Progress) -> tuple[int, Fault] | None:
        """The first round with a fault, and the fault."""
        with Stage(self.workplace, group) as stage:
            player = Player(stage, self.seed)
            try:
                for number in numbers:
                    seen = player.play(history(self.seed, number))
                    self.operations.update(seen.done)
                    fault = self.judge.judge(seen, round_number=number)
                    if fault is not None:
                        return number, fault
                    self.rounds_done += 1
                    progress.update(self.rounds_done)
            finally:
                self.counters.update(stage.counters())
        return None

    # -- a fault was found ---------------------------------------------------------------------------------------

    def _explain(self, group: int, group_start: int, number: int, fault: Fault, progress: Progress) -> None:
        """Find the shortest history that shows ``fault``, from the round alone or from all that led to it."""
        operations = history(self.seed, number)
        # Known from now on, so that Ctrl-C during the search loses nothing.
        self.mismatch = self._described(fault, number, group_start, operations, shrunk=False)
        if self.max_trials == 0:
            return
        progress.begin("looking for the shortest history", None)
        trials = _Trials(self, group, progress)
        for first_round in dict.fromkeys((number, group_start)):
            led_to_it = tuple(op for n in range(first_round, number + 1) for op in history(self.seed, n))
            if trials.fails(led_to_it):
                shortest = shrink(led_to_it, trials.fails, max_trials=self.max_trials)
                self.mismatch = self._described(trials.last or fault, number, first_round, shortest, shrunk=True)
                return

    def _described(
        self, fault: Fault, number: int, first_round: int, operations: tuple[Operation, ...], *, shrunk: bool
    ) -> Mismatch:
        return Mismatch(fault.kind.value, fault.text, number, first_round, tuple(map(str, operations)), shrunk)


@dataclass(slots=True)
class _Trials:
    """Plays histories on fresh runtimes.

    Attributes:
        last: the fault of the last history that failed: of the shortest one, when the search is over.
    """

    verification: _Verification
    group: int
    progress: Progress
    last: Fault | None = None
    count: int = 0

    def fails(self, operations: tuple[Operation, ...]) -> bool:
        """Whether the history shows a fault on a fresh runtime."""
        self.count += 1
        self.progress.update(self.count)
        with Stage(self.verification.workplace, self.group) as stage:
            seen = Player(stage, self.verification.seed).play(operations)
        fault = self.verification.judge.judge(seen)
        self.last = fault or self.last
        return fault is not None
