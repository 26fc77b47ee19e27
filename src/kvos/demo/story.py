"""The scenes that happen in the first process, on an open runtime."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvos.demo.evidence import CheckedReply, Evidence, checked_reply, evidence_of
from kvos.demo.measure import ForkMeter, block_tables, cold_start
from kvos.demo.record import ColdStart, ForkRecord, ReplyRecord, Scene, SessionBlocks
from kvos.demo.script import Question, Script
from kvos.demo.show import Show
from kvos.demo.text import seconds, size, times
from kvos.runtime import ReplyStream, Runtime, Session

__all__ = ["SavedStory", "Story"]

Asked = tuple[Session, Scene, str, str]
"""Session, scene, label, question."""


@dataclass(frozen=True, slots=True)
class SavedStory:
    """The supervisor's session on disk, and what it held."""

    path: Path
    tokens: int
    computed: int
    replies: tuple[CheckedReply, ...]


@dataclass(slots=True)
class Story:
    """Plays ``script`` on ``runtime`` scene by scene, shows it, and keeps what was measured.

    Attributes:
        replies, cold, forks, blocks: what the record needs.
        evidence: what the check needs.
    """

    runtime: Runtime
    script: Script
    show: Show
    replies: list[ReplyRecord] = field(default_factory=list)
    cold: list[ColdStart] = field(default_factory=list)
    forks: ForkRecord | None = None
    blocks: tuple[SessionBlocks, ...] = ()
    evidence: list[Evidence] = field(default_factory=list)
    _generated: dict[str, list[CheckedReply]] = field(default_factory=dict)

    def conversation(self) -> Session:
        """Scenes 1 to 3, and the evidence of all their replies; returns the supervisor's session."""
        supervisor = self.supervisor_answers()
        second = self.second_customer_comes()
        children = self.supervisor_forks(supervisor, [second])
        self.keep_evidence([supervisor, second, *children])
        return supervisor

    def supervisor_answers(self) -> Session:
        """Turn by turn; then the last turn's prompt again where nothing is cached."""
        self.show.scene(
            "1  A supervisor with a long system prompt answers a customer",
            "The first turn computes the prompt. Later ones compute what is new, and read the rest from their blocks.",
        )
        supervisor = self.runtime.session(
            self.script.supervisor, messages={"role": "system", "content": self.script.system}
        )
        for number, question in enumerate(self.script.turns, start=1):
            self._ask((supervisor, Scene.TURN, f"turn {number}", question))
        self._cold_start(supervisor)
        return supervisor

    def second_customer_comes(self) -> Session:
        """Another session sends the same system prompt, and shares its blocks without asking."""
        self.show.scene(
            "2  A second customer: another session sends the same system prompt",
            "Nobody tells kvos that they are alike: equal tokens behind equal tokens are found by content.",
        )
        other = self.script.second_customer
        session = self.runtime.session(other.name, messages={"role": "system", "content": self.script.system})
        (reply,) = self._ask((session, Scene.SECOND_SESSION, other.name, other.question))
        first = self.replies[0]
        self.show.note(
            f"{reply.shared_tokens:,} tokens came from the other session's blocks. TTFT of a first turn: "
            f"{seconds(first.ttft_s)} for the first customer, {seconds(reply.ttft_s)} for the second "
            f"({times(first.ttft_s, reply.ttft_s)} faster)."
        )
        return session

    def supervisor_forks(self, supervisor: Session, others: Sequence[Session]) -> list[Session]:
        """Sub-agents side by side over one prefix, and a picture of who holds which blocks."""
        agents = self.script.sub_agents
        self.show.scene(
            f"3  The supervisor forks {len(agents)} sub-agents; they work side by side",
            "A fork shares every block of its parent and writes into blocks of its own; all decode in one batch.",
        )
        supervisor.prefill()
        meter = ForkMeter(self.runtime, supervisor)
        children = supervisor.fork(len(agents), names=[agent.name for agent in agents])
        meter.forked(children)
        work = [
            (child, Scene.FORK, f"fork {child.name}", agent.question)
            for child, agent in zip(children, agents, strict=True)
        ]
        self._ask(*work)
        self.forks = meter.record()
        self.blocks = block_tables(self.runtime, [supervisor, *children, *others])
        self.show.note(_fork_facts(self.forks))
        self.show.blocks(self.blocks, self.runtime.stats().block_size)
        return children

    def keep_evidence(self, sessions: Sequence[Session]) -> None:
        """Read the logits behind every reply over the cached blocks, while they are there."""
        with self.show.busy("Reading the replies' logits over the cached blocks") as progress:
            for done, session in enumerate(sessions):
                progress(done, len(sessions))
                replies = self._generated[session.name]
                self.evidence.append(evidence_of(self.runtime, session, session.name, replies))

    def fork_record(self) -> ForkRecord:
        if self.forks is None:
            raise RuntimeError("nothing was forked yet")
        return self.forks

    def save(self, supervisor: Session, path: Path) -> SavedStory:
        """Everything that the supervisor is, as one file."""
        self.show.scene(
            "5  The session is saved; another process goes on",
            "Keys and values go into one file, this process's runtime is closed, a new process opens the file.",
        )
        with self.show.busy("Saving the supervisor's session"):
            supervisor.prefill()
            supervisor.save(path)
        report = supervisor.report()
        self.show.note(f"Saved {report.tokens:,} tokens, {size(path.stat().st_size)}.")
        replies = tuple(self._generated[supervisor.name])
        return SavedStory(path, report.tokens, report.tokens - report.pending, replies)

    def _ask(self, *asked: Asked) -> list[ReplyRecord]:
        """All questions at once; their replies are shown as they come."""
        records: list[ReplyRecord] = []
        questions = [Question(session.name, question) for session, _, _, question in asked]
        with ExitStack() as stack:
            view = stack.enter_context(self.show.replies(*questions))
            streams: list[ReplyStream] = []
            for number, (session, _, _, question) in enumerate(asked):
                session.append({"role": "user", "content": question})
                stream = session.generate(
                    max_tokens=self.script.max_tokens,
                    stop=self.script.stop,
                    on_prefill=lambda done, total, number=number: view.prefill(number, done, total),  # type: ignore[misc]
                )
                streams.append(stack.enter_context(stream))
            running = dict(enumerate(map(iter, streams)))
            while running:
                for number, texts in tuple(running.items()):
                    text = next(texts, None)
                    if text is not None:
                        view.text(number, text)
                        continue
                    del running[number]
            for number, (session, scene, label, question) in enumerate(asked):
                record = ReplyRecord.of(label, session.name, scene, question, streams[number].result())
                view.finish(number, record)
                self._keep(session, record)
                records.append(record)
        self.replies += records
        return records

    def _keep(self, session: Session, record: ReplyRecord) -> None:
        reply = checked_reply(session.tokens.tolist(), record.prompt_tokens, record.tokens)
        self._generated.setdefault(session.name, []).append(reply)

    def _cold_start(self, session: Session) -> None:
        """The last turn's prompt for a tenant of its own, which shares nothing with anybody."""
        warm = self.replies[-1]
        with self.show.busy(f"The same {warm.prompt_tokens:,} prompt tokens where nothing is cached") as progress:
            prompt = session.tokens.tolist()[: warm.prompt_tokens]
            cold = cold_start(self.runtime, prompt, warm.label, progress)
        self.cold.append(cold)
        self.show.note(
            f"The prompt of {warm.label} cold: TTFT {seconds(cold.ttft_s)}, {cold.computed_tokens:,} tokens computed. "
            f"Warm it was {seconds(warm.ttft_s)}: {times(cold.ttft_s, warm.ttft_s)} faster."
        )


def _fork_facts(forks: ForkRecord) -> str:
    return (
        f"{forks.children} forks in {seconds(forks.fork_s)}: {forks.blocks_allocated_at_fork} blocks allocated, "
        f"{forks.blocks_copied_at_fork} copied. With their work: {forks.blocks_allocated} allocated, "
        f"{forks.blocks_copied} partial tails copied; "
        f"{forks.full_blocks_copied} of {forks.children * forks.parent_full_blocks} full blocks copied."
    )
