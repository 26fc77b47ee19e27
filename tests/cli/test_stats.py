from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import kvos
from kvos.cli.processes import ProcessState, read_published
from kvos.cli.stats_view import stats_view
from kvos.counters import COUNTERS
from kvos.runtime.published import KEEP_ENDED_SECONDS, StatsPublisher
from kvos.testing.models import toy_model, toy_tokenizer

STATS = {
    "model": "toy",
    "dtype": "float32",
    "block_size": 16,
    "bytes_per_token": 1024,
    "max_blocks": 100,
    "blocks": {"free": 5, "active": 20, "cached": 10, "reserved": 5},
    "utilisation": 0.25,
    "sessions": 2,
    "running": 1,
    "counters": dict.fromkeys(COUNTERS, 0) | {"tokens_reused": 30, "prompt_tokens": 40},
    "reuse_rate": 0.75,
}


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def open_toy(**settings):
    return kvos.open(toy_model(), tokenizer=toy_tokenizer(), kernels="generic", cache_bytes=4 << 20, **settings)


# -- what is written -------------------------------------------------------------------------------------------------


def test_a_runtime_leaves_its_counters(home):
    with open_toy() as runtime:
        runtime.session(messages={"role": "user", "content": "Hello"}).generate(max_tokens=3).result()
        expected = runtime.stats().as_dict()
    [found] = read_published(home)
    assert (found.pid, found.state) == (os.getpid(), ProcessState.CLOSED)
    assert found.stats == json.loads(json.dumps(expected))


def test_a_short_life_without_work_leaves_nothing(home):
    with open_toy() as runtime:
        runtime.session()
        runtime.get("session-1").close()
    assert not (home / "run").exists()


def test_only_its_user_can_read_it(home):
    folder = home / "run"
    publisher = StatsPublisher(folder, lambda: {"n": time.monotonic()})
    publisher.start()
    publisher.stop()
    [path] = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_written_again_only_when_something_changed(home):
    stats, reads = {"n": 1}, []

    def read() -> dict[str, int]:
        reads.append(dict(stats))
        return dict(stats)

    publisher = StatsPublisher(home, read, interval_seconds=0.01)
    publisher.start()
    until(lambda: read_json(home) is not None)
    first = read_json(home)["updated"]
    seen = len(reads)
    until(lambda: len(reads) > seen + 3)
    assert read_json(home)["updated"] == first
    stats["n"] = 2
    until(lambda: read_json(home)["stats"] == {"n": 2})
    assert read_json(home)["closed"] is None
    publisher.stop()
    assert read_json(home)["closed"] is not None


def read_json(folder: Path):
    for path in folder.glob("[0-9]*.json"):
        text = path.read_text()
        return json.loads(text) if text else None
    return None


def test_two_runtimes_of_one_process_have_two_files(home):
    folder = home / "run"
    publishers = [StatsPublisher(folder, lambda: {"n": time.monotonic()}, interval_seconds=0.01) for _ in range(2)]
    for publisher in publishers:
        publisher.start()
    until(lambda: folder.is_dir() and {path.name for path in folder.glob("[0-9]*.json")} == mine(0, 1))
    for publisher in publishers:
        publisher.stop()
    assert {path.name for path in folder.iterdir()} == mine(0, 1)


def test_one_after_another_leaves_the_last(home):
    for number in range(3):
        publisher = StatsPublisher(home, lambda number=number: {"n": number, "at": time.monotonic()})
        publisher.start()
        publisher.stop()
    assert {path.name for path in home.iterdir()} == mine(0)
    assert read_json(home)["stats"]["n"] == 2


def mine(*numbers: int) -> set[str]:
    return {f"{os.getpid()}-{number}.json" for number in numbers}


def test_a_folder_that_cannot_be_written_is_logged_once_and_disturbs_nobody(home, caplog):
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder should be")
    with open_toy() as runtime:
        reply = runtime.session(messages={"role": "user", "content": "Hello"}).generate(max_tokens=3).result()
        assert reply.tokens
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "kvos stats will not show this process" in caplog.text


def test_what_ended_more_than_a_day_ago_is_swept(home):
    folder = home / "run"
    folder.mkdir(parents=True)
    long_ago = time.time() - KEEP_ENDED_SECONDS - 60
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = {"pid": os.getpid(), "process_started": StatsPublisher(folder, dict)._process_started, "closed": None}
    records = {
        "1-0.json": mine | {"pid": gone.pid},
        "2-0.json": mine | {"closed": long_ago},
        "3-0.json": mine | {"process_started": 1.0},  # somebody else had this process's number
        "4-0.json": mine,
        "5-0.json": mine | {"closed": time.time()},
    }
    for name, record in records.items():
        (folder / name).write_text(json.dumps(record))
    (folder / ".1-0.json.tmp").write_text("{")
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago) if path.name != "5-0.json" else None)
    publisher = StatsPublisher(folder, lambda: {"n": time.monotonic()})
    publisher.start()
    publisher.stop()
    assert {path.name for path in folder.iterdir()} == {"4-0.json", "5-0.json", f"{os.getpid()}-0.json"}


# -- what is read ----------------------------------------------------------------------------------------------------


def write_record(home: Path, name: str, **changes: object) -> None:
    folder = home / "run"
    folder.mkdir(parents=True, exist_ok=True)
    started = StatsPublisher(folder, dict)._process_started
    record = {
        "format": 1,
        "pid": os.getpid(),
        "process_started": started,
        "opened": 1.0,
        "updated": 2.0,
        "closed": None,
    }
    (folder / name).write_text(json.dumps(record | {"stats": STATS} | changes))


def test_a_process_that_lives_is_running(home):
    write_record(home, "1-0.json")
    [found] = read_published(home)
    assert found.state is ProcessState.RUNNING
    assert found.command


def test_a_later_process_with_the_same_number_is_not_taken_for_it(home):
    write_record(home, "1-0.json", process_started=1.0)
    [found] = read_published(home)
    assert (found.state, found.command) == (ProcessState.ENDED, "")


def test_running_ones_come_first_then_the_last_ended(home):
    write_record(home, "1-0.json", closed=9.0, updated=9.0)
    write_record(home, "2-0.json", closed=99.0, updated=99.0)
    write_record(home, "3-0.json", updated=2.0)
    assert [one.updated for one in read_published(home)] == [2.0, 99.0, 9.0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1}'])
def test_what_cannot_be_read_is_left_out(home, text):
    write_record(home, "1-0.json")
    (home / "run" / "2-0.json").write_text(text)
    assert len(read_published(home)) == 1


# -- the command -----------------------------------------------------------------------------------------------------


def test_without_any_process_it_says_so(call, home):
    result = call("stats")
    assert result.exit_code == 0
    assert "No kvos process has left counters" in result.stdout


def test_it_shows_every_running_process_and_no_ended_one(call, home):
    write_record(home, "1-0.json")
    write_record(home, "2-0.json", stats=STATS | {"model": "second"})
    write_record(home, "3-0.json", closed=5.0, stats=STATS | {"model": "ended"})
    output = call("stats").stdout
    assert output.count(f"process {os.getpid()} running") == 2
    assert "toy in fp32" in output
    assert "second in fp32" in output
    assert "ended in" not in output


def test_it_shows_the_last_ended_one_if_none_runs(call, home):
    write_record(home, "1-0.json", closed=5.0, updated=5.0, stats=STATS | {"model": "older"})
    write_record(home, "2-0.json", process_started=1.0, updated=6.0, stats=STATS | {"model": "killed"})
    output = call("stats").stdout
    assert "ended without closing" in output
    assert "killed in fp32" in output
    assert "older" not in output


def test_json_gives_all_of_them_as_data(call, home):
    write_record(home, "1-0.json")
    write_record(home, "2-0.json", closed=5.0)
    found = json.loads(call("stats", "--json").stdout)
    assert [one["state"] for one in found] == ["running", "closed"]
    assert found[0]["stats"] == STATS


def test_the_view_explains_counters_and_draws_the_pool():
    console = Console(width=130)
    with console.capture() as capture:
        console.print(stats_view(STATS, console.width))
    text = capture.get()
    assert all(f"{name} " in text and meaning in text for name, meaning in COUNTERS.items())
    assert " 75.0%  30 of 40 prompt tokens" in text
    assert " 25.0% of 100 blocks in use" in text
    bar = next(line for line in text.splitlines() if line.startswith("blocks"))
    assert [bar.count(glyph) for glyph in "█▓▒░"] == [32, 8, 16, 8]
    assert "of the 40 allocated so far:  █ 20 held by sessions  ▓ 5 promised" in text


def test_even_one_block_of_many_is_seen():
    console = Console(width=130)
    with console.capture() as capture:
        console.print(stats_view(STATS | {"blocks": {"free": 9999, "active": 1, "cached": 0, "reserved": 0}}, 130))
    bar = next(line for line in capture.get().splitlines() if line.startswith("blocks"))
    assert (bar.count("█"), bar.count("░")) == (1, 63)


TIER = {
    "name": "disk",
    "usage": {"capacity_bytes": 4 << 30, "used_bytes": 1 << 30, "blocks": 1234, "counters": {"hits": 7, "damaged": 2}},
    "bytes_per_second": 256e6,
    "switched_off": False,
}
ABOUT_TIERS = {
    "free_now": {"blocks": 60, "runs": 9, "longest": 20},
    "free_at_start": {"blocks": 100, "runs": 2, "longest": 50},
    "tiers": [TIER],
    "prefill_tokens_per_second": 500.0,
}


def shown(stats) -> str:
    console = Console(width=130)
    with console.capture() as capture:
        console.print(stats_view(stats, console.width))
    return " ".join(capture.get().split())


def test_tiers_are_shown_with_what_they_cost_now():
    text = shown(STATS | ABOUT_TIERS)
    assert "25.0% of 4.0 GiB, 1,234 blocks, loads 256 MB/s" in text
    assert "7 hits, 2 damaged" in text
    # 1,000 tokens of 1,024 bytes at 256 MB/s; at 500 tokens/s
    assert "1,000 tokens: 4 ms from disk, 2.0 s computed (500 tokens/s)" in text
    assert "60 blocks in 9 runs, the longest 20 at start 2 runs, the longest 50" in text
    assert "tried again soon" not in text


def test_what_was_not_measured_is_not_made_up():
    text = shown(STATS | ABOUT_TIERS | {"tiers": [TIER | {"bytes_per_second": None, "switched_off": True}]})
    assert "no load measured yet switched off after failures, tried again soon" in text
    assert "1,000 tokens: 2.0 s computed" in text
    text = shown(STATS | ABOUT_TIERS | {"prefill_tokens_per_second": None})
    assert "4 ms from disk, computing them was not measured yet" in text


def test_a_runtime_with_a_disk_tier_shows_how_fast_it_came_back(call, home):
    question = {"role": "user", "content": "A question that takes quite a few tokens to ask. " * 8}
    for _ in range(2):
        with open_toy(disk_cache_bytes=64 << 20, block_size=8) as runtime:
            session = runtime.session("s", messages=question)
            session.generate(max_tokens=3).result()
            session.hibernate()
            blocks = runtime.tiers()[0].usage.blocks
    text = " ".join(call("stats").stdout.split())
    assert f"of 64.0 MiB, {blocks} blocks, loads " in text
    assert "MB/s" in text
    assert "from disk, " in text
    assert "tokens/s)" in text
