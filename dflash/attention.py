"""Attention of draft blocks over the context of packed documents, without copying a key per block.

Shapes: S context rows of all documents laid end to end · N blocks sorted by (document, anchor) ·
B slots a block · Q query heads · K key/value heads, G = Q/K · d head width · R query rows and
L keys of one kernel call.

A slot of a block anchored at row a sees the context rows of its own document strictly before a, and
the slots of its own block; blocks never see each other. Since the blocks are sorted, the keys of
some neighbouring blocks are one contiguous view of the context (from the start of the first one's
document to the last one's anchor) followed by the group's own slots. The groups' key ranges form a
staircase, so about half of the [N·B, S] rectangle is never computed, no key is copied per block and
no mask is larger than a group's.

Backends, all with the same result:

- `chunked`: group by group that way, one masked kernel call a group;
- `split`: the same groups in two calls. Rows before the group's first anchor are visible to all its
  slots and need no mask; only the band of anchors and the own slots do. The parts are merged by
  their log-sum-exp, and in the backward pass each is given the merged output and log-sum-exp, which
  makes its share of the gradient exact (the identity ring attention rests on);
- `dense`: one mask over everything and the softmax written out: slow, obvious, what the others are
  tested against;
- `gather`: a copy of its keys for every block, as this project began; kept to be measured against;
- `flex`: torch's flex_attention, where it works.

`chunked` and `split` are one autograd function. Between forward and backward it keeps queries,
keys, values, the output and one number a row, never a group's copies or masks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from dflash.errors import UserError

BACKENDS = ("chunked", "split", "dense", "gather", "flex")

# What the temporaries of one group may take unless the number of rows is set. Small groups compute
# less of what the mask forbids, large ones give the kernel more to do at once.
GROUP_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
GROUP_ROWS = (128, 2048)  # and never fewer or more slots than these


def group_bytes(device_type: str) -> int:
    """The memory target of a group on a kind of device."""
    return GROUP_BYTES.get(device_type, GROUP_BYTES["cuda"])


# Context rows that a group may span however little each of its slots sees.
SPAN_ROWS = 1024

# Rows that all slots of a group see are worth a call without a mask from this many on.
CLEAR_ROWS = 64


@dataclass(frozen=True)
class Visibility:
    """How far a slot sees: `window` positions back (own counted; None: all), and whether only back.

    Context always lies before the block, so `causal` matters inside the block only.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class Group:
    """Some neighbouring blocks, the context rows any of them may see, and those that all see."""

    first: int  # blocks first..last-1
    last: int
    low: int  # context rows low..high-1
    high: int
    clear_low: int  # rows clear_low..clear_high-1 are visible to every slot
    clear_high: int


@dataclass(frozen=True)
class Part:
    """The keys of one kernel call: ranges of context rows, perhaps the own slots, perhaps a mask."""

    ranges: tuple[tuple[int, int], ...]
    own: bool
    bias: torch.Tensor | None  # what is added to scores, 0 or -inf, [R, L]; R slots and L keys


class Numbers(NamedTuple):
    """What passes need of a layout as tensors on their device; int64."""

    anchor_N: torch.Tensor  # context row of each block's anchor
    start_N: torch.Tensor  # first context row of its document
    context_positions_S: torch.Tensor  # position of each context row in its document
    block_positions_NB: torch.Tensor  # and of each slot


class Layout:
    """Where documents and blocks lie in a pack. Built once a batch, shared by all layers.

    Args:
        starts: first context row of each document, and S at the end; int64 [documents + 1].
        anchors: context row of each block's anchor, ascending; int64 [N].
        block_size: B.
        group_rows: slots in one group; at least one block is always taken.
    Raises ValueError when anchors are not ascending or lie outside the pack.
    """

    def __init__(
        self,
        starts: torch.Tensor,
        anchors: torch.Tensor,
        block_size: int,
        group_rows: int | None = None,
    ):
        if anchors.numel() and (
            (anchors.diff() < 0).any() or anchors[0] < starts[0] or anchors[-1] >= starts[-1]
        ):
            raise ValueError("anchors must ascend and lie inside the pack")
        self.starts, self.anchors, self.block_size = starts, anchors, block_size
        self.document_N = torch.searchsorted(starts, anchors, right=True) - 1
        self.start_N = starts[self.document_N]
        self.group_blocks = max(1, (group_rows or GROUP_ROWS[0] * 2) // block_size)
        self._groups: dict[int | None, list[Group]] = {}
        self._parts: dict[tuple, list[list[Part]]] = {}
        self._on_device: dict[str, Numbers] = {}
        self.flex_masks: dict[tuple, Any] = {}

    @property
    def num_context(self) -> int:
        """S."""
        return int(self.starts[-1])

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.anchors.numel()

    @cached_property
    def context_positions_S(self) -> torch.Tensor:
        """Position of each context row within its document."""
        rows = torch.arange(self.num_context)
        return rows - self.starts[torch.searchsorted(self.starts, rows, right=True) - 1]

    @cached_property
    def block_positions_NB(self) -> torch.Tensor:
        """Position of each slot within its document: anchor + slot."""
        return (self.anchors - self.start_N)[:, None] + torch.arange(self.block_size)

    def groups(self, see: Visibility) -> list[Group]:
        """The blocks in groups of at most `group_blocks`, fewer where their keys lie far apart.

        - A document that fills half a group or more shares none with another, since rows that every
          slot sees exist only where all slots belong to one document.
        - A group's rows span at most 1.5 times what one slot sees (or `SPAN_ROWS`), so that neither
          a window nor documents of few blocks make a group compute mostly what its mask forbids.
        """
        if see.window not in self._groups:
            anchors, starts = self.anchors.tolist(), self.start_N.tolist()
            window = see.window if see.window is not None else 1 << 62
            lows = [max(start, a - window + 1) for a, start in zip(anchors, starts, strict=True)]
            lows = [min(low, a) for low, a in zip(lows, anchors, strict=True)]
            out: list[Group] = []
            for first, last in self._cuts(anchors, lows):
                z, start = anchors[last - 1], starts[first]
                clear_low = max(start, z + self.block_size - window)
                one = starts[last - 1] == start
                enough = one and anchors[first] - clear_low >= CLEAR_ROWS
                clear = (clear_low, anchors[first]) if enough else (lows[first], lows[first])
                out.append(Group(first, last, lows[first], z, *clear))
            self._groups[see.window] = out
        return self._groups[see.window]

    def _cuts(self, anchors: list[int], lows: list[int]) -> list[tuple[int, int]]:
        """Where groups begin and end; block i sees rows lows[i] to anchors[i] - 1."""
        documents = self.document_N.tolist()
        counts = torch.bincount(self.document_N).tolist() if documents else []
        cuts, first, seen = [], 0, 0
        for i in range(1, len(anchors)):
            seen = max(seen, anchors[i - 1] - lows[i - 1])
            ends = documents[i] != documents[i - 1] and any(
                2 * counts[d] >= self.group_blocks for d in (documents[i - 1], documents[i])
            )
            span = anchors[i] - lows[first]
            wide = span > max(1.5 * max(seen, anchors[i] - lows[i]), SPAN_ROWS)
            if i - first >= self.group_blocks or ends or wide:
                cuts.append((first, i))
                first, seen = i, 0
        return [*cuts, (first, len(anchors))] if anchors else []

    def mask(
        self,
        first: int,
        last: int,
        ranges: tuple[tuple[int, int], ...],
        see: Visibility,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Which keys the slots of blocks first..last-1 see; bool [R, L], own slots last."""
        slot = torch.arange(self.block_size, device=device)
        numbers = self.on_device(device)
        anchor_C, start_C = numbers.anchor_N[first:last], numbers.start_N[first:last]
        row_L = torch.cat([torch.arange(*r, device=device) for r in ranges or ((0, 0),)])
        context = (row_L >= start_C[:, None]) & (row_L < anchor_C[:, None])
        context_CBL = context[:, None].expand(-1, self.block_size, -1)
        back = slot[:, None] - slot[None, :]  # positions from key back to query, in one block
        own = torch.ones_like(back, dtype=torch.bool)
        if see.causal:
            own &= back >= 0
        if see.window is not None:
            distance = (anchor_C[:, None] + slot)[:, :, None] - row_L
            context_CBL = context_CBL & (distance < see.window)
            own &= back.abs() < see.window
        blocks, rows = last - first, (last - first) * self.block_size
        own_RR = torch.zeros(rows, rows, dtype=torch.bool, device=device)
        own_CBCB = own_RR.view(blocks, self.block_size, blocks, self.block_size)
        own_CBCB.diagonal(dim1=0, dim2=2).copy_(own[..., None])  # one kernel, however many blocks
        return torch.cat([context_CBL.flatten(0, 1), own_RR], dim=1)

    @property
    def numbers(self) -> Numbers:
        """What passes need on their device."""
        return Numbers(
            self.anchors, self.start_N, self.context_positions_S, self.block_positions_NB
        )

    def on_device(self, device: torch.device | str) -> Numbers:
        """`numbers` on a device: as `put` there, else copied now, once."""
        key = str(device)
        if key not in self._on_device:
            self._on_device[key] = Numbers(*(x.to(device) for x in self.numbers))
        return self._on_device[key]

    def put(self, device: torch.device | str, numbers: Numbers) -> None:
        """Say where `numbers` have been copied to."""
        self._on_device[str(device)] = numbers

    def parts(
        self, see: Visibility, split: bool, device: torch.device, dtype: torch.dtype
    ) -> list[list[Part]]:
        """The kernel calls of each group, biases on the device; made at first use."""
        key = (see, split, str(device), dtype)
        if key not in self._parts:
            self._parts[key] = [
                [
                    Part(ranges, own, self._bias(g, ranges, see, device, dtype) if own else None)
                    for ranges, own in _calls(g, split)
                ]
                for g in self.groups(see)
            ]
        return self._parts[key]

    def _bias(self, g: Group, ranges, see: Visibility, device, dtype) -> torch.Tensor:
        return additive(self.mask(g.first, g.last, ranges, see, device), dtype)


def _calls(g: Group, split: bool) -> list[tuple[tuple[tuple[int, int], ...], bool]]:
    """Context ranges of each kernel call of a group, and whether its own slots belong to it."""
    if not split or g.clear_high <= g.clear_low:
        return [(((g.low, g.high),), True)]
    rest = tuple(r for r in ((g.low, g.clear_low), (g.clear_high, g.high)) if r[0] < r[1])
    return [(((g.clear_low, g.clear_high),), False), (rest, True)]


def group_rows_within(
    limit_bytes: int,
    context: int,
    block_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> int:
    """Slots a group may have so that the temporaries of one call stay within a limit.

    `context` is the longest range that one slot sees. Counted for R slots over L keys, L that range
    (or `SPAN_ROWS`, see `Layout.groups`) and the own slots: queries, output and their
    gradients (4·R·Q·d), copies of keys and values and their gradients (4·L·K·d), and the mask once
    as booleans and once as numbers for each of the G query heads of a key head.
    """
    per_mask = 1 + itemsize * (heads // kv_heads)
    rows = GROUP_ROWS[0]
    while 2 * rows <= GROUP_ROWS[1]:
        r = 2 * rows
        keys = max(context, SPAN_ROWS) + r
        size = 4 * itemsize * head_dim * (r * heads + keys * kv_heads) + r * keys * per_mask
        if size > limit_bytes:
            break
        rows = r
    return max(rows // block_size, 1) * block_size


def attend(
    q_NBQd: torch.Tensor,
    k_SKd: torch.Tensor,
    v_SKd: torch.Tensor,
    k_NBKd: torch.Tensor,
    v_NBKd: torch.Tensor,
    layout: Layout,
    see: Visibility = Visibility(),  # noqa: B008 (frozen)
    backend: str = "split",
    recompute: bool = False,
    reentrant: bool = False,
    memo: Memo | None = None,
) -> torch.Tensor:
    """Attention of all blocks' slots over their context and their own block, scaled by d^-1/2.

    Takes queries [N, B, Q, d], context keys and values [S, K, d], block keys and values
    [N, B, K, d], all in one dtype; returns [N, B, Q, d]. Differentiable in all five.

    Args:
        recompute: keep nothing of a group for the backward pass but its inputs ("group"
            checkpointing); `reentrant` chooses torch's older checkpoint for the backends that use it.
        memo: keeps the result of `chunked` and `split` for a second call with the same arguments.
    Raises ValueError for an unknown backend, UserError where flex_attention cannot run.
    """
    tensors = (q_NBQd, k_SKd, v_SKd, k_NBKd, v_NBKd)
    if not layout.num_blocks:
        return torch.zeros_like(q_NBQd) + 0 * (k_SKd.sum() + v_SKd.sum())
    if backend in ("chunked", "split"):
        parts = layout.parts(see, backend == "split", q_NBQd.device, q_NBQd.dtype)
        return _Grouped.apply(*tensors, layout.groups(see), parts, recompute, memo)
    run: Callable[..., torch.Tensor]
    if backend == "dense":
        run = partial(_dense, layout=layout, see=see)
    elif backend == "gather":
        return _gather(*tensors, layout, see, recompute, reentrant)
    elif backend == "flex":
        return _flex(*tensors, layout, see)
    else:
        raise ValueError(f"no attention backend {backend!r}; there are {', '.join(BACKENDS)}")
    return _perhaps_again(run, tensors, recompute, reentrant)


def _perhaps_again(
    run: Callable[..., torch.Tensor], tensors: tuple, recompute: bool, reentrant: bool
) -> torch.Tensor:
    """`run`, and with `recompute` once more in the backward pass. Nothing in it is random."""
    if not recompute:
        return run(*tensors)
    return checkpoint(run, *tensors, use_reentrant=reentrant, preserve_rng_state=False)


# --- chunked and split ------------------------------------------------------------------------


class Memo:
    """The attention result of a layer that is run twice: once forward, and again, from the same inputs,
    when its activations are recomputed for the backward pass. The second run takes what the first kept.

    A dispatch mode that keeps the kernels' outputs (torch's selective checkpoint) does the same at
    three times the host time of a pass (docs/log.md).
    """

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def keep(self, out: torch.Tensor, lses: list[torch.Tensor]) -> None:
        """Keep an output and its log-sum-exps, without the graph that the output becomes part of."""
        self._kept = out.detach(), lses

    def take(self) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """What was kept, once."""
        kept, self._kept = self._kept, None
        return kept


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_S, v_S, k_N, v_N, groups, parts, recompute, memo):
        found = memo.take() if memo is not None else None
        if found is None:
            found = _grouped_forward(q, k_S, v_S, k_N, v_N, groups, parts)
            if memo is not None:
                memo.keep(*found)
        out, lses = found
        ctx.groups, ctx.parts, ctx.recompute = groups, parts, recompute
        kept = () if recompute else (out, *lses)
        ctx.save_for_backward(q, k_S, v_S, k_N, v_N, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k_S, v_S, k_N, v_N, *kept = ctx.saved_tensors
        out, lses = (None, []) if ctx.recompute else (kept[0], kept[1:])
        grads = _grouped_backward(grad_out, q, k_S, v_S, k_N, v_N, out, lses, ctx.groups, ctx.parts)
        return *grads, None, None, None, None


def _grouped_forward(q, k_S, v_S, k_N, v_N, groups, parts):
    """Output [N, B, Q, d] and each group's log-sum-exp [1, K, G·R]."""
    out, lses = torch.empty_like(q), []
    for g, calls in zip(groups, parts, strict=True):
        rows = fold(q[g.first : g.last], k_S.shape[1])
        merged, lse = _run(rows, k_S, v_S, k_N, v_N, g, calls)
        out[g.first : g.last] = unfold(merged, q.shape)
        lses.append(lse)
    return out, lses


def _grouped_backward(grad_out, q, k_S, v_S, k_N, v_N, out, lses, groups, parts):
    """Gradients of the five inputs. Without `out` and `lses` each group is computed again."""
    kv = k_S.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)  # many groups add to one context row
    dq, dk_N, dv_N = torch.empty_like(q), torch.empty_like(k_N), torch.empty_like(v_N)
    dk_S, dv_S = torch.zeros_like(k_S, dtype=wide), torch.zeros_like(v_S, dtype=wide)
    for i, (g, calls) in enumerate(zip(groups, parts, strict=True)):
        blocks = slice(g.first, g.last)
        rows, slope = fold(q[blocks], kv), fold(grad_out[blocks], kv)
        if out is None:
            of_group, lse = _run(rows, k_S, v_S, k_N, v_N, g, calls)
        else:
            of_group, lse = fold(out[blocks], kv), lses[i]
        total = None
        for part in calls:
            k, v = _keys(k_S, k_N, g, part), _keys(v_S, v_N, g, part)
            dq_part, dk, dv = kernel_backward(slope, rows, k, v, part.bias, of_group, lse)
            total = dq_part if total is None else total.add_(dq_part)
            at = 0
            dk, dv = dk[0].transpose(0, 1), dv[0].transpose(0, 1)  # [L, K, d]
            for low, high in part.ranges:
                dk_S[low:high] += dk[at : at + high - low]
                dv_S[low:high] += dv[at : at + high - low]
                at += high - low
            if part.own:
                dk_N[blocks] = dk[at:].unflatten(0, (-1, q.shape[1]))
                dv_N[blocks] = dv[at:].unflatten(0, (-1, q.shape[1]))
        dq[blocks] = unfold(total, q.shape)
    return dq, dk_S.to(k_S.dtype), dv_S.to(v_S.dtype), dk_N, dv_N


def _keys(context_SKd, own_NBKd, g: Group, part: Part) -> torch.Tensor:
    """Keys or values of one call, [1, K, L, d]; a view where it is one range of the context."""
    pieces = [context_SKd[low:high] for low, high in part.ranges]
    if part.own:
        pieces.append(own_NBKd[g.first : g.last].flatten(0, 1))
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return rows.transpose(0, 1)[None]


def _run(rows, k_S, v_S, k_N, v_N, g: Group, calls: list[Part]):
    """Output [1, K, G·R, d] of one group's slots and their log-sum-exp [1, K, G·R]."""
    out = lse = None
    for part in calls:
        k, v = _keys(k_S, k_N, g, part), _keys(v_S, v_N, g, part)
        o, s = kernel_forward(rows, k, v, part.bias)
        out, lse = (o, s) if out is None else _merged(out, lse, o, s)
    return out, lse


def _merged(out, lse, other_out, other_lse):
    """Output and log-sum-exp of one softmax over the keys of two calls."""
    both = torch.logaddexp(lse, other_lse)
    share, other = (lse - both).exp()[..., None], (other_lse - both).exp()[..., None]
    return (out * share + other_out * other).to(other_out.dtype), both


def fold(x_CBQd: torch.Tensor, kv: int) -> torch.Tensor:
    """Slots of some blocks as query rows, [1, K, G·R, d]: the G query heads of a key head become rows.

    `enable_gqa` with a mask has no fused CUDA kernel and falls silently to the math one, and repeating
    the keys copies them G times; folded, it is plain attention with K heads on any kernel.
    """
    rows_RQd = x_CBQd.flatten(0, 1)
    r, heads, d = rows_RQd.shape
    g = heads // kv
    return rows_RQd.view(r, kv, g, d).permute(1, 2, 0, 3).reshape(1, kv, g * r, d)


def unfold(x_1KMd: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `fold`: [1, K, G·R, d] -> [C, B, Q, d], B and Q as in `shape`."""
    _, block, heads, d = shape
    kv = x_1KMd.shape[1]
    g = heads // kv
    x = x_1KMd.view(kv, g, -1, d).permute(2, 0, 1, 3)
    return x.reshape(-1, block, heads, d)


def additive(mask_RL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as what is added to scores."""
    bias = torch.zeros(mask_RL.shape, dtype=dtype, device=mask_RL.device)
    return bias.masked_fill_(~mask_RL, float("-inf"))


def _repeated(bias_RL: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """A bias for all heads folded into rows, [M, L]."""
    return None if bias_RL is None else bias_RL.repeat(rows // len(bias_RL), 1)


def kernel_forward(q, k, v, bias_RL: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [1, K, M, d] over [1, K, L, d], with its log-sum-exp [1, K, M].

    M is a multiple of the bias's rows R. Calls the fused kernel of the device, and writes the softmax
    out where there is none (float64 on a GPU, other devices).
    """
    kind = fused_kernel(q, bias_RL)
    if kind == "cpu flash":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=_repeated(bias_RL, q.shape[2])
        )
    if kind == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    if kind == "efficient":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned(bias_RL, q.shape[2], q.shape[1]), True
        )
        return out, lse[..., : q.shape[2]]
    return _math_forward(q, k, v, _repeated(bias_RL, q.shape[2]))


def kernel_backward(slope, q, k, v, bias_RL: torch.Tensor | None, out, lse):
    """Gradients of q, k and v from the gradient of the output, and the whole softmax's out and lse."""
    kind = fused_kernel(q, bias_RL)
    if kind == "cpu flash":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            slope, q, k, v, out, lse, 0.0, False, attn_mask=_repeated(bias_RL, q.shape[2])
        )
    if kind == "flash":
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            slope, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, False,
            none, none,
        )  # fmt: skip
    if kind == "efficient":
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        short = -q.shape[2] % 32  # the kernel reads whole warps of rows
        padded = F.pad(lse.float(), (0, short), value=float("inf")).contiguous()
        # In half precision the kernel takes `out` to lie in memory as [1, M, K, d], whatever its
        # strides say, and reads other rows and beyond the buffer where it does not (o_strideM() in
        # ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h).
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            slope, q, k, v, _aligned(bias_RL, q.shape[2], q.shape[1]), out, padded, none, none, 0.0,
            [True, True, True, False],
        )[:3]  # fmt: skip
    return _math_backward(slope, q, k, v, _repeated(bias_RL, q.shape[2]), out, lse)


def _aligned(bias_RL: torch.Tensor | None, rows: int, heads: int) -> torch.Tensor | None:
    """A bias for [1, K, M, L] whose rows begin at multiples of 16 numbers, as the CUDA kernel asks."""
    if bias_RL is None:
        return None
    length = bias_RL.shape[1]
    wide = F.pad(bias_RL, (0, -length % 16))
    return _repeated(wide, rows)[:, :length].expand(1, heads, -1, -1)


def fused_kernel(q: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Which kernel a call gets: `cpu flash`, `flash`, `efficient` or `math`.

    A kernel is used only after it has agreed with the written-out softmax on a small problem in this
    process, forward and backward; one that fails or is not there gives way to the next, `math` last.
    """
    d, masked = q.shape[-1], bias is not None
    if (tried := _trying.get()) is not None:
        return tried.get(masked, "math")
    for kind in candidates(q.device.type, q.dtype, d, masked):
        if kernel_fault(kind, q.device, q.dtype, d, masked) is None:
            return kind
    return "math"


def candidates(device_type: str, dtype: torch.dtype, head_dim: int, masked: bool) -> list[str]:
    """The fused kernels that ought to serve a call, the best first."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device_type == "cpu" and (half or dtype in (torch.float32, torch.float64)):
        return ["cpu flash"]
    if device_type == "cuda" and head_dim <= 256 and head_dim % 8 == 0:
        flash = ["flash"] if half and not masked else []
        return [*flash, "efficient"] if half or dtype == torch.float32 else []
    return []


# While a kernel is being tried: the kernel of masked (True) or unmasked calls, others get `math`.
_trying: ContextVar[dict[bool, str] | None] = ContextVar("trying", default=None)
_faults: dict[tuple, str | None] = {}
_faults_lock = threading.Lock()


def kernel_fault(
    kind: str, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool
) -> str | None:
    """Why a fused kernel must not be used here, or None if it agrees with the written-out softmax."""
    key = (kind, str(device), dtype, head_dim, masked)
    with _faults_lock:
        if key not in _faults:
            token = _trying.set({masked: kind})
            try:
                # not part of whatever is being recorded or recomputed around this call
                with _disable_current_modes(), torch.autocast(device.type, enabled=False):
                    _faults[key] = _try_kernel(device, dtype, head_dim, masked)
            except Exception as e:  # whatever a build of torch does where it lacks the kernel
                _faults[key] = f"{type(e).__name__}: {e}".splitlines()[0]
            finally:
                _trying.reset(token)
        return _faults[key]


# Query heads : key heads that a kernel is tried with: one key head and several, one query head a key
# head and several.
TRIAL_HEADS = ((4, 2), (3, 3), (6, 1), (32, 4))


@torch.no_grad()
def _try_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool
) -> str | None:
    """What training does, forward and backward, on a small pack, against float64.

    Groups of one call and of two, whose other call is the written-out softmax; outputs merged, laid out
    for all slots and taken from there; keys that are views of the context and copies; sizes that are no
    multiples of anything. So the kernel meets the very strides, padding and log-sum-exps of training.
    """
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}.get(dtype, 1e-9)
    starts = torch.tensor([0, 151, 189])
    anchors = torch.tensor([5, 70, 71, 100, 131, 149, 160, 188])
    block, names = 5, ("q", "k of context", "v of context", "k of blocks", "v of blocks")
    see, cpu = Visibility(), torch.device("cpu")
    for heads, kv in TRIAL_HEADS:
        layout = Layout(starts, anchors, block, group_rows=3 * block)
        rows, slots = (layout.num_context,), (layout.num_blocks, block)
        shapes = [(*slots, heads), (*rows, kv), (*rows, kv), (*slots, kv), (*slots, kv)]
        g = torch.Generator().manual_seed(heads)
        *tensors, grad_out = (
            torch.randn(*shape, head_dim, generator=g).to(dtype) for shape in [*shapes, shapes[0]]
        )
        groups, parts = layout.groups(see), layout.parts(see, True, device, dtype)
        moved = [x.to(device) for x in tensors]
        out, lses = _grouped_forward(*moved, groups, parts)
        got = out, *_grouped_backward(grad_out.to(device), *moved, out, lses, groups, parts)

        token = _trying.set({})  # the written-out softmax, every block with a mask over everything
        whole = Layout(starts, anchors, block, group_rows=block)
        groups = [Group(0, layout.num_blocks, 0, layout.num_context, 0, 0)]
        bias = additive(whole.mask(0, layout.num_blocks, ((0, *rows),), see), torch.float64)
        parts = [[Part(((0, *rows),), True, bias)]]
        exact = [x.double() for x in tensors]
        out, lses = _grouped_forward(*exact, groups, parts)
        want = out, *_grouped_backward(grad_out.double(), *exact, out, lses, groups, parts)
        _trying.reset(token)
        for name, a, b in zip(("output", *names), got, want, strict=True):
            off = float((a.to(cpu).double() - b).norm() / b.norm())
            if not off <= tolerance:
                what = name if name == "output" else f"gradient of {name}"
                return f"its {what} is off by {off:.1e} with heads {heads}:{kv}"
    return None


def _math_forward(q, k, v, bias):
    """The softmax written out, in float32 at least."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v).to(dtype), lse


def _math_backward(slope, q, k, v, bias, out, lse):
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    slope, q, k, v, out = (x.to(wide) for x in (slope, q, k, v, out))
    scale = q.shape[-1] ** -0.5
    with torch.autocast(q.device.type, enabled=False):
        scores = (q @ k.transpose(-1, -2)) * scale
        scores = scores if bias is None else scores + bias
        p = (scores - lse[..., None].to(wide)).exp()
        dp = slope @ v.transpose(-1, -2)
        ds = p * (dp - (slope * out).sum(-1, keepdim=True)) * scale
        grads = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ slope
    return tuple(g.to(dtype) for g in grads)


# --- dense, gather, flex ----------------------------------------------------------------------


def _dense(q, k_S, v_S, k_N, v_N, layout: Layout, see: Visibility) -> torch.Tensor:
    n, block, heads, d = q.shape
    kv = k_S.shape[1]
    mask = layout.mask(0, n, ((0, layout.num_context),), see, q.device)
    k = torch.cat([k_S, k_N.flatten(0, 1)]).repeat_interleave(heads // kv, 1)  # [L, Q, d]
    v = torch.cat([v_S, v_N.flatten(0, 1)]).repeat_interleave(heads // kv, 1)
    scores = torch.einsum("rhd,lhd->hrl", q.flatten(0, 1), k) * d**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hrl,lhd->rhd", weights, v).view(q.shape)


GATHER_BLOCKS = 45  # blocks of 16 slots in a chunk, as in the run that this project starts from


def _gather(q, k_S, v_S, k_N, v_N, layout, see, recompute, reentrant) -> torch.Tensor:
    out = []
    for first in range(0, layout.num_blocks, GATHER_BLOCKS):
        blocks = slice(first, first + GATHER_BLOCKS)
        run = partial(_gather_chunk, layout=layout, blocks=blocks, see=see)
        args = (q[blocks], k_S, v_S, k_N[blocks], v_N[blocks])
        out.append(_perhaps_again(run, args, recompute, reentrant))
    return torch.cat(out)


def _gather_chunk(q, k_S, v_S, k_N, v_N, layout, blocks, see) -> torch.Tensor:
    device = q.device
    numbers = layout.on_device(device)
    anchor_C, start_C = numbers.anchor_N[blocks], numbers.start_N[blocks]
    longest = int((layout.anchors - layout.start_N)[blocks].max())
    slot = torch.arange(q.shape[1], device=device)
    row_CL = start_C[:, None] + torch.arange(longest, device=device)
    context = (row_CL < anchor_C[:, None])[:, None].expand(-1, len(slot), -1)
    back = slot[:, None] - slot
    own = back >= 0 if see.causal else torch.ones_like(back, dtype=torch.bool)
    if see.window is not None:
        distance = (anchor_C[:, None] + slot)[:, :, None] - row_CL[:, None]
        context = context & (distance < see.window)
        own = own & (back.abs() < see.window)
    mask = torch.cat([context, own.expand(len(q), -1, -1)], -1)[:, None]  # [C, 1, B, L]
    at = torch.minimum(row_CL, anchor_C[:, None])
    k, v = torch.cat([k_S[at], k_N], 1), torch.cat([v_S[at], v_N], 1)  # the copies
    return folded(q, k.transpose(1, 2), v.transpose(1, 2), mask)


def _flex(q, k_S, v_S, k_N, v_N, layout: Layout, see: Visibility) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if (
        q.device.type != "cuda"
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in (q, k_S, v_S, k_N, v_N))
    ):
        raise UserError(
            f"attention backend flex cannot train on a {q.device.type} device (torch's flex_attention has "
            "no backward pass there); use machine.train.attention: split"
        )
    if q.device.type != "cuda":  # torch refuses even tensors that merely could need a gradient
        q, k_S, v_S, k_N, v_N = (t.detach() for t in (q, k_S, v_S, k_N, v_N))
    device, block, s = q.device, layout.block_size, layout.num_context
    anchor, start, *_ = layout.on_device(device)

    def sees(_b, _h, row, key):
        n, slot = row // block, row % block
        position = anchor[n] + slot
        context = (key < s) & (key >= start[n]) & (key < anchor[n])
        own_slot = (key - s) % block
        own = (key >= s) & ((key - s) // block == n)
        back = slot - own_slot
        if see.causal:
            own = own & (back >= 0)
        if see.window is not None:
            context = context & (position - key < see.window)
            own = own & (back.abs() < see.window)
        return context | own

    rows = q.flatten(0, 1)
    keys = torch.cat([k_S, k_N.flatten(0, 1)])
    values = torch.cat([v_S, v_N.flatten(0, 1)])
    inputs = [x.transpose(0, 1)[None] for x in (rows, keys, values)]
    compiled = device.type == "cuda"

    def run() -> torch.Tensor:
        key = see, str(device)
        if key not in layout.flex_masks:  # built once a batch, not once a layer
            # compiled, or it makes several int64 tensors of rows x keys on the way
            layout.flex_masks[key] = create_block_mask(
                sees, None, None, len(rows), len(keys), device=str(device), _compile=compiled
            )
        attention = _compiled_flex() if compiled else flex_attention
        return attention(*inputs, block_mask=layout.flex_masks[key], enable_gqa=True)

    if not compiled:
        out = run()
    else:
        try:
            with _flex_lock:  # tracing is not safe between threads
                out = run()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as e:  # whatever the compiler of this build does
            raise UserError(
                f"attention backend flex does not compile here ({type(e).__name__}: "
                f"{str(e).splitlines()[0] if str(e) else ''}); use machine.train.attention: split"
            ) from e
    return out[0].transpose(0, 1).reshape(q.shape)


def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    global _FLEX
    if _FLEX is None:
        _FLEX = torch.compile(flex_attention, dynamic=False)
    return _FLEX


_FLEX = None
_flex_lock = threading.Lock()


def folded(
    q_nRQd: torch.Tensor, k_nKLd: torch.Tensor, v_nKLd: torch.Tensor, mask_n1RL: torch.Tensor
) -> torch.Tensor:
    """Masked attention of R query rows over L keys with grouped heads, [n, R, Q, d].

    The G query heads of a key head become G·R rows of it (see `fold`).
    """
    n, r, heads, d = q_nRQd.shape
    kv = k_nKLd.shape[1]
    g = heads // kv
    q_nKRd = q_nRQd.reshape(n, r, kv, g, d).permute(0, 2, 3, 1, 4).reshape(n, kv, g * r, d)
    mask = mask_n1RL.repeat(1, 1, g, 1)
    out = F.scaled_dot_product_attention(q_nKRd, k_nKLd, v_nKLd, attn_mask=mask)
    return out.view(n, kv, g, r, d).permute(0, 3, 1, 2, 4).reshape(n, r, heads, d)
