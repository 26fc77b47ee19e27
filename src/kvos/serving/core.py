"""Everything that the engine thread owns, and the step that moves it on. Single-threaded by itself.

A step: choose rows (decodes first, then prefill chunks, within the token budget), make room for their KV, run the model
once, publish what became full, sample, tell the callers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count

import torch

from kvos.counters import Counters
from kvos.engine import Engine
from kvos.policy.residency import ResidencyRules
from kvos.residency import Residency
from kvos.sequences import BlockManager, Compactor
from kvos.serving.batch import Scheduled, StepBudget, pack
from kvos.serving.known_logits import KnownLogits
from kvos.serving.moves import BlockMoves
from kvos.serving.params import SamplingParams
from kvos.serving.reply_text import ReplyText
from kvos.serving.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Request,
    RequestId,
    TextDelta,
)
from kvos.serving.residents import Residents
from kvos.serving.sampler import SamplingState, sample
from kvos.sessions.registry import SessionRegistry
from kvos.sessions.rendering import Extension
from kvos.sessions.session import CacheSession

__all__ = ["EngineCore"]

_logger = logging.getLogger(__name__)


class EngineCore:
    """Sessions, blocks, engine and the running requests. Engine thread only."""

    def __init__(
        self,
        engine: Engine,
        manager: BlockManager,
        *,
        budget: StepBudget,
        decode: Callable[[Sequence[int]], str],
        eos_ids: frozenset[int] = frozenset(),
        residency: Residency | None = None,
        compactor: Compactor | None = None,
        rules: ResidencyRules | None = None,
    ) -> None:
        self.engine = engine
        self.moves = BlockMoves(manager, residency, compactor)
        self.manager = manager
        self.sessions = SessionRegistry()
        store = None if residency is None else self.moves.store
        self.residents = Residents(manager, self.sessions, rules or ResidencyRules(), store)
        self.budget = budget
        self._decode = decode
        self._eos_ids = eos_ids
        self._requests: dict[RequestId, Request] = {}
        self._request_ids = count(1)
        self._last_logits = KnownLogits()

    @property
    def counters(self) -> Counters:
        return self.manager.counters

    @property
    def num_running(self) -> int:
        return len(self._requests)

    # -- requests ------------------------------------------------------------------------------------------------

    def generate(
        self,
        session: CacheSession,
        params: SamplingParams,
        sink: Callable[[Event], None],
        prompt: Extension | None = None,
        *,
        called_at: float | None = None,
    ) -> RequestId:
        """Start a reply.

        Args:
            sink: takes the events; called on this thread.
            prompt: the rendered generation prompt; None for a session of raw tokens.
            called_at: when the caller asked (``time.perf_counter``), from which the time to the first token counts.

        Raises:
            SessionBusyError, SessionClosedError, SessionConflictError: see ``CacheSession``.
            ContextLengthExceededError: no room for a single new token.
            InvalidInputError: the session holds no tokens to go on from.
            OutOfBlocksError: the prompt does not fit; the session is as before.
        """
        request = Request(
            RequestId(next(self._request_ids)),
            session,
            sink,
            reply=ReplyText(self._decode, params.stop),
            sampling=SamplingState.start(params),
            eos_ids=frozenset() if params.ignore_eos else self._eos_ids,
            started=time.perf_counter() if called_at is None else called_at,
        )
        lost = session.begin_reply(prompt)  # last: whatever raises above must not leave the session busy
        self._admit(request, undo=session.drop_reply)
        if prompt is not None and prompt.rewritten and lost:
            self.counters.add("history_rewritten")
        return request.id

    def prefill(
        self,
        session: CacheSession,
        sink: Callable[[Event], None],
        logits_from: int | None = None,
        *,
        before_fork: bool = False,
    ) -> RequestId:
        """Compute a session's pending tokens; with ``logits_from`` also the logits behind each token from there on.

        ``before_fork`` says that nobody asked for what the session holds already, so that no counter calls it reused.

        Raises:
            SessionBusyError, SessionClosedError: see ``CacheSession``.
            OutOfBlocksError: the tokens do not fit; the session is as before.
        """
        session.begin()
        request = Request(RequestId(next(self._request_ids)), session, sink, logits_from=logits_from)
        request.uncounted = session.sequence.num_computed if before_fork else 0
        self._admit(request, undo=session.end)
        return request.id

    def cancel(self, request_id: RequestId) -> None:
        """End a request early; what it has generated stays. Does nothing if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self.counters.add("requests_cancelled")
            self._finish(request, FinishReason.CANCELLED)

    def fail_all(self, error: BaseException) -> None:
        """End every running request by ``error``; each caller hears of it, whatever state its session is in."""
        for request in tuple(self._requests.values()):
            try:
                self._fail(request, error)
            except Exception:  # logged with its traceback; the other callers must hear of the end, too
                _logger.exception("session %s can only be closed now", request.session.id)
                self._tell(request, Failed(error))

    def forget(self, session: CacheSession) -> None:
        """Cancel what runs on ``session``, close it, and give its blocks back."""
        for request in [request for request in self._requests.values() if request.session is session]:
            self.cancel(request.id)
        self._last_logits.forget(session.sequence)
        self.moves.forget(session)
        self.residents.forget(session)
        self.sessions.remove(session)
        session.close()

    def swap_out(self, session: CacheSession, revision: int) -> None:
        """Take an idle session's blocks off the device, unless its tokens have changed since ``revision``."""
        if session.swap_out(revision):
            self.residents.left(session)

    def fork(self, parent: CacheSession, names: Sequence[str | None]) -> tuple[CacheSession, ...]:
        """One child of ``parent`` per name; None lets kvos choose. All of them, or none and an error.

        Raises:
            SessionExistsError: a name is taken.
            SessionBusyError, SessionClosedError: of the parent.
        """
        parent.check_idle()
        children: list[CacheSession] = []
        try:
            for name in names:
                child = parent.fork(self.sessions.free_name(name, stem=f"{parent.id}.fork"))
                child.is_named = name is not None
                self.sessions.add(child)
                children.append(child)
                self._last_logits.inherit(parent.sequence, child.sequence)
        except BaseException:
            for child in children:
                self.forget(child)
            raise
        self.counters.add("forks", len(children))
        return tuple(children)

    def _admit(self, request: Request, undo: Callable[[], None]) -> None:
        sequence = request.session.sequence
        already = sequence.num_computed
        self.manager.index.begin_request()
        try:
            request.shared = sequence.adopt_prefix()
            pending = sequence.num_pending
            if pending:
                request.reservation = self.manager.reserve(sequence.blocks_needed(pending), sequence.owner)
        except BaseException:
            undo()
            raise
        request.lost_to_template = request.session.take_lost_tokens()
        request.saved_kv_unusable, request.session.saved_kv_unusable = request.session.saved_kv_unusable, False
        request.prompt_tokens = sequence.num_tokens
        request.reused = already + request.shared
        request.met_eviction = sequence.next_was_evicted()
        # On a full hit the last token is computed again, without writing: its logits are needed.
        request.next_row = min(sequence.num_computed, sequence.num_tokens - 1)
        if request.logits_from is not None:
            request.next_row = min(request.next_row, request.logits_from)
        request.first_row = request.next_row
        self.residents.used(request.session)
        self.moves.begin(request)
        self._requests[request.id] = request
        self.counters.add("requests")
        self.counters.add("prompt_tokens", request.prompt_tokens - request.uncounted)
        self.counters.add("tokens_reused", request.reused - request.uncounted)
        self.counters.add("full_hits", int(request.reused == request.prompt_tokens))

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Move every running request on by one forward pass; False if there was nothing to do."""
        self._cancel_deserted()
        self._move_blocks()
        self._answer_from_known_logits()
        scheduled = self._schedule()
        if not scheduled:
            return bool(self._requests)
        try:
            begun = time.perf_counter()
            logits = self.engine.forward(pack(scheduled))
        except Exception as error:  # noqa: BLE001 - whatever the model raised belongs to the callers of this step
            self._abandon(scheduled, error)
            return True
        self.counters.add("steps")
        if not any(item.request.is_decoding for item in scheduled):
            self.moves.computed(sum(item.num_rows for item in scheduled), time.perf_counter() - begun)
        self._complete(scheduled)
        self._deliver(scheduled, logits)
        return True

    def _schedule(self) -> list[Scheduled]:
        ready = [request for request in self._requests.values() if request.restore is None]
        waiting = sorted(ready, key=lambda request: not request.is_decoding)
        budget = self.budget.tokens
        someone_decodes = any(request.is_decoding for request in waiting)
        prefill_budget = min(budget, self.budget.prefill_beside_decodes if someone_decodes else budget)
        scheduled: list[Scheduled] = []
        for request in waiting:
            if budget <= 0 or len(scheduled) >= self.budget.sequences:
                break
            self._adopt_more(request)
            rows = min(request.rows_left, budget, self.budget.prefill_chunk)
            if not request.is_decoding:
                rows = min(rows, prefill_budget)
                prefill_budget -= rows
            if rows == 0:
                continue
            try:
                item = self._schedule_rows(request, rows)
            except Exception as error:  # noqa: BLE001 - no block, or no memory for a segment: only this request's
                self._fail(request, error)
                continue
            scheduled.append(item)
            budget -= rows
        return scheduled

    def _adopt_more(self, request: Request) -> None:
        """Another request may have published, since the last step, what this one is about to compute."""
        sequence = request.session.sequence
        if request.is_decoding or request.next_row != sequence.num_computed or not sequence.num_pending:
            return
        gained = sequence.adopt_prefix()
        if gained:
            request.shared += gained
            request.skip_rows(gained)
            self.counters.add("tokens_reused", gained)

    def _move_blocks(self) -> None:
        """Take in what lower tiers have brought, and gather a batch of what they are to get."""
        for request in [request for request in self._requests.values() if request.restore is not None]:
            try:
                self.counters.add("tokens_reused", self.moves.advance(request))
            except Exception as error:  # noqa: BLE001 - no memory to write them: only this request's
                self._fail(request, error)
        self.residents.look()
        self.moves.work()

    def patience_s(self) -> float | None:
        """How long the engine thread may wait for commands: 0 if there is something to do, None if nothing will be."""
        waits = (self.moves.patience_s(self._requests.values()), self.residents.seconds_to_look())
        return min((wait for wait in waits if wait is not None), default=None)

    def idle_work(self) -> bool:
        """Something useful while no request can go on; False if there is nothing to do."""
        self.residents.look()
        return bool(self.manager.scrub_some()) or self.moves.work()

    def _schedule_rows(self, request: Request, rows: int) -> Scheduled:
        sequence = request.session.sequence
        start, end = request.next_row, request.next_row + rows
        writes = end - max(start, sequence.num_computed)
        plan = sequence.prepare_write(writes, request.reservation) if writes > 0 else None
        if request.logits_from is not None:
            logits_from = max(start, request.logits_from)
        else:
            logits_from = end - 1 if end == sequence.num_tokens else end
        return Scheduled(request, start, end, plan, min(logits_from, end))

    def _complete(self, scheduled: list[Scheduled]) -> None:
        for item in scheduled:
            if item.plan is not None:
                item.request.session.sequence.complete_write(item.plan)
            item.request.next_row = item.end
            self.counters.add("tokens_computed", item.num_rows)
            if not item.request.is_decoding:
                self._tell_progress(item.request)

    def _tell_progress(self, request: Request) -> None:
        total = request.prompt_tokens - request.first_row
        self._tell(request, PrefillProgress(request.next_row - request.first_row, total))

    @staticmethod
    def _tell(request: Request, event: Event) -> None:
        """Give an event to the caller; one who can't take it (an event loop that was closed) gets no more."""
        if request.deserted:
            return
        try:
            request.sink(event)
        except BaseException as error:  # noqa: BLE001 - the caller's code, and not a reason to fail anybody else
            _logger.warning("the reply on session %s is cancelled: its caller raised %r", request.session.id, error)
            request.deserted = True

    def _cancel_deserted(self) -> None:
        for request in [request for request in self._requests.values() if request.deserted]:
            self.cancel(request.id)

    def _abandon(self, scheduled: list[Scheduled], error: Exception) -> None:
        for item in scheduled:
            if item.plan is not None:
                item.request.session.sequence.abandon_write(item.plan)
            self._fail(item.request, error)

    def _deliver(self, scheduled: list[Scheduled], logits: torch.Tensor) -> None:
        """Hand each request its rows of ``logits`` ``[outputs, vocab]``; sample where a reply goes on."""
        sampled: list[Request] = []
        rows: list[int] = []
        offset = 0
        for item in scheduled:
            outputs = item.end - item.logits_from
            request = item.request
            mine = slice(offset, offset + outputs)
            offset += outputs
            if request.logits_from is not None:
                request.scored.append(logits[mine].clone())
            if request.rows_left:
                continue
            if request.sampling is not None:
                sampled.append(request)
                rows.append(mine.stop - 1)
            else:
                self._last_logits.remember(request.session.sequence, logits[mine.stop - 1])
                self._finish(request, FinishReason.STOP)
        if sampled:
            self._sample(sampled, logits[rows])

    def _answer_from_known_logits(self) -> None:
        """Replies whose prompt is computed and whose next logits are known need no forward pass to begin."""
        ready: list[Request] = []
        known: list[torch.Tensor] = []
        for request in self._requests.values():
            sequence = request.session.sequence
            logits = self._last_logits.get(sequence)
            begins = request.sampling is not None and not request.is_decoding
            if begins and logits is not None and sequence.num_pending == 0:
                ready.append(request)
                known.append(logits)
        if ready:
            self._sample(ready, torch.stack(known))

    # -- tokens and text -----------------------------------------------------------------------------------------

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        states = [request.sampling for request in requests if request.sampling is not None]
        histories = [request.session.sequence.tokens() for request in requests]
        try:
            tokens = sample(logits, states, histories)
        except Exception as error:  # noqa: BLE001 - the caller's, and only of the one whose logits or settings it is
            self._sample_apart(requests, logits, error)
            return
        for request, token in zip(requests, tokens, strict=True):
            self._extend(request, token)

    def _sample_apart(self, requests: list[Request], logits: torch.Tensor, error: Exception) -> None:
        """Sampling them together failed: find out whose fault it is."""
        if len(requests) == 1:
            self._fail(requests[0], error)
            return
        for row, request in enumerate(requests):
            self._sample([request], logits[row : row + 1])

    def _extend(self, request: Request, token: int) -> None:
        if request.first_token is None:
            request.first_token = time.perf_counter()
            self._cancel_reservation(request)
            self._last_logits.forget(request.session.sequence)
        session, reply = request.session, request.reply
        session.extend_reply(token)
        request.next_row = session.sequence.num_tokens - 1
        request.generated.append(token)
        request.unsent.append(token)
        self.counters.add("tokens_generated")
        if token in request.eos_ids:
            self._finish(request, FinishReason.STOP)
            return
        text = reply.push(token) if reply is not None else ""
        if text:
            self._send_text(request, text)
        if reply is not None and reply.stopped:
            self._finish(request, FinishReason.STOP)
        elif self._is_full(request):
            self._finish(request, FinishReason.LENGTH)

    def _is_full(self, request: Request) -> bool:
        limit = request.sampling.params.max_tokens if request.sampling is not None else None
        reached = limit is not None and len(request.generated) >= limit
        return reached or request.session.sequence.num_tokens >= request.session.limits.max_tokens

    def _send_text(self, request: Request, text: str) -> None:
        self._tell(request, TextDelta(text, tuple(request.unsent)))
        request.unsent.clear()

    # -- endings -------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        content = self._close_reply(request)
        self.moves.keep(request.session)
        scored = torch.cat(request.scored) if request.scored else None
        self._tell(request, Finished(content, tuple(request.generated), reason, request.usage(), scored))

    def _fail(self, request: Request, error: BaseException) -> None:
        self.counters.add("requests_failed")
        self._close_reply(request)
        self._tell(request, Failed(error))

    def _close_reply(self, request: Request) -> str:
        """Take the request out of the batch and leave its session idle, with what was generated so far."""
        self._requests.pop(request.id, None)
        self._cancel_reservation(request)
        self.moves.drop(request)
        session, reply = request.session, request.reply
        if reply is None:
            session.end()
            self.residents.used(session)
            return ""
        rest = reply.finish()
        if rest:
            self._send_text(request, rest)
        tokens, text = reply.kept()
        if not reply.stopped:
            # An end-of-sequence token stays: it is what the template puts behind a reply, or nearly so.
            ending = request.generated[reply.num_tokens :]
            tokens, text = len(request.generated), text + self._decode(ending)
        session.end_reply(reply.content, text, request.prompt_tokens + tokens)
        self.residents.used(session)
        return reply.content

    def _cancel_reservation(self, request: Request) -> None:
        if request.reservation is not None:
            self.manager.cancel(request.reservation)
            request.reservation = None

    def check_invariants(self) -> None:
        """Raises AssertionError if blocks, sequences, sessions and requests contradict each other."""
        self.manager.check_invariants()
        self.sessions.check_invariants()
        for request in self._requests.values():
            assert request.session in tuple(self.sessions), "a request runs on a session that is not open"
            assert request.next_row <= request.session.sequence.num_tokens
        if not self._requests:
            assert self.manager.allocator.counts().reserved == 0, "blocks are reserved for nobody"
