"""From documents to packed training batches: some documents laid end to end, with their blocks.

Legend: S context rows · N blocks · B slots of a block · T taps · H hidden width · D = T·H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from dflash.attention import Layout, Numbers
from dflash.errors import UserError


class Document(Protocol):
    """What a feature shard gives for one document of S tokens."""

    sample_id: str
    input_ids: np.ndarray  # int32 [S]
    loss_mask: np.ndarray  # bool [S]
    hidden: np.ndarray  # uint16 [S, T, H], bf16 bits
    last_hidden: np.ndarray | None  # uint16 [S, H], bf16 bits, before the final norm; if asked for


@dataclass
class Pack:
    """Some documents laid end to end, with their blocks. S context rows, N blocks, B slots, R supervised
    slots of the blocks."""

    sample_ids: list[str]
    taps_SD: torch.Tensor  # bfloat16 [S, T·H]
    anchor_tokens_N: torch.Tensor  # int64
    labels_NB: torch.Tensor  # int64; -1 where nothing is supervised
    weights_NB: torch.Tensor  # float32; 0 where nothing is supervised
    target_rows_NB: torch.Tensor  # int64; context row whose hidden state decides the slot's token
    layout: Layout
    last_SH: torch.Tensor | None = None  # bfloat16 [S, H], before the target's final norm
    real_rows: int = 0  # the first so many rows and blocks; the others are padding
    real_blocks: int = 0
    outside_head: int = 0  # slots whose label a reduced head lacks
    at_R: torch.Tensor | None = None  # int64; places among N·B of the supervised slots (`stage`)
    integers: torch.Tensor | None = None  # all int64 of the pack in one block of pinned memory

    @property
    def mass(self) -> float:
        """Sum of the weights."""
        return float(self.weights_NB.sum(dtype=torch.float64))

    def stage(self, pin: bool) -> None:
        """Do what is left for the host, once labels and weights are final: look up the supervised slots
        and, with `pin`, put what is small into pinned memory, so that `to` need not wait."""
        self.at_R = (self.weights_NB > 0).flatten().nonzero()[:, 0]
        if pin:
            parts = [x.flatten() for x in self._integers()]
            size = sum(x.numel() for x in parts)
            self.integers = torch.empty(size, dtype=torch.int64, pin_memory=True)
            torch.cat(parts, out=self.integers)
            self.weights_NB = self.weights_NB.pin_memory()

    def _integers(self) -> tuple[torch.Tensor, ...]:
        own = self.anchor_tokens_N, self.labels_NB, self.target_rows_NB, self.at_R
        return *own, *self.layout.numbers

    def to(self, device: torch.device) -> Pack:
        """The pack for passes on a device; on the current stream, and without the host waiting where all
        of it lies in pinned memory."""
        if self.at_R is None:
            self.stage(pin=False)
        if self.taps_SD.device == device:
            return self
        parts = self._integers()
        if self.integers is None:
            moved = [x.to(device) for x in parts]
        else:
            block = self.integers.to(device, non_blocking=True)
            pieces = block.split([x.numel() for x in parts])
            moved = [a.view(b.shape) for a, b in zip(pieces, parts, strict=True)]
        tokens_N, labels_NB, rows_NB, at_R, *numbers = moved
        self.layout.put(device, Numbers(*numbers))
        last_SH = self.last_SH
        return replace(
            self,
            taps_SD=self.taps_SD.to(device, non_blocking=True),
            last_SH=None if last_SH is None else last_SH.to(device, non_blocking=True),
            anchor_tokens_N=tokens_N,
            labels_NB=labels_NB,
            weights_NB=self.weights_NB.to(device, non_blocking=True),
            target_rows_NB=rows_NB,
            at_R=at_R,
            integers=None,
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that passes read."""
        own = [self.taps_SD, self.last_SH, self.weights_NB, self.anchor_tokens_N, self.labels_NB]
        own += [self.target_rows_NB, self.at_R, *self.layout.on_device(self.taps_SD.device)]
        return [x for x in own if x is not None]


def responses(loss_mask_S: np.ndarray) -> np.ndarray:
    """Where each response of one document, a run of supervised tokens, begins and ends; int64 [R, 2]."""
    edges = np.diff(loss_mask_S.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges).reshape(-1, 2)


def supervised_slots(loss_mask_S: np.ndarray, anchors_N: np.ndarray, block: int) -> np.ndarray:
    """Which slots of the blocks at some anchors of one document are supervised; bool [N, B].

    Slot k of the block at a is, iff k >= 1, a + k lies in the document and the mask is True there.
    """
    at_NB = anchors_N[:, None] + np.arange(block)
    inside_NB = at_NB < len(loss_mask_S)
    on_NB = inside_NB & loss_mask_S[np.minimum(at_NB, len(loss_mask_S) - 1)]
    on_NB[:, 0] = False
    return on_NB


def pack(
    documents: list[Document],
    anchors_of: list[np.ndarray],
    slot_weights_B: torch.Tensor,
    group_rows: int | None = None,
    pad_context: int | None = None,
    pad_blocks: int | None = None,
    pin: bool = False,
) -> Pack:
    """Lay documents end to end and label the blocks at their anchors.

    The label of a supervised slot (see `supervised_slots`) is the token at its own position, no
    shift. The target decided on that token from its hidden state one position earlier: the row
    a + k - 1 for slot k of the block at a.

    `pad_context` and `pad_blocks` bring the pack to exactly so many context rows and blocks, so that
    every step has the same shapes. What is added is one more document of zeros with blocks at its
    first row: they see nothing of the others, nothing of theirs is supervised, and no gradient
    changes. `pin` puts the hidden states into memory that a GPU can fetch by itself. Raises
    UserError when a pack is larger than it is to become.
    """
    block = len(slot_weights_B)
    starts = np.cumsum([0, *(len(d.input_ids) for d in documents)])
    labels, tokens, rows = [], [], []
    for document, chosen, start in zip(documents, anchors_of, starts[:-1], strict=True):
        ids = document.input_ids.astype(np.int64)
        on = supervised_slots(document.loss_mask, chosen, block)
        at = np.minimum(chosen[:, None] + np.arange(block), len(ids) - 1)
        labels.append(np.where(on, ids[at], -1))
        tokens.append(ids[chosen])
        rows.append(chosen + start)
    labels_NB = torch.from_numpy(np.concatenate(labels))
    anchors_N = torch.from_numpy(np.concatenate(rows))
    tokens_N = torch.from_numpy(np.concatenate(tokens))
    real_rows, real_blocks = int(starts[-1]), len(labels_NB)
    short_rows, short_blocks = 0, 0
    if (pad_context is None) != (pad_blocks is None):
        raise ValueError("pad_context and pad_blocks make constant shapes only together")
    if pad_context is not None and pad_blocks is not None:
        check_room(real_rows, real_blocks, pad_context, pad_blocks)
        short_rows, short_blocks = pad_context - real_rows, pad_blocks - real_blocks
    if short_rows:
        starts = np.append(starts, real_rows + short_rows)
    if short_blocks:
        labels_NB = F.pad(labels_NB, (0, 0, 0, short_blocks), value=-1)
        tokens_N = F.pad(tokens_N, (0, short_blocks))
        anchors_N = F.pad(anchors_N, (0, short_blocks), value=real_rows)
    num_rows = real_rows + short_rows
    last = [d.last_hidden for d in documents]
    return Pack(
        sample_ids=[d.sample_id for d in documents],
        taps_SD=_end_to_end([d.hidden for d in documents], num_rows, pin),
        anchor_tokens_N=tokens_N,
        labels_NB=labels_NB,
        weights_NB=torch.where(labels_NB >= 0, slot_weights_B, 0.0),
        target_rows_NB=(anchors_N[:, None] + torch.arange(-1, block - 1)).clamp(0, num_rows - 1),
        layout=Layout(torch.from_numpy(starts), anchors_N, block, group_rows),
        last_SH=None if any(x is None for x in last) else _end_to_end(last, num_rows, pin),
        real_rows=real_rows,
        real_blocks=real_blocks,
    )


def _end_to_end(states: list[np.ndarray], rows: int, pin: bool) -> torch.Tensor:
    """The documents' bf16 bits in one tensor of so many rows, zeros behind them; bfloat16 [S, ...]."""
    widths = states[0].shape[1:]
    out = torch.empty(rows, math.prod(widths), dtype=torch.bfloat16, pin_memory=pin)
    bits, at = out.view(torch.uint16).numpy().reshape(rows, *widths), 0
    for one in states:
        bits[at : at + len(one)] = one
        at += len(one)
    bits[at:] = 0
    return out


def check_room(rows: int, blocks: int, pad_context: int, pad_blocks: int) -> None:
    """Raises UserError when a pack of so many rows and blocks is larger than the constant shape."""
    if rows + 1 > pad_context or blocks > pad_blocks:
        raise UserError(
            f"machine.train: packs have up to {rows} tokens and {blocks} blocks, more than pad_context "
            f"{pad_context} (one row of it is for the padding) and pad_blocks {pad_blocks} hold; raise them "
            "or lower micro_batch"
        )
