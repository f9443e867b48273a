"""What the evaluation reports, from numbers worked out by hand; and its check of the outputs."""

import pytest
import torch

from dflash import evaluate
from dflash.corpus import Prompt
from dflash.decode import Response, generate
from dflash.errors import UserError
from dflash.target import load_model


def test_acceptance_mean_over_responses_and_pooled():
    a = evaluate.acceptance([[4, 2], [1, 1, 1, 3], []], block_size=4)
    assert a["responses"] == 2 and a["cycles"] == 6
    assert a["tau_mean"] == pytest.approx((3 + 1.5) / 2)
    assert a["tau_pooled"] == pytest.approx(12 / 6)
    assert a["per_slot"] == pytest.approx([3 / 6, 2 / 6, 1 / 6])


def test_nothing_to_report():
    assert evaluate.acceptance([[], []], 4)["tau_mean"] is None
    assert evaluate.bootstrap_interval([[]]) is None


def test_bootstrap_interval_holds_the_mean():
    lists = [[1], [2], [3], [2], [2], [1], [3]]
    low, high = evaluate.bootstrap_interval(lists)
    assert 1 <= low < 2 < high <= 3
    assert evaluate.bootstrap_interval(lists) == (low, high)
    assert evaluate.bootstrap_interval([[2]] * 5) == (2, 2)


def test_speed_leaves_the_prefills_token_out():
    rows = [
        dict(plain_seconds=1.0, plain_tokens=11, drafted_seconds=0.5, drafted_tokens=11,
             draft_seconds=0.1),
        dict(plain_seconds=3.0, plain_tokens=11, drafted_seconds=1.5, drafted_tokens=11,
             draft_seconds=0.3),
    ]  # fmt: skip
    s = evaluate.speed(rows)
    assert s["seconds_per_token_plain"] == pytest.approx(0.2)
    assert s["speed_up"] == pytest.approx(2.0) and s["draft_share"] == pytest.approx(0.2)
    one_token = dict(plain_seconds=0.1, plain_tokens=1, drafted_seconds=0.1, drafted_tokens=1,
                     draft_seconds=0.0)  # fmt: skip
    assert evaluate.speed([one_token])["speed_up"] is None


def test_greedy_check_accepts_the_targets_own_output_and_nothing_else(tiny, identity_of):
    identity = identity_of(tiny)
    model = load_model(identity, "float32", device=torch.device("cpu"))
    ids = [[5, 9, 200, 31], [7], [100, 101, 102, 103, 104, 105], [50, 60, 70], [31, 31]]
    prompts = [Prompt(f"{i:016x}", "s", str(i), "k", "heldout", [], p) for i, p in enumerate(ids)]
    eos, limit = identity.eos_token_ids, 20
    responses, _ = generate(model, ids, limit, eos)

    def check(changed):
        return evaluate.own_greedy_outputs(model, prompts, changed, limit, eos, batch_tokens=40)

    assert check(responses) == [True] * 5
    for i, response in enumerate(responses):
        for place in range(len(response.tokens)):
            wrong = list(response.tokens)
            wrong[place] = (wrong[place] + 1) % 320
            changed = [Response(wrong) if j == i else r for j, r in enumerate(responses)]
            assert check(changed) == [j != i for j in range(5)], (i, place)
        if len(response.tokens) > 1:  # stopped too early
            short = [Response(r.tokens[:-1]) if j == i else r for j, r in enumerate(responses)]
            assert check(short) == [j != i for j in range(5)]


def test_a_drafter_of_another_target_is_refused(finished, identity_of, tiny_qwen3):
    import dataclasses

    from dflash.drafter import load_drafter

    folder = finished[0] / "results/export/small"
    drafter = load_drafter(folder)
    identity = identity_of(tiny_qwen3)
    evaluate.check_fits(drafter, identity, folder)
    other = dataclasses.replace(identity, hidden_size=128, vocab_size=99)
    with pytest.raises(UserError, match="hidden_size 64 against 128; vocab_size 320 against 99"):
        evaluate.check_fits(drafter, other, folder)
