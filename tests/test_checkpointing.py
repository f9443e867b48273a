"""Every attention backend with every checkpoint mode gives the drafter's gradients of `dense` without."""

import threading

import pytest
import torch

from dflash import attention
from dflash.attention import Layout
from dflash.drafter import CHECKPOINTING, Drafter, DrafterConfig

BLOCK, WIDTH = 4, 32
MODES = [(m, r) for m in CHECKPOINTING for r in (False, True) if not (m == "selective" and r)]


def make_drafter(window=None, layers=2):
    kind = "sliding_attention" if window else "full_attention"
    config = DrafterConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=4096, vocab_size=64, block_size=BLOCK, mask_token_id=63,
        target_layer_ids=(0, 1), num_target_layers=4, layer_types=(kind,) * layers,
        sliding_window=window,
    )  # fmt: skip
    drafter = Drafter(config)
    drafter.init_weights(0)
    return drafter


CASES = {  # document lengths, anchors of each, window, autocast to bf16
    "one document": ([130], [list(range(70, 130, 3))], None, False),
    "five packed": (
        [9, 2, 90, 1, 14],
        [[0, 4, 8], [1], list(range(60, 90, 2)), [0], [3, 13]],
        None,
        False,
    ),
    "window": ([130, 20], [list(range(70, 130, 3)), [0, 19]], 40, False),
    "bf16": ([130, 20], [list(range(70, 130, 3)), [0, 19]], None, True),
}


def gradients(case, backend, checkpointing, reentrant, dtype=torch.float64, cast=False):
    """Output and gradients of all weights and of the taps, as one vector each."""
    lengths, chosen, window, _ = CASES[case]
    drafter = make_drafter(window).to(dtype)
    g = torch.Generator().manual_seed(1)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    anchors = torch.tensor(
        [s + a for s, own in zip(starts.tolist(), chosen, strict=False) for a in own]
    )
    taps = torch.randn(int(starts[-1]), 2 * WIDTH, generator=g, dtype=torch.float64).to(dtype)
    block = torch.randn(len(anchors), BLOCK, WIDTH, generator=g, dtype=torch.float64).to(dtype)
    direction = torch.randn(block.shape, generator=g, dtype=torch.float64).to(dtype)
    taps.requires_grad_()
    layout = Layout(starts, anchors, BLOCK, group_rows=16)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = drafter(taps, block, layout, backend, checkpointing, reentrant)
    (out * direction).sum().backward()
    grads = {n: p.grad for n, p in drafter.named_parameters()}
    return out.detach().double(), {k: v.double() for k, v in {**grads, "taps": taps.grad}.items()}


@pytest.fixture(scope="module")
def reference():
    return {case: gradients(case, "dense", "none", False) for case in CASES}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointing, reentrant", MODES)
@pytest.mark.parametrize("backend", ["chunked", "split", "gather", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_all_agree_with_dense(case, backend, checkpointing, reentrant, reference, monkeypatch):
    monkeypatch.setattr(attention, "CLEAR_ROWS", 8)
    half = CASES[case][3]
    got, got_grads = gradients(
        case, backend, checkpointing, reentrant, torch.float32 if half else torch.float64, half
    )
    want, want_grads = reference[case]
    tolerance = 4e-2 if half else 1e-12
    assert (got - want).norm() <= tolerance * want.norm()
    for name, value in want_grads.items():
        off = (got_grads[name] - value).norm() / value.norm()
        assert off <= tolerance, f"{name}: {off:.1e}"


def kept_bytes(backend, checkpointing):
    """Bytes that a forward pass keeps for its backward pass, weights left out."""
    drafter = make_drafter(layers=4)
    weights = {p.data_ptr() for p in drafter.parameters()}
    seen = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    taps, anchors = torch.randn(600, 2 * WIDTH), torch.arange(300, 600, 5)
    layout = Layout(torch.tensor([0, 600]), anchors, BLOCK, group_rows=32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = drafter(taps, torch.randn(len(anchors), BLOCK, WIDTH), layout, backend, checkpointing)
    assert out.requires_grad
    return sum(seen.values())


def test_checkpointing_keeps_less_and_gather_is_what_it_was_needed_for():
    plain = kept_bytes("chunked", "none")
    assert kept_bytes("chunked", "layer") < 0.35 * plain
    assert kept_bytes("chunked", "group") < plain
    assert kept_bytes("gather", "none") > 5 * plain
    assert kept_bytes("gather", "group") < 0.35 * kept_bytes("gather", "none")
    assert kept_bytes("dense", "none") > plain


def test_selective_does_not_run_attention_twice(monkeypatch):
    calls = []
    real = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func is real)
            return func(*args, **(kwargs or {}))

    counts = {}
    for mode in ("none", "layer", "selective"):
        drafter = make_drafter()
        layout = Layout(torch.tensor([0, 90]), torch.arange(60, 90, 3), BLOCK, group_rows=16)
        block = torch.randn(len(layout.anchors), BLOCK, WIDTH)
        taps = torch.randn(90, 2 * WIDTH)
        drafter(
            taps, block, layout, "chunked", mode
        ).sum().backward()  # kernels are tried at first use
        calls.clear()
        with Count():
            drafter(taps, block, layout, "chunked", mode).sum().backward()
        counts[mode] = sum(calls)
    assert counts["selective"] == counts["none"] == counts["layer"] / 2 > 0


def test_first_use_of_a_kernel_may_lie_inside_any_checkpoint(monkeypatch):
    """The kernel is tried on a small problem then, which must not enter what is kept of the step."""
    want = gradients("one document", "dense", "none", False, torch.float32)[1]
    for mode in CHECKPOINTING:
        monkeypatch.setattr(attention, "_faults", {})
        got = gradients("one document", "chunked", mode, False, torch.float32)[1]
        assert attention._faults and set(attention._faults.values()) == {None}
        for name, value in want.items():
            assert (got[name] - value).norm() <= 1e-4 * value.norm(), (mode, name)


@pytest.mark.parametrize("checkpointing", ["layer", "group", "both", "selective"])
def test_recomputation_leaves_the_global_generator_alone(checkpointing, monkeypatch):
    """Restoring its state during a recomputation would change what other threads draw meanwhile."""

    def touched(*_args):
        raise AssertionError("the generator that all threads share was set")

    monkeypatch.setattr(torch, "set_rng_state", touched)
    monkeypatch.setattr(torch.random, "set_rng_state", touched)
    gradients("one document", "gather", checkpointing, False, torch.float32)


def test_modes_that_do_not_exist_are_refused():
    drafter = make_drafter()
    layout = Layout(torch.tensor([0, 9]), torch.tensor([4]), BLOCK)
    args = torch.randn(9, 2 * WIDTH), torch.randn(1, BLOCK, WIDTH), layout
    with pytest.raises(ValueError, match="there are none, layer, group, both, selective"):
        drafter(*args, checkpointing="full")
    with pytest.raises(ValueError, match="non-reentrant"):
        drafter(*args, checkpointing="selective", reentrant=True)


@pytest.mark.parametrize("checkpointing", ["none", "both", "selective"])
def test_two_drafters_in_two_threads_train_bit_for_bit_as_alone(checkpointing):
    """What compiled flex_attention could not do: its tracing is not safe between threads."""

    def train(seed, out):
        drafter = make_drafter()
        drafter.init_weights(seed)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
        g = torch.Generator().manual_seed(seed)
        for step in range(12):
            torch.rand(3)  # from the generator that all threads share: must disturb nobody
            anchors = torch.arange(40 + step, 120, 4 + seed)
            layout = Layout(torch.tensor([0, 30, 120]), anchors, BLOCK, group_rows=16)
            taps = torch.randn(120, 2 * WIDTH, generator=g)
            block = torch.randn(len(anchors), BLOCK, WIDTH, generator=g)
            loss = drafter(taps, block, layout, "split", checkpointing).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        out[seed] = {n: p.detach().clone() for n, p in drafter.named_parameters()}

    alone, together = {}, {}
    for seed in (1, 2):
        train(seed, alone)
    threads = [threading.Thread(target=train, args=(seed, together)) for seed in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for seed in (1, 2):
        for name, value in alone[seed].items():
            assert torch.equal(value, together[seed][name]), name
