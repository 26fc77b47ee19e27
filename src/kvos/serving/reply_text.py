"""A reply's text while its tokens arrive: whole characters only, and nothing of a stop string.

Decoding one token takes microseconds and happens on the engine thread, so that a stop string ends a reply at the same
token each time, however fast its reader is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

__all__ = ["ReplyText"]

INCOMPLETE = "\ufffd"
"""What a decoder puts where the bytes of a character are not complete yet."""

LONGEST_INCOMPLETE = 3
"""Bytes, and so marks, that may yet become a character; further ones before them will not."""


class ReplyText:
    """Tokens in, text out.

    Args:
        decode: token ids to text, special tokens included, nothing cleaned up.
        stop: strings that end the reply.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids: list[int] = []
        self._text = ""
        self._emitted = 0
        # Tokens before _window_start are never decoded again; those before _window_read are in _text, and so are
        # _window_taken characters of what comes behind them.
        self._window_start = 0
        self._window_read = 0
        self._window_taken = 0
        # After _tokens_at[i] tokens the text was whole and _chars_at[i] characters long.
        self._tokens_at = [0]
        self._chars_at = [0]
        self._end: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def stopped(self) -> bool:
        """A stop string was found; the reply ends before it."""
        return self._end is not None

    @property
    def content(self) -> str:
        """All text so far, without a stop string."""
        return self._text[: self._end]

    def push(self, token: int) -> str:
        """Add a token; returns the text that may be shown now, possibly none."""
        self._ids.append(token)
        text = self._behind_read()
        sure = text.rstrip(INCOMPLETE)
        open_marks = min(len(text) - len(sure), LONGEST_INCOMPLETE)
        self._accept(text[: len(text) - open_marks])
        if text and not open_marks:
            self._move_window()
        return self._release(hold_back=True)

    def finish(self) -> str:
        """The reply is over; returns what was held back."""
        if not self.stopped and self._window_read < len(self._ids):
            self._accept(self._behind_read())
            self._move_window()
        return self._release(hold_back=False)

    def kept(self) -> tuple[int, str]:
        """Tokens that stand for the content's beginning, and that beginning; the rest of it is inside a token."""
        place = bisect_right(self._chars_at, len(self.content)) - 1
        return self._tokens_at[place], self._text[: self._chars_at[place]]

    def _behind_read(self) -> str:
        """The text of the tokens from ``_window_read`` on."""
        before = self._decode(self._ids[self._window_start : self._window_read])
        return self._decode(self._ids[self._window_start :])[len(before) :]

    def _move_window(self) -> None:
        """All tokens so far stand for all text so far."""
        self._window_start, self._window_read, self._window_taken = self._window_read, len(self._ids), 0
        self._tokens_at.append(len(self._ids))
        self._chars_at.append(len(self._text))

    def _accept(self, text: str) -> None:
        """Take over what is new in ``text``, which stands behind ``_window_read``."""
        searched = max(0, len(self._text) - self._longest_stop + 1)
        self._text += text[self._window_taken :]
        self._window_taken = max(self._window_taken, len(text))
        found = [place for place in (self._text.find(stop, searched) for stop in self._stop) if place >= 0]
        if found and self._end is None:
            self._end = min(found)

    def _release(self, *, hold_back: bool) -> str:
        end = len(self.content)
        if hold_back and not self.stopped:
            end -= self._possible_stop(end)
        shown = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return shown

    def _possible_stop(self, end: int) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, end), 0, -1):
            tail = self._text[end - length : end]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
