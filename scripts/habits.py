"""House rules that no linter knows: short files and functions, and no assert outside check_invariants."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
"""A function is meant to fit on a screen (about 40 lines); this is where the check stops it. Inner ones count apart.

A comment ``# long: REASON`` on the line of its ``def`` lets one pass.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def asserts(node: ast.AST) -> Iterator[ast.Assert]:
    """Every assert below ``node`` that is not inside a method named ``check_invariants``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) and child.name.endswith("check_invariants"):
            continue
        if isinstance(child, ast.Assert):
            yield child
        yield from asserts(child)


def lines_of(function: Function) -> set[int]:
    """Line numbers from ``def`` to the last statement."""
    return set(range(function.lineno, (function.end_lineno or function.lineno) + 1))


def own_lines(function: Function) -> set[int]:
    """The same without the functions inside it."""
    inner = (child for child in ast.walk(function) if child is not function and isinstance(child, Function))
    return lines_of(function).difference(*map(lines_of, inner))


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with one file, as ``path:line: text``."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, str(path))
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{path}:1: {lines} lines; divide it, {FILE_LINES} is the limit"
    for found in asserts(tree):
        yield f"{path}:{found.lineno}: assert is for check_invariants and tests; raise an error from kvos.errors"
    for node in ast.walk(tree):
        if isinstance(node, Function) and "# long: " not in source.splitlines()[node.lineno - 1]:
            length = len(own_lines(node))
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; {FUNCTION_LINES} is the limit"


def main() -> int:
    """Print the complaints; 1 if there are any."""
    found = [text for path in sorted(Path("src").rglob("*.py")) for text in complaints(path)]
    print("\n".join(found) or "House rules: kept.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
