from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from kvos.demo import Script, run_demo

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Played:
    """One run of the demo: exit code, data, what was printed, and the folder where its temporary files were."""

    code: int
    data: dict[str, Any]
    text: str
    temporary: Path
    folder: Path


@pytest.fixture(scope="module")
def played(toy_folder: Path, toy_script: Script, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("demo")
    temporary = folder / "temporary"
    temporary.mkdir()
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVOS_HOME", str(folder / "home"))
        patch.setattr("tempfile.tempdir", str(temporary))
        code = run_demo(
            toy_folder,
            dtype="fp64",
            json_path=folder / "demo.json",
            script=toy_script,
            console=Console(file=output, width=120, highlight=False),
        )
    data = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    return Played(code, data, output.getvalue(), temporary, folder)


def reply(played: Played, label: str) -> dict[str, Any]:
    everything = [*played.data["replies"], played.data["resume"]["reply"]]
    (found,) = (one for one in everything if one["label"] == label)
    return found


def test_the_demo_passes_its_own_check(played: Played) -> None:
    assert played.code == 0
    assert played.data["ok"] is True
    assert played.data["check"]["ok"] is True


def test_the_last_line_is_the_verdict(played: Played) -> None:
    assert played.text.splitlines()[-1].startswith("Every reuse equalled a recompute: ")


def test_the_first_turn_computes_everything(played: Played) -> None:
    first = reply(played, "turn 1")
    assert first["reused_tokens"] == 0
    assert first["computed_tokens"] == first["prompt_tokens"]


def test_a_later_turn_reuses_all_of_the_turn_before_but_the_last_token_that_was_sampled(played: Played) -> None:
    first, second = reply(played, "turn 1"), reply(played, "turn 2")
    assert second["reused_tokens"] == first["prompt_tokens"] + first["generated_tokens"] - 1
    assert second["computed_tokens"] == second["prompt_tokens"] - second["reused_tokens"]


def test_the_cold_start_has_the_same_prompt_and_computes_all_of_it(played: Played) -> None:
    (cold,) = played.data["cold"]
    assert cold["of"] == "turn 2"
    assert cold["reused_tokens"] == 0
    assert cold["computed_tokens"] == reply(played, "turn 2")["prompt_tokens"]


def test_the_second_customer_shares_every_full_block_of_the_common_beginning(
    played: Played, toy_script: Script
) -> None:
    # one token per byte, and each special token is one: "<|im_start|>" "system\n" ... "<|im_end|>" "\n" then the user's
    system = 1 + len("system\n") + len(toy_script.system) + 1 + 1
    common = system + 1 + len("user\n")
    assert reply(played, "customer-2")["shared_tokens"] == common // BLOCK_SIZE * BLOCK_SIZE


def test_forking_takes_and_copies_no_block_and_work_copies_at_most_each_tail(played: Played) -> None:
    forks = played.data["forks"]
    assert forks["children"] == 3
    assert forks["blocks_allocated_at_fork"] == forks["blocks_copied_at_fork"] == 0
    assert forks["blocks_copied"] <= forks["children"]
    assert forks["parent_full_blocks"] > 0
    assert forks["full_blocks_copied"] == 0


def test_every_fork_shares_the_full_blocks_of_its_parent(played: Played) -> None:
    full = played.data["forks"]["parent_full_blocks"]
    tables = {table["session"]: table for table in played.data["blocks"]}
    assert list(tables) == ["supervisor", "a", "b", "c", "customer-2"]
    for name in ("supervisor", "a", "b", "c"):
        assert tables[name]["shared"][:full] == [True] * full
    assert all(tables[name]["private_blocks"] >= 1 for name in ("a", "b", "c"))


def test_another_process_reuses_every_token_that_was_computed(played: Played) -> None:
    resume = played.data["resume"]
    assert resume["saved_computed_tokens"] == resume["saved_tokens"] > 0
    assert resume["reply"]["reused_tokens"] == resume["saved_computed_tokens"]
    assert resume["cold"]["reused_tokens"] == 0


def test_each_history_is_timed_with_and_without_the_cache(played: Played, toy_script: Script) -> None:
    points = played.data["growth"]
    assert [point["history_tokens"] for point in points] == list(toy_script.histories)
    assert all(point["decode_s"] > 0 and point["recompute_s"] > 0 for point in points)


def test_the_check_covers_every_generated_token_and_the_restored_ones_twice(played: Played) -> None:
    generated = {label: reply(played, label)["generated_tokens"] for label in ("turn 1", "turn 2", "customer-2")}
    generated |= {label: reply(played, label)["generated_tokens"] for label in ("fork a", "fork b", "fork c")}
    restored = generated["turn 1"] + generated["turn 2"] + reply(played, "resumed turn")["generated_tokens"]
    check = played.data["check"]
    assert check["tokens_checked"] == sum(generated.values()) + restored
    assert check["tokens_compared"] == check["tokens_checked"]  # fp64 skips nothing
    assert check["noise_pairs"] >= 8


def test_nothing_is_left_behind(played: Played) -> None:
    assert list(played.temporary.iterdir()) == []
    assert sorted(path.name for path in played.folder.iterdir()) == ["demo.json", "home", "temporary"]
    assert not list((played.folder / "home").rglob("*.kvos"))
    pid = played.data["resume"]["pid"]
    assert not psutil.pid_exists(pid) or "kvos.demo" not in " ".join(psutil.Process(pid).cmdline())


def test_without_a_terminal_replies_come_as_lines_with_the_session_in_front(played: Played) -> None:
    lines = played.text.splitlines()
    assert "  supervisor | > Is it light?" in lines
    assert "  b | > Two, or three?" in lines
    assert "\x1b" not in played.text
