"""An agent's process that is killed while it saves and hibernates: ``killed_agent.py HOME KILLS SEED roomy|small``.

Three kinds of processes. The one that runs this file has everything imported, starts no thread, and forks the others:
a *writer*, which opens a runtime, works on named sessions and says through a pipe what it is about to do and what has
returned, until it is killed; and a *checker*, which opens the home after that as the next process of a user would.
Prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import kvos
from durability.homes import (
    BLOCK,
    ROOMY,
    SMALL,
    assert_goes_on_like_the_plain_model,
    assert_right_accounts,
    blocks_there,
    disk_tier,
    open_home,
    parts,
    tier_folder,
)
from kvos.runtime.session_file import STALE_SECONDS
from serving.harness import reference

NAMES = ("ann", "bob", "cy")
LONGEST = 150
MOST_CALLS = 6
FIRST_CALL_S = 0.01
OPENING_S = 0.06
PATIENCE_S = 60.0

Version = list[int]
"""Of a session: its tokens."""


@dataclass
class Known:
    """What the world was told of one saved or hibernated session.

    Attributes:
        acknowledged: what the last call that returned has stored; None before the first.
        attempted: what later calls would have stored; they were killed.
        safe: blocks that the disk tier was said to have of the acknowledged version; None if the call was killed.
    """

    acknowledged: Version | None = None
    attempted: list[Version] = field(default_factory=list)
    safe: int | None = None


Ledger = dict[tuple[str, str], Known]

# -- the writer ------------------------------------------------------------------------------------------------------


def say(pipe: int, **message: Any) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")


def open_session(runtime: kvos.Runtime, name: str) -> kvos.Session:
    """As an agent after a restart would."""
    if name in runtime.hibernated_sessions():
        return runtime.resume(name)
    if name in runtime.saved_sessions():
        return runtime.load(name)
    return runtime.session(name)


def write_for_ever(home: Path, capacity: int, seed: int, pipe: int) -> None:
    rng = random.Random(seed)
    runtime = open_home(home, capacity)
    sessions = {name: open_session(runtime, name) for name in NAMES}
    say(pipe, opened=True)
    while True:
        name = rng.choice(NAMES)
        session = sessions[name]
        if len(session.tokens) > LONGEST:
            session.truncate(tokens=rng.randint(1, 40))
        session.append_tokens([rng.randrange(3, 259) for _ in range(rng.randint(1, 30))])
        if rng.random() < 0.5:
            session.generate(max_tokens=2, ignore_eos=True).result()
        else:
            session.prefill()
        tokens = session.tokens.tolist()
        for kind in rng.choice((["save"], ["hibernate"], ["save", "hibernate"], [])):
            say(pipe, doing=kind, name=name, tokens=tokens)
            begun = time.perf_counter()
            safe = session.hibernate().safe if kind == "hibernate" else session.save(name) or 0
            say(pipe, done=kind, name=name, safe=safe, seconds=time.perf_counter() - begun)


# -- the killer ------------------------------------------------------------------------------------------------------


def forked(work: Callable[[int], None]) -> tuple[int, IO[bytes]]:
    """A child that does ``work`` with a pipe to write to; its id, and the pipe's other end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(writing)
            os._exit(0)
        finally:  # whatever it was, this process must not go on as its parent
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    return child, os.fdopen(reading, "rb", buffering=0)


def listen(pipe: IO[bytes], heard: bytearray, seconds: float, what: bytes = b"", enough: int = 1) -> None:
    """Read for so long, or until ``what`` was said so often."""
    end = time.perf_counter() + seconds
    while not what or heard.count(what) < enough:
        left = end - time.perf_counter()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return
        if not (data := pipe.read(1 << 16)):
            return
        heard += data


def kill_one(home: Path, capacity: int, rng: random.Random, number: int, call_s: float) -> list[dict[str, Any]]:
    """Kill a writer at a random moment; what it said.

    Of five, one dies while it opens, one at any time of its work, and three within a call or just behind it. ``call_s``
    is how long a call takes.
    """
    seed = rng.randrange(1 << 30)
    child, pipe = forked(lambda writing: write_for_ever(home, capacity, seed, writing))
    heard = bytearray()
    with pipe:
        moment = number % 5
        if moment == 0:
            listen(pipe, heard, rng.uniform(0, OPENING_S))
        elif moment == 1:
            listen(pipe, heard, PATIENCE_S, b'"opened"')
            listen(pipe, heard, rng.uniform(0, 10 * call_s))
        else:
            listen(pipe, heard, PATIENCE_S, b'"doing"', rng.randint(2, MOST_CALLS))
            listen(pipe, heard, rng.uniform(0, 1.3 * call_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status != signal.SIGKILL:
            raise RuntimeError("the writer ended by itself")
        heard += pipe.read()
    whole = heard[: heard.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def note(ledger: Ledger, said: list[dict[str, Any]]) -> Counter[str]:
    """What a writer said becomes what must be there, and what may be."""
    seen: Counter[str] = Counter()
    for message in said:
        if "doing" in message:
            known = ledger.setdefault((message["doing"], message["name"]), Known())
            known.attempted.append(message["tokens"])
        elif "done" in message:
            known = ledger[message["done"], message["name"]]
            known.acknowledged, known.attempted, known.safe = known.attempted[-1], [], message["safe"]
            seen[message["done"]] += 1
    seen["killed_in_a_call"] = int(bool(said) and "doing" in said[-1])
    seen["killed_while_opening"] = int(not said)
    return seen


# -- the checker -----------------------------------------------------------------------------------------------------


def check(home: Path, capacity: int, ledger: Ledger, pipe: int) -> None:
    """Open the home, compare with the ledger, say what each session is now."""
    seen: Counter[str] = Counter()
    found = []
    with open_home(home, capacity) as runtime:
        tier = disk_tier(runtime)
        assert_right_accounts(tier, tier_folder(home))
        for (kind, name), known in ledger.items():
            version = check_one(runtime, kind, name, known, seen, exact=capacity == ROOMY)
            found.append([kind, name, version])
        known_names = {kind: {name for k, name in ledger if k == kind} for kind in ("save", "hibernate")}
        assert set(runtime.saved_sessions()) <= known_names["save"]
        assert set(runtime.hibernated_sessions()) <= known_names["hibernate"]
        runtime.check_invariants()
        assert tier.verify() == 0, "nothing torn"
        assert_right_accounts(tier, tier_folder(home))
        counters = tier.usage().counters
        seen.update({name: counters.get(name, 0) for name in ("adopted", "damaged", "evicted", "catalogs_rebuilt")})
    say(pipe, seen=seen, found=found)


def check_one(
    runtime: kvos.Runtime, kind: str, name: str, known: Known, seen: Counter[str], *, exact: bool
) -> Version | None:
    """A session that was acknowledged is there: as it was then, or as a later attempt would have it."""
    names = runtime.saved_sessions() if kind == "save" else runtime.hibernated_sessions()
    if name not in names:
        assert known.acknowledged is None, f"{kind} of {name} was acknowledged, and it is gone"
        return None
    session = runtime.load(name, name=f"saved-{name}") if kind == "save" else runtime.resume(name)
    tokens: Version = session.tokens.tolist()
    assert tokens in [known.acknowledged, *known.attempted], f"{kind} of {name} has come back as something else"
    if kind == "hibernate" and exact and tokens == known.acknowledged and known.safe is not None:
        assert known.safe >= (len(tokens) - 1) // BLOCK, "all but what the last token's block may still want"
        assert blocks_there(runtime, name) >= known.safe
    reply = assert_goes_on_like_the_plain_model(session, tokens)
    seen["restored_tokens"] += reply.usage.restored_tokens
    seen["later_than_acknowledged"] += tokens != known.acknowledged
    session.close()
    return tokens


def checked(home: Path, capacity: int, ledger: Ledger) -> Counter[str]:
    child, pipe = forked(lambda writing: check(home, capacity, ledger, writing))
    with pipe:
        said = b"".join(iter(lambda: pipe.read(1 << 16), b""))
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("what the killed process left is not right, see above")
    message = json.loads(said)
    for kind, name, version in message["found"]:
        safe = ledger[kind, name].safe if version == ledger[kind, name].acknowledged else None
        ledger[kind, name] = Known(version, safe=safe)
    return Counter(message["seen"])


def unfinished(home: Path) -> list[Path]:
    return [path for folder in ("sessions", "hibernated") for path in (home / folder).glob("*/.*")]


def check_sweep(home: Path, capacity: int) -> None:
    """What the dead left goes with the first session that is written after an hour."""
    long_ago = time.time() - STALE_SECONDS - 60
    for path in unfinished(home):
        for one in [*path.glob("*"), path]:
            os.utime(one, (long_ago, long_ago))
    with open_home(home, capacity) as runtime:
        session = runtime.session("last")
        session.append_tokens([5] * BLOCK)
        session.prefill()
        session.save("last")
        session.hibernate()
    assert unfinished(home) == []


def main(home: Path, kills: int, seed: int, capacity: int) -> None:
    torch.set_num_threads(1)
    parts()
    reference()
    rng = random.Random(seed)
    ledger: Ledger = {}
    seen: Counter[str] = Counter()
    took = [FIRST_CALL_S]
    for number in range(kills):
        said = kill_one(home, capacity, rng, number, statistics.median(took))
        took += [message["seconds"] for message in said if "done" in message]
        seen += note(ledger, said)
        seen += checked(home, capacity, ledger)
    seen["unfinished"] = len(unfinished(home))
    child, pipe = forked(lambda _: check_sweep(home, capacity))
    pipe.close()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("unfinished files stay")
    sys.stdout.write(json.dumps(seen | {"kills": kills}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), ROOMY if sys.argv[4] == "roomy" else SMALL)
