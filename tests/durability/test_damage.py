"""Damaged files never give a wrong token, and every damage is counted, or has a name.

All through the way that a user takes: a session is resumed, its reply and logits are compared with the plain model's.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvos
from durability.damage import WAYS, Records, spoil, swap
from durability.homes import (
    BLOCK,
    assert_goes_on_like_the_plain_model,
    assert_right_accounts,
    disk_tier,
    keys_of,
    open_home,
    reclaim_everything,
    tier_folder,
)
from kvos.errors import SessionFileDamagedError, SessionNotFoundError
from kvos.serving import WhyComputed
from serving.harness import some_ids
from tiers.tier_suite import FAST_FOLDER

LENGTHS = {"ann": 61, "bob": 90, "cy": 43}
"""Tokens of each session; none ends with a block, so that all full blocks are wanted back."""

ROUNDS_PER_HOME = 25
Rounds = Callable[[int, int], int]
Record = Callable[[str, object], None]


def tokens_of(name: str) -> list[int]:
    return some_ids(LENGTHS[name], seed=LENGTHS[name])


@pytest.fixture(scope="module")
def fast() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def homes(fast: Path) -> tuple[Path, Path]:
    """Three sessions, saved and hibernated: as a process left it that ended, and as one that was killed."""
    with open_home(fast / "ended") as runtime:
        for name in LENGTHS:
            session = runtime.session(name)
            session.append_tokens(tokens_of(name))
            session.prefill()
            session.save(name)
            assert session.hibernate().safe == LENGTHS[name] // BLOCK
        shutil.copytree(fast / "ended", fast / "killed")
    assert list(tier_folder(fast / "killed").glob("*-wal"))
    return fast / "ended", fast / "killed"


def counted(runtime: kvos.Runtime) -> int:
    """Everything that the disk tier found wrong."""
    counters = disk_tier(runtime).usage().counters
    return sum(counters.get(name, 0) for name in ("damaged", "catalogs_rebuilt", "other_format", "load_errors"))


def failed_restores(runtime: kvos.Runtime) -> int:
    return runtime.inspect(lambda core: core.manager.counters["restores_failed"])


# -- packs go bad while the runtime is open --------------------------------------------------------------------------


def one_round_while_open(runtime: kvos.Runtime, folder: Path, rng: random.Random, seen: Counter[str]) -> None:
    """Spoil a pack, go on with a session, and put everything back: the session as it was, in blocks that are whole."""
    name = rng.choice(list(LENGTHS))
    tier = disk_tier(runtime)
    session = runtime.resume(name)
    wanted = keys_of(runtime, name)
    reclaim_everything(runtime)
    records = Records(tier, folder)
    assert set(wanted) <= set(records.places), "the round before has put everything back"
    damaged, failed = tier.usage().counters.get("damaged", 0), failed_restores(runtime)
    seen[spoil(list(folder.glob("*.pack")), rng)] += 1
    changed = records.changed()
    reply = assert_goes_on_like_the_plain_model(session, tokens_of(name))
    good = next((n for n, key in enumerate(wanted) if key in changed), len(wanted))
    assert reply.usage.restored_tokens == good * BLOCK
    now = tier.usage().counters.get("damaged", 0)
    read = len(changed & set(wanted))
    assert read <= now - damaged <= len(changed)
    assert failed_restores(runtime) - failed == (read > 0)
    assert (reply.usage.why_computed is WhyComputed.TIER_FAILED) == (read > 0)
    tier.verify()
    assert tier.usage().counters.get("damaged", 0) - damaged == len(changed), "what was not read is found by verify"
    seen["read"] += read > 0
    seen["found by verify"] += len(changed) > now - damaged
    seen["in no block"] += not changed
    session.truncate(tokens=LENGTHS[name])
    session.prefill()
    assert session.hibernate().safe >= LENGTHS[name] // BLOCK, "what was lost is stored again"
    session.close()
    for other in LENGTHS:  # what another session has lost is computed and stored again, too
        if other != name:
            session = runtime.resume(other)
            session.prefill()
            assert session.hibernate().safe >= LENGTHS[other] // BLOCK
            session.close()
    assert_right_accounts(tier, folder)


def test_packs_that_go_bad_under_an_open_runtime(
    homes: tuple[Path, Path], fast: Path, rounds: Rounds, record_property: Record
) -> None:
    seen: Counter[str] = Counter()
    total = rounds(12, 300)
    for first in range(0, total, ROUNDS_PER_HOME):
        home = fast / f"open{first}"
        shutil.copytree(homes[0], home)
        with open_home(home) as runtime:
            for seed in range(first, min(first + ROUNDS_PER_HOME, total)):
                one_round_while_open(runtime, tier_folder(home), random.Random(seed), seen)
            runtime.check_invariants()
        shutil.rmtree(home)
    record_property("damage under an open runtime", dict(seen))
    assert seen["read"] >= total / 4


# -- files that went bad while nobody had them open ------------------------------------------------------------------


def one_round_while_closed(home: Path, rng: random.Random, seen: Counter[str]) -> None:
    """Spoil files of the disk tier, then open the home and go on with every session."""
    folder = tier_folder(home)
    catalogs = [path for path in folder.glob("catalog*") if not path.name.endswith("-shm")]
    files = rng.choice([list(folder.glob("*.pack")), catalogs, [*folder.glob("*.pack"), *catalogs]])
    seen[spoil(files, rng)] += 1
    with open_home(home) as runtime:
        tier, restored = disk_tier(runtime), 0
        for name in rng.sample(list(LENGTHS), len(LENGTHS)):
            session = runtime.resume(name)
            reply = assert_goes_on_like_the_plain_model(session, tokens_of(name))
            restored += reply.usage.restored_tokens
            session.close()
        lost = sum(length // BLOCK for length in LENGTHS.values()) - restored // BLOCK
        found = counted(runtime)
        seen["read"] += found > 0
        seen["harmless"] += lost == 0
        if lost and not found:
            assert tier.verify() > 0, f"{lost} blocks did not come back, and nothing tells why"
            seen["found by verify"] += 1
        tier.verify()
        assert tier.verify() == 0
        assert_right_accounts(tier, folder)
        runtime.check_invariants()
    with open_home(home) as runtime:
        assert counted(runtime) == 0, "once it was found, it is over"


def test_a_disk_cache_that_went_bad_while_closed(
    homes: tuple[Path, Path], fast: Path, rounds: Rounds, record_property: Record
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(rounds(8, 200)):
        home = fast / f"closed{seed}"
        shutil.copytree(homes[seed % 2], home)
        one_round_while_closed(home, random.Random(seed), seen)
        shutil.rmtree(home)
    record_property("damage while closed", dict(seen))
    assert seen["read"] > 0


# -- session files ---------------------------------------------------------------------------------------------------


def opened(open_it: Callable[[], kvos.Session], tokens: list[int]) -> str:
    """Open a session and go on: ``refused`` by name, ``computed`` again, or ``used`` as it is."""
    try:
        session = open_it()
    except (SessionFileDamagedError, SessionNotFoundError):
        return "refused"
    try:
        reply = assert_goes_on_like_the_plain_model(session, tokens)
        return "computed" if reply.usage.why_computed is WhyComputed.SAVED_KV_UNUSABLE else "used"
    finally:
        session.close()


def test_session_files_that_went_bad(
    homes: tuple[Path, Path], fast: Path, rounds: Rounds, record_property: Record
) -> None:
    home = fast / "files"
    shutil.copytree(homes[0], home)
    seen: Counter[tuple[str, str]] = Counter()
    with open_home(home, disk_bytes=1 << 20) as runtime:
        for seed in range(rounds(20, 300)):
            rng = random.Random(seed)
            kind = rng.choice(["sessions", "hibernated"])
            files = sorted((home / kind).glob("*/*.kvos"))
            before = {path: path.read_bytes() for path in files}
            # A saved session may be renamed, so there is nothing wrong with two that have each other's names.
            spoil(files, rng, ways=[way for way in WAYS if kind == "hibernated" or way is not swap])
            for path in files:
                name = path.stem
                reclaim_everything(runtime)
                outcome = opened(lambda: open_by(runtime, kind, name), tokens_of(name))  # noqa: B023 - called here
                whole = path.exists() and path.read_bytes() == before[path]
                assert (outcome == "used") == (whole or is_harmless(path, before[path])), (seed, path, outcome)
                seen[kind, outcome] += 1
            for path, content in before.items():
                path.write_bytes(content)
        runtime.check_invariants()
    record_property("damage to session files", {" ".join(what): count for what, count in seen.items()})
    assert seen["sessions", "refused"] > 0
    assert seen["hibernated", "refused"] > 0


def open_by(runtime: kvos.Runtime, kind: str, name: str) -> kvos.Session:
    return runtime.load(name) if kind == "sessions" else runtime.resume(name)


def is_harmless(path: Path, good: bytes) -> bool:
    """Only white space behind the header, which is padding, has changed."""

    def without_padding(data: bytes) -> Any:
        header = 8 + int.from_bytes(good[:8], "little")
        return data[:8], data[8:header].rstrip(), data[header:]

    return path.exists() and without_padding(path.read_bytes()) == without_padding(good)
