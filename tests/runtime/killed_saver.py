"""Saves two sessions in turn under one name, and is killed while it does so: ``killed_saver.py FOLDER KILLS``.

Each child is forked from a process that has imported everything already, so that a kill costs milliseconds. After each
kill the file must be one of the two, whole. Prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kvos.runtime.session_file import FileSessionStore
from kvos.sessions import SavedSession, SessionManifest, Span, SpanKind, Transcript

SIZES = (700, 900)


def session_of(number: int) -> SavedSession:
    """A session that says everywhere which one it is."""
    tokens = SIZES[number]
    spans = (Span(0, SpanKind.USER, "user", 0, tokens, 0),)
    tensors = [torch.full((tokens, 2, 16), float(number), dtype=torch.float64) for _ in range(6)]
    return SavedSession(
        manifest=SessionManifest(f"s{number}", "default", tokens, tokens, Transcript(spans=spans)),
        model="m",
        model_name="m",
        numeric_class="float64",
        tokens=np.full(tokens, number, np.int32),
        keys=tensors[:3],
        values=tensors[3:],
    )


def save_for_ever(store: FileSessionStore, saved: int) -> None:
    """One byte into the pipe ``saved`` after each save, and one before the first."""
    sessions = [session_of(number) for number in range(2)]
    os.write(saved, b"!")
    while True:
        for session in sessions:
            store.put("x", session)
            os.write(saved, b"!")


def which(store: FileSessionStore) -> int:
    """The number of the session in the file; raises if it is not a whole one."""
    found = store.get("x")
    number = int(found.tokens[0])
    if found.kv_problem or len(found.tokens) != SIZES[number] or not (found.tokens == number).all():
        raise ValueError(f"a torn file: {found.kv_problem}")
    if not all(bool((tensor == number).all()) for tensor in (*found.keys, *found.values)):
        raise ValueError("keys and values of another session")
    return number


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    store = FileSessionStore(folder)
    store.put("x", session_of(0))
    started = time.perf_counter()
    store.put("x", session_of(0))
    one_save = time.perf_counter() - started
    delays = random.Random(0)
    seen = [0, 0]
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(store, writing)
        for _ in range(delays.randint(1, 4)):
            os.read(reading, 1)
        time.sleep(delays.uniform(0, one_save))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        seen[which(store)] += 1
    left = len(list(folder.glob(".*.unfinished")))
    sys.stdout.write(json.dumps({"kills": kills, "even": seen[0], "odd": seen[1], "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
