"""Decoding against a slow loop without caches, and against the target's own `generate`."""

import pytest
import torch
import torch.nn.functional as F
from conftest import SHAPE

from dflash import decode
from dflash.attention import Layout
from dflash.decode import generate
from dflash.drafter import Drafter, DrafterConfig, block_input
from dflash.errors import UserError
from dflash.taps import Taps, run_decoder
from dflash.target import load_model

END = 1
PROMPTS = [[5, 9, 200, 31], [7], [100, 101, 102, 103, 104, 105, 106, 107, 108], [50, 60, 70]]


def make_drafter(block=6, layers=2, sliding=None, is_causal=None, seed=0) -> Drafter:
    """A random drafter for the tiny targets."""
    config = DrafterConfig(
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
    drafter = Drafter(config)
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


@pytest.mark.parametrize("with_drafter", [False, True])
def test_output_is_the_targets_own(model, with_drafter):
    drafter = fit(model, make_drafter()) if with_drafter else None
    responses, _ = generate(model, PROMPTS, 40, [END], drafter)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        own = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )
        assert response.tokens == own[0, len(prompt) :].tolist()


@pytest.mark.parametrize("pieces", [4096, 8, 1])
def test_together_equals_one_by_one(model, pieces, monkeypatch):
    drafter = fit(model, make_drafter())
    monkeypatch.setattr(decode, "PREFILL_TOKENS", pieces)  # prompts read in one or many pieces
    together, _ = generate(model, PROMPTS, 30, [END], drafter)
    for prompt, response in zip(PROMPTS, together, strict=True):
        (alone,), _ = generate(model, [prompt], 30, [END], drafter)
        assert alone == response


@pytest.mark.parametrize("family", ["mistral", "qwen3 mixed"])
def test_targets_with_sliding_windows(family):
    """Windows far shorter than the text, in all layers or in some: still the target's own output."""
    from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = SHAPE | {"num_hidden_layers": 3, "sliding_window": 6}
    torch.manual_seed(5)
    if family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shape))
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Qwen3Config(**shape, use_sliding_window=True, layer_types=kinds)
        model = Qwen3ForCausalLM(config)
    model = model.double().eval()
    responses, _ = generate(model, PROMPTS, 30, [END])
    for prompt, response in zip(PROMPTS, responses, strict=True):
        own = model.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=END,
            pad_token_id=0,
        )  # fmt: skip
        assert response.tokens == own[0, len(prompt) :].tolist()
    for layer in model.model.layers:  # the windows matter at this length
        layer.self_attn.sliding_window = None
    model.config.sliding_window = None
    model.config.layer_types = ["full_attention"] * 3
    wide, _ = generate(model, PROMPTS, 30, [END])
    assert [r.tokens for r in wide] != [r.tokens for r in responses]


def test_a_target_with_unknown_layers_is_refused(model):
    model.config.layer_types = ["chunked_attention", "full_attention"] * 2
    with pytest.raises(UserError, match="layers of kind chunked_attention, whose cache"):
        generate(model, PROMPTS, 5, [END], make_drafter())
