"""Acceptance from numbers worked out by hand, and reading a response against decoding it."""

import pytest
import torch
from test_decode import END, PROMPTS, fit, make_drafter

from dflash import acceptance
from dflash.attention import Layout
from dflash.decode import generate
from dflash.drafter import block_input
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


@torch.no_grad()
def all_slots_at_once(drafter, embed, head, features, ids, anchors, block, ends):
    """The obvious way, which asks the head for every slot of every block."""
    layout = Layout(torch.tensor([0, len(ids)]), anchors, block)
    x = block_input(embed, ids[anchors], block, drafter.config.mask_token_id)
    guesses = head(drafter(features, x, layout)[:, 1:]).argmax(-1)
    at = anchors[:, None] + torch.arange(1, block)
    right = (at < ends[:, None]) & (guesses == ids[at.clamp_max(len(ids) - 1)])
    return right.long().cumprod(-1).sum(-1)


@pytest.mark.parametrize("shape", [dict(), dict(sliding=4)])
def test_the_head_is_asked_no_further_than_the_run_goes(
    shape, tiny_llama, identity_of, monkeypatch
):
    model = load_model(identity_of(tiny_llama), "float32", device=torch.device("cpu")).double()
    drafter = fit(model, make_drafter(**shape))
    embed, head, asked = model.get_input_embeddings().weight, model.get_output_embeddings(), []

    def counted(hidden):
        asked.append(len(hidden))
        return head(hidden)

    (response,), _ = generate(model, PROMPTS[2:3], 50, [END])
    ids = torch.tensor(PROMPTS[2] + response.tokens)
    with Taps(model, drafter.config.target_layer_ids) as taps, torch.no_grad():
        run_decoder(model, input_ids=ids[None])
    features, anchors = taps.stack()[0].flatten(1), torch.arange(5, len(ids))
    text = (drafter, embed, counted, features, ids, anchors)
    middle = (anchors // 20 + 1) * 20  # as if responses ended every 20 tokens
    for block in (2, 6):
        for ends in (None, middle.clamp_max(len(ids)), middle - 21):
            asked.clear()
            runs = acceptance.accepted_runs(*text, block, ends)
            ends = torch.full_like(anchors, len(ids)) if ends is None else ends
            # each slot of the run, and the first wrong one if there is something to guess
            guessed = torch.minimum(runs + 1, (ends - anchors - 1).clamp_min(0)).clamp_max(
                block - 1
            )
            assert sum(asked) == guessed.sum()
            want = all_slots_at_once(drafter, embed, head, *text[3:], block, ends)
            assert torch.equal(runs, want)
        assert not runs.any() and not asked
    runs = acceptance.accepted_runs(*text)
    assert runs.max() > 2 and runs.min() == 0
    # in pieces of any size
    monkeypatch.setattr(acceptance, "rows_within", lambda kind, vocab: 16)
    asked.clear()
    assert torch.equal(acceptance.accepted_runs(*text), runs) and max(asked) == 16
    monkeypatch.setattr(acceptance, "SLOTS", 1)
    asked.clear()
    assert torch.equal(acceptance.accepted_runs(*text), runs) and max(asked) == 1
    assert acceptance.accepted_runs(*text[:5], anchors[:0]).tolist() == []
