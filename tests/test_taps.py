"""Taps are the model's own hidden states, of the right layer, before the final norm."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from dflash.errors import UserError
from dflash.taps import Taps, decoder, final_norm, run_decoder

LAYERS = 4


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])  # one tied, one untied
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    folder: Path = request.getfixturevalue(request.param)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def some_ids(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(4, 300, (batch, length), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
def test_taps_are_hidden_states_of_the_layer(model):
    ids = some_ids()
    every = model(ids, output_hidden_states=True).hidden_states
    with Taps(model, [2, 0, 1]) as taps:
        run_decoder(model, input_ids=ids, use_cache=False)
    hidden = taps.stack()
    assert hidden.shape == (2, 17, 3, 64)
    for position, layer in enumerate([2, 0, 1]):
        assert torch.equal(hidden[:, :, position], every[layer + 1])
        # Off by one in either direction must not pass for equal.
        for wrong in (layer, layer + 2):
            near = torch.nn.functional.cosine_similarity(
                hidden[:, :, position].flatten(), every[wrong].flatten(), dim=0
            )
            assert near < 0.999


@torch.inference_mode()
def test_last_layer_is_tapped_before_the_final_norm(model):
    ids = some_ids()
    last = model(ids, output_hidden_states=True).hidden_states[-1]
    with Taps(model, [LAYERS - 1]) as taps:
        run_decoder(model, input_ids=ids)
    hidden = taps.stack()[:, :, 0]
    assert not torch.allclose(hidden, last, atol=1e-3)
    assert torch.equal(decoder(model).norm(hidden), last)
    assert torch.equal(model.lm_head(last), model(ids).logits)


@torch.inference_mode()
def test_each_forward_replaces_what_was_caught(model):
    ids = some_ids(batch=1)
    with Taps(model, [1, 3]) as taps:
        whole = model(ids)
        expected = taps.stack()
        first = model(ids[:, :10], use_cache=True)
        prompt = taps.stack()
        steps = []
        for p in range(10, ids.shape[1]):
            model(ids[:, p : p + 1], past_key_values=first.past_key_values, use_cache=True)
            steps.append(taps.stack())
    assert whole.logits.shape[1] == 17
    assert [s.shape[1] for s in steps] == [1] * 7
    assert torch.allclose(torch.cat([prompt, *steps], 1), expected, atol=1e-5)


@torch.inference_mode()
def test_hooks_leave_with_the_block(model):
    ids = some_ids()
    with Taps(model, [1]) as taps:
        run_decoder(model, input_ids=ids)
    before = taps.stack()
    run_decoder(model, input_ids=ids[:, :3])
    assert torch.equal(taps.stack(), before)
    taps.clear()
    with pytest.raises(RuntimeError, match="no forward"):
        taps.stack()


def test_failed_forward_leaves_nothing_old(model):
    with Taps(model, [1, 3]) as taps, torch.inference_mode():
        run_decoder(model, input_ids=some_ids())
        decoder(model).layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_decoder(model, input_ids=some_ids())
        with pytest.raises(RuntimeError, match="no forward"):
            taps.stack()


@torch.inference_mode()
def test_taps_round_to_nearest_even(model):
    with Taps(model, [0, 3]) as taps, Taps(model, [0, 3], torch.bfloat16) as rounded:
        run_decoder(model, input_ids=some_ids())
    assert taps.stack().dtype == torch.float32
    assert torch.equal(rounded.stack(), taps.stack().to(torch.bfloat16))


def test_no_head_and_no_layers_output_is_kept(model):
    """The head never runs, and what a layer gave is gone once the next one has read it."""
    calls, given = [], []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, x, out: given.append(weakref.ref(out)))
    with Taps(model, [1, 3]) as taps, torch.inference_mode():
        out = run_decoder(model, input_ids=some_ids())
        assert taps.stack().shape == (2, 17, 2, 64) and out.hidden_states is None
        assert len(given) == LAYERS and not any(ref() is not None for ref in given)
    assert not calls


def test_layers_in_several_places(tiny_qwen3, tmp_path):
    """As `device_map` places them, here on the CPU and on disk: hooks of accelerate move the rest."""
    ends = ("embed_tokens", "norm", "rotary_emb")
    places = {"lm_head": "cpu", **{f"model.{name}": "cpu" for name in ends}}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(LAYERS)}
    options = dict(dtype=torch.float32, device_map=places, offload_folder=tmp_path)
    spread = AutoModelForCausalLM.from_pretrained(tiny_qwen3, **options).eval()
    whole = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    assert spread.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    found = []
    for model in (spread, whole):
        with Taps(model, [0, 1, 3]) as taps, torch.inference_mode():
            run_decoder(model, input_ids=some_ids())
        found.append(taps.stack())
    assert torch.equal(*found)


@pytest.mark.parametrize("ids", [[4], [-1], [0, 9]])
def test_layers_outside_the_target(model, ids):
    with pytest.raises(UserError, match=r"expected layer ids from 0 to 3.*change the drafter's"):
        Taps(model, ids)


def test_a_model_without_a_norm_of_a_known_name(model):
    assert final_norm(model) is model.model.norm
    model.model.closing = model.model.norm
    del model.model.norm
    with pytest.raises(UserError, match=r"ForCausalLM has 0 of the modules norm, .*labels: data`"):
        final_norm(model)


def test_unknown_structure():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8))
    with pytest.raises(UserError, match="GPT2LMHeadModel has no list of layers"):
        Taps(gpt2, [0])
