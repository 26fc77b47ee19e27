"""One reply on the screen: a bar while a long prompt is computed, the text as it comes, and what it cost."""

from __future__ import annotations

from contextlib import closing

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvos.cli.console import human_seconds, printable
from kvos.runtime import ReplyStream, Session
from kvos.serving import FinishReason, SamplingParams, Usage, WhyComputed

__all__ = ["PrefillBar", "stream_reply", "usage_line"]

LONG_PROMPT_TOKENS = 200
"""Fewer are computed in a moment, and a bar would only flicker."""

EXPECTED = (WhyComputed.NOTHING, WhyComputed.NEW_TOKENS)
ENDINGS = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut off at --max-tokens or the end of the context",
    FinishReason.CANCELLED: "cancelled; what there is stays",
}


class PrefillBar:
    """A bar that is there while a long prompt is computed, and gone afterwards; nothing where there is no terminal."""

    def __init__(self, console: Console, tokens: int) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal and tokens >= LONG_PROMPT_TOKENS:
            columns = (TextColumn("[dim]computing {task.completed} of {task.total} tokens[/dim]"), BarColumn(30))
            self._progress = Progress(*columns, TimeRemainingColumn(compact=True), console=console, transient=True)
            self._task = self._progress.add_task("prefill", total=tokens)
            self._progress.start()

    def update(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def stream_reply(console: Console, session: Session, sampling: SamplingParams) -> None:
    """Generate and show; Ctrl-C ends the reply and keeps what there is.

    Raises:
        KvosError: what ended the reply early; the session keeps what was generated.
    """
    with closing(PrefillBar(console, session.report().pending)) as bar:
        reply = session.generate(sampling, on_prefill=bar.update)
        _show(console, bar, reply)
    ended = reply.result()
    line = ("" if ended.text else "no words · ") + usage_line(ended.usage, ended.finish_reason)
    console.print(line, style="dim", markup=False, soft_wrap=not console.is_terminal)


def _show(console: Console, bar: PrefillBar, reply: ReplyStream) -> None:
    anything = False
    try:
        with reply:  # leaving it early cancels, and waits for the end of the step
            for text in reply:
                bar.close()
                anything = True
                console.out(printable(text), end="", highlight=False)
                console.file.flush()
    except KeyboardInterrupt:
        bar.close()
    if anything:
        console.print()


def usage_line(usage: Usage, reason: FinishReason) -> str:
    """What the cache saved and how fast it went, in one line."""
    parts = [f"reused {usage.reused_tokens}, computed {usage.computed_tokens} of {usage.prompt_tokens} tokens"]
    whence = [f"{usage.shared_tokens} from blocks that another session computed"] * bool(usage.shared_tokens)
    whence += [f"{usage.restored_tokens} from below the device"] * bool(usage.restored_tokens)
    if whence:
        parts[0] += f" ({', '.join(whence)})"
    if usage.why_computed not in EXPECTED:
        parts.append(usage.why_computed.value)
    if usage.generated_tokens:
        parts.append(f"first token after {human_seconds(usage.ttft_s)}")
    if usage.tpot_s:
        parts.append(f"{1 / usage.tpot_s:.1f} tokens/s")
    if ENDINGS[reason]:
        parts.append(ENDINGS[reason])
    return " · ".join(parts)
