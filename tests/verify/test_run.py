"""The command as a whole, on runtimes that are right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvos.config import KvosConfig
from kvos.errors import InvalidInputError
from kvos.testing import toy_model, toy_tokenizer
from kvos.verify import DEFAULT_ROUNDS, VerifyReport, run_verify

Verify = Callable[..., VerifyReport]
Rounds = Callable[[int, int], int]


class InterruptAfter:
    """Progress of a person who presses Ctrl-C after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.ended = False

    def begin(self, label: str, total: int | None) -> None:
        self.ended = False

    def update(self, done: int) -> None:
        if done == self.rounds:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.ended = True


@pytest.fixture(scope="module")
def clean(rounds: Rounds) -> VerifyReport:
    return run_verify(toy_model(dtype=torch.float64), tokenizer=toy_tokenizer(), rounds=rounds(30, 300), seed=4)


def test_random_histories_equal_runs_without_a_cache(clean: VerifyReport) -> None:
    assert clean.ok, clean.mismatch
    assert clean.rounds_done == clean.rounds
    assert clean.tally.largest_relative < 1e-9  # the toy's norms are in float32 with and without a cache
    assert clean.tally.logit_rows > 1000
    assert clean.tally.tokens_skipped == 0
    assert clean.tally.tokens_compared > 100


def test_histories_exercise_what_they_are_for(clean: VerifyReport) -> None:
    for counter in ("tokens_shared", "full_hits", "forks", "blocks_copied", "blocks_reclaimed", "blocks_scrubbed"):
        assert clean.counters[counter] > 0, counter
    for operation in ("Truncate", "Save", "Load", "Migrate", "SideBySide", "Generate", "ChatTurn"):
        assert clean.operations[operation] > 0, operation
    assert clean.not_exercised == ()
    assert min(clean.exercised.values()) > 0
    assert clean.operations["tokens taken from files"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_working_dtype_is_judged_by_its_noise(verify_toy: Verify, dtype: torch.dtype) -> None:
    report = verify_toy(rounds=8, dtype=dtype)
    assert report.ok, report.mismatch
    assert report.floor > 0
    assert report.floor_pairs >= 8 * report.floor_sequences
    assert report.limit == 2 * report.floor
    assert report.tally.largest_difference <= report.limit


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_default_run_exercises_all_that_is_below_the_device(verify_toy: Verify, seed: int) -> None:
    report = verify_toy(seed=seed)
    assert report.ok, report.mismatch
    assert report.rounds_done == DEFAULT_ROUNDS
    assert report.not_exercised == ()
    # Nothing is damaged, late or without room here.
    for counter in ("restores_failed", "restores_late", "restores_not_worth_it", "stores_failed", "stores_skipped"):
        assert report.counters[counter] == 0, counter
    assert report.counters["tokens_restored"] >= report.operations["tokens restored after a restart"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_by_bit_it_does_not_matter_what_was_hibernated_restarted_or_moved(
    verify_toy: Verify, dtype: torch.dtype
) -> None:
    report = verify_toy(rounds=5, dtype=dtype, bitwise=True)
    assert report.ok, report.mismatch
    assert report.tally.largest_difference == 0
    assert report.operations["Hibernate"] >= 2
    assert report.operations["Restart"] >= 2
    assert report.counters["tokens_restored"] > 0


def test_behind_other_tokens_they_come_back_from_tiers_too(verify_toy: Verify) -> None:
    report = verify_toy(rounds=5, behind=200)
    assert report.ok, report.mismatch
    assert report.counters["tokens_restored"] > 200


def test_nothing_is_left_in_the_home_of_the_user(verify_toy: Verify, tmp_path: Path) -> None:
    report = verify_toy(rounds=5, config=KvosConfig.from_env(home=tmp_path))
    assert report.operations["Restart"] >= 2
    assert {path.name for path in tmp_path.iterdir()} <= {"kernels"}


def test_ctrl_c_leaves_a_report_of_what_was_verified(verify_toy: Verify) -> None:
    progress = InterruptAfter(3)
    report = verify_toy(rounds=20, progress=progress)
    assert report.interrupted
    assert report.ok
    assert report.rounds_done == 3
    assert report.exit_code == 130
    assert progress.ended


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": 1, "seed": -1}, {"rounds": 1, "first_round": -1}])
def test_impossible_numbers_are_refused(verify_toy: Verify, wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="nothing negative"):
        verify_toy(**wrong)


@pytest.mark.model
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("options", "short", "long"),
    [
        ("--dtype bf16", 1, 200),
        ("--dtype fp64", 2, 200),
        ("--dtype fp32", 2, 200),
        pytest.param("--dtype bf16 --bitwise", 0, 20, marks=pytest.mark.long),
        pytest.param("--dtype fp32 --bitwise", 0, 20, marks=pytest.mark.long),
    ],
)
def test_the_default_model(
    options: str, short: int, long: int, rounds: Rounds, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    number = rounds(short, long)
    file = tmp_path / "report.json"
    command = ["verify", *options.split(), "--rounds", str(number), "--json", str(file)]
    run = subprocess.run([sys.executable, "-m", "kvos", *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["rounds_done"] == number
    assert report["tally"]["logit_rows"] > 0
    assert f"Every hit equalled a recompute in {number} rounds." in run.stdout
    record_property(f"kvos {' '.join(command[:-2])}", run.stdout)
