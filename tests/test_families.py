"""Every family of targets: the stages take it, and its stored taps are the model's own.

Tiny random models, four layers each. Windows of 9 positions are shorter than most documents. The
reference reads each document alone, in float32, with the attention that the family is defined by
(eager) and none of our code but the final norm's hook.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.targets import SHAPE, save_tiny
from test_extract import SETTINGS, as_float, some_rows
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from dflash import config, evaluate, extract, initial, target
from dflash.corpus import Prompt
from dflash.decode import generate
from dflash.drafter import Drafter
from dflash.errors import UserError
from dflash.features import open_shard
from dflash.regenerate import write_tokens
from dflash.taps import head_logits, softcapped

TAPS = [0, 1, 2, 3]  # the last one stands for `last_hidden` too
LENGTHS = [2, 60, 9, 33, 34, 3, 58, 10, 31, 21, 35, 57, 20, 32]
WINDOW = dict(sliding_window=9)
GEMMA = dict(query_pre_attn_scalar=16, hidden_activation="gelu_pytorch_tanh")
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LINEAR = dict(
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 8,
    long_factor=[1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0],
    original_max_position_embeddings=33,
)

FAMILIES = {
    "llama": (LlamaConfig, dict(tie_word_embeddings=True)),
    "mistral": (MistralConfig, WINDOW),
    "qwen2": (Qwen2Config, {}),
    "qwen2-sliding": (Qwen2Config, dict(use_sliding_window=True, max_window_layers=2, **WINDOW)),
    "qwen3": (Qwen3Config, {}),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS),
    "gemma2": (
        Gemma2Config,
        dict(final_logit_softcapping=3.0, attn_logit_softcapping=2.0, **GEMMA, **WINDOW),
    ),
    "gemma3": (
        Gemma3TextConfig,
        dict(layer_types=["sliding_attention", "full_attention"] * 2, **GEMMA, **WINDOW),
    ),
    "phi3": (Phi3Config, WINDOW),
    "phi3-long": (Phi3Config, dict(rope_parameters=LONG, original_max_position_embeddings=33)),
    "gpt-oss": (GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW)),
    "qwen3.5": (Qwen3_5TextConfig, LINEAR),
    "qwen3.5-with-sight": (
        Qwen3_5Config,
        dict(
            text_config=SHAPE | LINEAR,
            vision_config=dict(
                depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64
            ),
        ),
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        # no layer with a dense MLP: what a token passes is two experts of 32 and a shared one
        dict(shared_expert_intermediate_size=32, intermediate_size=None, **EXPERTS, **LINEAR),
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        dict(shared_expert_intermediate_size=32, **EXPERTS, **LINEAR),
    ),
}


def make(folder: Path, config_class: type, more: dict) -> Path:
    """Save a tiny model whose vectors (gains, biases, sinks) are random too, not ones and zeros."""
    torch.manual_seed(5)
    made = config_class(**{**SHAPE, **more})
    if (
        config_class is Qwen3_5Config
    ):  # as it is published; transformers takes the text's part of it
        model = Qwen3_5ForConditionalGeneration(made)
    else:
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return save_tiny(model, folder, end_factor=1.5)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model of each family in turn, with an identity.json of the target stage."""
    return prepared(request.param, tmp_path_factory)


def prepared(name: str, factory: pytest.TempPathFactory) -> Path:
    root = factory.getbasetemp() / "families" / name
    if not root.exists():
        root.parent.mkdir(exist_ok=True)
        make(root / "model", *FAMILIES[name])
        run_target(root)
    return root


def run_target(root: Path) -> None:
    settings = {"stage": "target", "version": 1, "target": {"model": str(root / "model")}}
    target.main(["--settings", json.dumps(settings), "--out", str(root / "identity.json")])


def run_extract(root: Path, out: Path, rows: list, batch_tokens: int = 300) -> Path:
    write_tokens(out.with_suffix(".parquet"), rows)
    settings = SETTINGS | {"taps": TAPS, "last_hidden": True}
    extract.main(
        [
            *("--settings", json.dumps(settings)),
            *("--machine", json.dumps({"batch_tokens": batch_tokens})),
            *("--identity", str(root / "identity.json")),
            *("--tokens", str(out.with_suffix(".parquet")), "--threads", "1", "--out", str(out)),
        ]
    )
    return out


def own_states(model: nn.Module, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's own hidden states of one document, [S, T, H], and its logits [S, V]."""
    caught = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, x: caught.append(x[0][0]))
    with torch.inference_mode():
        out = model(torch.from_numpy(ids).long()[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    states = [out.hidden_states[i + 1][0] for i in TAPS[:-1]]
    return torch.stack([*states, caught[0]], 1), out.logits[0]


def test_every_tap_of_every_document_is_the_models_own(family, tmp_path):
    rows = {row.sample_id: row for row in some_rows(LENGTHS)}
    shard = open_shard(run_extract(family, tmp_path / "a.zarr", list(rows.values())))
    own = AutoModelForCausalLM.from_pretrained(
        family / "model", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    identity = target.read_identity(family / "identity.json")
    norm, head = target.load_final_norm(identity), target.load_embedding_and_head(identity)[1]
    cap = target.load_softcap(identity)
    assert len(shard) == len(LENGTHS)
    for i in range(len(shard)):
        document = shard.read(i, last_hidden=True)
        exact, logits = own_states(own, rows[document.sample_id].input_ids)
        stored = as_float(document.hidden)
        # half a step of bf16, and the rounding of float32 on another way
        allowed = exact.abs() * 2.0**-8 + 1e-4 * exact.abs().mean()
        assert ((stored - exact).abs() <= allowed).all(), (document.sample_id, len(exact))
        assert np.array_equal(document.last_hidden, document.hidden[:, -1])
        last = as_float(document.last_hidden)
        again = softcapped(norm(last) @ head.T, cap)
        assert (again - logits).norm() < 0.01 * logits.norm()


def test_the_target_stage_gives_what_a_drafter_needs(family):
    identity = target.read_identity(family / "identity.json")
    own = json.loads((family / "model/config.json").read_text())
    own = own.get("text_config", own)
    rope = own["rope_parameters"]
    assert identity.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert identity.intermediate_size == 96
    model = target.load_model(identity, "float32")
    ids = torch.tensor([[5, 9, 300]])
    out = model(ids, output_hidden_states=True)
    torch.testing.assert_close(head_logits(model, out.hidden_states[-1]), out.logits)
    embed, head = target.load_embedding_and_head(identity)
    assert torch.equal(embed, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)


def some_drafter(identity: target.Identity) -> Drafter:
    settings = config.Drafter(block_size=4, num_hidden_layers=2, taps=[0, 2], mask_token_id=3)
    return initial.new_drafter(settings, identity)


def test_a_drafter_starts_from_what_plays_the_same_part(family):
    identity = target.read_identity(family / "identity.json")
    drafter, model = some_drafter(identity), target.load_model(identity, "float32")
    x = torch.randn(5, 64)
    torch.testing.assert_close(drafter.norm(x), model.model.norm(x))
    for mine, own in zip(drafter.layers, model.model.layers[-2:], strict=True):
        torch.testing.assert_close(mine.input_layernorm(x), own.input_layernorm(x))
        before_mlp = getattr(own, "pre_feedforward_layernorm", own.post_attention_layernorm)
        torch.testing.assert_close(mine.post_attention_layernorm(x), before_mlp(x))


@pytest.mark.parametrize("name", FAMILIES)
def test_speculative_output_is_the_targets_own(name, tmp_path_factory):
    root = prepared(name, tmp_path_factory)
    identity = target.read_identity(root / "identity.json")
    model, drafter = target.load_model(identity, "float32"), some_drafter(identity)
    lengths, limit = ([3, 12, 7], 15) if name == "phi3-long" else ([3, 25, 14], 30)
    prompts = [row.input_ids.tolist() for row in some_rows(lengths)]
    plain, _ = generate(model, prompts, limit, identity.eos_token_ids)
    drafted, _ = generate(model, prompts, limit, identity.eos_token_ids, drafter)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    reference = AutoModelForCausalLM.from_pretrained(
        root / "model", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    asked = [Prompt(f"{i:016x}", "", "", "", "heldout", [], ids) for i, ids in enumerate(prompts)]
    checks = evaluate.check_greedy(reference, asked, plain, limit, identity.eos_token_ids)
    assert all(check.identical for check in checks)


def test_a_text_that_may_pass_the_edge_of_its_frequencies_is_not_decoded(tmp_path_factory):
    identity = target.read_identity(prepared("phi3-long", tmp_path_factory) / "identity.json")
    with pytest.raises(UserError, match="may reach 34 tokens, and beyond 33 this target turns all"):
        generate(target.load_model(identity, "float32"), [[5] * 23], 10, [1])


def test_tensor_parallelism_without_a_plan_or_without_torchrun(tmp_path_factory, monkeypatch):
    identity = target.read_identity(prepared("gpt-oss", tmp_path_factory) / "identity.json")
    with pytest.raises(UserError, match="found tensor, which needs a process a card; start the st"):
        target.load_model(identity, "float32", parallel="tensor")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="no plan that splits the layers of gpt_oss; use device_map"
    ):
        target.load_model(identity, "float32", parallel="tensor")
