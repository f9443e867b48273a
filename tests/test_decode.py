"""Decoding against a slow loop without caches, and against the target's own `generate`."""

import pytest
import torch
import torch.nn.functional as F

from dflash import decode
from dflash.attention import Layout
from dflash.decode import PromptLookup, generate
from dflash.drafter import Drafter, DrafterConfig, block_input
from dflash.errors import UserError
from dflash.taps import Taps, run_decoder
from dflash.target import load_model

END = 1
PROMPTS = [[5, 9, 200, 31], [7], [100, 101, 102, 103, 104, 105, 106, 107, 108], [50, 60, 70]]


def make_drafter(block=6, layers=2, sliding=None, is_causal=None, seed=0, **other_shape) -> Drafter:
    """A random drafter, by default of the tiny targets' shape."""
    shape = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        vocab_size=320,
        block_size=block,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        layer_types=("sliding_attention" if sliding else "full_attention",) * layers,
        sliding_window=sliding,
        is_causal=is_causal,
    )
    drafter = Drafter(DrafterConfig(**shape | other_shape))
    drafter.init_weights(seed)
    return drafter.double().eval()


def fit(model, drafter: Drafter, steps=12) -> Drafter:
    """Teach a drafter the target's own answers to PROMPTS, so that blocks are accepted in part."""
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    responses, _ = generate(model, PROMPTS, 40, [END])
    examples = []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        ids = torch.tensor(prompt + response.tokens)
        with Taps(model, drafter.config.target_layer_ids) as taps, torch.no_grad():
            run_decoder(model, input_ids=ids[None])
        anchors = torch.arange(len(prompt), len(ids) - 1)
        if len(anchors):
            examples.append((ids, taps.stack()[0].flatten(1), anchors))
    optimizer = torch.optim.AdamW(drafter.requires_grad_().parameters(), lr=3e-3)
    block = drafter.config.block_size
    for _ in range(steps):
        for ids, features, anchors in examples:
            layout = Layout(torch.tensor([0, len(ids)]), anchors, block)
            x = block_input(embed, ids[anchors], block, drafter.config.mask_token_id)
            at = anchors[:, None] + torch.arange(1, block)
            inside = at < len(ids)
            hidden = drafter(features, x.detach(), layout)[:, 1:][inside]
            loss = F.cross_entropy(hidden @ head.T.detach(), ids[at[inside]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return drafter.requires_grad_(False)


class Recalled:
    """Proposes the known responses, with every n-th token wrong."""

    def __init__(self, prompts: list[list[int]], responses: list[list[int]], wrong_every: int):
        self.texts = [p + r for p, r in zip(prompts, responses, strict=True)]
        self.wrong_every = wrong_every

    def __call__(self, text: list[int], count: int) -> list[int]:
        known = next((t for t in self.texts if t[: len(text)] == text), [])
        places = range(len(text), min(len(known), len(text) + count))
        return [(known[i] + (i % self.wrong_every == 0)) % 320 for i in places]


def own(model, prompt: list[int], limit: int, ends=(END,)) -> list[int]:
    """The response of the target's own `generate`."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=limit, do_sample=False, eos_token_id=list(ends),
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def slow(model, drafter, prompt, limit, ends):
    """The loop of the paper with nothing cached: every forward reads everything again."""
    taps, block = list(drafter.config.target_layer_ids), drafter.config.block_size
    embed = model.get_input_embeddings().weight

    def read(ids):
        out = model(torch.tensor([ids]), output_hidden_states=True)
        features = torch.cat([out.hidden_states[t + 1] for t in taps], dim=-1)[0]
        return out.logits[0].argmax(-1).tolist(), features

    choices, _ = read(prompt)
    new, cycles = [choices[-1]], []
    while new[-1] not in ends and len(new) < limit:
        size = min(block, limit - len(new) + 1)
        context = prompt + new[:-1]
        _, features = read(context)
        ids = torch.tensor([new[-1]] + [drafter.config.mask_token_id] * (size - 1))
        layout = Layout(torch.tensor([0, len(context) + 1]), torch.tensor([len(context)]), size)
        padded = torch.cat(
            [features, torch.full_like(features[:1], 7.0)]
        )  # the anchor's own: unseen
        hidden = drafter(padded, F.embedding(ids, embed)[None], layout, backend="dense")[0, 1:]
        guesses = model.get_output_embeddings()(hidden).argmax(-1).tolist()
        choices, _ = read(context + [new[-1]] + guesses)
        choices = choices[len(context) :]
        accepted = 0
        while accepted < size - 1 and guesses[accepted] == choices[accepted]:
            accepted += 1
        count = 0
        for token in [*guesses[:accepted], choices[accepted]]:
            new.append(token)
            count += 1
            if token in ends or len(new) == limit:
                break
        cycles.append(count)
    return new, cycles


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])
def model(request, identity_of):
    folder = request.getfixturevalue(request.param)
    return load_model(identity_of(folder), "float32", device=torch.device("cpu")).double()


@pytest.mark.parametrize("shape", [dict(), dict(sliding=4), dict(sliding=5, is_causal=False)])
def test_equals_the_loop_without_caches(model, shape):
    drafter = fit(model, make_drafter(**shape))
    gained = []
    for limit in (1, 2, 7, 25):
        responses, _ = generate(model, PROMPTS, limit, [END], drafter)
        for prompt, response in zip(PROMPTS, responses, strict=True):
            tokens, cycles = slow(model, drafter, prompt, limit, [END])
            assert response.tokens == tokens
            assert response.cycles == cycles
            assert 1 + sum(cycles) == len(tokens)
            gained += cycles
    assert max(gained) > 3 and min(gained) == 1 and len(set(gained)) > 2  # the test sees all cases


def how(model, way: str) -> dict:
    """Arguments of `generate` for a way to draft."""
    if way == "lookup":
        return dict(propose=PromptLookup(), block_size=5)
    return dict(drafter=fit(model, make_drafter())) if way == "drafter" else {}


@pytest.mark.parametrize("way", ["plain", "drafter", "lookup"])
def test_output_is_the_targets_own(model, way):
    responses, _ = generate(model, PROMPTS, 40, [END], **how(model, way))
    assert [r.tokens for r in responses] == [own(model, p, 40) for p in PROMPTS]


@pytest.mark.parametrize("way", ["plain", "drafter", "lookup"])
def test_stop_rules_are_the_targets_own(model, way):
    """Several end tokens, ends in the prefill, in a draft and as the bonus, limits in mid-block."""
    ways = how(model, way)
    free = [own(model, p, 25, ends=[]) for p in PROMPTS]
    seen = set()
    for limit in (1, 8, 25):
        for place in (0, 3, 6):  # where the first prompt's response is to end, at the latest
            ends = [free[0][place], free[1][9]]
            responses, _ = generate(model, PROMPTS, limit, ends, **ways)
            for prompt, response in zip(PROMPTS, responses, strict=True):
                assert response.tokens == own(model, prompt, limit, ends)
                assert 1 + sum(response.cycles) == len(response.tokens)
                ended = response.tokens[-1] in ends
                seen.add((ended, len(response.tokens) == 1, len(response.tokens) == limit))
    # ended and not, in the prefill and later, at the limit and before
    assert seen >= {(True, True, False), (True, False, False), (False, False, True)}


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_smaller_block_than_the_trained_one(model, block):
    drafter = fit(model, make_drafter(block=6))
    responses, _ = generate(model, PROMPTS, 25, [END], drafter, block_size=block)
    assert [r.tokens for r in responses] == [own(model, p, 25) for p in PROMPTS]
    assert max(c for r in responses for c in r.cycles) == block


@pytest.mark.parametrize("block", [0, 7])
def test_a_block_that_was_not_trained_is_refused(model, block):
    with pytest.raises(UserError, match=f"block size {block}: .* blocks of 6; choose one from 1 "):
        generate(model, PROMPTS, 5, [END], make_drafter(block=6), block_size=block)


def test_32_ragged_prompts_together_equal_one_by_one_in_float32(model):
    drafter, model = fit(model, make_drafter()).float(), model.float()
    generator = torch.Generator().manual_seed(0)
    prompts = [PROMPTS[i % 4] + PROMPTS[(i * 3 + 1) % 4][: i % 3] for i in range(16)]
    prompts += [
        torch.randint(4, 320, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 60, (16,), generator=generator)
    ]
    together, _ = generate(model, prompts, 20, [END], drafter)
    alone = [generate(model, [prompt], 20, [END], drafter)[0][0] for prompt in prompts]
    assert together == alone
    assert len({len(r.cycles) for r in together}) > 5  # they advance at different speeds


def test_on_cycle_sees_every_cycle(model):
    drafter, seen = fit(model, make_drafter()), []
    responses, timing = generate(
        model, PROMPTS[:1], 25, [], drafter, on_cycle=lambda r: seen.append(len(r[0].tokens))
    )
    assert seen == [1 + sum(responses[0].cycles[: i + 1]) for i in range(len(seen))]
    assert len(seen) == len(responses[0].cycles)
    assert timing.prefill > 0 and timing.draft > 0 and timing.verify > 0


def test_weights_are_laid_out_anew_but_not_changed(model):
    model = model.float()
    linear = model.model.layers[0].mlp.up_proj
    before, embed = linear.weight.clone(), model.get_input_embeddings().weight.clone()
    decode.lay_out(model)
    assert torch.equal(linear.weight, before) and linear.weight.t().is_contiguous()
    assert torch.equal(model.get_input_embeddings().weight, embed)
    tied = model.config.tie_word_embeddings
    assert tied == (model.lm_head.weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3], 1, [9]),
        ([5, 3, 8, 2, 3, 7, 1, 3], 2, [7, 1]),  # the last time, where only one token is known
        ([5, 3, 8, 2, 3, 7, 2, 3], 4, [7, 2, 3]),  # two tokens go before one; no more than there is
        ([4, 4], 5, [4]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
    ],
)
def test_prompt_lookup(text, count, found):
    assert PromptLookup(max_ngram=3)(text, count) == found


def test_exclusive_arguments(model):
    with pytest.raises(ValueError, match="exclude each other"):
        generate(model, PROMPTS, 5, [END], make_drafter(), propose=PromptLookup())


@pytest.mark.parametrize("pieces", [4096, 8, 1])
def test_together_equals_one_by_one(model, pieces, monkeypatch):
    drafter = fit(model, make_drafter())
    monkeypatch.setattr(decode, "PREFILL_TOKENS", pieces)  # prompts read in one or many pieces
    together, _ = generate(model, PROMPTS, 30, [END], drafter)
    for prompt, response in zip(PROMPTS, together, strict=True):
        (alone,), _ = generate(model, [prompt], 30, [END], drafter)
        assert alone == response


def test_windows_matter_at_this_length(model):
    """So that the tests of families with sliding windows see them."""
    from test_decode_families import family

    for name in ("mistral", "qwen3 mixed"):
        model = family(name)
        narrow, _ = generate(model, PROMPTS, 30, [END])
        for layer in model.model.layers:
            layer.self_attn.sliding_window = None
        model.config.sliding_window, kinds = None, ["full_attention"] * len(model.model.layers)
        model.config.layer_types = kinds
        wide, _ = generate(model, PROMPTS, 30, [END])
        assert [r.tokens for r in wide] != [r.tokens for r in narrow]


def test_a_target_with_unknown_layers_is_refused(model):
    model.config.layer_types = ["chunked_attention", "full_attention"] * 2
    with pytest.raises(UserError, match="layers of kind chunked_attention, whose cache"):
        generate(model, PROMPTS, 5, [END], make_drafter())
