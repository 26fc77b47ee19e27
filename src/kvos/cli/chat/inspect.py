"""``/blocks``: from sessions to their blocks, and from a block back to what it holds."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from kvos.cli.chat.picture import session_rows
from kvos.cli.chat.state import Chat
from kvos.cli.console import printable
from kvos.cli.stats_view import blocks_bar
from kvos.errors import InvalidInputError
from kvos.runtime import BlockReport
from kvos.sessions import BlockSpan
from kvos.storage import BlockStatus

__all__ = ["show_block", "show_blocks"]

STATUS_IN_WORDS = {
    BlockStatus.ACTIVE: "held by {} block table{}",
    BlockStatus.CACHED: "held by nobody; kept in case its content is asked for again, and the first to be reclaimed",
}


def show_blocks(chat: Chat) -> None:
    """Every session's block table as a row, then the whole pool as a bar."""
    stats = chat.runtime.stats()
    chat.console.print(session_rows(chat.runtime.sessions(), stats.block_size, chat.session.name))
    chat.console.print(blocks_bar(stats.as_dict(), chat.console.width))
    chat.note("/blocks N shows what is in block N")


def show_block(chat: Chat, number: int) -> None:
    """What a block holds: of which session, which span, role and tokens, and the text.

    Raises:
        InvalidInputError: no such block is in use.
    """
    found = [report for report in chat.runtime.blocks() if report.block.id == number]
    if not found:
        raise InvalidInputError(f"block {number} is free or does not exist; /blocks shows which are in use")
    report, size = found[0], chat.runtime.config.block_size
    chat.console.print(_headline(report, size))
    if not report.content:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("SESSION", "SPAN", "ROLE", "TOKENS", "TEXT"):
        table.add_column(column, overflow="fold", no_wrap=column not in ("SESSION", "TEXT"))
    for part in report.content:
        table.add_row(*_row(chat, part))
    chat.console.print(table)


def _headline(report: BlockReport, size: int) -> Text:
    block = report.block
    words = STATUS_IN_WORDS[block.status].format(block.ref_count, "" if block.ref_count == 1 else "s")
    line = Text(f"block {block.id}", "bold").append(f": {words}; {block.filled} of {size} slots filled", "none")
    if block.published:
        line.append("; findable by its content, so any session with this past shares it")
    return line


def _row(chat: Chat, part: BlockSpan) -> tuple[Text, str, str, str, Text]:
    span = part.span
    tokens = chat.runtime.get(part.session).tokens[part.start : part.end]
    text = printable(chat.runtime.tokenizer.decode(tokens.tolist())).replace("\n", "⏎")
    role = span.role if span.kind.value == span.role else f"{span.role} ({span.kind.value})"
    return Text(part.session), str(span.id), role, f"{part.start}-{part.end - 1}", Text(text, "dim")
