"""``/blocks`` and its picture: which session holds which blocks, and what a block holds."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from kvos.cli.chat.picture import CELLS, block_ranges, cells, legend, session_rows
from kvos.runtime import SessionReport
from kvos.sessions import SessionState

SHARED, OWN, SHARED_PART, OWN_PART = (
    CELLS[key][0] for key in ((True, False), (False, False), (True, True), (False, True))
)


def report(name: str = "main", *, tokens: int, pending: int = 0, blocks: tuple[int, ...], shared: tuple[int, ...] = ()):
    return SessionReport(
        name=name,
        tenant="default",
        parent=None,
        state=SessionState.IDLE,
        tokens=tokens,
        pending=pending,
        messages=1,
        blocks=blocks,
        shared_blocks=shared,
    )


def printed(renderable: object, **options: object) -> str:
    console = Console(width=100, **options)  # type: ignore[arg-type]
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_cells_tell_shared_own_and_not_full_apart_without_colour():
    assert len({glyph for glyph, _, _ in CELLS.values()}) == 4
    assert cells(report(tokens=32, blocks=(0, 1)), 16).plain == OWN * 2
    assert cells(report(tokens=33, blocks=(0, 1, 2), shared=(0, 1)), 16).plain == SHARED * 2 + OWN_PART
    assert cells(report(tokens=20, blocks=(4, 7), shared=(4, 7)), 16).plain == SHARED + SHARED_PART


def test_a_token_that_is_not_computed_yet_fills_no_slot():
    assert cells(report(tokens=32, pending=1, blocks=(0, 1)), 16).plain == OWN + OWN_PART


def test_cells_are_grouped_by_eight():
    assert cells(report(tokens=160, blocks=tuple(range(10))), 16).plain == OWN * 8 + " " + OWN * 2


def test_the_legend_names_every_glyph():
    text = legend(16).plain
    assert all(f"{glyph} {meaning}" in text for glyph, _, meaning in CELLS.values())
    assert "16 tokens" in text


def test_rows_say_who_shares_with_whom():
    main = report("main", tokens=40, blocks=(0, 1, 5), shared=(0, 1))
    idea = report("idea", tokens=32, blocks=(0, 1), shared=(0, 1))
    other = report("other", tokens=3, pending=3, blocks=())
    text = printed(session_rows((main, idea, other), 16, "main"))
    assert "40 tokens, 1 message · blocks 0-1, 5 · 1 own, 2 shared with idea" in text
    assert "blocks 0-1 · 0 own, 2 shared with main" in text
    assert re.search(r"other +no blocks yet", text)


def test_colour_only_adds():
    rows = session_rows((report(tokens=40, blocks=(0, 1, 5), shared=(0,)),), 16, "main")
    coloured = printed(rows, force_terminal=True, color_system="standard")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(rows)


@pytest.mark.parametrize(
    ("blocks", "text"), [((), ""), ((3,), "3"), ((3, 4, 5, 9, 2), "3-5, 9, 2"), ((1, 0), "1, 0"), ((7, 9), "7, 9")]
)
def test_block_numbers_are_runs_in_table_order(blocks, text):
    assert block_ranges(blocks) == text


def test_forks_share_their_full_blocks_in_the_picture(talk, runtime):
    output = talk(["Hello", "/fork b", "More", "/blocks"], max_tokens=4)
    shared = len(runtime.get("main").report().shared_blocks)
    assert shared == len(set(runtime.get("main").report().blocks) & set(runtime.get("b").report().blocks)) > 0
    picture = output[output.rindex("/blocks\n") :]
    row = next(line for line in picture.splitlines() if line.startswith("main "))
    assert row.count(SHARED) == shared
    assert f"{shared} shared with b" in picture


def test_a_block_says_whose_it_is_and_what_it_holds(talk, runtime):
    output = talk(["Hello", "/fork b", "/blocks 1"], system="Be brief.")
    # Block 1 of size 8 holds bytes 8 to 15 of the rendered text; <|im_start|> is one token.
    rendered = ["<|im_start|>", *"system\nBe brief.", "<|im_end|>", *"\n", "<|im_start|>", *"user\nHello"]
    text = "".join(rendered[8:16]).replace("\n", "⏎")
    assert "block 1: held by 2 block tables; 8 of 8 slots filled" in output
    for name in ("main", "b"):
        assert re.search(rf"{name} +0 +system +8-15 +{re.escape(text)}", output)


def test_a_block_on_a_boundary_belongs_to_two_spans(talk):
    output = talk(["Hello", "/blocks 2"], system="Be brief.")  # the system message ends with token 18 of 16 to 23
    assert re.search(r"main +0 +system +16-18", output)
    assert re.search(r"main +1 +user +19-23", output)


def test_a_block_that_nobody_holds_is_explained(talk):
    output = talk(["Hello", "/fork b", "More and more and more", "/switch main", "/close b", "/blocks 7"])
    assert "held by nobody; kept in case its content is asked for again" in output


def test_a_free_block_is_not_shown(talk):
    assert "block 40 is free or does not exist" in talk(["Hello", "/blocks 40"])
