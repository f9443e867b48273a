"""What is minimised over the slots of the blocks, never holding [N·B, V] logits.

Shapes: N blocks · B slots of a block · R supervised rows (slots) · S context rows · H hidden width ·
V rows of the target's head.

The loss of a pack is the sum over its supervised slots of weight · slot loss. Three kinds of labels:

    data    cross-entropy to the data's token
    argmax  cross-entropy to the target's own likeliest token there
    soft    KL(target || drafter), with the gradient of the cross-entropy to that distribution

and two kinds of weights:

    decay   exp(-(k-1)/gamma) for slot k (DFlash paper)
    dpace   1 times the factor of `dpace_factors`, which follows the drafter's own confidence

A step is normalised once: the sum over all its packs is divided by its *weight mass*, the sum of the
weights of all its supervised slots before any D-PACE factor. So the mass follows from the batch
alone, is known before the first forward pass, and may be added up over micro-batches and ranks,
which makes the gradient independent of how a step is split. For `decay` that is the weighted mean
(SpecForge's); for `dpace`, whose weights are all 1 before the factor, the mass is the count of
supervised slots (speculators'; SpecForge divides by the count of documents instead).

The head belongs to the target and is frozen, so the only gradient wanted is the one of the hidden
states, and a slot's is known as soon as its logits are: (softmax - target distribution) @ head. It
is computed in the forward pass, group of rows by group; nothing is kept but [R, H], and the head is
multiplied twice a step (three times with the target's distribution) instead of once more for
recomputing. The weights only scale rows of it, so they may depend on all of a block's slot losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dflash.taps import softcapped


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Weight of each slot, exp(-(k-1)/gamma) for k >= 1 and 0 for the anchor; float32 [B].

    An infinite gamma weighs all slots alike.
    """
    w = torch.tensor([0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)])
    return w


# Logits that exist at once unless a number of rows is set. The C library maps and unmaps buffers
# beyond 32 MiB anew each time, which costs more than larger products gain.
LOGITS_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def rows_within(device_type: str, vocab: int, itemsize: int = 4) -> int:
    """Rows of logits that fit the memory target of a kind of device."""
    limit = LOGITS_BYTES.get(device_type, LOGITS_BYTES["cuda"])
    return max(16, (limit - 4096) // (vocab * itemsize))


@torch.no_grad()
def dpace_factors(confidence_NB: Tensor, supervised_NB: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights, [N, B]; 0 where nothing is supervised (arXiv 2605.18810, eq. 7 and 8).

    With q_i the drafter's probability of slot i's label and q~_i = (1 - alpha) q_i + alpha, slot j
    weighs the sum over m >= j of the product over i <= m of q~_i: the chance that the block is
    accepted up to j, times the tokens to be won from there. Unsupervised slots are passed over in
    product and sum. Nothing flows back through it.
    """
    smooth_NB = torch.where(supervised_NB, (1 - alpha) * confidence_NB + alpha, 1.0)
    reach_NB = smooth_NB.cumprod(-1) * supervised_NB
    return reach_NB.flip(-1).cumsum(-1).flip(-1) * supervised_NB


@dataclass(frozen=True)
class Teacher:
    """Where the target's own distribution of each slot's token comes from.

    The hidden state at position p - 1 decides the token at position p, so the slot at a + k belongs
    to the row of position a + k - 1 (`dflash.data.Pack.target_rows_NB`).
    """

    last_SH: Tensor  # outputs of the target's last layer, before its final norm
    rows_NB: Tensor  # int64; row of last_SH for each slot, read where it is supervised
    norm: nn.Module  # the target's own final norm, in the head's dtype
    cap: float | None = None  # of its logits (`dflash.taps.softcapped`)


class SlotLosses(NamedTuple):
    """What is known of each supervised row."""

    loss_R: Tensor  # cross-entropy or KL; differentiable in the hidden states
    confidence_R: Tensor  # the drafter's probability of the label (soft: of the target's argmax)
    correct_R: Tensor  # bool; whether the drafter's likeliest token is that label


def _group(
    rows: slice,
    hidden_RH: Tensor,
    head_VH: Tensor,
    labels_R: Tensor | None,
    target_logits: Callable[[slice], Tensor] | None,
    soft: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One group of rows: loss, log of the confidence, whether right, and the loss's gradient [C, H].

    Its own function, so that nothing [C, V] outlives the group.
    """
    p_CV = None
    if target_logits is None:
        label_C = labels_R[rows]
    elif soft:
        t_CV = target_logits(rows).to(_wide(head_VH))
        top_C1, label_C = t_CV.max(-1, keepdim=True)
        label_C = label_C[:, 0]
        t_CV = t_CV - top_C1
        p_CV = t_CV.exp()
        sum_C1 = p_CV.sum(-1, keepdim=True)
        p_CV /= sum_C1
        # sum of p log p
        loss_C = torch.linalg.vecdot(p_CV, t_CV) - sum_C1[:, 0].log()
        del t_CV
    else:
        label_C = target_logits(rows).argmax(-1)
    q_CV = (hidden_RH[rows].to(head_VH.dtype) @ head_VH.T).to(_wide(head_VH))
    top_C1, best_C = q_CV.max(-1, keepdim=True)
    q_CV -= (
        top_C1  # every pass over [C, V] costs as much as a good part of the product: few, in place
    )
    label_C1 = label_C[:, None]
    log_confidence_C1 = q_CV.gather(1, label_C1)
    if p_CV is not None:
        cross_C = torch.linalg.vecdot(p_CV, q_CV)
    q_CV.exp_()
    sum_C1 = q_CV.sum(-1, keepdim=True)
    log_sum_C1 = sum_C1.log()
    log_confidence_C1 -= log_sum_C1
    q_CV /= sum_C1
    if p_CV is not None:
        loss_C += log_sum_C1[:, 0] - cross_C
        q_CV -= p_CV
    else:
        loss_C = -log_confidence_C1[:, 0]
        q_CV.scatter_add_(1, label_C1, torch.full_like(log_confidence_C1, -1.0))
    grad_CH = q_CV.to(head_VH.dtype) @ head_VH
    return loss_C, log_confidence_C1[:, 0], best_C[:, 0] == label_C, grad_CH


def _wide(head_VH: Tensor) -> torch.dtype:
    """The dtype of softmax and sums: float32, or float64 in that (tests)."""
    return torch.promote_types(head_VH.dtype, torch.float32)


class _SlotLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RH, head_VH, labels_R, target_logits, soft, chunk):
        loss_R = hidden_RH.new_empty(len(hidden_RH), dtype=_wide(head_VH))
        log_confidence_R = torch.empty_like(loss_R)
        correct_R = torch.empty_like(loss_R, dtype=torch.bool)
        grad_RH = torch.empty_like(hidden_RH)
        for i in range(0, len(hidden_RH), chunk):
            rows = slice(i, i + chunk)
            loss_R[rows], log_confidence_R[rows], correct_R[rows], grad_RH[rows] = _group(
                rows, hidden_RH, head_VH, labels_R, target_logits, soft
            )
        ctx.save_for_backward(grad_RH)
        confidence_R = log_confidence_R.exp_()
        ctx.mark_non_differentiable(confidence_R, correct_R)
        return loss_R, confidence_R, correct_R

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_R, _confidence, _correct):
        (grad_RH,) = ctx.saved_tensors
        # `out` rounds once and makes no copy in the wider dtype
        out = torch.mul(grad_RH, grad_R[:, None], out=torch.empty_like(grad_RH))
        return out, None, None, None, None, None


def slot_losses(
    hidden_RH: Tensor,
    head_VH: Tensor,
    labels_R: Tensor | None,
    chunk: int | None = None,
    target_logits: Callable[[slice], Tensor] | None = None,
    soft: bool = False,
) -> SlotLosses:
    """The loss of each row, differentiable in `hidden_RH` only.

    Without `target_logits`, cross-entropy to `labels_R`. With it (rows -> the target's logits [C, V]
    over the same rows of the head), cross-entropy to the target's argmax or, if `soft`, the KL from
    its distribution. Products run in the head's dtype, softmax and sums in at least float32; at most
    `chunk` rows of logits exist at once.
    """
    chunk = chunk or rows_within(hidden_RH.device.type, len(head_VH))
    with torch.autocast(hidden_RH.device.type, enabled=False):
        return SlotLosses(
            *_SlotLosses.apply(hidden_RH, head_VH, labels_R, target_logits, soft, chunk)
        )


def block_loss(
    hidden_NBH: Tensor,
    head_VH: Tensor,
    labels_NB: Tensor,
    weights_NB: Tensor,
    chunk: int | None = None,
    teacher: Teacher | None = None,
    soft: bool = False,
    dpace_alpha: float | None = None,
    at_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of weight · slot loss over the supervised slots of a pack, not yet divided by the mass.

    Args:
        hidden_NBH: the drafter's outputs, [N, B, H].
        head_VH: the target's head, or some rows of it; then the target's distribution is that over
            these rows alone, and its argmax the likeliest of them.
        labels_NB: the data's tokens as rows of the head; int64.
        weights_NB: weights before any D-PACE factor, whose sum is the mass; 0: not supervised.
        chunk: rows of logits that exist at once; None: as `rows_within` says.
        teacher: where the target's distribution comes from; None for the data's labels.
        soft: KL to that distribution instead of cross-entropy to its argmax.
        dpace_alpha: smoothing of D-PACE's factors; None for none.
        at_R: places among N·B of the slots whose weight is above 0, ascending; None: they are looked
            for, which on a GPU waits for all that was queued before.
    Returns (sum [], correct bool [N, B], false where nothing is supervised).
    """
    if at_R is None:
        at_R = (weights_NB > 0).flatten().nonzero()[:, 0]

    def of_supervised(x_NB: Tensor) -> Tensor:
        return x_NB.flatten().index_select(0, at_R)

    def over_slots(x_R: Tensor) -> Tensor:
        zeros = torch.zeros(weights_NB.numel(), dtype=x_R.dtype, device=x_R.device)
        return zeros.index_copy_(0, at_R, x_R).view(weights_NB.shape)

    target_logits = None
    if teacher is not None:
        rows_R = of_supervised(teacher.rows_NB)

        def target_logits(rows: slice) -> Tensor:
            last_CH = teacher.last_SH[rows_R[rows]].to(head_VH.dtype)
            return softcapped(teacher.norm(last_CH) @ head_VH.T, teacher.cap)

    loss_R, confidence_R, correct_R = slot_losses(
        hidden_NBH.flatten(0, 1).index_select(0, at_R),
        head_VH,
        of_supervised(labels_NB),
        chunk,
        target_logits,
        soft,
    )
    weights_R = of_supervised(weights_NB)
    if dpace_alpha is not None:
        factors_NB = dpace_factors(over_slots(confidence_R), weights_NB > 0, dpace_alpha)
        weights_R = weights_R * of_supervised(factors_NB)
    return (weights_R * loss_R).sum(), over_slots(correct_R)
