"""Weighted cross-entropy of slots against the data's tokens, never holding [N·B, V] logits.

Shapes: R supervised rows (slots) · H hidden width · V rows of the target's head.

The head belongs to the target and is frozen, so the only gradient wanted is the one of the hidden
states, and for a weighted sum of cross-entropies it is known as soon as a chunk's logits are:
w · (softmax - one_hot) @ head. It is computed in the forward pass, chunk by chunk; nothing is kept
but [R, H], and the head is multiplied twice a step instead of three times (as it would be with the
chunk recomputed in a checkpoint).
"""

from __future__ import annotations

import math

import torch


def slot_weights(block_size: int, gamma: float) -> torch.Tensor:
    """Weight of each slot, exp(-(k-1)/gamma) for k >= 1 and 0 for the anchor; float32 [B]."""
    w = torch.tensor([0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)])
    return w


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RH, head_VH, labels_R, weights_R, chunk):
        total = hidden_RH.new_zeros((), dtype=torch.float32)
        correct_R = torch.empty_like(labels_R, dtype=torch.bool)
        ce_R = torch.empty_like(weights_R)
        grad_RH = torch.empty_like(hidden_RH)
        for i in range(0, len(labels_R), chunk):
            rows = slice(i, i + chunk)
            logits = (hidden_RH[rows].to(head_VH.dtype) @ head_VH.T).float()
            label, weight = labels_R[rows, None], weights_R[rows, None]
            correct_R[rows] = logits.argmax(-1) == label[:, 0]
            logz = logits.logsumexp(-1, keepdim=True)
            ce = logz - logits.gather(1, label)
            ce_R[rows] = ce[:, 0]
            total += (weight * ce).sum()
            slope = logits.sub_(logz).exp_()  # softmax, in place
            slope.scatter_add_(1, label, torch.full_like(ce, -1.0))
            slope *= weight
            grad_RH[rows] = (slope.to(head_VH.dtype) @ head_VH).to(grad_RH.dtype)
        ctx.save_for_backward(grad_RH)
        ctx.mark_non_differentiable(ce_R, correct_R)
        return total, ce_R, correct_R

    @staticmethod
    def backward(ctx, grad_total, _ce, _correct):
        (grad_RH,) = ctx.saved_tensors
        return grad_RH * grad_total, None, None, None, None


def head_cross_entropy(
    hidden_RH: torch.Tensor,
    head_VH: torch.Tensor,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of weight · cross-entropy over rows, differentiable in `hidden_RH` only.

    Products run in the head's dtype, softmax and sums in float32; at most `chunk` rows of logits
    exist at once. Returns (sum [], cross-entropy [R], whether the argmax is the label [R]).
    """
    with torch.autocast(hidden_RH.device.type, enabled=False):
        return _HeadCrossEntropy.apply(hidden_RH, head_VH, labels_R, weights_R, chunk)
