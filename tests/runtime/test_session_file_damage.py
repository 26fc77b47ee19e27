"""Damage to a saved session is refused or computed again, never used; who writes a file may die at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import kvos
from kvos.errors import SessionFileDamagedError
from kvos.runtime.session_file import STALE_SECONDS
from serving.harness import assert_same_logits, some_ids

Open = Callable[..., kvos.Runtime]
Rounds = Callable[[int, int], int]
HERE = Path(__file__).parent
TOKENS = 6


@pytest.fixture
def saved(open_toy: Open, tmp_path: Path) -> Path:
    runtime = open_toy()
    session = runtime.session("victim")
    session.append_tokens(some_ids(TOKENS))
    session.prefill()
    session.save(tmp_path / "victim.kvos")
    runtime.close()
    return tmp_path / "victim.kvos"


def outcome(runtime: kvos.Runtime, path: Path) -> str:
    """Load and compare: ``refused``, ``recomputed`` or ``used``; anything else is an error."""
    try:
        session = runtime.load(path)
    except SessionFileDamagedError:
        return "refused"
    try:
        pending = session.report().pending
        assert session.tokens.tolist() == some_ids(TOKENS)
        assert_same_logits(session.score([7]), [*some_ids(TOKENS), 7])
        return "recomputed" if pending else "used"
    finally:
        session.close()


def places(size: int, count: int, seed: int = 0) -> list[int]:
    return sorted(random.Random(seed).sample(range(size), min(count, size)))


def test_no_flipped_byte_is_ever_used(open_toy: Open, saved: Path, rounds: Rounds) -> None:
    good = saved.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    runtime = open_toy()
    assert outcome(runtime, saved) == "used"
    ids = good.find(np.array(some_ids(TOKENS), np.int32).tobytes())
    assert ids > 0
    chosen = [*range(10), *places(header, 120), *range(ids, ids + 4 * TOKENS), *places(len(good), 60, 1)]
    everywhere = range(len(good)) if rounds(0, 1) else chosen
    randomly = random.Random(5)
    seen = {"refused": 0, "recomputed": 0, "used": 0}
    for place in everywhere:
        damaged = bytearray(good)
        damaged[place] ^= randomly.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
        saved.write_bytes(damaged)
        result = outcome(runtime, saved)
        seen[result] += 1
        assert result != "used" or harmless(good, place), f"byte {place} was changed and the file was used"
    assert seen["refused"] > 50
    assert seen["recomputed"] > 20
    runtime.check_invariants()


def harmless(good: bytes, place: int) -> bool:
    """White space behind the header, which is padding: everything that it says is checked by digests."""
    header = 8 + int.from_bytes(good[:8], "little")
    return place < header and good[place : place + 1] == b" "


def test_no_file_cut_short_is_ever_used(open_toy: Open, saved: Path, rounds: Rounds) -> None:
    good = saved.read_bytes()
    runtime = open_toy()
    lengths = range(len(good)) if rounds(0, 1) else [0, 1, 7, 8, 9, *places(len(good), 60), len(good) - 1]
    for length in lengths:
        saved.write_bytes(good[:length])
        assert outcome(runtime, saved) == "refused"
    for more in (b"\0", b"x" * 100, good):
        saved.write_bytes(good + more)
        assert outcome(runtime, saved) in ("refused", "recomputed")
    runtime.check_invariants()


def test_lost_pages_of_a_file_are_never_used(open_toy: Open, saved: Path, rounds: Rounds) -> None:
    good = saved.read_bytes()
    runtime = open_toy()
    for number in range(rounds(25, 1000)):
        randomly = random.Random(number)
        damaged = bytearray(good)
        start = randomly.randrange(len(good))
        size = randomly.choice([16, 512, 4096])
        end = min(len(good), start + size)
        damaged[start:end] = randomly.choice([bytes(end - start), randomly.randbytes(end - start)])
        if damaged != good:
            saved.write_bytes(damaged)
            assert outcome(runtime, saved) != "used"


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04pickle", b"PK\x03\x04", b"{}", bytes(100), b"\xff" * 100])
def test_files_of_other_kinds_are_refused(open_toy: Open, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.kvos"
    path.write_bytes(content)
    runtime = open_toy()
    with pytest.raises(SessionFileDamagedError, match=r"other\.kvos"):
        runtime.load(path)
    assert runtime.sessions() == ()


def test_a_safetensors_file_that_is_no_session_is_refused(open_toy: Open, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"tokens": torch.zeros(3, dtype=torch.int32)}, tmp_path / "x.kvos", {"kvos": "{}"})
    with pytest.raises(SessionFileDamagedError):
        open_toy().load(tmp_path / "x.kvos")
    save_file({"tokens": torch.zeros(3, dtype=torch.int32)}, tmp_path / "x.kvos")
    with pytest.raises(SessionFileDamagedError, match="not a session"):
        open_toy().load(tmp_path / "x.kvos")


def with_header(saved: Path, text: str) -> None:
    """Give a saved session another description, with a right digest."""
    from safetensors.torch import load_file, save_file

    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    save_file(load_file(saved), saved, {"kvos": text, "kvos_digest": digest})


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"', "{}", "", '{"format": 1}', "[" * 100_000])
def test_a_description_that_is_none_is_refused(open_toy: Open, saved: Path, text: str) -> None:
    with_header(saved, text)
    runtime = open_toy()
    with pytest.raises(SessionFileDamagedError, match=r"victim\.kvos"):
        runtime.load(saved)
    assert runtime.sessions() == ()


@pytest.mark.parametrize("key", ["format", "model", "model_name", "numeric_class", "manifest", "digests"])
@pytest.mark.parametrize("value", [None, 5, [], {}, ["x"]])
def test_a_description_with_a_field_of_another_type_is_refused(
    open_toy: Open, saved: Path, key: str, value: object
) -> None:
    with safe_open(saved, framework="pt") as file:
        header = json.loads(file.metadata()["kvos"])
    with_header(saved, json.dumps(header | {key: value}))
    with pytest.raises(SessionFileDamagedError, match=r"victim\.kvos"):
        open_toy().load(saved)


def test_parts_of_two_files_are_not_mixed(open_toy: Open, tmp_path: Path) -> None:
    """Keys and values of another session of the same length, under the header of this one."""
    runtime = open_toy()
    files = []
    for number in range(2):
        session = runtime.session()
        session.append_tokens(some_ids(TOKENS, number))
        session.prefill()
        session.save(tmp_path / f"{number}.kvos")
        session.close()
        files.append((tmp_path / f"{number}.kvos").read_bytes())
    header = 8 + int.from_bytes(files[0][:8], "little")
    tokens = files[0][header:].find(np.array(some_ids(TOKENS), np.int32).tobytes())
    assert tokens >= 0
    mixed = bytearray(files[1])
    mixed[:header] = files[0][:header]
    mixed[header + tokens : header + tokens + 4 * TOKENS] = files[0][header + tokens : header + tokens + 4 * TOKENS]
    (tmp_path / "mixed.kvos").write_bytes(mixed)
    fresh = open_toy()
    assert outcome(fresh, tmp_path / "mixed.kvos") in ("recomputed", "refused")


# -- the disk, and death ---------------------------------------------------------------------------------------------


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file of this process can grow beyond ``limit`` bytes: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_leaves_the_old_session_and_no_rubbish(open_toy: Open, saved: Path) -> None:
    runtime = open_toy()
    session = runtime.load(saved)
    session.append_tokens(some_ids(50, 1))
    session.prefill()
    good = saved.read_bytes()
    for limit in (0, 100, 4096, 20_000):
        with small_files(limit), pytest.raises(OSError, match="victim"):
            session.save(saved)
        assert saved.read_bytes() == good
        assert [path.name for path in saved.parent.iterdir() if path.is_file()] == ["victim.kvos"]
    session.save(saved)
    assert runtime.load(saved, name="again").report().tokens == TOKENS + 50


def test_a_full_disk_leaves_the_old_session(open_toy: Open, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    ) if os.geteuid() == 0 and sys.platform == "linux" else None  # fmt: skip
    if mounting is None or mounting.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        runtime = open_toy()
        session = runtime.session("s")
        session.append_tokens(some_ids(TOKENS))
        session.prefill()
        session.save(disk / "s.kvos")
        session.append_tokens(some_ids(60))
        session.prefill()
        with pytest.raises(OSError, match="No space left"):
            session.save(disk / "s.kvos")
        assert [path.name for path in disk.iterdir()] == ["s.kvos"]
        assert runtime.load(disk / "s.kvos", name="old").tokens.tolist() == some_ids(TOKENS)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            session.save(disk / "s.kvos")
        with pytest.raises(OSError, match="Read-only"):
            session.save(disk / "folder" / "s.kvos")
        assert runtime.load(disk / "s.kvos", name="still").tokens.tolist() == some_ids(TOKENS)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_may_not_be_written_is_an_error_of_the_system(open_toy: Open, saved: Path) -> None:
    session = open_toy().load(saved)
    with pytest.raises(OSError, match="victim"):
        session.save(saved / "inside.kvos")  # a file is where the folder should be
    if os.geteuid() != 0:
        saved.parent.chmod(0o500)
        with pytest.raises(PermissionError):
            session.save(saved)
        saved.parent.chmod(0o700)


def test_a_killed_writer_leaves_the_old_session_or_the_new_one(tmp_path: Path, rounds: Rounds) -> None:
    kills = rounds(25, 500)
    memory = Path("/dev/shm")  # death of a process, not of a machine: no need to wait for a disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        run = subprocess.run(
            [sys.executable, HERE / "killed_saver.py", folder, str(kills)], capture_output=True, text=True, check=False
        )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["kills"] == kills
    assert seen["odd"] + seen["even"] == kills, "each file was a whole one"
    assert seen["odd"]
    assert seen["even"]
    assert seen["left"], "no kill hit an unfinished file: this test shows nothing"


def test_what_the_dead_left_is_swept_and_what_the_living_write_is_not(open_toy: Open, saved: Path) -> None:
    folder = saved.parent
    long_ago = time.time() - STALE_SECONDS - 60

    def left(name: str, *files: str, at: float | None = None) -> Path:
        """A folder with files, or a file if there are none, from then on untouched."""
        path = folder / name
        if files:
            path.mkdir()
        for one in [path / file for file in files] or [path]:
            one.write_bytes(b"half")
        for one in [*path.glob("*"), path] if at else []:
            os.utime(one, (at, at))
        return path

    old = [
        left(".victim.kvos.abc_1234.unfinished", "session", at=long_ago),
        left(".victim.kvos.def_1234.unfinished", ".tmpXYZ", at=long_ago),
        left(".bystander.kvos.abc_1234.unfinished", ".tmpXYZ", "session", at=long_ago),
        left(".from-an-older-kvos.kvos.abc_1234.unfinished", at=long_ago),
    ]
    young = [
        left(".victim.kvos.ghi_1234.unfinished", ".tmpXYZ"),
        left(".victim.kvos.jkl_1234.unfinished"),
        left(".of-somebody-else.unfinished", "thesis.txt", at=long_ago),
        left(".essay.unfinished", at=long_ago),
        left(".notes.thursday.unfinished", "thesis.txt", at=long_ago),
    ]
    slow = left(".slow.kvos.abc_1234.unfinished", "session", at=long_ago)
    os.utime(slow / "session")
    session = open_toy().load(saved)
    session.save(saved)
    assert [path.name for path in old if path.exists()] == []
    assert all(path.exists() for path in [*young, slow])
    assert (folder / ".of-somebody-else.unfinished" / "thesis.txt").exists()


def test_all_that_is_unfinished_lies_in_a_private_folder(
    open_toy: Open, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvos.runtime import session_file

    seen: list[tuple[str, int]] = []

    def interrupted(tensors: object, path: Path, metadata: object) -> None:
        (path.parent / ".tmpXYZ").write_bytes(b"half")
        seen.append((path.parent.name, stat.S_IMODE(path.parent.stat().st_mode)))
        raise KeyboardInterrupt

    session = open_toy().load(saved)
    good = saved.read_bytes()
    monkeypatch.setattr(session_file, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.save(saved)
    [(name, mode)] = seen
    assert (name.startswith(".victim.kvos."), name.endswith(".unfinished"), mode) == (True, True, 0o700)
    assert not (saved.parent / name).exists()
    assert saved.read_bytes() == good


def test_a_file_name_may_be_as_long_as_the_file_system_takes(open_toy: Open, saved: Path) -> None:
    path = saved.parent / ("x" * 250 + ".kvos")
    runtime = open_toy()
    runtime.load(saved).save(path)
    assert runtime.load(path, name="again").tokens.tolist() == some_ids(TOKENS)
