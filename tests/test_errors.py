"""The tree in the docstring of ``kvos.errors`` is the tree of the classes."""

from __future__ import annotations

import re

import pytest

from kvos import errors
from kvos.errors import ClientError, KvosError, OutOfBlocksError, ServerError

LINE = re.compile(r"^(?P<branch>[│├└─\s]*)(?P<name>[A-Z]\w+)(?:\s+(?P<status>\d{3}))?(?:\s{2,}\S.*)?$")


def drawn() -> dict[str, tuple[str | None, int | None]]:
    """Per class, its parent and its status as the docstring draws them; four characters per level."""
    tree: dict[str, tuple[str | None, int | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = LINE.match(line)
        if found is None or not found["name"].endswith("Error"):
            continue
        level = len(found["branch"]) // 4
        path = [*path[:level], found["name"]]
        tree[found["name"]] = (path[-2] if level else None, int(found["status"]) if found["status"] else None)
    return tree


def classes() -> dict[str, type[KvosError]]:
    return {name: getattr(errors, name) for name in errors.__all__}


def test_the_drawn_tree_is_the_tree_of_the_classes() -> None:
    assert drawn().keys() == classes().keys()
    for name, (parent, _) in drawn().items():
        bases = [base.__name__ for base in classes()[name].__bases__ if issubclass(base, KvosError)]
        assert bases == ([parent] if parent else []), name


def test_the_drawn_http_statuses_are_those_of_the_classes() -> None:
    tree = drawn()
    for name, found in classes().items():
        status, above = tree[name][1], tree[name][0]
        while status is None and above is not None:
            above, status = tree[above]
        if status is not None:
            assert found.http_status == status, name


def test_every_error_of_the_module_is_public_and_documented() -> None:
    defined = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    ]
    assert sorted(error.__name__ for error in defined) == errors.__all__
    assert all(error.__doc__ for error in defined)


@pytest.mark.parametrize("name", errors.__all__)
def test_the_fault_is_the_clients_or_the_servers(name: str) -> None:
    error = classes()[name]
    if error is not KvosError:
        assert issubclass(error, ClientError) != issubclass(error, ServerError)
        assert error.http_status // 100 == (4 if issubclass(error, ClientError) else 5)


def test_out_of_blocks_says_how_many_and_who() -> None:
    error = OutOfBlocksError(5, 1, 2, 7, (("session a", 4), ("session b", 3)))
    assert str(error).startswith(
        "out of KV blocks: asked for 5, 1 free, 2 cached, 7 held (session a: 4, session b: 3)."
    )
    assert "nobody named" in str(OutOfBlocksError(1, 0, 0, 0))
