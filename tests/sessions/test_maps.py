"""Spans to blocks and slots, and back, at block edges, counted by hand: blocks hold 8 tokens."""

from __future__ import annotations

from kvos.sessions import BlockSpan, CacheSession, SpanBlock, SpanKind
from serving.harness import Bench, some_ids


def spans_of(bench: Bench, *sizes: int) -> CacheSession:
    """A computed session with one span of raw tokens for each size."""
    session = bench.open()
    for number, size in enumerate(sizes):
        bench.handle(session).append_tokens(some_ids(size, number))
    bench.compute(session)
    return session


def test_a_span_is_in_the_slots_that_hold_its_tokens() -> None:
    bench = Bench()
    session = spans_of(bench, 5, 3, 8, 1, 16, 4)
    a, b, c, d, e = bench.table(session)
    assert bench.handle(session).span_blocks() == {
        0: (SpanBlock(a, 0, 5),),
        1: (SpanBlock(a, 5, 8),),  # ends where the block ends
        2: (SpanBlock(b, 0, 8),),  # is the block
        3: (SpanBlock(c, 0, 1),),
        4: (SpanBlock(c, 1, 8), SpanBlock(d, 0, 8), SpanBlock(e, 0, 1)),
        5: (SpanBlock(e, 1, 5),),
    }


def test_what_is_not_computed_yet_is_in_no_block() -> None:
    bench = Bench()
    session = spans_of(bench, 6)
    (a,) = bench.table(session)
    bench.handle(session).append_tokens(some_ids(9, 5))
    assert bench.handle(session).span_blocks() == {0: (SpanBlock(a, 0, 6),), 1: ()}
    assert session.spans_in_block(a) == (BlockSpan(session.id, session.transcript.spans[0], 0, 6),)


def test_a_block_knows_whose_tokens_it_holds() -> None:
    bench = Bench()
    session = spans_of(bench, 5, 3, 8, 1, 2)
    a, b, c = bench.table(session)
    spans = session.transcript.spans
    assert session.spans_in_block(a) == (BlockSpan(session.id, spans[0], 0, 5), BlockSpan(session.id, spans[1], 5, 8))
    assert session.spans_in_block(b) == (BlockSpan(session.id, spans[2], 8, 16),)
    assert session.spans_in_block(c) == (
        BlockSpan(session.id, spans[3], 16, 17),
        BlockSpan(session.id, spans[4], 17, 19),
    )
    assert session.spans_in_block(max(a, b, c) + 1) == ()


def test_the_two_maps_are_each_others_reverse() -> None:
    bench = Bench()
    session = spans_of(bench, 3, 9, 1, 17, 4, 8)
    forward = {
        (part.block, slot, span)
        for span, parts in session.blocks_by_span().items()
        for part in parts
        for slot in range(part.first_slot, part.end_slot)
    }
    table = bench.table(session)
    backward = {
        (block, token - 8 * place, part.span.id)
        for place, block in enumerate(table)
        for part in session.spans_in_block(block)
        for token in range(part.start, part.end)
    }
    assert forward == backward
    assert len(forward) == 42
    for block, slot, span in forward:
        content = session.sequence.slot_content(block * 8 + slot)
        assert content is not None
        held = session.transcript.spans[span]
        assert held.start <= content.index < held.end


def test_an_empty_span_is_in_no_block() -> None:
    bench = Bench()
    template = str(bench.tokenizer.chat_template).replace(
        "in messages %}", "in messages if message['role'] != 'tool' %}"
    )
    bench.tokenizer.chat_template = template
    session = bench.chat(
        {"role": "user", "content": "hi"}, {"role": "tool", "content": "x"}, {"role": "user", "content": "y"}
    )
    bench.compute(session)
    assert session.transcript.spans[1].num_tokens == 0
    assert session.blocks_by_span()[1] == ()
    listed = {part.span.id for block in bench.table(session) for part in session.spans_in_block(block)}
    assert listed == {0, 2}


def test_forks_share_the_blocks_of_the_past_and_not_those_of_their_own_words() -> None:
    bench = Bench()
    parent = spans_of(bench, 8, 5)
    children = bench.core.fork(parent, ["left", "right"])
    for number, child in enumerate(children):
        bench.handle(child).append_tokens([20 + number] * 4)
        bench.compute(child)
    (a, tail), (_, left_tail, left_more), (_, right_tail, _) = map(bench.table, (parent, *children))
    assert children[0].blocks_by_span() == {
        0: (SpanBlock(a, 0, 8),),
        1: (SpanBlock(left_tail, 0, 5),),
        2: (SpanBlock(left_tail, 5, 8), SpanBlock(left_more, 0, 1)),
    }
    assert parent.blocks_by_span() == {0: (SpanBlock(a, 0, 8),), 1: (SpanBlock(tail, 0, 5),)}
    assert [part.session for part in bench.core.sessions.spans_in_block(a)] == [parent.id, "left", "right"]
    assert [(part.session, part.start, part.end) for part in bench.core.sessions.spans_in_block(right_tail)] == [
        ("right", 8, 13),
        ("right", 13, 16),
    ]
    assert [part.session for part in bench.core.sessions.spans_in_block(tail)] == [parent.id]


def test_all_messages_of_one_prompt_version_are_found_under_it() -> None:
    bench = Bench()
    session = bench.open()
    handle = bench.handle(session)
    handle.append([{"role": "system", "content": "abc"}, {"role": "system", "content": "def"}], version="v7")
    handle.append({"role": "user", "content": "hi"})
    bench.compute(session)
    # "<|im_start|>system\nabc<|im_end|>\n" is 1 + 7 + 3 + 1 + 1 = 13 tokens
    a, b, c, d = bench.table(session)[:4]
    first = (SpanBlock(a, 0, 8), SpanBlock(b, 0, 5))
    second = (SpanBlock(b, 5, 8), SpanBlock(c, 0, 8), SpanBlock(d, 0, 2))
    assert handle.version_blocks() == {"v7": first + second}


def test_two_sessions_of_one_prompt_version_hold_it_in_the_same_blocks() -> None:
    bench = Bench()
    blocks = []
    for question in ("one", "two"):
        session = bench.open()
        bench.handle(session).append({"role": "system", "content": "You are so kind"}, version="kind-1")
        bench.handle(session).append({"role": "user", "content": question})
        bench.compute(session)
        blocks.append([part.block for part in bench.handle(session).version_blocks()["kind-1"]])
    # 1 + 7 + 15 + 1 + 1 = 25 tokens: three full blocks shared; the fourth holds the question, too
    assert len(blocks[0]) == len(blocks[1]) == 4
    assert blocks[0][:3] == blocks[1][:3]
    assert blocks[0][3] != blocks[1][3]


def test_tool_messages_are_found_in_their_blocks() -> None:
    bench = Bench()
    bench.tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] + (m['content'] or 'call') }}{% endfor %}"
    session = bench.open()
    handle = bench.handle(session)
    handle.append({"role": "system", "content": "tools!!"}, kind=SpanKind.TOOLS)  # s + 7: block 0
    handle.append({"role": "user", "content": "hi"})  # 8 to 11
    handle.append({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]})  # 11 to 16
    handle.append({"role": "tool", "content": "result"})  # 16 to 23
    bench.compute(session)
    a, b, c = bench.table(session)
    assert handle.tool_blocks() == {
        0: (SpanBlock(a, 0, 8),),
        2: (SpanBlock(b, 3, 8),),
        3: (SpanBlock(c, 0, 7),),
    }


def test_maps_follow_a_truncation() -> None:
    bench = Bench()
    session = spans_of(bench, 6, 6, 6)
    a, b, _ = bench.table(session)
    bench.handle(session).truncate(tokens=10)
    assert bench.handle(session).span_blocks() == {
        0: (SpanBlock(a, 0, 6),),
        1: (SpanBlock(a, 6, 8), SpanBlock(b, 0, 2)),
    }


def test_the_maps_name_where_the_values_really_are() -> None:
    """Two spans with equal keys in the first layer: a token's key depends on itself and its position alone."""
    bench = Bench()
    session = spans_of(bench, 8, 11)
    other = bench.raw([*some_ids(8), *some_ids(11, 1)], tenant="other")
    bench.compute(other)
    ((part, *_),) = [parts for span, parts in session.blocks_by_span().items() if span == 1]
    (whole,) = other.blocks_by_span().values()
    assert part.block != whole[1].block
    pool = bench.manager.pool
    for layer in range(pool.layout.num_layers):
        ours = pool.segments[0].keys[layer][part.block, part.first_slot : part.end_slot]
        theirs = pool.segments[0].keys[layer][whole[1].block, whole[1].first_slot : whole[1].end_slot]
        assert (ours - theirs).abs().max() < 1e-9
