"""Conversations go on while the disk under them is full or in other hands, and its cache comes back by itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvos
from durability.homes import (
    BLOCK,
    BLOCK_BYTES,
    assert_goes_on_like_the_plain_model,
    assert_right_accounts,
    disk_tier,
    open_home,
    reclaim_everything,
    tier_folder,
)
from kvos.serving import EngineCore
from kvos.tiers import late
from kvos.tiers.disk.upkeep import locked_folder
from serving.harness import some_ids

TOKENS = 20 * BLOCK + 3
DISK_BYTES = 30 * BLOCK_BYTES


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one session's blocks, and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], capture_output=True, check=False
        )
        if os.geteuid() == 0 and sys.platform == "linux"
        else None
    )
    if mounting is None or mounting.returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def talk(runtime: kvos.Runtime, name: str, seed: int) -> kvos.Session:
    session = runtime.session(name)
    session.append_tokens(some_ids(TOKENS, seed))
    assert_goes_on_like_the_plain_model(session, some_ids(TOKENS, seed))
    return session


def after_the_pause(runtime: kvos.Runtime) -> None:
    """As if the disk had been left alone for long enough, after it failed so often."""

    def forgive(core: EngineCore) -> None:
        level = core.moves.residency._levels[-1]
        level.loads.succeeded()
        level.stores.succeeded()

    runtime.inspect(forgive)


def test_a_conversation_goes_on_while_the_disk_is_full(small_disk: Path) -> None:
    home = small_disk / "home"
    with open_home(home, disk_codec="raw") as runtime:
        first = talk(runtime, "first", 1)
        assert first.hibernate().safe >= TOKENS // BLOCK
        second = talk(runtime, "second", 2)
        with contextlib.suppress(OSError):  # unless its description finds room, which is said in this way
            assert second.hibernate().safe < TOKENS // BLOCK
        counters = disk_tier(runtime).usage().counters
        assert counters["store_errors"] >= 1
        assert second.tokens.tolist()[:TOKENS] == some_ids(TOKENS, 2)
        reclaim_everything(runtime)
        reply = first.generate(max_tokens=2).result()
        assert reply.usage.restored_tokens >= TOKENS // BLOCK * BLOCK, "what is there can be read"
        subprocess.run(["mount", "-o", f"remount,size={10 * DISK_BYTES}", str(small_disk)], check=True)
        after_the_pause(runtime)
        second.prefill()
        assert second.hibernate().safe >= TOKENS // BLOCK, "there is room again"
        assert_right_accounts(disk_tier(runtime), tier_folder(home))
        runtime.check_invariants()
    with open_home(home, disk_codec="raw") as later:
        resumed = later.resume("second")
        tokens = resumed.tokens.tolist()
        assert assert_goes_on_like_the_plain_model(resumed, tokens).usage.restored_tokens >= TOKENS // BLOCK * BLOCK


def open_home_beside(somebody: contextlib.ExitStack, home: Path) -> kvos.Runtime:
    """A runtime that finds its cache folder in use, until ``somebody`` is closed."""
    somebody.enter_context(locked_folder(tier_folder(home)))
    return open_home(home)


def test_a_runtime_whose_disk_cache_is_in_use_takes_it_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "PAUSE_S", 0.0)
    with open_home(tmp_path) as first:
        talk(first, "first", 1).hibernate()
    with contextlib.ExitStack() as somebody, open_home_beside(somebody, tmp_path) as second:
        session = talk(second, "second", 2)
        assert session.hibernate().safe == 0
        [report] = second.tiers()
        assert report.usage.blocks == 0
        assert report.usage.counters["open_errors"] > 1
        somebody.close()
        after_the_pause(second)
        session.append_tokens([5])
        session.prefill()
        assert session.hibernate().safe >= TOKENS // BLOCK
        reclaim_everything(second)
        tokens = session.tokens.tolist()
        assert assert_goes_on_like_the_plain_model(session, tokens).usage.restored_tokens >= TOKENS // BLOCK * BLOCK
        resumed = second.resume("first")
        tokens = resumed.tokens.tolist()
        assert assert_goes_on_like_the_plain_model(resumed, tokens).usage.restored_tokens >= TOKENS // BLOCK * BLOCK


def test_a_file_in_place_of_the_cache_folder_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late, "PAUSE_S", 0.0)
    (tmp_path / "blocks").write_text("somebody's notes")
    with open_home(tmp_path) as runtime:
        session = talk(runtime, "one", 1)
        assert session.hibernate().safe == 0
        (tmp_path / "blocks").unlink()
        after_the_pause(runtime)
        session.prefill()
        assert session.hibernate().safe >= TOKENS // BLOCK
