"""``kvos cache`` on what a real runtime left on disk: a toy model with blocks of 8 tokens."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvos
from kvos.cli import app
from kvos.runtime import Runtime
from kvos.testing.models import toy_model, toy_tokenizer
from kvos.tiers.disk.index import CATALOG_BYTES
from kvos.tiers.disk.survey import survey_folder

CAPACITY = 64 << 20
QUESTION = {"role": "user", "content": "The agent reads a file, and then it waits for an answer. " * 6}


@pytest.fixture(autouse=True)
def disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOS_DISK_CACHE_BYTES", str(CAPACITY))


def open_toy() -> Runtime:
    return kvos.open(toy_model(), tokenizer=toy_tokenizer(), block_size=8, kernels="generic", cache_bytes=4 << 20)


def asked(runtime: Runtime) -> kvos.Reply:
    session = runtime.session("asker", messages=QUESTION)
    reply = session.generate(max_tokens=4).result()
    session.hibernate()
    return reply


@pytest.fixture
def kept(home: Path) -> Path:
    """The folder that a runtime left behind."""
    with open_toy() as runtime:
        asked(runtime)
    (folder,) = (home / "blocks").iterdir()
    return folder


@pytest.fixture
def in_use(home: Path) -> Iterator[Runtime]:
    with open_toy() as runtime:
        asked(runtime)
        yield runtime


def words(text: str) -> str:
    return " ".join(text.split())


def damage(folder: Path) -> str:
    pack = sorted(folder.glob("*.pack"))[0]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    return pack.name


def test_without_anything_on_disk_every_command_says_so(call, home):
    assert "No blocks are kept" in call("cache").stdout
    for name in ("verify", "collect", "clear"):
        result = call("cache", name)
        assert (result.exit_code, "nothing on disk" in result.stdout) == (0, True)


@pytest.mark.parametrize("command", [["cache"], ["cache", "show"]])
def test_show_says_what_a_running_runtime_says(call, in_use, command):
    (tier,) = in_use.tiers()
    stats = in_use.stats()
    output = words(call(*command).stdout)
    assert "LlamaForCausalLM in fp32, 3 layers, 8 tokens a block, codec lossless-planes-4" in output
    assert f"in {tier.usage.blocks} blocks ({tier.usage.blocks * stats.block_size} tokens)" in output
    assert "64.0 MiB" in output
    assert "which runs" in output
    assert "hits on" in output


def test_json_is_the_same_as_data(call, in_use):
    (tier,) = in_use.tiers()
    data = json.loads(call("cache", "show", "--json").stdout)
    (folder,) = data["folders"]
    assert (data["capacity_bytes"], folder["blocks"]) == (CAPACITY, tier.usage.blocks)
    assert folder["used_bytes"] == tier.usage.used_bytes
    assert folder["about"]["models"] == ["LlamaForCausalLM"]
    assert folder["hits"] == 0


def test_hits_are_counted_over_processes(call, kept):
    with open_toy() as runtime:
        usage = asked(runtime).usage
    assert usage.restored_tokens > 0
    (folder,) = json.loads(call("cache", "show", "--json").stdout)["folders"]
    assert (folder["hits"], folder["blocks_hit"]) == (usage.restored_tokens // 8,) * 2


def test_while_a_process_uses_it_the_others_refuse_and_change_nothing(call, in_use, home):
    (folder,) = (home / "blocks").iterdir()
    before = {path.name: path.stat().st_size for path in folder.glob("*.pack")}
    for command in (["verify"], ["collect"], ["clear", "--yes"], ["clear"]):
        result = call("cache", *command)
        assert result.exit_code == 2
        assert "end it (`kvos stats` shows which ones run) and try again" in words(result.stderr)
    assert {path.name: path.stat().st_size for path in folder.glob("*.pack")} == before
    in_use.check_invariants()


def test_verify_finds_everything_whole(call, kept):
    result = call("cache", "verify")
    assert (result.exit_code, "all of it whole" in result.stdout) == (0, True)
    assert f"Verifying {kept.name}" in result.stderr


def test_verify_names_a_damaged_block_and_a_later_run_computes_it_again(call, kept):
    with open_toy() as runtime:
        expected = asked(runtime).text
    pack = damage(kept)
    result = call("cache", "verify")
    assert result.exit_code == 1
    assert f"{pack}, block " in result.stdout
    assert "1 damaged" in result.stdout
    assert call("cache", "verify").exit_code == 0
    with open_toy() as runtime:
        reply = asked(runtime)
        assert reply.text == expected
        assert runtime.stats().counters["restores_failed"] == 0
        assert reply.usage.computed_tokens > 8


def test_collect_keeps_within_the_limit_that_is_set(call, kept, monkeypatch):
    (before,) = json.loads(call("cache", "show", "--json").stdout)["folders"]
    limit = before["used_bytes"] - before["used_bytes"] // 10
    monkeypatch.setenv("KVOS_DISK_CACHE_BYTES", str(limit))
    result = call("cache", "collect")
    assert result.exit_code == 0, result.stderr
    (after,) = json.loads(call("cache", "show", "--json").stdout)["folders"]
    assert after["used_bytes"] <= limit
    assert f"{before['blocks'] - after['blocks']} blocks dropped for the limit" in words(result.stdout)


def test_the_limit_is_for_all_folders_together_and_the_older_ones_give_room(call, kept, monkeypatch):
    """A copy of the folder under another name is another model's: it takes as much room, and was written later."""
    new = kept.with_name("another")
    shutil.copytree(kept, new)
    for pack in new.glob("*.pack"):
        os.utime(pack, (time.time() + 60, time.time() + 60))
    size = survey_folder(new).used_bytes
    monkeypatch.setenv("KVOS_DISK_CACHE_BYTES", str(size + CATALOG_BYTES))
    assert call("cache", "collect").exit_code == 0
    assert survey_folder(new).used_bytes == size
    assert survey_folder(kept).blocks == 0


def test_collect_without_a_limit_says_what_to_do(call, kept, monkeypatch):
    monkeypatch.setenv("KVOS_DISK_CACHE_BYTES", "0")
    result = call("cache", "collect")
    assert (result.exit_code, "kvos cache clear" in words(result.stderr)) == (2, True)
    assert "switched off" in call("cache").stdout


def test_clear_asks_first(home, kept):
    def clear(*more: str, answer: str):
        return CliRunner().invoke(app, ["cache", "clear", *more], input=answer)

    assert clear(answer="n\n").exit_code == 1
    assert clear(answer="").exit_code == 1
    assert list(kept.glob("*.pack"))
    assert clear(answer="y\n").exit_code == 0
    assert not list(kept.glob("*.pack"))


def test_clear_takes_a_model_or_the_beginning_of_a_folder(call, kept):
    result = call("cache", "clear", "nobody", "--yes")
    assert result.exit_code == 2
    assert "LlamaForCausalLM" in result.stderr
    assert list(kept.glob("*.pack"))
    assert call("cache", "show", kept.name[:4]).exit_code == 0
    assert call("cache", "clear", "LlamaForCausalLM", "--yes").exit_code == 0
    assert "No blocks are kept" in call("cache").stdout
    with open_toy() as runtime:
        assert asked(runtime).usage.restored_tokens == 0


def test_a_folder_that_does_not_say_whose_it_is_can_be_looked_after_all_the_same(call, kept):
    (kept / "about.json").unlink()
    assert "a model that is not known" in call("cache").stdout
    assert call("cache", "verify").exit_code == 0
    assert call("cache", "collect").exit_code == 0
    assert call("cache", "clear", kept.name, "--yes").exit_code == 0


def test_a_runtime_whose_folder_cannot_describe_itself_keeps_its_cache(kept):
    (kept / "about.json").unlink()
    (kept / "about.json").mkdir()
    with open_toy() as runtime:
        assert asked(runtime).usage.restored_tokens > 0
