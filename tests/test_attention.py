"""The chunked attention against a per-slot loop in float64 that follows the definition word for word."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import attention
from dflash.attention import Layout, Visibility, attend
from dflash.errors import UserError

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


@pytest.fixture
def any_clear_row(monkeypatch):
    """Small documents have parts without a mask too."""
    monkeypatch.setattr(attention, "CLEAR_ROWS", 1)


@pytest.mark.usefixtures("any_clear_row")
@pytest.mark.parametrize("backend", ["chunked", "split", "dense", "gather"])
@pytest.mark.parametrize("see", SEES.values(), ids=SEES)
def test_packed_documents_with_gradients(see, backend):
    # anchors at position 0 and at the last token, a document of one anchor, one shorter than a block
    tensors, starts, anchors = make([9, 3, 1, 12], [[0, 4, 8], [2], [0], [0, 1, 5, 6, 11]], block=4)
    assert_same(tensors, starts, anchors, 4, see, group_rows=8, backend=backend)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "split", "gather"])
@pytest.mark.parametrize("see", SEES.values(), ids=SEES)
def test_long_documents_with_rows_that_all_slots_see(see, backend, recompute, monkeypatch):
    """Documents long enough for `split` to have parts without a mask, also behind a window."""
    monkeypatch.setattr(attention, "CLEAR_ROWS", 3)
    see = Visibility(see.window and 11, see.causal)
    anchors = [[0, 9, 10, 17, 30, 31, 32, 33, 34, 35, 36, 39], [1, 2], [20]]
    tensors, starts, anchors = make([40, 6, 23], anchors, block=3)
    layout = Layout(starts, anchors, 3, group_rows=12)
    if backend == "split":
        clear = [g.clear_high - g.clear_low for g in layout.groups(see)]
        assert max(clear) >= 3
    ours = attend(*tensors, layout, see, backend, recompute)
    theirs = attend(*tensors, layout, see, "dense")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(ours)
    got = torch.autograd.grad(ours, tensors, direction)
    want = torch.autograd.grad(theirs, tensors, direction)
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=60, deadline=None)
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
    backend = data.draw(st.sampled_from(["chunked", "split", "gather", "dense"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CLEAR_ROWS", 1)
        assert_same(tensors, starts, anchors, block, see, group_rows, backend)


@pytest.mark.usefixtures("any_clear_row")
@pytest.mark.parametrize("backend", ["chunked", "split", "gather", "dense"])
def test_no_gradient_reaches_context_at_or_after_the_anchor(backend):
    tensors, starts, anchors = make([10, 8], [[3, 7], [2]], block=4)
    out = attend(*tensors, Layout(starts, anchors, 4, group_rows=64), backend=backend)
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


def test_large_documents_share_no_group():
    """Only where all slots of a group belong to one document are there rows that all of them see."""
    starts = torch.tensor([0, 100, 110, 120, 300])
    anchors = torch.tensor([*range(90, 100), 105, 115, *range(280, 300)])
    layout = Layout(starts, anchors, 4, group_rows=32)  # 8 blocks
    cuts = [(g.first, g.last) for g in layout.groups(Visibility())]
    assert cuts == [(0, 8), (8, 10), (10, 12), (12, 20), (20, 28), (28, 32)]
    assert [g.clear_high - g.clear_low for g in layout.groups(Visibility())] == [
        90, 98, 0, 160, 168, 176
    ]  # fmt: skip


def test_a_pack_without_blocks_is_no_error():
    tensors, starts, anchors = make([6], [[]], block=4)
    for backend in attention.BACKENDS:
        assert attend(*tensors, Layout(starts, anchors, 4), backend=backend).shape == (0, 4, 4, 8)


def test_flex_agrees_where_it_runs_and_says_where_it_does_not():
    tensors, starts, anchors = make([40, 30], [[5, 20], [3]], block=4, d=16, dtype=torch.float32)
    layout = Layout(starts, anchors, 4)
    for see in SEES.values():
        with torch.no_grad():
            ours, theirs = (attend(*tensors, layout, see, b) for b in ("flex", "dense"))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="no backward pass there.*split"):
        attend(*tensors, layout, backend="flex")


def test_unknown_backend():
    tensors, starts, anchors = make([6], [[2]], block=4)
    with pytest.raises(ValueError, match="there are chunked, split, dense, gather, flex"):
        attend(*tensors, Layout(starts, anchors, 4), backend="sparse")


def test_nothing_of_a_group_is_kept_for_the_backward_pass():
    """What is saved is the inputs, the output and a number a row: no mask, no copy of a key."""
    tensors, starts, anchors = make([400], [list(range(100, 400, 3))], 8, dtype=torch.float32)
    q, k = tensors[0], tensors[1]
    for backend, recompute, extra in [
        ("chunked", False, 1),
        ("split", False, 1),
        ("split", True, 0),
    ]:
        saved = []
        pack = lambda t: saved.append(t.numel()) or t  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            attend(*tensors, Layout(starts, anchors, 8), backend=backend, recompute=recompute)
        inputs = sum(t.numel() for t in tensors)
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        assert sum(saved) == inputs + extra * (q.numel() + rows)
        assert 2 * k.numel() * len(anchors) > 10 * sum(saved)  # what copies per block would take


def test_group_size_follows_the_memory_target():
    small = attention.group_rows_within(4 << 20, 4096, 16, 8, 2, 32, 4)
    large = attention.group_rows_within(256 << 20, 4096, 16, 8, 2, 32, 4)
    assert small < large and small % 16 == large % 16 == 0
    assert attention.group_rows_within(1, 10**6, 48, 8, 2, 32, 4) == 96  # at least 128 rows' blocks


def test_a_kernel_that_is_wrong_or_missing_gives_way_to_the_written_out_softmax(monkeypatch):
    tensors, starts, anchors = make([30], [[4, 11, 20]], block=4, dtype=torch.float32)
    layout = Layout(starts, anchors, 4)
    want = attend(*tensors, layout)
    real = attention.kernel_backward

    def wrong(slope, q, k, v, bias, out, lse):
        if attention.fused_kernel(q, bias) == "math":
            return real(slope, q, k, v, bias, out, lse)
        return tuple(2 * g for g in real(slope, q, k, v, bias, out, lse))

    monkeypatch.setattr(attention, "_faults", {})
    monkeypatch.setattr(attention, "kernel_backward", wrong)
    got = attend(*tensors, layout)
    fault = attention.kernel_fault("cpu flash", torch.device("cpu"), torch.float32, 8, True)
    assert fault.startswith("its gradient of q is off by")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(got.square().sum(), tensors)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


PACKS = {  # document lengths, anchors of each, window
    "one long document": ([8000], [range(100, 8000, 40)], None),
    "window": ([16000], [range(0, 16000, 250)], 512),
    "sparse documents": ([3072] * 8, [range(600, 3072, 600)] * 8, None),
    "one anchor each": ([3072] * 8, [[2000]] * 8, None),
    "many short ones": ([90] * 60, [range(40, 90, 10)] * 60, None),
}


@pytest.mark.parametrize("case", PACKS)
def test_no_group_is_larger_than_its_target_or_computes_mostly_what_is_masked(case):
    lengths, chosen, window = PACKS[case]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    anchors = torch.tensor(
        [s + a for s, own in zip(starts.tolist(), chosen, strict=False) for a in own]
    )
    see, block, target = Visibility(window), 16, 64 << 20
    longest = min(max(lengths), window or 1 << 60)
    rows = attention.group_rows_within(target, longest, block, 8, 2, 64, 4)
    layout = Layout(starts, anchors, block, rows)
    groups = layout.groups(see)
    assert [g.first for g in groups] == [0, *(g.last for g in groups[:-1])]
    assert groups[-1].last == len(anchors)
    seen = computed = 0
    for g in groups:
        slots, keys = (g.last - g.first) * block, g.high - g.low
        own = (layout.anchors - layout.start_N)[g.first : g.last].clamp(max=(window or 1 << 60) - 1)
        seen += int(own.sum())
        computed += (g.last - g.first) * keys
        total = keys + slots
        assert keys <= max(1.5 * int(own.max()), attention.SPAN_ROWS)
        assert slots * total * 4 * 4 <= 2 * target  # the mask as numbers, for four heads folded
    assert computed <= max(3 * seen, attention.SPAN_ROWS * len(anchors))
