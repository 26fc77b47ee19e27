"""Names of open sessions."""

from __future__ import annotations

import pytest

from kvos.errors import SessionExistsError, SessionNotFoundError
from serving.harness import Bench


def test_a_name_is_taken_once_and_free_again_after_the_close() -> None:
    bench = Bench()
    first = bench.open("a")
    with pytest.raises(SessionExistsError, match="'a'"):
        bench.open("a")
    bench.core.forget(first)
    assert bench.open("a") is bench.core.sessions.get("a")


def test_closing_an_old_session_again_leaves_the_new_one_of_that_name_alone() -> None:
    bench = Bench()
    old = bench.open("a")
    bench.core.forget(old)
    new = bench.raw([5, 6, 7], "a")
    bench.handle(old).close()
    assert bench.core.sessions.get("a") is new
    bench.check(new)


def test_an_unknown_name_is_an_error_that_says_which_are_open() -> None:
    bench = Bench()
    bench.open("left")
    bench.open("right")
    with pytest.raises(SessionNotFoundError, match="left, right"):
        bench.core.sessions.get("middle")


def test_names_that_kvos_chooses_avoid_those_that_are_taken() -> None:
    bench = Bench()
    for taken in ("session-1", "session-3"):
        bench.open(taken)
    names = [bench.open().id for _ in range(3)]
    assert len({*names, "session-1", "session-3"}) == 5


def test_forks_all_get_their_names_or_none_is_made() -> None:
    bench = Bench()
    parent = bench.raw([5, 6, 7], "p")
    bench.compute(parent)
    bench.open("taken")
    before = bench.state()
    for names in (["x", "taken"], ["x", "y", "x"], ["p"]):
        with pytest.raises(SessionExistsError):
            bench.core.fork(parent, names)
        assert bench.state() == before
    children = bench.core.fork(parent, ["x", None, None])
    assert len({child.id for child in children}) == 3
    assert [child.parent for child in children] == ["p"] * 3
    assert bench.count("forks") == 3
