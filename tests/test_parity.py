"""Our forward and gradients against what speculators and SpecForge computed (tests/golden).

Both got the same weights, features, anchors and labels; see tests/golden/README.md. They share
ancestry, so this is necessary, not sufficient: tests/test_attention.py holds the definition.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.attention import Layout
from dflash.drafter import Drafter, DrafterConfig, block_input
from dflash.loss import block_loss, slot_losses, slot_weights

GOLDEN = Path(__file__).parent / "golden"
SHAPES = ("A", "B")


def run(shape: str, backend="chunked", checkpointing="none", dpace_alpha=None):
    """Slot hidden states, per-slot cross-entropy, loss over weight mass, gradients and that mass."""
    weights = load_file(GOLDEN / f"shape{shape}.weights.safetensors")
    x = load_file(GOLDEN / f"shape{shape}.inputs.safetensors")
    size = {k: v.shape for k, v in weights.items()}
    d, hidden = size["layers.0.self_attn.q_norm.weight"][0], size["norm.weight"][0]
    block_size, context = x["labels"].shape[1], x["features"].shape[1]
    layers = sum(k.endswith("input_layernorm.weight") for k in weights)
    taps = x["features"].shape[2] // hidden
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=size["layers.0.mlp.up_proj.weight"][0],
        num_hidden_layers=layers,
        num_attention_heads=size["layers.0.self_attn.q_proj.weight"][0] // d,
        num_key_value_heads=size["layers.0.self_attn.k_proj.weight"][0] // d,
        head_dim=d,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=32768,
        vocab_size=size["embed"][0],
        block_size=block_size,
        mask_token_id=size["embed"][0] - 1,
        target_layer_ids=tuple(range(1, 1 + taps)),
        num_target_layers=36,
        layer_types=("full_attention",) * layers,
    )
    drafter = Drafter(config)
    drafter.load_state_dict({k: weights[k] for k in drafter.state_dict()})
    anchors = x["anchors"].long()
    layout = Layout(torch.tensor([0, context]), anchors, block_size, group_rows=3 * block_size)
    tokens = x["input_ids"][0][anchors].long()
    block = block_input(weights["embed"], tokens, block_size, config.mask_token_id)
    hidden = drafter(x["features"][0], block, layout, backend, checkpointing)
    gamma = 4.0 if dpace_alpha is None else math.inf
    labels, w = x["labels"].long(), slot_weights(block_size, gamma).expand(len(anchors), -1)
    head = weights["lm_head"]
    total, _ = block_loss(hidden, head, labels, w, 64, dpace_alpha=dpace_alpha)
    (total / w.sum()).backward()
    grads = {n: p.grad for n, p in drafter.named_parameters()}
    ce = slot_losses(hidden[w > 0].detach(), head, labels[w > 0]).loss_R
    return hidden, ce.reshape(len(anchors), -1), total / w.sum(), grads, float(w.sum())


@pytest.mark.parametrize("checkpointing", ["none", "layer"])
@pytest.mark.parametrize("backend", ["chunked", "split", "dense"])
@pytest.mark.parametrize("peer", ["specforge", "speculators"])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_peer(shape, peer, backend, checkpointing):
    theirs = load_file(GOLDEN / f"shape{shape}.{peer}.decay.safetensors")
    hidden, ce, loss, grads, _ = run(shape, backend, checkpointing)
    scale = 1.0
    if peer == "speculators":  # divides by the count of slots, SpecForge and we by the weight mass
        w = slot_weights(ce.shape[1] + 1, 4.0)
        scale = (ce.numel() + 1e-5) / (float(w.sum()) * len(ce))
    assert (hidden - theirs["hidden"]).abs().max() <= 1e-4
    assert (ce - theirs["ce"][:, 1:]).abs().max() <= 1e-4
    assert abs(float(loss.detach()) / (float(theirs["loss"]) * scale) - 1) <= 1e-5
    for name, grad in grads.items():
        want = theirs[f"grad.{name}"] * scale
        assert (grad - want).norm() <= 1e-3 * want.norm(), name


@pytest.mark.parametrize("peer", ["specforge", "speculators"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dpace_agrees_with_the_peer(shape, peer):
    """Our mass is the count of slots, as speculators'; SpecForge divides by one document."""
    theirs = load_file(GOLDEN / f"shape{shape}.{peer}.dpace.safetensors")
    _, _, loss, grads, mass = run(shape, dpace_alpha=0.5)
    scale = 1 / mass if peer == "specforge" else (mass + 1e-5) / mass
    assert abs(float(loss.detach()) / (float(theirs["loss"]) * scale) - 1) <= 1e-5
    for name, grad in grads.items():
        want = theirs[f"grad.{name}"] * scale
        assert (grad - want).norm() <= 1e-4 * want.norm(), name


def test_a_changed_weight_is_seen():
    """The comparison above would notice a key norm that is 1 % off."""
    theirs = load_file(GOLDEN / "shapeA.specforge.decay.safetensors")
    path = GOLDEN / "shapeA.weights.safetensors"
    weights = load_file(path)
    weights["layers.1.self_attn.k_norm.weight"] *= 1.01
    original = globals()["load_file"]
    globals()["load_file"] = lambda p: weights if Path(p) == path else original(p)
    try:
        hidden, *_ = run("A")
    finally:
        globals()["load_file"] = original
    assert (hidden - theirs["hidden"]).abs().max() > 1e-4
