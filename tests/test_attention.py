"""The chunked attention against a per-slot loop in float64 that follows the definition word for word."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.attention import Layout, Visibility, attend

NAMES = ("q", "k context", "v context", "k block", "v block")


def make(lengths, anchors, block, heads=4, kv=2, d=8, seed=0, dtype=torch.float64):
    """Random inputs for documents of some lengths, anchors given per document."""
    g = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    rows = [start + a for start, own in zip(starts.tolist(), anchors, strict=False) for a in own]
    s, n = int(starts[-1]), len(rows)
    shapes = [(n, block, heads, d), (s, kv, d), (s, kv, d), (n, block, kv, d), (n, block, kv, d)]
    tensors = [torch.randn(x, generator=g, dtype=dtype).requires_grad_() for x in shapes]
    return tensors, starts, torch.tensor(rows, dtype=torch.int64)


def slow(q, k_context, v_context, k_block, v_block, starts, anchors, see):
    """One slot and one head at a time, straight from the definition."""
    n, b, heads, d = q.shape
    kv = k_context.shape[1]
    out = torch.empty_like(q)
    for i, anchor in enumerate(anchors.tolist()):
        start = max(s for s in starts.tolist() if s <= anchor)
        for slot in range(b):
            position = anchor + slot
            rows = [
                s for s in range(start, anchor) if see.window is None or position - s < see.window
            ]
            slots = [
                j
                for j in range(b)
                if (j <= slot or not see.causal)
                and (see.window is None or abs(slot - j) < see.window)
            ]
            for h in range(heads):
                g = h // (heads // kv)
                keys = torch.cat([k_context[rows, g], k_block[i, slots, g]])
                values = torch.cat([v_context[rows, g], v_block[i, slots, g]])
                weights = ((keys @ q[i, slot, h]) / math.sqrt(d)).softmax(0)
                out[i, slot, h] = weights @ values
    return out


def assert_same(tensors, starts, anchors, block, see, group_rows, backend="chunked", tol=1e-12):
    layout = Layout(starts, anchors, block, group_rows)
    ours = attend(*tensors, layout, see, backend)
    theirs = slow(*tensors, starts, anchors, see)
    torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
    direction = torch.randn(
        ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype
    )
    got = torch.autograd.grad(ours, tensors, direction)
    want = torch.autograd.grad(theirs, tensors, direction)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert not a.isnan().any(), name
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


SEES = {
    "full": Visibility(),
    "causal": Visibility(causal=True),
    "window causal": Visibility(window=5, causal=True),
    "window both ways": Visibility(window=3),
}


@pytest.mark.parametrize("backend", ["chunked", "split", "dense", "gather"])
@pytest.mark.parametrize("see", SEES.values(), ids=SEES)
def test_packed_documents_with_gradients(see, backend):
    # anchors at position 0 and at the last token, a document of one anchor, one shorter than a block
    tensors, starts, anchors = make([9, 3, 1, 12], [[0, 4, 8], [2], [0], [0, 1, 5, 6, 11]], block=4)
    assert_same(tensors, starts, anchors, 4, see, group_rows=8, backend=backend)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_layouts(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    chosen = [
        sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=min(n, 5)))) for n in lengths
    ]
    if not any(chosen):
        chosen[0] = [0]
    block = data.draw(st.integers(2, 5))
    see = data.draw(st.sampled_from(list(SEES.values())))
    group_rows = data.draw(st.integers(1, 30))
    heads, kv = data.draw(st.sampled_from([(4, 2), (3, 3), (6, 1)]))
    tensors, starts, anchors = make(lengths, chosen, block, heads=heads, kv=kv, d=4)
    assert_same(tensors, starts, anchors, block, see, group_rows)


def test_no_gradient_reaches_context_at_or_after_the_anchor():
    tensors, starts, anchors = make([10, 8], [[3, 7], [2]], block=4)
    out = attend(*tensors, Layout(starts, anchors, 4, group_rows=64))
    for block, (low, high) in enumerate([(0, 3), (0, 7), (10, 12)]):
        grads = torch.autograd.grad(out[block].sum(), tensors[1:3], retain_graph=True)
        for grad in grads:
            touched = grad.abs().sum((1, 2)) > 0
            assert touched[low:high].all()
            assert not touched[:low].any() and not touched[high:].any()


def test_bfloat16_and_float32_stay_close():
    for dtype, tol in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        tensors, starts, anchors = make([40], [[5, 20, 33]], block=8, dtype=dtype)
        layout = Layout(starts, anchors, 8, 16)
        exact = slow(*[t.double() for t in tensors], starts, anchors, Visibility())
        out = attend(*tensors, layout)
        torch.testing.assert_close(out.double(), exact, rtol=tol, atol=tol)


def test_groups_are_a_staircase():
    """No group computes keys after its last anchor; one document's groups grow one after the other."""
    starts, anchors = torch.tensor([0, 1000]), torch.arange(0, 1000, 10)
    layout = Layout(starts, anchors, 16, 160)
    computed = sum((g.last - g.first) * (g.high - g.low) for g in layout.groups(Visibility()))
    assert computed <= 0.56 * len(anchors) * 1000
    assert [g.high for g in layout.groups(Visibility())] == [
        90,
        190,
        290,
        390,
        490,
        590,
        690,
        790,
        890,
        990,
    ]


def test_anchors_must_ascend():
    with pytest.raises(ValueError, match="ascend"):
        Layout(torch.tensor([0, 10]), torch.tensor([5, 2]), 4)
    with pytest.raises(ValueError, match="inside"):
        Layout(torch.tensor([0, 10]), torch.tensor([10]), 4)
