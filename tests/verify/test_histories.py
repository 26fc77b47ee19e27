"""Histories: reproducible, playable in any part, and readable."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvos.config import KvosConfig
from kvos.testing import toy_model, toy_tokenizer
from kvos.verify.histories import history, salted_tokens, text_tokens
from kvos.verify.operations import (
    Compact,
    Extend,
    Fork,
    Generate,
    Hibernate,
    Left,
    Open,
    Probe,
    Restart,
    SideBySide,
    simpler,
)
from kvos.verify.player import Player
from kvos.verify.stage import Stage
from kvos.verify.workplace import Workplace


def test_a_history_follows_from_seed_and_round() -> None:
    assert history(5, 3) == history(5, 3)
    assert history(5, 3) != history(5, 4)
    assert history(5, 3) != history(6, 3)


def test_a_history_begins_with_a_session_and_ends_with_a_look_at_all() -> None:
    for number in range(20):
        operations = history(0, number)
        assert isinstance(operations[0], Open)
        assert isinstance(operations[-1], Probe)


@pytest.mark.parametrize("seed", range(4))
def test_every_five_rounds_leave_the_device_for_each_tier_restart_in_both_ways_and_compact(seed: int) -> None:
    for first in (0, 35):
        played = [operation for number in range(first, first + 5) for operation in history(seed, number)]
        assert {Left.HOST, Left.DISK} <= {one.left for one in played if isinstance(one, Hibernate)}
        restarts = [one for one in played if isinstance(one, Restart)]
        assert any(one.step for one in restarts)
        assert any(one.step == 0 and one.warm for one in restarts)
        assert any(isinstance(one, Compact) for one in played)


def test_every_place_for_the_blocks_of_a_session_comes_in_its_turn() -> None:
    played = [operation for number in range(100) for operation in history(0, number)]
    assert {one.left for one in played if isinstance(one, Hibernate)} == set(Left)


def test_longer_texts_begin_with_shorter_ones() -> None:
    assert np.array_equal(text_tokens(1, 2, 50, 259)[:20], text_tokens(1, 2, 20, 259))
    assert not np.array_equal(text_tokens(1, 2, 20, 259), text_tokens(1, 3, 20, 259))
    assert not np.array_equal(salted_tokens(1, 2, 20, 259), text_tokens(1, 2, 20, 259))


def test_token_ids_are_inside_the_vocabulary() -> None:
    tokens = text_tokens(0, 0, 500, 7)
    assert set(tokens.tolist()) == set(range(7))


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_history_can_be_played_whatever_is_removed(group: int) -> None:
    rng = np.random.default_rng(group)
    workplace = Workplace(toy_model(dtype=torch.float64), toy_tokenizer(), KvosConfig.from_env())
    with Stage(workplace, group) as stage:
        player = Player(stage, seed=0)
        for number in range(6):
            operations = [operation for operation in history(8, number) if rng.random() < 0.6]
            seen = player.play(operations)
            assert seen.fault is None, operations
            assert all(len(record.ids) > record.start for record in seen.records)


def test_operations_say_what_they_do() -> None:
    assert str(Open(2, 37, 25)) == "open a session on 37 tokens of text 2, logits of 12"
    assert str(Fork(1, 2)) == "fork session 1 into 2"
    assert str(SideBySide((0, 4), 3, (1, 5))) == "extend sessions 0, 4 side by side by 1 + 5 tokens of salt 3"
    assert str(Hibernate((0, 3), Left.DISK)) == "hibernate sessions 0, 3, their blocks left on disk alone"
    assert str(Restart((2,), 1, warm=True)) == (
        "hibernate sessions 2, restart with another block size, resume what was hibernated and compute them"
    )
    assert str(Compact((1,), 3)) == "scatter and compact tables while sessions 1 generate 3 tokens"
    assert str(Generate((7,), 4)) == "generate 4 tokens in sessions 7 side by side"


def test_simpler_operations_are_smaller_and_still_ask_for_logits() -> None:
    assert set(simpler(Extend(0, 1, 5, 3))) == {
        Extend(0, 1, 1, 0),
        Extend(0, 1, 3, 2),
        Extend(0, 1, 4, 3),
        Extend(0, 1, 5, 0),
        Extend(0, 1, 5, 1),
        Extend(0, 1, 5, 2),
    }
    assert set(simpler(Restart((1, 2), 2, warm=False))) == {
        Restart((1,), 2, warm=False),
        Restart((1, 2), 1, warm=False),
        Restart((1, 2), 0, warm=False),
    }
    assert set(simpler(Fork(2, 2))) == {Fork(2, 1)}
    assert set(simpler(Probe(0, close=True))) == set()
