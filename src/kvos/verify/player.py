"""Plays histories on a runtime and writes down what comes out.

Uses the public API, as any caller would, and ``kvos.verify.below`` for what that does not offer.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from kvos.errors import OutOfBlocksError
from kvos.verify.below import compact, leave, published_keys, scatter
from kvos.verify.cast import Cast, Live, LostBlocksError, WrongTokensError
from kvos.verify.histories import MESSAGES, SYSTEM_PROMPTS, salted_tokens, text_tokens
from kvos.verify.observed import Fault, FaultKind, LogitRecord, Observation, TokenRecord
from kvos.verify.operations import (
    ChatTurn,
    Close,
    Compact,
    Extend,
    Fork,
    Generate,
    Hibernate,
    Left,
    Load,
    Migrate,
    Open,
    Operation,
    Prewarm,
    Probe,
    Restart,
    Save,
    SideBySide,
    Truncate,
    Twin,
)
from kvos.verify.stage import Stage

__all__ = ["Player"]

MAX_TOKENS = 64
MAX_CHAT_TOKENS = 96
MAX_FILES = 5


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    ids: tuple[int, ...]
    is_chat: bool


class Player:
    """One per runtime. What a history leaves behind (cached blocks, files) is there for the next.

    Args:
        stage: where to play; closed by its owner.
        seed: of the token ids.
    """

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._seed = seed
        self._cast = Cast(stage.runtime)
        self._files: list[_File] = []
        self._step = 0
        self._seen = Observation()

    def play(self, operations: Iterable[Operation]) -> Observation:
        """Run one operation after another, checking tokens and invariants after each; stops at the first fault."""
        self._seen = Observation()
        for self._step, operation in enumerate(operations):
            try:
                self._do(operation)
                self._cast.check()
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here is what this command is to find
                self._seen.fault = self._fault(error)
                break
        return self._seen

    def _do(self, operation: Operation) -> None:
        try:
            worked = self._apply(operation)
        except OutOfBlocksError:  # an honest answer of a pool this small; what the sessions hold must be right still
            self._seen.done["out of blocks"] += 1
            self._cast.close_longest()
        else:
            if worked:
                self._seen.done[type(operation).__name__] += 1

    def _fault(self, error: Exception) -> Fault:
        kind = FaultKind.ERROR
        if isinstance(error, AssertionError):
            kind = FaultKind.INVARIANT
        elif isinstance(error, WrongTokensError):
            kind = FaultKind.BOOKKEEPING
        elif isinstance(error, LostBlocksError):
            kind = FaultKind.LOST
        return Fault(kind, self._step, f"{type(error).__name__}: {error}")

    def _apply(self, operation: Operation) -> bool:
        """Do it; False if there was nothing to do it on."""
        match operation:
            case Open(text, tokens, silent):
                behind = self._stage.behind
                return self._extend(self._cast.open(), self._text(text, behind + tokens), behind + silent)
            case Twin(session, keep, salt, tokens):
                return self._twin(self._cast.pick(session), keep, self._salted(salt, tokens))
            case Extend(session, salt, tokens, silent):
                return self._extend(self._cast.pick(session, chat=False), self._salted(salt, tokens), silent)
            case SideBySide(sessions, salt, pieces):
                return self._side_by_side(self._cast.pick_all(sessions, chat=False), salt, pieces)
            case Generate(sessions, tokens):
                return self._generate(self._cast.pick_all(sessions), tokens)
            case ChatTurn(session, message, tokens):
                return self._chat(session, message, tokens)
            case Fork(session, children):
                return self._fork(self._cast.pick(session), children)
            case Truncate(session, keep):
                return self._truncate(self._cast.pick(session), keep)
            case Close(session):
                return self._close(self._cast.pick(session))
            case Save(session):
                return self._save(self._cast.pick(session)) is not None
            case Load(file):
                return self._load(file)
            case Migrate(session, salt, tokens):
                return self._migrate(self._cast.pick(session, chat=False), self._salted(salt, tokens))
            case Hibernate(sessions, left):
                return self._hibernate(self._cast.pick_all(sessions), left)
            case Prewarm(sessions):
                return self._prewarm(self._cast.pick_all(sessions))
            case Restart(sessions, step, warm):
                return self._restart(self._cast.pick_all(sessions), step, warm=warm)
            case Compact(sessions, tokens):
                return self._compact(self._cast.pick_all(sessions), tokens)
            case Probe(salt, close):
                return self._probe(salt, close=close)

    def _text(self, text: int, n: int) -> list[int]:
        tokens: list[int] = text_tokens(self._seed, text, n, self._stage.vocab_size).tolist()
        return tokens

    def _salted(self, salt: int, n: int) -> list[int]:
        tokens: list[int] = salted_tokens(self._seed, salt, n, self._stage.vocab_size).tolist()
        return tokens

    def _close(self, live: Live | None) -> bool:
        if live is not None:
            self._cast.close(live)
        return live is not None

    # -- raw tokens ----------------------------------------------------------------------------------------------

    def _extend(self, live: Live | None, tokens: list[int], silent: int = 0) -> bool:
        if live is None or len(live.ids) >= self._limit(live):
            return False
        if silent:
            live.session.append_tokens(tokens[:silent])
            live.ids += tokens[:silent]
        self._score(live, tokens[silent:])
        return True

    def _score(self, live: Live, tokens: list[int]) -> None:
        self._seen.records.append(self._scored(live, tokens))

    def _scored(self, live: Live, tokens: list[int]) -> LogitRecord:
        logits = live.session.score(tokens)  # if there is no room to compute them, the session does not keep them
        start = len(live.ids)
        live.ids += tokens
        return LogitRecord(self._step, tuple(live.ids), start, logits)

    def _twin(self, model: Live | None, keep_permille: int, tokens: list[int]) -> bool:
        if model is None or not model.ids:
            return False
        kept = model.ids[: max(1, len(model.ids) * keep_permille // 1000)]
        return self._extend(self._cast.open(), kept + tokens, silent=len(kept))

    def _side_by_side(self, lives: list[Live], salt: int, pieces: tuple[int, ...]) -> bool:
        lives = [live for live in lives if len(live.ids) < self._limit(live)]
        if not lives:
            return False
        tokens = [self._salted(salt + i * (salt % 2), sum(pieces)) for i in range(len(lives))]
        start = 0
        with ThreadPoolExecutor(len(lives)) as pool:
            for size in pieces:
                self._score_together(pool, lives, [mine[start : start + size] for mine in tokens])
                start += size
        return True

    def _score_together(self, pool: ThreadPoolExecutor, lives: list[Live], tokens: list[list[int]]) -> None:
        """``score`` in each session from a thread of its own, so that the runtime computes them in the same steps."""
        runs = [pool.submit(self._scored, live, mine) for live, mine in zip(lives, tokens, strict=True)]
        wait(runs)
        self._seen.records += [run.result() for run in runs if run.exception() is None]
        for run in runs:
            run.result()  # raises what went wrong

    def _probe(self, salt: int, *, close: bool) -> bool:
        token = self._salted(salt, 1)
        for live in self._cast.all(chat=False):
            try:
                self._score(live, token)
            except OutOfBlocksError:
                self._seen.done["out of blocks"] += 1
        self._cast.check()
        for live in self._cast.all() if close else ():
            self._cast.close(live)
        return True

    # -- generation ----------------------------------------------------------------------------------------------

    def _generate(self, lives: list[Live], tokens: int, *, moves: int = 0) -> bool:
        lives = [live for live in lives if live.ids and len(live.ids) < self._limit(live)]
        streams = []
        failed: list[OutOfBlocksError] = []
        for live in lives:
            try:
                streams.append((live, live.session.generate(max_tokens=tokens, ignore_eos=not live.is_chat)))
            except OutOfBlocksError as error:
                failed.append(error)
                self._take_account(live)
        for i in range(moves):  # each waits for the end of a step
            (scatter if i % 2 else compact)(self._stage.runtime)
        for live, stream in streams:
            try:
                reply = stream.result()
            except OutOfBlocksError as error:
                failed.append(error)
                self._take_account(live)
            else:
                self._note_reply(live, reply.usage.prompt_tokens, list(reply.tokens))
        if failed:
            raise failed[0]
        return bool(lives)

    def _note_reply(self, live: Live, prompt: int, generated: list[int]) -> None:
        if live.is_chat:  # the template has put tokens in between, which only the session knows
            live.ids = live.session.tokens[:prompt].tolist()
        live.ids += generated
        self._seen.records.append(TokenRecord(self._step, tuple(live.ids), prompt))

    def _take_account(self, live: Live) -> None:
        """After a reply that failed: what it had generated stays, behind what was there."""
        held, before = live.session.tokens.tolist(), live.ids
        live.ids = held
        if live.is_chat:
            return
        if held[: len(before)] != before:
            raise WrongTokensError(f"a failed reply left {held} in {live.session.name}, there was {before}")
        if len(held) > len(before):
            self._seen.records.append(TokenRecord(self._step, tuple(held), len(before)))

    def _chat(self, number: int, message: int, tokens: int) -> bool:
        chats = [live for live in self._cast.all(chat=True) if len(live.ids) < MAX_CHAT_TOKENS]
        place = number % (len(chats) + 1)
        if place < len(chats):
            live = chats[place]
        else:
            live = self._cast.open(is_chat=True)
            live.session.append({"role": "system", "content": SYSTEM_PROMPTS[message % len(SYSTEM_PROMPTS)]})
            live.ids = live.session.tokens.tolist()
        live.session.append({"role": "user", "content": MESSAGES[message % len(MESSAGES)]})
        live.ids = live.session.tokens.tolist()
        return self._generate([live], tokens)

    # -- forks, truncation, files --------------------------------------------------------------------------------

    def _fork(self, parent: Live | None, children: int) -> bool:
        if parent is None or not parent.ids or not self._cast.has_room(children):
            return False
        for child in parent.session.fork(children, names=[self._cast.new_name() for _ in range(children)]):
            self._cast.enter(child, parent.ids, is_chat=parent.is_chat)
        return True

    def _truncate(self, live: Live | None, keep_permille: int) -> bool:
        if live is None or not live.ids:
            return False
        keep = len(live.ids) * keep_permille // 1000
        if live.is_chat:
            ends = [span.end for span in live.session.transcript.spans]
            messages = max(1, sum(end <= keep for end in ends))
            live.session.truncate(messages=messages)
            del live.ids[ends[messages - 1] :]
        else:
            live.session.truncate(tokens=keep)
            del live.ids[keep:]
        return True

    def _save(self, live: Live | None) -> _File | None:
        if live is None or not live.ids:
            return None
        file = _File(self._stage.folder / f"{self._cast.new_name()}.kvos", tuple(live.ids), live.is_chat)
        live.session.save(file.path)
        self._files.append(file)
        if len(self._files) > MAX_FILES:
            self._files.pop(0).path.unlink()
        return file

    def _load(self, number: int) -> bool:
        if not self._files or not self._cast.has_room():
            return False
        file = self._files[number % len(self._files)]
        session = self._stage.runtime.load(file.path, name=self._cast.new_name())
        self._cast.enter(session, file.ids, is_chat=file.is_chat)
        self._seen.done["tokens taken from files"] += len(file.ids) - session.report().pending
        return True

    def _migrate(self, live: Live | None, tokens: list[int]) -> bool:
        file = self._save(live)
        if file is None:
            return False
        visitor = self._stage.visitor()
        session = visitor.load(file.path, name=self._cast.new_name())
        guest = Live(session, list(file.ids))
        self._seen.done["tokens taken from files"] += len(file.ids) - session.report().pending
        self._score(guest, tokens)
        visitor.check_invariants()
        self._save(guest)
        session.close()
        return self._load(-1)

    # -- lower tiers, moved blocks -------------------------------------------------------------------------------

    def _hibernate(self, lives: list[Live], left: Left) -> bool:
        lives = [live for live in lives if live.ids]
        runtime = self._stage.runtime
        keys = dict.fromkeys(key for live in lives for key in published_keys(runtime, live.session))
        for live in lives:
            self._cast.hibernate(live)
        leave(runtime, tuple(keys), left)
        return bool(lives)

    def _prewarm(self, lives: list[Live]) -> bool:
        for live in lives:
            live.session.prewarm()
        return bool(lives)

    def _restart(self, lives: list[Live], step: int, *, warm: bool) -> bool:
        stored = {live.session.name: self._cast.hibernate(live) for live in lives if live.ids}
        returned = self._cast.move_to(self._stage.restart(step))
        self._seen.done["restarts with another block size"] += int(step > 0)
        for live in returned if warm else ():
            self._bring_back(live, 0 if step else stored.get(live.session.name, 0))
        return True

    def _bring_back(self, live: Live, stored: int) -> None:
        """Compute what a session holds, whose leading ``stored`` blocks went to disk before the restart."""
        size = self._stage.runtime.config.block_size
        expected = min(stored, len(live.ids) // size) * size  # after a truncate the last one is longer than the session
        try:
            usage = live.session.prefill()
        except OutOfBlocksError:
            self._seen.done["out of blocks"] += 1
            return
        self._seen.done["tokens restored after a restart"] += usage.restored_tokens
        if usage.reused_tokens < expected:
            raise LostBlocksError(
                f"{live.session.name} had {expected} tokens in blocks on disk; {usage.reused_tokens} came back"
            )

    def _compact(self, lives: list[Live], tokens: int) -> bool:
        scatter(self._stage.runtime)
        self._generate(lives, tokens, moves=tokens)
        compact(self._stage.runtime)
        return True

    def _limit(self, live: Live) -> int:
        return MAX_CHAT_TOKENS if live.is_chat else self._stage.behind + MAX_TOKENS
