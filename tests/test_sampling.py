"""Sampled decoding: the output's distribution is the target's, and wrong rules are found out."""

from collections import Counter
from itertools import product

import pytest
import torch
from test_decode import make_drafter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash import decode
from dflash.decode import PromptLookup, generate
from dflash.errors import UserError
from dflash.sampling import Sampler, Sampling, draw

VOCAB, DEEP = 5, 5
PROMPT = [1, 3, 2]


@pytest.fixture(scope="module")
def pair():
    """A target over five tokens, and a drafter that is right now and then."""
    torch.manual_seed(4)
    shape = dict(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.6,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    drafter = make_drafter(
        block=4, layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=VOCAB, mask_token_id=0,
        target_layer_ids=(0,), num_target_layers=2,
    ).float()  # fmt: skip
    return model, drafter


@torch.inference_mode()
def own_distribution(model, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's probability of every continuation of PROMPT, from forwards without a cache."""
    every = list(product(range(VOCAB), repeat=DEEP))
    logits = model(torch.tensor([PROMPT + list(t) for t in every])).logits[:, len(PROMPT) - 1 : -1]
    p = sampling.probabilities(logits).double()
    chosen = p.gather(-1, torch.tensor(every)[..., None])[..., 0].prod(-1)
    return dict(zip(every, chosen.tolist(), strict=True))


def distance(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts, in standard deviations above its mean; rare outcomes are pooled."""
    draws = sum(counts.values())
    assert all(expected[outcome] > 0 for outcome in counts)
    common = {o: p * draws for o, p in expected.items() if p * draws >= 10}
    rest = draws - sum(common.values())
    cells = [(counts[o], e) for o, e in common.items()]
    if rest >= 10:
        cells.append((draws - sum(counts[o] for o in common), rest))
    degrees = len(cells) - 1
    return (sum((c - e) ** 2 / e for c, e in cells) - degrees) / (2 * degrees) ** 0.5


def sampled(
    model, sampling: Sampling, drafter=None, draws=6_000, **more
) -> tuple[Counter, list[int]]:
    """What comes of many responses to PROMPT, and the tokens of their cycles."""
    responses, _ = generate(
        model, [PROMPT] * draws, DEEP, [], drafter, sampling=sampling, seed=7, **more
    )
    return Counter(tuple(r.tokens) for r in responses), [c for r in responses for c in r.cycles]


FAR = 5.0  # a right rule stays below 4 in 30,000 of 30,001 draws

SETTINGS = [
    Sampling(1.0),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, top_k=4, top_p=0.9),
    Sampling(1.0, rule="sample_match"),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_distribution_is_the_targets(pair, sampling):
    model, drafter = pair
    counts, cycles = sampled(model, sampling, drafter, draws=20_000)
    assert distance(counts, own_distribution(model, sampling)) < FAR
    assert {1, 2, 3} <= set(cycles)  # blocks rejected at once, in part and accepted


def test_the_distribution_of_plain_sampling_and_of_prompt_lookup(pair):
    model, _ = pair
    sampling = Sampling(0.8, top_k=4)
    expected = own_distribution(model, sampling)
    assert distance(sampled(model, sampling)[0], expected) < FAR
    counts, cycles = sampled(model, sampling, propose=PromptLookup(), block_size=4)
    assert distance(counts, expected) < FAR
    assert {1, 2, 3} <= set(cycles)


class OtherTemperature(Sampler):
    """Drafts at twice the temperature that the rule is told."""

    def draft(self, logits, made):
        return super().draft(logits / 2, made)[0], super().draft(logits, made)[1]


class BonusFromDraft(Sampler):
    """Draws the bonus from the draft's distribution."""

    def verify(self, draft_nb, q_nbV, logits, made, drafted):
        tokens, right = super().verify(draft_nb, q_nbV, logits, made, drafted)
        rows = torch.arange(len(right))
        slot = right.clamp_max(q_nbV.shape[1] - 1)
        place = (made + right).clamp_max(DEEP - 1)
        tokens[rows, right] = draw(q_nbV[rows, slot], self.to_draw[rows, place])
        return tokens, right


class AllAccepted(Sampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.to_keep = torch.zeros_like(self.to_keep)


class SameNumbers(Sampler):
    """Keeps or rejects by the number that drew the token."""

    def __init__(self, *args):
        super().__init__(*args)
        self.to_keep = self.to_draft


@pytest.mark.parametrize("wrong", [OtherTemperature, BonusFromDraft, AllAccepted, SameNumbers])
def test_wrong_rules_are_found_out(pair, wrong, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr(decode, "Sampler", wrong)
    counts, _ = sampled(model, Sampling(1.0), drafter)
    assert distance(counts, own_distribution(model, Sampling(1.0))) > 2 * FAR


def test_redrawing_a_rejected_token_from_p_is_found_out(pair, monkeypatch):
    model, drafter = pair
    monkeypatch.setattr("dflash.sampling.excess", lambda p, q: p)
    counts, _ = sampled(model, Sampling(1.0), drafter)
    assert distance(counts, own_distribution(model, Sampling(1.0))) > 2 * FAR


def test_greedy_drafts_under_rejection_without_their_distribution_are_found_out(pair, monkeypatch):
    """The older rule needs equality with the sample; acceptance by p(x) alone is another matter."""
    model, drafter = pair

    class Greedy(Sampler):
        def draft(self, logits, made):
            _, q = super().draft(logits, made)
            return logits.argmax(-1), q

    monkeypatch.setattr(decode, "Sampler", Greedy)
    counts, _ = sampled(model, Sampling(1.0), drafter)
    assert distance(counts, own_distribution(model, Sampling(1.0))) > 2 * FAR


def test_sample_match_gives_the_tokens_of_plain_sampling(pair):
    model, drafter = pair
    sampling = Sampling(0.7, rule="sample_match")
    prompts = [[1, 3], [2], [4, 0, 1, 1]]
    plain, _ = generate(model, prompts, 20, [], sampling=sampling, seed=3)
    drafted, _ = generate(model, prompts, 20, [], drafter, sampling=sampling, seed=3)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert max(c for r in drafted for c in r.cycles) > 1


@pytest.mark.parametrize("rule", ["rejection", "sample_match"])
def test_a_response_depends_on_its_seed_and_stream_only(pair, rule):
    model, drafter = pair
    sampling = Sampling(1.0, rule=rule)
    prompts = [[1, 3], [2], [4, 0, 1, 1], [2]]

    def tokens(prompts, **more):
        responses, _ = generate(model, prompts, 12, [], drafter, sampling=sampling, **more)
        return [r.tokens for r in responses]

    together = tokens(prompts, seed=3)
    torch.manual_seed(99)  # the global generator is not asked
    assert [tokens([p], seed=3, streams=[i])[0] for i, p in enumerate(prompts)] == together
    assert tokens(prompts[::-1], seed=3, streams=[3, 2, 1, 0]) == together[::-1]
    assert together[1] != together[3]  # the same prompt, another stream
    assert tokens(prompts, seed=4) != together


@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.9, 1.0])
def test_probabilities_are_those_of_transformers(top_k, top_p):
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 40)
    steps = [TemperatureLogitsWarper(0.7)]
    steps += [TopKLogitsWarper(min(top_k, 40))] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p not in (None, 1.0) else []
    expected = LogitsProcessorList(steps)(None, logits).softmax(-1)
    found = Sampling(0.7, top_k, top_p).probabilities(logits)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, atol=1e-6)


def test_draw_follows_the_weights_and_never_takes_a_weightless_token():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53, 1.0], dtype=torch.float64)
    found = draw(weights.expand(len(uniform), -1), uniform)
    assert found.tolist() == [1, 1, 3, 3, 4, 4, 4]
    assert draw(8 * weights, uniform[2]).item() == 3  # they need not sum to one


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (dict(temperature=-1), r"temperature -1; expected 0 \(greedy\) or more"),
        (dict(temperature=1, top_k=0), "top_k 0; expected 1 or more"),
        (dict(temperature=1, top_p=0.0), "top_p 0.0; expected above 0, at most 1"),
        (dict(temperature=1, top_p=1.5), "top_p 1.5; expected above 0"),
        (dict(rule="typical"), "rule typical; expected rejection or sample_match"),
    ],
)
def test_values_out_of_range_are_refused(values, sentence):
    with pytest.raises(UserError, match=sentence):
        Sampling(**values)
