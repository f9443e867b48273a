"""Attention of draft blocks over the context of packed documents, without copying a key per block.

Shapes: S context rows of all documents laid end to end · N blocks sorted by (document, anchor) ·
B slots a block · Q query heads · K key/value heads, G = Q/K · d head width.

A slot of a block anchored at row a sees the context rows of its own document strictly before a, and
the slots of its own block; blocks never see each other. Since the blocks are sorted, the keys of
some neighbouring blocks are one contiguous view of the context (from the start of the first one's
document to the last one's anchor) followed by the group's own slots. `chunked` takes the blocks
group by group that way: no key is copied per block, no mask is larger than a group's, and the
groups' key ranges form a staircase, so about half of the [N·B, S] rectangle is never computed.

`dense` is the same with one mask over everything: slow, obvious, and what `chunked` is tested
against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

# Slots in one group unless set. Smaller groups compute less of what the mask forbids, larger ones
# give the kernel more to do at once; on CPU and at documents of a few thousand tokens the step time
# is flat between 128 and 512.
GROUP_ROWS = 256


@dataclass(frozen=True)
class Visibility:
    """How far a slot sees: `window` positions back (own counted; None: all), and whether only back.

    Context always lies before the block, so `causal` matters inside the block only.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class Group:
    """Some neighbouring blocks and the context rows that any of them may see."""

    first: int  # blocks first..last-1
    last: int
    low: int  # context rows low..high-1
    high: int


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
        self.group_blocks = max(1, (group_rows or GROUP_ROWS) // block_size)
        self._masks: dict[tuple[Visibility, str], list[torch.Tensor]] = {}

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

    @cached_property
    def groups(self) -> list[Group]:
        """The blocks in groups, each with the context rows it may see."""
        out = []
        for first in range(0, self.num_blocks, self.group_blocks):
            last = min(first + self.group_blocks, self.num_blocks)
            out.append(Group(first, last, int(self.start_N[first]), int(self.anchors[last - 1])))
        return out

    def mask(self, group: Group, see: Visibility) -> torch.Tensor:
        """Which keys the group's slots see; bool [C·B, (high - low) + C·B], context keys first."""
        blocks = slice(group.first, group.last)
        slot = torch.arange(self.block_size)
        anchor_C, start_C = self.anchors[blocks], self.start_N[blocks]
        row_K = torch.arange(group.low, group.high)
        context = (row_K >= start_C[:, None]) & (row_K < anchor_C[:, None])
        context_CBK = context[:, None].expand(-1, self.block_size, -1)
        back = slot[:, None] - slot[None, :]  # positions from key back to query, in one block
        own = torch.ones_like(back, dtype=torch.bool)
        if see.causal:
            own &= back >= 0
        if see.window is not None:
            distance = (anchor_C[:, None] + slot)[:, :, None] - row_K
            context_CBK = context_CBK & (distance < see.window)
            own &= back.abs() < see.window
        count = group.last - group.first
        own = torch.block_diag(*[own] * count)
        return torch.cat([context_CBK.flatten(0, 1), own], dim=1)

    def masks(self, see: Visibility, device: torch.device) -> list[torch.Tensor]:
        """The masks of all groups on a device, made at first use."""
        key = (see, str(device))
        if key not in self._masks:
            self._masks[key] = [self.mask(g, see).to(device) for g in self.groups]
        return self._masks[key]


def attend(
    q_NBQd: torch.Tensor,
    k_SKd: torch.Tensor,
    v_SKd: torch.Tensor,
    k_NBKd: torch.Tensor,
    v_NBKd: torch.Tensor,
    layout: Layout,
    see: Visibility = Visibility(),  # noqa: B008 (frozen)
    backend: str = "chunked",
) -> torch.Tensor:
    """Attention of all blocks' slots over their context and their own block, scaled by d^-1/2.

    Takes queries [N, B, Q, d], context keys and values [S, K, d], block keys and values
    [N, B, K, d], all in one dtype; returns [N, B, Q, d]. Differentiable in all five.
    """
    if backend == "dense":
        everything = Group(0, layout.num_blocks, 0, layout.num_context)
        groups, masks = [everything], [layout.mask(everything, see).to(q_NBQd.device)]
    elif backend == "chunked":
        groups, masks = layout.groups, layout.masks(see, q_NBQd.device)
    else:
        raise ValueError(f"no attention backend {backend!r}; there are chunked and dense")
    out = []
    for g, mask in zip(groups, masks, strict=True):
        k_LKd = torch.cat([k_SKd[g.low : g.high], k_NBKd[g.first : g.last].flatten(0, 1)])
        v_LKd = torch.cat([v_SKd[g.low : g.high], v_NBKd[g.first : g.last].flatten(0, 1)])
        rows_RQd = q_NBQd[g.first : g.last].flatten(0, 1)
        seen = folded(
            rows_RQd[None],
            k_LKd.transpose(0, 1)[None],
            v_LKd.transpose(0, 1)[None],
            mask[None, None],
        )
        out.append(seen[0].unflatten(0, (-1, layout.block_size)))
    return torch.cat(out) if out else torch.zeros_like(q_NBQd)


def folded(
    q_nRQd: torch.Tensor, k_nKLd: torch.Tensor, v_nKLd: torch.Tensor, mask_n1RL: torch.Tensor
) -> torch.Tensor:
    """Masked attention of R query rows over L keys with grouped heads, [n, R, Q, d].

    The G query heads of a key head become G·R rows of it. `enable_gqa` with a mask has no fused CUDA
    kernel and falls silently to the math one, and repeating the keys copies them G times; folded, it
    is plain attention with K heads on any kernel.
    """
    n, r, heads, d = q_nRQd.shape
    kv = k_nKLd.shape[1]
    g = heads // kv
    q_nKRd = q_nRQd.reshape(n, r, kv, g, d).permute(0, 2, 3, 1, 4).reshape(n, kv, g * r, d)
    mask = mask_n1RL.repeat(1, 1, g, 1)
    out = F.scaled_dot_product_attention(q_nKRd, k_nKLd, v_nKLd, attn_mask=mask)
    return out.view(n, kv, g, r, d).permute(0, 3, 1, 2, 4).reshape(n, r, heads, d)
