from __future__ import annotations

import pytest
import torch

from kvos.demo.check import check
from kvos.demo.evidence import CheckedReply, Evidence, checked_reply
from kvos.demo.record import CheckRecord
from kvos.testing import toy_model

PROMPT = tuple(range(10, 40))
REPLY = 5


def run(evidence: list[Evidence], dtype: torch.dtype = torch.float32) -> CheckRecord:
    return check(toy_model(dtype=dtype), evidence, lambda done, total: None)


def honest(dtype: torch.dtype = torch.float32, prompt: tuple[int, ...] = PROMPT, label: str = "honest") -> Evidence:
    """Greedy tokens of the plain model, and its logits, by the model's own forward pass."""
    model, ids = toy_model(dtype=dtype), list(prompt)
    for _ in range(REPLY):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    rows = logits_of(model, ids)[len(prompt) - 1 : -1]
    return Evidence(label, tuple(ids), (CheckedReply(len(prompt), tuple(ids[len(prompt) :])),), rows)


@torch.inference_mode()
def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def changed(evidence: Evidence, by: float) -> Evidence:
    logits = evidence.logits.clone()
    logits[2, 7] += by
    return Evidence(evidence.label, evidence.ids, evidence.replies, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_plain_model_says_passes(dtype: torch.dtype) -> None:
    record = run([honest(dtype)], dtype)
    assert record.ok
    assert record.largest_difference <= record.limit
    assert record.noise_pairs >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_logit_beyond_the_limit_fails(dtype: torch.dtype) -> None:
    limit = run([honest(dtype)], dtype).limit
    record = run([changed(honest(dtype), 4 * limit)], dtype)
    assert not record.ok
    assert record.largest_difference > limit


def test_a_logit_that_is_not_a_number_fails() -> None:
    assert not run([changed(honest(), float("nan"))]).ok


def test_a_token_that_the_model_would_not_have_chosen_fails() -> None:
    right = honest()
    (reply,) = right.replies
    wrong = (*reply.chosen[:-1], (reply.chosen[-1] + 1) % 200)
    record = run([Evidence("wrong", right.ids, (CheckedReply(reply.start, wrong),), right.logits)])
    assert not record.ok
    assert record.parts[0].different == 1


def test_a_session_that_begins_others_is_counted_once() -> None:
    parent = honest(label="parent")
    one, other = honest(prompt=(*parent.ids, 50), label="one"), honest(prompt=(*parent.ids, 60), label="other")
    record = run([parent, one, other])
    assert record.ok
    assert sorted(part.label for part in record.parts) == ["one", "other", "parent"]
    assert record.sequences == 2


def test_one_wrong_session_does_not_hide_behind_right_ones() -> None:
    parts = run([honest(label="right"), changed(honest(prompt=PROMPT[:20], label="wrong"), 1.0)]).parts
    assert {part.label: part.ok for part in parts} == {"right": True, "wrong": False}


def test_a_reply_that_was_kept_whole_is_checked_whole() -> None:
    assert checked_reply([1, 2, 3, 4, 9], 2, [3, 4]) == CheckedReply(2, (3, 4))


def test_the_first_token_that_a_stop_string_cut_off_is_still_checked() -> None:
    assert checked_reply([1, 2, 3, 9, 9], 2, [3, 4, 5]) == CheckedReply(2, (3, 4))


def test_a_reply_at_the_end_of_its_session_is_checked_whole() -> None:
    assert checked_reply([1, 2, 3, 4], 2, [3, 4]) == CheckedReply(2, (3, 4))


def test_what_fails_is_judged_again_by_the_noise_on_its_own_ids() -> None:
    right, wrong = honest(label="right"), changed(honest(prompt=PROMPT[:20], label="wrong"), 1.0)
    once = run([right]).noise_pairs
    assert once >= 8  # fewer pairs say too little of the noise
    assert run([right, wrong]).noise_pairs == 2 * once
