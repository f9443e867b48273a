"""Decoding with targets of other families: still their own output, from `generate`, in float32."""

import pytest
import torch
import transformers
from support.targets import END, SHAPE
from test_decode import PROMPTS, Recalled, make_drafter, own

from dflash.decode import generate
from dflash.errors import UserError

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_conv_kernel_dim=4,
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "mistral": ("Mistral", dict(sliding_window=6)),
    "qwen3 mixed": (
        "Qwen3",
        dict(sliding_window=6, use_sliding_window=True, layer_types=MIXED),
    ),
    "phi3": ("Phi3", dict(sliding_window=None)),
    "phi3 sliding": ("Phi3", dict(sliding_window=6)),
    "gemma2": (
        "Gemma2",
        dict(sliding_window=6, query_pre_attn_scalar=16, tie_word_embeddings=False),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            sliding_window=6, layer_types=MIXED, query_pre_attn_scalar=16, tie_word_embeddings=False
        ),
    ),
    "qwen3 moe": ("Qwen3Moe", MOE),
    "gpt-oss": (
        "GptOss",
        dict(sliding_window=6, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2),
    ),
    "qwen3-next": ("Qwen3Next", LINEAR | MOE | dict(shared_expert_intermediate_size=32)),
    "qwen3.5": ("Qwen3_5", LINEAR),
}
CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}


def family(name: str):
    """A tiny random model."""
    kind, more = FAMILIES[name]
    config_class = getattr(transformers, CONFIG_NAMES.get(kind, f"{kind}Config"))
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**SHAPE | more)).eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "sinks" in parameter_name:  # attention that may rest on nothing
                p.fill_(1.0)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_output_is_the_targets_own(name):
    model = family(name)
    expected = [own(model, prompt, 30) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 8  # no trivial output
    plain, _ = generate(model, PROMPTS, 30, [END])
    assert [r.tokens for r in plain] == expected
    # drafts that are right for a while, and wrong in every slot at one time or another
    recalled = Recalled(PROMPTS, expected, wrong_every=5)
    drafted, _ = generate(model, PROMPTS, 30, [END], propose=recalled, block_size=4)
    assert [r.tokens for r in drafted] == expected
    cycles = {count for r in drafted for count in r.cycles}
    assert {1, 4} < cycles
    with_drafter, _ = generate(model, PROMPTS, 30, [END], make_drafter().float())
    assert [r.tokens for r in with_drafter] == expected


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "qwen3.5"])
def test_what_makes_a_family_special_matters_here(name):
    """Without it the output differs, so that the tests above see it."""
    model = family(name)
    before, _ = generate(model, PROMPTS, 30, [END])
    with torch.no_grad():
        for layer in model.model.layers:
            attention = getattr(layer, "self_attn", None)
            if name == "gemma2":
                attention.attn_logit_softcapping = 0.1
            elif name == "gpt-oss":
                attention.sinks.fill_(-100.0)
            elif attention is None:
                layer.linear_attn.A_log.fill_(10.0)  # a state that forgets at once
    after, _ = generate(model, PROMPTS, 30, [END])
    assert [r.tokens for r in after] != [r.tokens for r in before]


def test_a_block_read_twice_spoils_the_state_of_linear_attention(monkeypatch):
    """What restoring is for."""
    model = family("qwen3.5")
    expected = [own(model, prompt, 30) for prompt in PROMPTS]
    recalled = Recalled(PROMPTS, expected, wrong_every=5)
    monkeypatch.setattr("dflash.cache.TargetCache.restore", lambda self, states: None)
    drafted, _ = generate(model, PROMPTS, 30, [END], propose=recalled, block_size=4)
    assert [r.tokens for r in drafted] != expected


def test_gemmas_cap_on_logits_reaches_the_samples():
    from dflash.decode import TargetRunner

    model = family("gemma2")
    hidden = 100 * torch.ones(1, 1, 64)
    logits = TargetRunner(model, [], 1, 4).logits(hidden)
    bare = model.lm_head(hidden)
    assert logits.abs().max() <= 30 < bare.abs().max()
    assert torch.allclose(logits, 30 * torch.tanh(bare / 30))


def test_scaled_logits_are_refused():
    config = transformers.GraniteConfig(**SHAPE | dict(num_hidden_layers=1), logits_scaling=8.0)
    with pytest.raises(UserError, match=r"scales its logits \(logits_scaling 8.0\)"):
        generate(transformers.GraniteForCausalLM(config), PROMPTS, 5, [END])


def test_attention_without_masks_is_refused():
    model = family("mistral")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention_2, which takes no mask"):
        generate(model, PROMPTS, 5, [END])


def test_linear_attention_with_random_answers_wants_single_prompts():
    with pytest.raises(UserError, match="`machine.regenerate.batch_size` to 1"):
        generate(family("qwen3.5"), PROMPTS, 5, [END], choose=lambda logits: logits.argmax(-1))
