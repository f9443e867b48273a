"""Caches of keys and values that are indexed by position, so that nothing ever needs cropping.

Shapes: n prompts decoded together · L new tokens · K key/value heads · Q query heads · d head width ·
P cache places.

The key of position p of a prompt lies at place p of its row. Rejected tokens stay where they are: the
next block begins at the first rejected position and overwrites their places before anything can look
at them, since a query at position q sees the places up to q and no further. Prompts of any length,
advancing at different speeds, share a batch, each seeing exactly what it would see alone.

Linear attention keeps a state instead, which cannot be overwritten by position: it is kept before a
block is read, put back where the block was not accepted whole, and fed the accepted tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer


@dataclass(frozen=True)
class Span:
    """The positions of L new tokens of every prompt, as the device and as the host know them."""

    at_nL: torch.Tensor
    start: int | None  # the first position, where it is the same for all prompts
    end: int  # one after the last position of any prompt

    @classmethod
    def of(cls, first_n: torch.Tensor, first: list[int], length: int) -> Span:
        """Positions `first[i]` to `first[i] + length - 1` of prompt i; `first_n` has them on the device."""
        start = first[0] if len(set(first)) == 1 else None
        at_nL = first_n[:, None] + torch.arange(length, device=first_n.device)
        return cls(at_nL, start, max(first) + length)

    def head(self, length: int) -> Span:
        """The first `length` positions of every prompt."""
        return Span(self.at_nL[:, :length], self.start, self.end - self.at_nL.shape[1] + length)


class Places:
    """Keys and values [n, K, P, d] of one layer, written and read by position."""

    def __init__(self, n: int, places: int):
        self.n, self.places = n, places
        self.keys = self.values = None

    def write(self, k_nKLd: torch.Tensor, v_nKLd: torch.Tensor, span: Span) -> None:
        """Store L new keys and values of every prompt at its own positions."""
        if self.keys is None:
            shape = (self.n, k_nKLd.shape[1], self.places, k_nKLd.shape[3])
            # zeros, since a hidden place is multiplied by a weight of 0 and must not be NaN
            self.keys, self.values = k_nKLd.new_zeros(shape), v_nKLd.new_zeros(shape)
        if span.start is not None:
            self.keys[:, :, span.start : span.end] = k_nKLd
            self.values[:, :, span.start : span.end] = v_nKLd
        else:
            index = span.at_nL[:, None, :, None].expand_as(k_nKLd)
            self.keys.scatter_(2, index, k_nKLd)
            self.values.scatter_(2, index, v_nKLd)

    def read(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` places, as views."""
        return self.keys[:, :, :length], self.values[:, :, :length]


class _AttentionLayer(DynamicLayer):
    """`Places` behind the interface that Hugging Face models call."""

    def __init__(self, owner: TargetCache, n: int, places: int):
        super().__init__()
        self.owner, self.data = owner, Places(n, places)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.data.write(key_states, value_states, self.owner.span)
        return self.data.read(self.owner.span.end)

    def get_seq_length(self) -> int:
        return 0


class TargetCache(Cache):
    """The target's cache. Set `span` before each forward.

    Layers of linear attention have no places: `states` copies what they hold, `restore` puts it back.
    """

    def __init__(self, n: int, places: int, kinds: list[str]):
        self.span: Span | None = None
        super().__init__(
            layers=[
                LinearAttentionLayer()
                if kind == "linear_attention"
                else _AttentionLayer(self, n, places)
                for kind in kinds
            ]
        )
        self.linear = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    def states(self) -> list[torch.Tensor]:
        """Copies of what the linear layers hold."""
        return [held[0].clone() for held in self._held()]

    def restore(self, states: list[torch.Tensor]) -> None:
        """Put back what `states` gave, which is used up."""
        for held, state in zip(self._held(), states, strict=True):
            held[0] = state

    def _held(self) -> list[dict[int, torch.Tensor]]:
        return [
            held for layer in self.linear for held in (layer.conv_states, layer.recurrent_states)
        ]


def grouped_attention(
    q_nQLd: torch.Tensor,
    k_nKPd: torch.Tensor,
    v_nKPd: torch.Tensor,
    mask_n1LP: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention [n, Q, L, d] of few queries over many places, whose keys are not copied.

    The G query heads of a key head become G·L rows of it: fused kernels want as many key heads as
    query heads where there is a mask, and repeating the keys copies the whole cache in every layer.
    Without a mask everything is visible.
    """
    n, heads, length, d = q_nQLd.shape
    groups = heads // k_nKPd.shape[1]
    q = q_nQLd.reshape(n, -1, groups * length, d)
    mask = mask_n1LP
    if mask is not None:
        mask = mask.expand(n, groups, -1, -1).reshape(n, 1, groups * length, -1)
    out = F.scaled_dot_product_attention(q, k_nKPd, v_nKPd, attn_mask=mask, scale=scale)
    return out.reshape(n, heads, length, d)
