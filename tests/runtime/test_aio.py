"""The same for asyncio: replies beside each other, cancelled tasks, and an event loop that ends first."""

from __future__ import annotations

import asyncio
import threading

import pytest

import kvos
from kvos.errors import EngineStoppedError, InvalidInputError, SessionBusyError
from kvos.serving import FinishReason
from kvos.sessions import SessionState
from serving.harness import plain_greedy, some_ids


def raw(runtime: kvos.Runtime, n: int = 12) -> kvos.AsyncSession:
    session = runtime.async_session()
    session.sync.append_tokens(some_ids(n))
    return session


async def idle(session: kvos.AsyncSession) -> None:
    """Wait until nothing runs on the session, or fail."""
    async with asyncio.timeout(20):
        while (await session.report()).state is not SessionState.IDLE:
            await asyncio.sleep(0.005)


def test_every_verb_can_be_awaited(runtime: kvos.Runtime) -> None:
    async def main() -> None:
        session = runtime.async_session("x")
        assert session.name == "x"
        await session.append({"role": "system", "content": "s"}, version="v1")
        await session.append({"role": "user", "content": "hello"})
        assert (await session.prefill()).computed_tokens == session.sync.tokens.size
        reply = await session.generate(max_tokens=8, ignore_eos=True)
        text = "".join([piece async for piece in reply])
        result = await reply.result()
        assert text == result.text
        assert len(result.tokens) == 8
        assert reply.usage == result.usage
        assert [piece async for piece in reply] == []
        left, right = await session.fork(2, names=["left", "right"])
        await left.truncate(messages=2)
        await left.save("left")
        assert (await left.report()).messages == 2
        await right.close()
        assert runtime.saved_sessions() == ("left",)

    asyncio.run(main())
    runtime.check_invariants()


def test_usage_of_a_running_reply_is_refused_and_its_text_outlives_the_wait_for_it(runtime: kvos.Runtime) -> None:
    async def main() -> None:
        reply = await raw(runtime).generate(max_tokens=8, ignore_eos=True)
        with pytest.raises(InvalidInputError, match="await result"):
            _ = reply.usage
        result = await reply.result()
        assert "".join([piece async for piece in reply]) == result.text != ""
        assert reply.usage.generated_tokens == 8

    asyncio.run(main())


def test_replies_run_beside_each_other_and_beside_the_loop(runtime: kvos.Runtime) -> None:
    async def one(n: int) -> list[int]:
        reply = await raw(runtime, 5 + n).generate(max_tokens=10, ignore_eos=True)
        return list((await reply.result()).tokens)

    async def main() -> tuple[list[list[int]], int]:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(heart())
        replies = await asyncio.gather(*(one(n) for n in range(4)))
        beating.cancel()
        return replies, beats

    replies, beats = asyncio.run(main())
    assert replies == [plain_greedy(some_ids(5 + n), 10) for n in range(4)]
    assert beats > 10


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_cancelling_the_task_that_reads_cancels_the_reply(runtime: kvos.Runtime, tokens: int) -> None:
    async def main() -> None:
        session = raw(runtime)
        seen = asyncio.Event()

        async def read() -> None:
            reply = await session.generate(ignore_eos=True)
            count = 0
            if tokens == 0:
                seen.set()
            async for _ in reply:
                count += 1
                if count == tokens:
                    seen.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(seen.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(session)
        assert len(session.sync.tokens) < 200, "it would have gone on to the end of the context"

    asyncio.run(main())
    assert runtime.stats().counters["requests_cancelled"] == 1
    runtime.check_invariants()


def test_cancelling_the_task_that_starts_a_reply_cancels_the_reply(runtime: kvos.Runtime) -> None:
    async def main() -> None:
        session = raw(runtime)
        held = threading.Event()
        blocker = asyncio.get_running_loop().run_in_executor(None, lambda: runtime.inspect(lambda core: held.wait(20)))
        task = asyncio.create_task(session.generate(ignore_eos=True))
        await asyncio.sleep(0.05)  # now it waits for the engine thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.set()
        await blocker
        await asyncio.sleep(0.05)
        await idle(session)
        assert len(session.sync.tokens) < 200

    asyncio.run(main())
    runtime.check_invariants()


def test_a_timeout_around_a_result_cancels_the_reply(runtime: kvos.Runtime) -> None:
    async def main() -> None:
        session = raw(runtime)
        reply = await session.generate(ignore_eos=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reply.result(), 0.1)
        await idle(session)

    asyncio.run(main())


def test_leaving_an_async_reply_early_cancels_it(runtime: kvos.Runtime) -> None:
    async def main() -> None:
        session = raw(runtime)
        reply = await session.generate(ignore_eos=True)
        async for _ in reply:
            break
        await idle(session)
        reply.cancel()
        assert (await reply.result()).finish_reason is FinishReason.CANCELLED

    asyncio.run(main())


def test_a_loop_that_ends_before_its_reply_disturbs_nobody(runtime: kvos.Runtime) -> None:
    left_behind = raw(runtime)

    async def main() -> None:
        await left_behind.generate(ignore_eos=True)

    asyncio.run(main())
    session = runtime.session()
    session.append_tokens(some_ids(9))
    assert list(session.generate(max_tokens=5, ignore_eos=True).result().tokens) == plain_greedy(some_ids(9), 5)
    left_behind.sync.close()
    runtime.check_invariants()


def test_errors_come_where_they_are_awaited(runtime: kvos.Runtime) -> None:
    async def main() -> None:
        session = raw(runtime)
        with pytest.raises(InvalidInputError):
            await session.generate(max_tokens=0)
        reply = await session.generate(ignore_eos=True)
        with pytest.raises(SessionBusyError):
            await session.generate()
        await asyncio.to_thread(runtime.close)
        with pytest.raises(EngineStoppedError):
            await reply.result()
        with pytest.raises(EngineStoppedError):
            await session.generate()

    asyncio.run(main())
