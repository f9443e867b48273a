"""What a drafter in training accepts, on documents kept from it.

A kept document is text that the target wrote, so reading it says what decoding it would accept (see
`dflash.acceptance`): at every token of a response the run of right guesses, and, walking from the
first token by what was accepted, the response's cycles, whose average is τ. The average over all
positions is not: predictable stretches hold many positions and few cycles.

Shapes: S tokens of a document · N anchors · R responses · V vocabulary · H hidden width.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dflash import acceptance, anchors, data
from dflash.drafter import Drafter
from dflash.files import text_sha256
from dflash.loader import Shards

# --- which documents ----------------------------------------------------------------------------


def choose(shards: list[Shards], share: float, most: int) -> list[str]:
    """Ids of the samples kept for validation, those with the smallest hashes; sorted.

    Only samples with a response of two tokens or more can be, in which something is drafted. Of
    these it is a share, rounded down, and no more than `most`; at least one unless the share is 0,
    but one is always left for training. How samples lie in shards has no say, and one in several
    counts once, as its last shard has it. Reads no hidden states.
    """
    drafted = {}
    for shard in map(copy, shards):
        _, mask_P = shard.tokens()
        masks = np.split(mask_P, np.cumsum(shard.lengths)[:-1])
        for sample_id, mask_S in zip(shard.sample_ids, masks, strict=True):
            drafted[sample_id] = len(anchors.candidates(mask_S)) > 0
    able = sorted(
        (i for i, on in drafted.items() if on), key=lambda i: text_sha256("validate/" + i)
    )
    count = min(max(1, int(share * len(able))), most, len(able) - 1) if share else 0
    return sorted(able[: max(0, count)])


@dataclass(frozen=True)
class Documents:
    """Some documents of feature shards, which each iteration reads anew, one at a time.

    A slice is that of the documents: `documents[rank::world]` is a rank's part.
    """

    shards: list[Shards]
    taps: list[int]  # positions of the wanted taps in the stores
    places: list[tuple[int, int]]  # shard and row of each, ascending

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, part: slice) -> Documents:
        return replace(self, places=self.places[part])

    def __iter__(self) -> Iterator[data.Document]:
        """Raises UserError where the store is damaged."""
        for number, places in itertools.groupby(self.places, lambda place: place[0]):
            shard = copy(self.shards[number])  # what it keeps of what it read goes with it
            # Asking for all taps by name would copy the document once more.
            taps = None if self.taps == list(range(len(shard.taps))) else self.taps
            for _, row in places:
                yield shard.read(row, taps)


def read(shards: list[Shards], taps: list[int], ids: Collection[str]) -> Documents:
    """The documents of some samples; of one in several shards that of the last, as in training.

    Raises KeyError for a sample that no shard holds.
    """
    where = {}
    for number, shard in enumerate(shards):
        for row, sample_id in enumerate(copy(shard).sample_ids):
            where[sample_id] = number, row
    return Documents(shards, taps, sorted(where[i] for i in ids))


# --- what is accepted ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """A run of tokens that the target wrote, read by the drafter."""

    sample_id: str
    kind: str  # of its prompt; empty where it is not known
    start: int  # position of its first token in the document
    runs: list[int]  # of right guesses after each of its tokens but the last


def measure(
    drafter: Drafter,
    documents: Iterable[data.Document],
    embed_VH: torch.Tensor,
    head_VH: torch.Tensor,
    block_size: int,
    kinds: dict[str, str],
    dtype: torch.dtype,
) -> list[Response]:
    """The run of right guesses at every position of the documents' responses.

    Each response of a document counts for itself: guesses beyond its end are wrong, as they are in
    decoding, which ends there. Those of a single token are left out. One document's hidden states
    are in memory at once.

    Args:
        embed_VH: the target's embedding table.
        head_VH: its whole output head, in `dtype`. A cap of its logits changes no guess.
        block_size: slots of a block.
        kinds: the kind of each sample, as far as known.
        dtype: that of the matrix products, as in training.
    """
    device, was_training = head_VH.device, drafter.training
    found = []
    drafter.eval()
    try:
        for document in documents:
            spans = [(a, b) for a, b in data.responses(document.loss_mask).tolist() if b - a > 1]
            if not spans:
                continue
            anchors_N = torch.cat([torch.arange(a, b - 1) for a, b in spans])
            ends_N = torch.cat([torch.full((b - 1 - a,), b) for a, b in spans])
            taps_SD = torch.from_numpy(document.hidden).view(torch.bfloat16).flatten(1)
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                runs_N = acceptance.accepted_runs(
                    drafter,
                    embed_VH,
                    lambda hidden: hidden.to(head_VH.dtype) @ head_VH.T,
                    taps_SD.to(device, dtype),
                    torch.from_numpy(document.input_ids).to(device, torch.int64),
                    anchors_N.to(device),
                    block_size,
                    ends_N.to(device),
                )
            sample_id = document.sample_id
            parts = runs_N.cpu().split([b - 1 - a for a, b in spans])
            found += [
                Response(sample_id, kinds.get(sample_id, ""), start, runs.tolist())
                for (start, _), runs in zip(spans, parts, strict=True)
            ]
    finally:
        drafter.train(was_training)
    return found


def summary(responses: Iterable[Response], block_size: int) -> dict[str, Any]:
    """Acceptance of some responses in any order, as JSON.

    `tau_mean`, `tau_pooled`, `responses` and `cycles` as in `acceptance.taus`, of the cycles that
    decoding would have; `per_slot` likewise (`acceptance.per_slot`). `by_position` is the mean of run
    + 1 over all positions. `kinds` has the taus of each kind; responses of none are only in the
    whole. What nothing was measured for is None.
    """
    responses = sorted(responses, key=lambda r: (r.sample_id, r.start))  # sums depend on order
    cycles = [acceptance.walk(r.runs) for r in responses]
    runs = [run for r in responses for run in r.runs]
    kinds = sorted({r.kind for r in responses} - {""})
    return {
        **_taus(cycles),
        "by_position": round(sum(runs) / len(runs) + 1, 5) if runs else None,
        "per_slot": [round(share, 5) for share in acceptance.per_slot(cycles, block_size)],
        "kinds": {
            kind: _taus([c for r, c in zip(responses, cycles, strict=True) if r.kind == kind])
            for kind in kinds
        },
    }


def _taus(cycles_of: list[list[int]]) -> dict[str, Any]:
    found = acceptance.taus([(sum(c), len(c)) for c in cycles_of])
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in found.items()}
