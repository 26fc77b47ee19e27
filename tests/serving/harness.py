"""The engine core over the toy model in float64, driven by hand, and the plain model that it is compared with.

No thread: a command runs when a test gives it, a step when a test takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import LlamaForCausalLM

from kvos.engine import Engine, PackedBatch, TransformersEngine
from kvos.residency import Residency
from kvos.runtime import Session
from kvos.runtime.parts import RuntimeParts
from kvos.sequences import BlockHasher, BlockManager
from kvos.serving import (
    EngineCore,
    EngineThread,
    Event,
    Failed,
    Finished,
    PrefillProgress,
    RequestId,
    SamplingParams,
    StepBudget,
    TextDelta,
)
from kvos.sessions import CacheSession, ChatRenderer, SessionLimits
from kvos.storage import BlockPool
from kvos.testing import toy_model, toy_tokenizer
from kvos.testing.models import TOY_VOCAB_SIZE

TOLERANCE = 1e-6
"""Of the largest logit: norms and RoPE of the library compute in float32 inside."""

IM_END = 2


@cache
def reference(vocab: int = TOY_VOCAB_SIZE) -> LlamaForCausalLM:
    """The toy model as the library has it; nothing of kvos touches this object."""
    return toy_model(dtype=torch.float64, vocab_size=vocab)


def plain_logits(ids: Iterable[int], vocab: int = TOY_VOCAB_SIZE) -> torch.Tensor:
    """``[tokens, vocab]`` by the library, without any cache."""
    with torch.no_grad():
        return reference(vocab)(torch.tensor([[int(i) for i in ids]]), use_cache=False).logits[0]


def plain_greedy(ids: Iterable[int], n: int, eos: Sequence[int] = ()) -> list[int]:
    """``n`` most likely tokens, one whole run for each; fewer if one of ``eos`` comes."""
    history = [int(i) for i in ids]
    start = len(history)
    for _ in range(n):
        history.append(int(plain_logits(history)[-1].argmax()))
        if history[-1] in eos:
            break
    return history[start:]


def assert_same_logits(got: torch.Tensor, ids: Iterable[int]) -> None:
    """``got`` are the logits behind the last ``len(got)`` of ``ids``; there may be none."""
    everything = plain_logits(ids, got.shape[-1])
    expected = everything[len(everything) - len(got) :]
    assert got.shape == expected.shape
    worst = float((got - expected).abs().max() / expected.abs().max()) if len(got) else 0.0
    assert worst < TOLERANCE, f"logits differ by {worst:.2e} of the largest"


def some_ids(n: int, seed: int = 0) -> list[int]:
    """Plain byte tokens, no special ones."""
    return np.random.default_rng(seed).integers(3, 259, n).tolist()


class SpyEngine(Engine):
    """Passes batches on and keeps them; on request it puts words into the model's mouth."""

    def __init__(self, engine: Engine) -> None:
        self.layout, self.info, self._engine = engine.layout, engine.info, engine
        self.batches: list[PackedBatch] = []
        self._script: dict[int, int] = {}

    def attach(self, pool: BlockPool) -> None:
        self._engine.attach(pool)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        self.batches.append(batch)
        logits = self._engine.forward(batch)
        lengths = batch.positions[batch.logit_rows] + 1
        if self._script.keys().isdisjoint(lengths.tolist()):
            return logits
        logits = logits.clone()
        for row, length in enumerate(lengths.tolist()):
            if length in self._script:
                logits[row, self._script[length]] = 1e6
        return logits

    def identity(self) -> str:
        return self._engine.identity()

    def close(self) -> None:
        self._engine.close()

    def say(self, sequence_length: int, ids: Sequence[int]) -> None:
        """From now on the likeliest tokens behind a sequence of that length are ``ids``, one after the other."""
        self._script = {sequence_length + place: token for place, token in enumerate(ids)}

    def rows(self) -> list[list[int]]:
        """Per step, the rows of each sequence."""
        return [np.diff(batch.query_starts).tolist() for batch in self.batches]


class InlineThread:
    """Has the methods of ``EngineThread``, and runs each command at once."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def submit(self, command: Callable[[EngineCore], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(command(self._core))
        return future

    def call(self, command: Callable[[EngineCore], Any]) -> Any:
        return command(self._core)


class Events(list[Event]):
    """Where a request's events go."""

    request: RequestId

    @property
    def text(self) -> str:
        return "".join(event.text for event in self if isinstance(event, TextDelta))

    @property
    def is_over(self) -> bool:
        return bool(self) and isinstance(self[-1], Finished | Failed)

    @property
    def finished(self) -> Finished:
        assert isinstance(self[-1], Finished), self[-1:]
        return self[-1]

    @property
    def error(self) -> BaseException:
        assert isinstance(self[-1], Failed), self[-1:]
        return self[-1].error

    @property
    def progress(self) -> list[tuple[int, int]]:
        return [(event.done, event.total) for event in self if isinstance(event, PrefillProgress)]


@cache
def toy_engine(block_size: int, vocab: int = TOY_VOCAB_SIZE) -> TransformersEngine:
    model = toy_model(dtype=torch.float64, vocab_size=vocab)
    return TransformersEngine(model, block_size=block_size, kernels="generic")


class Bench:
    """One of everything below the runtime. The engine is shared by all benches: use one at a time."""

    def __init__(
        self,
        *,
        block_size: int = 8,
        max_blocks: int = 200,
        blocks_per_segment: int = 50,
        budget: StepBudget | None = None,
        wrap: Callable[[Engine], Engine] | None = None,
        max_tokens: int = 1000,
        tokenizer: Any = None,
        eos: Iterable[int] = (IM_END,),
        residency: Callable[[BlockManager], Residency | None] = lambda _: None,
    ) -> None:
        self.tokenizer = toy_tokenizer() if tokenizer is None else tokenizer
        engine = toy_engine(block_size, len(self.tokenizer))
        self.engine = SpyEngine(engine if wrap is None else wrap(engine))
        pool = BlockPool(engine.layout, max_blocks=max_blocks, blocks_per_segment=blocks_per_segment)
        self.engine.attach(pool)
        self.manager = BlockManager(pool, BlockHasher(b"a key for tests"))
        self.core = EngineCore(
            self.engine,
            self.manager,
            budget=StepBudget(512, 256, 32) if budget is None else budget,
            decode=lambda ids: self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            eos_ids=frozenset(eos),
            residency=residency(self.manager),
        )
        self.renderer = ChatRenderer(self.tokenizer)
        self.parts = RuntimeParts(
            engine=self.engine,
            thread=cast(EngineThread, InlineThread(self.core)),
            renderer=self.renderer,
            limits=SessionLimits(max_tokens, engine.info.vocab_size),
            sessions_folder=Path("nothing is saved here"),
        )

    def open(self, name: str | None = None, *, tenant: str = "default") -> CacheSession:
        return self.parts.open_session(self.core, name, tenant)

    def raw(self, ids: Sequence[int], name: str | None = None, *, tenant: str = "default") -> CacheSession:
        """A session of raw tokens, none of them computed."""
        session = self.open(name, tenant=tenant)
        self.handle(session).append_tokens(ids)
        return session

    def chat(self, *messages: dict[str, Any], name: str | None = None, tenant: str = "default") -> CacheSession:
        session = self.open(name, tenant=tenant)
        self.handle(session).append(messages)
        return session

    def handle(self, session: CacheSession) -> Session:
        """The public handle; good for everything that doesn't wait for steps."""
        return Session(self.parts, session)

    # -- requests ------------------------------------------------------------------------------------------------

    def generate(self, session: CacheSession, **settings: Any) -> Events:
        events = Events()
        chat = bool(session.transcript.messages)
        prompt = self.renderer.open_reply(session.transcript) if chat else None
        events.request = self.core.generate(session, SamplingParams(**settings), events.append, prompt)
        return events

    def prefill(self, session: CacheSession, logits_from: int | None = None) -> Events:
        events = Events()
        events.request = self.core.prefill(session, events.append, logits_from)
        return events

    def step(self) -> bool:
        more = self.core.step()
        self.core.check_invariants()
        return more

    def run(self, most: int = 2000) -> None:
        """Steps until nothing runs."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"still running after {most} steps")

    def reply(self, session: CacheSession, **settings: Any) -> Finished:
        """A whole reply."""
        events = self.generate(session, **settings)
        self.run()
        return events.finished

    def say(self, session: CacheSession, ids: Sequence[int], **settings: Any) -> Events:
        """A whole reply with these tokens."""
        prompt = self.renderer.open_reply(session.transcript)
        self.engine.say(prompt.keep + len(prompt.tokens), ids)
        events = self.generate(session, **{"max_tokens": len(ids), **settings})
        self.run()
        self.engine.say(0, [])
        assert list(events.finished.tokens) == list(ids)[: len(events.finished.tokens)]
        return events

    def compute(self, session: CacheSession) -> Finished:
        events = self.prefill(session)
        self.run()
        return events.finished

    def next_logits(self, session: CacheSession) -> torch.Tensor:
        """``[1, vocab]`` behind the last token, read through whatever the cache holds."""
        events = self.prefill(session, session.sequence.num_tokens - 1)
        self.run()
        logits = events.finished.logits
        assert logits is not None
        return logits

    def check(self, session: CacheSession) -> None:
        """What the model says next is what a plain run says."""
        self.core.check_invariants()
        if session.sequence.num_tokens:
            assert_same_logits(self.next_logits(session), session.sequence.tokens())

    # -- looking ---------------------------------------------------------------------------------------------------

    def count(self, name: str) -> int:
        return self.core.counters[name]

    def table(self, session: CacheSession) -> list[int]:
        return session.sequence.block_table().tolist()

    def state(self) -> list[object]:
        """Everything that a refused call must leave alone."""
        return [
            [
                (
                    s.id,
                    s.state,
                    replace(s.transcript, revision=0),
                    s.sequence.tokens().tolist(),
                    s.sequence.num_computed,
                    self.table(s),
                )
                for s in self.core.sessions
            ],
            self.manager.allocator.counts(),
            self.core.counters.snapshot(),
            self.core.num_running,
        ]
