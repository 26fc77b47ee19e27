"""The report as text and as data."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from kvos.verify import Mismatch, VerifyReport, render_report
from kvos.verify.compare import Tally

GOOD = VerifyReport(
    model="smollm2-135m",
    dtype="fp32",
    seed=17,
    rounds=20,
    rounds_done=20,
    tally=Tally(1200, 80, 310, 12, 2.5e-5, 1.2e-6),
    floor=4e-5,
    floor_pairs=60,
    floor_sequences=4,
    limit=8e-5,
    operations={
        "Fork": 21,
        "Truncate": 34,
        "Hibernate": 11,
        "Restart": 6,
        "restarts with another block size": 4,
        "tokens restored after a restart": 96,
    },
    counters={
        "tokens_shared": 777,
        "blocks_copied": 42,
        "tokens_from_host": 320,
        "tokens_from_disk": 480,
        "compactions": 9,
        "sessions_left": 7,
    },
    seconds=61.7,
)
MISMATCH = Mismatch(
    kind="logits differ from a run without cache",
    text="logit 5 behind token 9 of 12 is 1, without cache 2",
    round_number=13,
    first_round=13,
    history=("open a session on 9 tokens of text 0, logits of 9", "fork session 0 into 1"),
    shrunk=True,
)


def text_of(report: VerifyReport) -> str:
    out = io.StringIO()
    Console(file=out, width=300).print(render_report(report))
    return out.getvalue()


def test_a_good_report_gives_the_figures() -> None:
    text = text_of(GOOD)
    for part in (
        "smollm2-135m, fp32, seed 17",
        "20 of 20 in 62 s",
        "2.5e-05 logits, 1.2e-06 of the largest logit (1200 rows of logits)",
        "4e-05 logits over 60 pairs of runs without cache, of 4 sequences",
        "8e-05 logits, 2 floors",
        "310 compared, 12 skipped",
        "Fork 21, Hibernate 11, Restart 6, Truncate 34",
        "tokens shared 777",
        "blocks copied 42",
        "tokens restored from host memory 320, tokens restored from disk 480, tables compacted 9",
        "sessions hibernated 11, sessions that left for want of room 7, restarts 6, of them with another block size 4",
        "tokens restored after a restart 96",
        "Every hit equalled a recompute in 20 rounds.",
    ):
        assert part in text
    assert GOOD.ok
    assert GOOD.exit_code == 0
    assert GOOD.replay is None


def test_a_default_run_complains_about_what_it_never_did() -> None:
    counters = {name: count for name, count in GOOD.counters.items() if name != "tokens_from_disk"}
    report = replace(GOOD, counters=counters, operations={**GOOD.operations, "Restart": 0})
    assert report.not_exercised == ("tokens restored from disk", "restarts")
    assert "says nothing about what never happened in these rounds: tokens restored from disk, restarts." in text_of(
        report
    )
    assert replace(report, rounds_done=19).not_exercised == ()
    assert GOOD.not_exercised == ()
    assert "never happened" not in text_of(GOOD)


def test_in_float64_the_limit_is_a_share_of_the_largest_logit() -> None:
    assert "1e-06 of the largest logit" in text_of(replace(GOOD, dtype="fp64", limit=1e-6))


def test_a_mismatch_shows_the_history_and_how_to_play_it_again() -> None:
    report = replace(GOOD, mismatch=MISMATCH, rounds_done=13)
    text = text_of(report)
    for part in (
        "MISMATCH in round 13, seed 17: logits differ from a run without cache",
        "logit 5 behind token 9 of 12 is 1, without cache 2",
        "Shortest history that shows it:",
        "  1. open a session on 9 tokens of text 0, logits of 9",
        "  2. fork session 0 into 1",
        "kvos verify --model smollm2-135m --dtype fp32 --seed 17 --round 13 --rounds 1",
    ):
        assert part in text
    assert "Every hit" not in text
    assert not report.ok
    assert report.exit_code == 1


def test_a_mismatch_that_needs_earlier_rounds_is_replayed_from_the_first_of_them() -> None:
    report = replace(GOOD, mismatch=replace(MISMATCH, first_round=10, shrunk=False))
    assert "--round 10 --rounds 4" in str(report.replay)
    assert "did not come again on its own" in text_of(report)


def test_an_interrupted_report_says_how_far_it_came() -> None:
    report = replace(GOOD, interrupted=True, rounds_done=6)
    assert "Interrupted; no mismatch in the 6 rounds" in text_of(report)
    assert report.exit_code == 130
    assert replace(report, mismatch=MISMATCH).exit_code == 1


def test_the_data_survive_json() -> None:
    data = json.loads(json.dumps(replace(GOOD, mismatch=MISMATCH).as_dict()))
    assert data["ok"] is False
    assert data["tally"]["largest_difference"] == 2.5e-5
    assert data["mismatch"]["history"] == list(MISMATCH.history)
    assert data["counters"] == GOOD.counters
    assert data["not_exercised"] == []
    assert data["replay"].endswith("--rounds 1")
