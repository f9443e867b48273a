"""From feature shards to packed training batches.

The training stream is the documents of epoch 0 in an order drawn from (seed, 0), then those of epoch
1, and so on; step t takes the next `documents_per_step` of them. A step is therefore a function of
(settings, features, t) alone, and a resumed run needs to know nothing but t.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from dflash import anchors
from dflash.attention import Layout
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
    """Some documents laid end to end, with their blocks. S context rows, N blocks, B slots."""

    sample_ids: list[str]
    taps_SD: torch.Tensor  # bfloat16 [S, T·H]
    anchor_tokens_N: torch.Tensor  # int64
    labels_NB: torch.Tensor  # int64; -1 where nothing is supervised
    weights_NB: torch.Tensor  # float32; 0 where nothing is supervised
    target_rows_NB: torch.Tensor  # int64; context row whose hidden state decides the slot's token
    layout: Layout
    last_SH: torch.Tensor | None = None  # bfloat16 [S, H], before the target's final norm
    real_blocks: int = 0  # the first so many blocks; the others are padding

    @property
    def mass(self) -> float:
        """Sum of the weights, known before the forward: a step's loss is divided by its packs' sum."""
        return float(self.weights_NB.sum(dtype=torch.float64))


def pack(
    documents: list[Document],
    anchors_of: list[np.ndarray],
    slot_weights_B: torch.Tensor,
    group_rows: int | None = None,
    pad_context: int | None = None,
    pad_blocks: int | None = None,
) -> Pack:
    """Lay documents end to end and label the blocks at their anchors.

    Slot k of the block at a is supervised iff k >= 1, a + k lies in the document, and the token
    there belongs to the response; its label is that token (its own position, no shift). The target
    decided on that token from its hidden state one position earlier: the row a + k - 1.

    `pad_context` and `pad_blocks` bring the pack to exactly so many context rows and blocks, so that
    every step has the same shapes. What is added is one more document of zeros with blocks at its
    first row: they see nothing of the others, nothing of theirs is supervised, and no gradient
    changes. Raises UserError when a pack is larger than that.
    """
    block = len(slot_weights_B)
    lengths = [len(d.input_ids) for d in documents]
    starts = np.cumsum([0, *lengths])
    labels, tokens, rows = [], [], []
    for document, chosen, start in zip(documents, anchors_of, starts[:-1], strict=True):
        ids = document.input_ids.astype(np.int64)
        at = chosen[:, None] + np.arange(block)
        inside = at < len(ids)
        at = np.minimum(at, len(ids) - 1)
        supervised = inside & document.loss_mask[at]
        supervised[:, 0] = False
        labels.append(np.where(supervised, ids[at], -1))
        tokens.append(ids[chosen])
        rows.append(chosen + start)
    labels_NB = torch.from_numpy(np.concatenate(labels))
    hidden = np.concatenate([d.hidden.reshape(len(d.input_ids), -1) for d in documents])
    last = [d.last_hidden for d in documents]
    short_rows, short_blocks = 0, 0
    if (pad_context is None) != (pad_blocks is None):
        raise ValueError("pad_context and pad_blocks make constant shapes only together")
    if pad_context is not None and pad_blocks is not None:
        short_rows, short_blocks = _short(
            documents, starts[-1], len(labels_NB), pad_context, pad_blocks
        )
    anchors_N = torch.from_numpy(np.concatenate(rows))
    tokens_N = torch.from_numpy(np.concatenate(tokens))
    last_SH = None if any(x is None for x in last) else np.concatenate(last)
    if short_rows:
        starts = np.append(starts, starts[-1] + short_rows)
        hidden = np.pad(hidden, ((0, short_rows), (0, 0)))
        last_SH = None if last_SH is None else np.pad(last_SH, ((0, short_rows), (0, 0)))
    if short_blocks:
        labels_NB = F.pad(labels_NB, (0, 0, 0, short_blocks), value=-1)
        tokens_N = F.pad(tokens_N, (0, short_blocks))
        anchors_N = F.pad(anchors_N, (0, short_blocks), value=int(starts[-2]))
    return Pack(
        sample_ids=[d.sample_id for d in documents],
        taps_SD=torch.from_numpy(hidden).view(torch.bfloat16),
        anchor_tokens_N=tokens_N,
        labels_NB=labels_NB,
        weights_NB=torch.where(labels_NB >= 0, slot_weights_B, 0.0),
        target_rows_NB=(anchors_N[:, None] + torch.arange(-1, block - 1)).clamp(
            0, int(starts[-1]) - 1
        ),
        layout=Layout(torch.from_numpy(starts), anchors_N, block, group_rows),
        last_SH=None if last_SH is None else torch.from_numpy(last_SH).view(torch.bfloat16),
        real_blocks=len(labels_NB) - short_blocks,
    )


def _short(
    documents: list[Document],
    rows: int,
    blocks: int,
    pad_context: int,
    pad_blocks: int,
) -> tuple[int, int]:
    """Rows and blocks missing to a constant shape."""
    if rows + 1 > pad_context or blocks > pad_blocks:
        raise UserError(
            f"machine.train: a pack of {len(documents)} documents has {rows} tokens and {blocks} "
            f"blocks, more than pad_context {pad_context} (one row of it is for the padding) and "
            f"pad_blocks {pad_blocks} hold; raise them or lower micro_batch"
        )
    return pad_context - int(rows), pad_blocks - blocks


class Shards(Protocol):
    """An opened feature shard."""

    sample_ids: list[str]

    def read(
        self, i: int, taps: list[int] | None = None, last_hidden: bool = False
    ) -> Document: ...


class Stream:
    """The endless, deterministic sequence of training documents.

    Args:
        shards: opened feature shards.
        taps: positions of the wanted taps in the stores.
        seed: seed of document order and anchors.
        anchors_per_document: most blocks of a document in one epoch.
        last_hidden: read the target's last hidden state too.
        everywhere: draw and supervise blocks in prompts too, not only in responses.
    Raises UserError when no document can hold a block.
    """

    def __init__(
        self,
        shards: list[Shards],
        taps: list[int],
        seed: int,
        anchors_per_document: int,
        last_hidden: bool = False,
        everywhere: bool = False,
    ):
        self.shards, self.taps, self.seed, self.everywhere = shards, taps, seed, everywhere
        self.anchors_per_document, self.last_hidden = anchors_per_document, last_hidden
        where = {
            sample_id: (shard, i)
            for shard in range(len(shards))
            for i, sample_id in enumerate(shards[shard].sample_ids)
        }
        total = sum(len(s.sample_ids) for s in shards)
        self.repeated = total - len(where)  # the same prompt in two sources counts once
        # Sorted by id, so that the order does not depend on how documents lie in shards.
        self.ids = sorted(where)
        self.where = [where[i] for i in self.ids]
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Documents in one epoch."""
        return len(self.ids)

    def at(self, position: int) -> tuple[Document, np.ndarray]:
        """Document number `position` of the stream, and its anchors in that epoch."""
        epoch, i = divmod(position, len(self))
        if epoch not in self._orders:
            self._orders = {epoch: anchors.permutation(len(self), "documents", self.seed, epoch)}
        shard, row = self.where[int(self._orders[epoch][i])]
        document = self.shards[shard].read(row, self.taps, self.last_hidden)
        if self.everywhere:
            document = replace(document, loss_mask=supervised(document.loss_mask, True))
        chosen = anchors.choose(
            document.loss_mask, self.anchors_per_document, self.seed, epoch, document.sample_id
        )
        return document, chosen

    def drop_unusable(self) -> int:
        """Leave out documents that can hold no anchor (a response of fewer than two tokens).

        Returns how many. Raises UserError when none is left.
        """
        masks = (supervised(self.shards[s].loss_mask(r), self.everywhere) for s, r in self.where)
        usable = [len(anchors.candidates(mask)) > 0 for mask in masks]
        dropped = usable.count(False)
        self.ids = [x for x, ok in zip(self.ids, usable, strict=True) if ok]
        self.where = [x for x, ok in zip(self.where, usable, strict=True) if ok]
        if not self.ids:
            raise UserError(
                f"the features hold no supervised block: all {dropped} documents have responses of "
                "fewer than two tokens; raise regenerate.max_new_tokens or check the prompts"
            )
        return dropped

    def steps(
        self, first: int, last: int, documents_per_step: int
    ) -> Iterator[tuple[int, list[tuple[Document, np.ndarray]]]]:
        """Steps first..last-1 as (step, documents with anchors), the next one read in a thread."""

        def read(step: int) -> list[tuple[Document, np.ndarray]]:
            begin = step * documents_per_step
            return [self.at(p) for p in range(begin, begin + documents_per_step)]

        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(read, first) if first < last else None
            for step in range(first, last):
                documents = ahead.result()
                ahead = pool.submit(read, step + 1) if step + 1 < last else None
                yield step, documents


def supervised(loss_mask_S: np.ndarray, everywhere: bool) -> np.ndarray:
    """Where a document's tokens may be learned: its response, or all but its first token."""
    return np.arange(len(loss_mask_S)) > 0 if everywhere else loss_mask_S


def frequent_tokens(
    shards: list[Shards], count: int, vocab_size: int, everywhere: bool = False
) -> np.ndarray:
    """Ids of the `count` most frequent supervised tokens, ties to the smaller id; sorted int64."""
    seen = np.zeros(vocab_size, np.int64)
    for shard in shards:
        ids, mask = shard.tokens()
        seen += np.bincount(ids if everywhere else ids[mask], minlength=vocab_size)
    order = np.argsort(-seen, kind="stable")[:count]
    return np.sort(order[seen[order] > 0])
