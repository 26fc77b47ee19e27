"""The conversation: read a line, obey it or answer it, until the lines end."""

from __future__ import annotations

from rich.console import Console

from kvos.cli.chat.lines import ReadLine
from kvos.cli.chat.reply import stream_reply
from kvos.cli.chat.slash import obey
from kvos.cli.chat.state import Chat
from kvos.cli.console import human_bytes, printable, short_dtype
from kvos.cli.saved import file_or_name
from kvos.errors import KvosError
from kvos.runtime import Runtime
from kvos.serving import SamplingParams

__all__ = ["ChatLoop"]

FENCE = '"""'


class ChatLoop:
    """A chat on an open runtime, which stays the caller's. Main thread: that is where Ctrl-C arrives.

    Args:
        read_line: takes a prompt and gives a line, None at the end; may raise KeyboardInterrupt.
        system: the system message of new sessions.
        name: of the new session.
        load: go on with this saved session (a name or a file) instead of a new one.
        resume: go on with this hibernated session instead of a new one.

    Raises:
        KvosError: the first session cannot be opened.
    """

    def __init__(
        self,
        runtime: Runtime,
        console: Console,
        read_line: ReadLine,
        *,
        sampling: SamplingParams | None = None,
        system: str | None = None,
        name: str = "main",
        load: str | None = None,
        resume: str | None = None,
    ) -> None:
        self._read_line = read_line
        if resume is not None:
            session = runtime.resume(resume)
        elif load is not None:
            session = runtime.load(file_or_name(load))
        else:
            messages = None if system is None else {"role": "system", "content": system}
            session = runtime.session(name, messages=messages)
        self._chat = Chat(runtime, console, session, sampling or SamplingParams(), system)
        if resume is not None:
            self._chat.own.add(resume)

    def run(self) -> None:
        """Talk until the person leaves or the lines end."""
        self._greet()
        while not self._chat.over:
            try:
                line = self._read()
                if line is None:
                    break
                self._handle(line)
            except KeyboardInterrupt:
                self._chat.console.print()
                self._chat.note("Ctrl-D or /quit leaves.")
            except (KvosError, OSError) as error:
                console = self._chat.console
                console.print(printable(str(error)), style="red", markup=False, soft_wrap=not console.is_terminal)
        self._take_leave()

    def _read(self) -> str | None:
        line = self._read_line(f"{self._chat.session.name}>")
        if line is None or not line.lstrip().startswith(FENCE):
            return line
        lines = [line.lstrip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            more = self._read_line("...")
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines).strip().removesuffix(FENCE).strip()

    def _handle(self, line: str) -> None:
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            obey(self._chat, text)
        elif text:
            self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _answer(self, text: str) -> None:
        chat = self._chat
        before = len(chat.session.transcript.messages)
        chat.session.append({"role": "user", "content": text})
        try:
            stream_reply(chat.console, chat.session, chat.sampling)
        except KvosError:
            if len(chat.session.transcript.messages) == before + 1:  # nothing came of it: take the question back
                chat.session.truncate(messages=before)
            raise

    def _greet(self) -> None:
        chat, stats = self._chat, self._chat.runtime.stats()
        room = human_bytes(stats.max_blocks * stats.block_size * stats.bytes_per_token)
        context = f"context {chat.runtime.max_context_tokens:,} tokens"
        cache = f"KV cache up to {room} in blocks of {stats.block_size} tokens"
        chat.note(f"{stats.model} in {short_dtype(stats.dtype)}, {context}, {cache}. /help lists what else there is.")

    def _take_leave(self) -> None:
        counters = self._chat.runtime.stats().counters
        self._chat.note(f"{counters['tokens_reused']} tokens reused, {counters['tokens_computed']} computed.")
