"""Acceptance from numbers worked out by hand, and reading a response against decoding it."""

import pytest
import torch
from test_decode import END, PROMPTS, fit, make_drafter

from dflash import acceptance
from dflash.decode import generate
from dflash.taps import Taps, run_decoder
from dflash.target import load_model


def test_mean_over_responses_and_pooled():
    a = acceptance.figures([[4, 2], [1, 1, 1, 3], []], block_size=4)
    assert a["responses"] == 2 and a["cycles"] == 6
    assert a["tau_mean"] == pytest.approx((3 + 1.5) / 2)
    assert a["tau_pooled"] == pytest.approx(12 / 6)
    assert a["per_slot"] == pytest.approx([3 / 6, 2 / 6, 1 / 6])


def test_nothing_to_report():
    a = acceptance.figures([[], []], 4)
    assert a["tau_mean"] is a["tau_pooled"] is a["tau_mean_interval"] is None
    assert a["cycles"] == a["responses"] == 0 and a["per_slot"] == []


def test_bootstrap_intervals_hold_the_averages():
    # one long response that drafts badly: pooled it weighs as ten
    counts = [(2 * n, n) for n in (5, 6, 7, 5, 6, 7)] + [(60, 60)]
    a = acceptance.averages(counts)
    for name in ("tau_mean", "tau_pooled"):
        low, high = a[f"{name}_interval"]
        assert 1 <= low < a[name] < high <= 2
    assert a["tau_pooled_interval"][0] < a["tau_mean_interval"][0]
    assert acceptance.averages(counts) == a
    assert acceptance.averages([(4, 2)] * 5)["tau_pooled_interval"] == (2, 2)


def test_walk_goes_by_what_was_accepted():
    assert acceptance.walk([]) == []
    assert acceptance.walk([0, 0]) == [1, 1]
    #                       ^        ^     ^: 3 tokens, 2, then 1 of the 5 that would follow
    assert acceptance.walk([2, 9, 9, 1, 9, 4]) == [3, 2, 1]


@pytest.mark.parametrize(
    ("target", "shape"), [("tiny_llama", dict()), ("tiny_qwen3", dict(sliding=4))]
)
def test_reading_a_response_gives_the_cycles_of_decoding_it(target, shape, identity_of, request):
    """Position by position: what the drafter gets right in a finished response, walked from the
    prompt's end, is what decoding accepted; also with smaller blocks than trained."""
    identity = identity_of(request.getfixturevalue(target))
    model = load_model(identity, "float32", device=torch.device("cpu")).double()
    drafter = fit(model, make_drafter(**shape))
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    limit, gained = 50, []
    for block in (6, 3):
        responses, _ = generate(model, PROMPTS, limit, [END], drafter, block_size=block)
        for prompt, response in zip(PROMPTS, responses, strict=True):
            ids = torch.tensor(prompt + response.tokens)
            with Taps(model, drafter.config.target_layer_ids) as taps, torch.no_grad():
                run_decoder(model, input_ids=ids[None])
            anchors = torch.arange(len(prompt), len(ids) - 1)
            features = taps.stack()[0].flatten(1)
            runs = acceptance.accepted_runs(drafter, embed, head, features, ids, anchors, block)
            walked, real = acceptance.walk(runs.tolist()), response.cycles
            # near the limit decoding drafts fewer slots, so other ones
            count = sum(sum(real[:i]) + block <= limit for i in range(len(real)))
            assert count >= len(real) - block
            assert count == len(real) or len(response.tokens) == limit
            assert walked[:count] == real[:count]
            gained += real[:count]
    assert max(gained) > 2 and min(gained) == 1 and len(gained) > 20  # the test sees all cases
