"""Replies while they are generated: panels side by side in a terminal, prefixed lines elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvos.demo.record import ReplyRecord
from kvos.demo.script import Question
from kvos.demo.text import Pace, facts, printable

__all__ = ["LiveReplies", "live_replies"]

FRAMES_PER_SECOND = 8
"""Drawing takes time from the model; more is not seen to be smoother."""
LINE_WIDTH = 88
"""Characters of a reply that make a line where there is no terminal; of several at once, half as many."""


class LiveReplies(ABC):
    """Several replies at once, by their number. A context manager; for one thread."""

    @abstractmethod
    def prefill(self, number: int, done: int, total: int) -> None:
        """So much of the prompt is computed."""

    @abstractmethod
    def text(self, number: int, text: str) -> None:
        """More of the reply has come."""

    @abstractmethod
    def finish(self, number: int, record: ReplyRecord) -> None:
        """The reply is complete."""

    @abstractmethod
    def __enter__(self) -> LiveReplies: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def live_replies(console: Console, questions: Sequence[Question]) -> LiveReplies:
    """The form that fits ``console``; one reply per question."""
    if console.is_terminal:
        return _Panels(console, questions)
    return _Lines(console, questions)


@dataclass(slots=True)
class _Pane:
    name: str
    question: str
    text: str = ""
    waiting: str = ""
    facts: str = ""

    def render(self) -> RenderableType:
        parts: list[Text] = [Text(self.question, style="cyan"), Text("")]
        if self.waiting and not self.text:
            parts.append(Text(self.waiting, style="dim"))
        parts.append(Text(self.text, style="bold"))
        if self.facts:
            parts += [Text(""), Text(self.facts, style="dim")]
        return Panel(
            Group(*parts), title=self.name, title_align="left", border_style="blue" if self.facts else "yellow"
        )


class _Panels(LiveReplies):
    """One panel per reply; when they are complete they stay as they are."""

    def __init__(self, console: Console, questions: Sequence[Question]) -> None:
        self._panes = [_Pane(one.name, one.question, waiting="...") for one in questions]
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=FRAMES_PER_SECOND,
            vertical_overflow="visible",
        )

    def _render(self) -> RenderableType:
        grid = Table.grid(expand=True)
        for _ in self._panes:
            grid.add_column(ratio=1)
        grid.add_row(*(pane.render() for pane in self._panes))
        return grid

    def prefill(self, number: int, done: int, total: int) -> None:
        filled = round(24 * done / max(total, 1))
        bar = "█" * filled + "·" * (24 - filled)
        self._panes[number].waiting = f"{bar} {done:,} of {total:,} prompt tokens computed"

    def text(self, number: int, text: str) -> None:
        self._panes[number].text += printable(text)

    def finish(self, number: int, record: ReplyRecord) -> None:
        self._panes[number].facts = facts(record)

    def __enter__(self) -> LiveReplies:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class _Lines(LiveReplies):
    """Whole lines with the session's name in front, as soon as there is enough text for one."""

    def __init__(self, console: Console, questions: Sequence[Question]) -> None:
        self._console = console
        self._questions = questions
        self._unsaid = [""] * len(questions)
        self._pace = Pace()
        self._width = max(len(one.name) for one in questions)
        self._line = LINE_WIDTH if len(questions) == 1 else LINE_WIDTH // 2

    def prefill(self, number: int, done: int, total: int) -> None:
        if done < total and self._pace.is_due():
            self._say(number, f"... {done:,} of {total:,} prompt tokens computed")

    def text(self, number: int, text: str) -> None:
        self._unsaid[number] += printable(text)
        while len(self._unsaid[number]) > self._line or "\n" in self._unsaid[number]:
            head = self._unsaid[number][: self._line + 1]
            cut = head.find("\n") if "\n" in head else head.rfind(" ")
            line, rest = (head, "") if cut <= 0 else (head[:cut], head[cut + 1 :])
            self._unsaid[number] = rest + self._unsaid[number][self._line + 1 :]
            self._say(number, line)

    def finish(self, number: int, record: ReplyRecord) -> None:
        if self._unsaid[number]:
            self._say(number, self._unsaid[number])
        self._say(number, f"({facts(record)})")

    def _say(self, number: int, line: str) -> None:
        name = self._questions[number].name
        self._console.print(f"  {name:<{self._width}} | {line}", markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> LiveReplies:
        for number, one in enumerate(self._questions):
            self._say(number, f"> {one.question}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return
