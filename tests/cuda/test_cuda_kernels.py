"""The attention kernels as CUDA has them: what training gives them is what they assume."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from support.cuda import device, kernels

from dflash import attention
from dflash.attention import Layout, Visibility, attend

HALF = torch.bfloat16


def inputs(gpu, heads=4, kv=2, rows=40, keys=72, width=64, dtype=HALF):
    g = torch.Generator().manual_seed(0)
    shapes = [(1, kv, rows * heads // kv, width), *[(1, kv, keys, width)] * 2]
    shapes.append(shapes[0])
    q, k, v, slope = (torch.randn(s, generator=g).to(gpu, dtype) for s in shapes)
    bias = torch.zeros(rows, keys).masked_fill(
        torch.rand(rows, keys, generator=g) < 0.5, -torch.inf
    )
    bias[:, 3] = 0
    return q, k, v, slope, bias.to(gpu, dtype)


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, kv", [(4, 2), (8, 8), (6, 1), (32, 8)])
def test_both_kernels_agree_with_the_written_out_softmax(gpu, dtype, heads, kv):
    q, k, v, slope, bias = inputs(gpu, heads, kv, dtype=dtype)
    for masked in (True, False):
        b = bias if masked else None
        kind = attention.fused_kernel(q, b)
        half = dtype != torch.float32
        assert kind == ("flash" if half and not masked else "efficient")
        out, lse = attention.kernel_forward(q, k, v, b)
        got = out, lse, *attention.kernel_backward(slope, q, k, v, b, out, lse)
        wide = [x.cpu().double() for x in (q, k, v)]
        rep = None if b is None else b.cpu().double().repeat(heads // kv, 1)
        want_out, want_lse = attention._math_forward(*wide, rep)
        grads = attention._math_backward(slope.cpu().double(), *wide, rep, want_out, want_lse)
        for a, b_ in zip(got, (want_out, want_lse, *grads), strict=True):
            off = (a.cpu().double() - b_).norm() / b_.norm()
            assert off < (3e-2 if half else 1e-5)


@pytest.mark.parametrize(
    "kind, masked", [("flash", False), ("efficient", False), ("efficient", True)]
)
def test_the_self_check_passes_what_is_right(gpu, kind, masked):
    assert attention.kernel_fault(kind, gpu, HALF, 64, masked) is None


def plant(monkeypatch, kind: str, change):
    """Let the backward kernel of a kind get other arguments."""
    name = f"_scaled_dot_product_{kind}_attention_backward"
    real = getattr(torch.ops.aten, name)

    class Ops:
        def __getattr__(self, asked):
            if asked == name:
                return lambda *args, **kw: real(*change(list(args)), **kw)
            return getattr(torch.ops.aten, asked)

    class Torch:
        def __getattr__(self, asked):
            return ops if asked == "ops" else getattr(torch, asked)

    class AllOps:
        aten = Ops()

    ops = AllOps()
    monkeypatch.setattr(attention, "torch", Torch())
    monkeypatch.setattr(attention, "_faults", {})


def out_as_ours(args):
    """The layout that training has: finding 1 of the audit."""
    args[5] = args[5].contiguous()
    return args


def short_lse(args):
    args[6] = args[6][..., :-3].contiguous()
    return args


def lse_with_zeros(args):
    args[6] = args[6].nan_to_num(posinf=0.0)
    return args


def lse_of_one_call(args):
    args[6] = args[6] + 0.3
    return args


def bias_off_by_one(args):
    if args[4] is not None:
        bias = args[4]
        wide = F.pad(bias, (1, -bias.shape[-1] % 16 + 15))
        args[4] = wide[..., 1 : 1 + bias.shape[-1]]
    return args


@pytest.mark.parametrize(
    "change, words",
    [
        (out_as_ours, "gradient of q is off by nan"),
        (short_lse, "LSE is not correctly aligned|must be inf"),
        (lse_with_zeros, "must be inf"),
        (lse_of_one_call, "gradient of .* is off by"),
        (bias_off_by_one, "attn_bias_ptr is not correctly aligned"),
    ],
)
def test_the_self_check_catches(gpu, monkeypatch, change, words):
    plant(monkeypatch, "efficient", change)
    fault = attention.kernel_fault("efficient", gpu, HALF, 64, True)
    assert re.search(words, fault or "nothing"), fault


def test_an_output_in_another_layout_gives_other_gradients(gpu):
    """That of finding 1, with heads where it showed."""
    q, k, v, slope, bias = inputs(gpu, heads=32, kv=8)
    out, lse = attention.kernel_forward(q, k, v, bias)
    right = attention.kernel_backward(slope, q, k, v, bias, out.contiguous(), lse)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf).contiguous()
    zero = torch.zeros((), dtype=torch.int64, device=gpu)
    mask = attention._aligned(bias, q.shape[2], q.shape[1])
    wrong = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        slope, q, k, v, mask, out.contiguous(), lse, zero, zero, 0.0, [True, True, True, False]
    )
    off = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(wrong, right)]  # noqa: B905
    assert not off[0] < 0.1 and not off[1] < 0.1 and off[2] < 1e-6  # dv does not need delta


def test_a_kernel_that_is_off_gives_way_to_the_next(gpu, monkeypatch):
    plant(monkeypatch, "efficient", out_as_ours)
    q, _, _, _, bias = inputs(gpu)
    assert attention.fused_kernel(q, bias) == "math"
    assert attention.fused_kernel(q, None) == "flash"


def test_every_call_of_training_is_a_fused_kernel(gpu):
    starts, anchors = torch.tensor([0, 300, 380]), torch.tensor([*range(70, 300, 3), 301, 350, 379])
    g = torch.Generator().manual_seed(1)
    n, s = len(anchors), 380
    shapes = [(n, 4, 4, 64), (s, 2, 64), (s, 2, 64), (n, 4, 2, 64), (n, 4, 2, 64)]
    tensors = [torch.randn(x, generator=g).to(gpu, HALF).requires_grad_() for x in shapes]
    for kind, masked in (("flash", False), ("efficient", True)):
        assert attention.kernel_fault(kind, gpu, HALF, 64, masked) is None
    kernels.calls.clear()
    layout = Layout(starts, anchors, 4, group_rows=64)
    attend(*tensors, layout, Visibility()).float().square().sum().backward()
    parts = sum(layout.parts(Visibility(), True, gpu, HALF), [])
    masked = sum(p.bias is not None for p in parts)
    assert 0 < masked < len(parts)
    assert kernels.calls == {
        "efficient": masked,
        "efficient backward": masked,
        "flash": len(parts) - masked,
        "flash backward": len(parts) - masked,
    }


def test_cudnn_comes_last_and_builds_no_plan(gpu):
    """With the package imported; without it every length is a plan."""
    q, k = torch.randn(1, 4, 3, 64, device=gpu, dtype=HALF), None
    for length in range(10, 20):
        k = torch.randn(1, 4, length, 64, device=gpu, dtype=HALF)
        F.scaled_dot_product_attention(q, k, k)
        F.scaled_dot_product_attention(
            q, k, k, attn_mask=torch.zeros(3, length, device=gpu, dtype=HALF)
        )
    assert not kernels.plans and kernels.calls["flash"] == kernels.calls["efficient"] == 10
    kernels._prefer_cudnn = True
    try:
        for length in range(10, 20):
            k = torch.randn(1, 4, length, 64, device=gpu, dtype=HALF)
            F.scaled_dot_product_attention(q, k, k)
    finally:
        kernels._prefer_cudnn = False
    assert len(kernels.plans) == 10


def test_making_masks_does_not_wait(gpu):
    starts, anchors = torch.tensor([0, 900]), torch.arange(70, 900, 5)
    layout = Layout(starts, anchors, 4, group_rows=64)
    layout.on_device(gpu)
    with device.waits() as waits:
        layout.parts(Visibility(), True, gpu, HALF)
    assert waits == []
