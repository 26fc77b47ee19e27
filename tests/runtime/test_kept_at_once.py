"""Several threads hibernate, resume, save and forget the same sessions at once: the newest state stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvos
from kvos.errors import SessionExistsError, SessionNotFoundError
from kvos.runtime import session as session_module
from kvos.runtime.session_file import read_session, write_session
from kvos.sessions import SavedSession
from kvos.testing import FaultyTier, TierFault
from kvos.tiers import Tier
from runtime.test_threads import run_all
from serving.harness import some_ids

Open = Callable[..., kvos.Runtime]
THREADS = 6
WAIT_S = 30


def raw(runtime: kvos.Runtime, name: str, n: int = 20) -> kvos.Session:
    session = runtime.session(name)
    session.append_tokens(some_ids(n))
    session.prefill()
    return session


def test_all_who_resume_a_session_at_once_get_the_same_one(runtime: kvos.Runtime) -> None:
    raw(runtime, "shared").hibernate()
    for _ in range(20):
        runtime.get("shared").close()
        got: list[kvos.Session] = []
        run_all([lambda: got.append(runtime.resume("shared"))] * THREADS)  # noqa: B023 - used within the round
        assert len(got) == THREADS
        got[0].append_tokens([5])
        assert {session.tokens.tolist()[-1] for session in got} == {5}
        got[0].truncate(tokens=20)


def test_a_name_that_another_tenant_has_open_is_refused(runtime: kvos.Runtime) -> None:
    session = raw(runtime, "shared")
    session.hibernate()
    session.close()
    runtime.session("shared", tenant="other")
    with pytest.raises(SessionExistsError, match="shared"):
        runtime.resume("shared")


def test_a_hibernation_that_took_longer_does_not_replace_what_a_later_one_has_kept(open_toy: Open) -> None:
    runtime = open_toy(disk_cache_bytes=64 << 20)
    hung: list[FaultyTier] = []

    def wrap(tier: Tier) -> Tier:
        hung.append(FaultyTier(tier))
        hung[0].always("store", TierFault.HANG)
        return hung[0]

    runtime.inspect(lambda core: core.moves.residency.wrap_tiers(wrap))
    session = raw(runtime, "shared")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(session.hibernate)
        assert hung[0].hanging.wait(WAIT_S)
        session.truncate(tokens=4)  # no full block, so nothing to wait for
        session.hibernate()
        hung[0].heal()
        slow.result(WAIT_S)
    session.close()
    assert runtime.resume("shared").tokens.tolist() == some_ids(20)[:4]


def test_a_save_that_took_longer_does_not_replace_a_later_one(
    runtime: kvos.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, later_is_over = threading.Event(), threading.Event()

    def write(path: Path, saved: SavedSession) -> None:
        if not begun.is_set():
            begun.set()
            later_is_over.wait(0.5)  # it should not be, since it waits for this one
        write_session(path, saved)

    monkeypatch.setattr(session_module, "write_session", write)
    session, file = raw(runtime, "shared"), tmp_path / "file.kvos"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(session.save, file)
        assert begun.wait(WAIT_S)
        session.append_tokens([5])
        session.save(file)
        later_is_over.set()
        slow.result(WAIT_S)
    assert read_session(file).tokens.tolist() == [*some_ids(20), 5]


def test_of_all_who_forget_a_session_at_once_one_does(runtime: kvos.Runtime) -> None:
    session = raw(runtime, "shared")
    for _ in range(100):
        session.hibernate()
        ends: list[str] = []

        def forget(ends: list[str] = ends) -> None:
            try:
                runtime.forget_hibernated("shared")
                ends.append("forgotten")
            except SessionNotFoundError:
                ends.append("not found")

        run_all([forget] * THREADS)
        assert sorted(ends) == ["forgotten", *["not found"] * (THREADS - 1)]
