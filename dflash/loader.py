"""The documents of training in their order, from any number of shards, read ahead by threads.

The training stream is the documents of epoch 0 in an order drawn from (seed, 0), then those of epoch
1, and so on; step t takes the next `documents_per_step` of them. A step is therefore a function of
(settings, features, t) alone: a resumed run needs to know nothing but t, and neither threads, ranks
nor the way documents lie in shards have a say.

A step's loss is divided by the weights of all its slots (see `dflash.loss`). They follow from loss
masks and anchors, so these masks are kept, a bit a token, and hidden states are read only pack by
pack. In memory are the pack in training, those read ahead (`machine.train.loader_mb`), an index of
some 50 bytes a document, and the small arrays of at most `OPEN_SHARDS` shards.

Legend: P tokens of a shard · S tokens of a document · N blocks of a document · B slots of a block.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from threading import Event
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from dflash import anchors, config
from dflash.data import Document, Pack, responses, supervised_slots
from dflash.errors import UserError

OPEN_SHARDS = 32  # each holds its small arrays, some bytes a token
REFERENCES = 16  # documents that the others' beginnings are compared with
AHEAD = 2  # packs a thread has read ahead or is reading: one is enough to hide a slow document
T = TypeVar("T")


class Shards(Protocol):
    """A feature shard. A copy of it has read nothing yet, and is free of what the original reads."""

    sample_ids: list[str]
    lengths: np.ndarray  # tokens of each document
    taps: list[int]
    attributes: dict[str, Any]  # `hidden_size` of them

    def read(
        self, i: int, taps: list[int] | None = None, last_hidden: bool = False
    ) -> Document: ...

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """input_ids int32 [P], loss_mask bool [P]."""


@dataclass(frozen=True)
class Place:
    """Where a document of the stream lies, and its blocks in that epoch."""

    sample_id: str
    shard: int
    row: int
    length: int  # S
    anchors_N: np.ndarray  # int64
    slots_B: np.ndarray  # int64; how many of its slots teach something, by their number


@dataclass(frozen=True)
class Plan:
    """One optimiser step, before any hidden state is read."""

    step: int
    mass: float  # sum of the weights of all its slots, on all ranks
    places: list[Place]  # what this rank reads


class Stream:
    """The endless, deterministic sequence of training documents.

    Looks once at all tokens and loss masks, one shard at a time. A sample that several shards hold
    counts once (`repeated` says how many more there are). Documents that can hold no anchor (a
    response of fewer than two tokens) are left out (`unusable` says how many). `longest` is the most
    tokens in a row that any document has supervised.

    Args:
        shards: feature shards, in an order that does not change between runs.
        taps: positions of the wanted taps in the stores.
        seed: seed of document order and anchors.
        anchors_per_document: most blocks of a document in one epoch.
        block: slots of a block, B, where none are asked for.
        last_hidden: read the target's last hidden state too.
        everywhere: draw and supervise blocks in prompts too, not only in responses, from where a
            document differs from others: what prompts begin alike with, the chat template's first
            words and a system prompt, is learned within some steps and never drafted.
        kept: ids of the tokens that the head still has (default: all); slots with others teach
            nothing.
        without: ids of samples that are passed over, as if no shard held them.
    Raises UserError when no document can hold a block.
    """

    def __init__(
        self,
        shards: list[Shards],
        taps: list[int],
        seed: int,
        anchors_per_document: int,
        block: int,
        last_hidden: bool = False,
        everywhere: bool = False,
        kept: np.ndarray | None = None,
        without: Collection[str] = (),
    ):
        self.taps, self.seed, self.everywhere = taps, seed, everywhere
        self.anchors_per_document, self.last_hidden = anchors_per_document, last_hidden
        self.block = block
        # All that grows with the corpus: a bit a token (two with `kept`), and numbers a document.
        self.masks: list[np.ndarray] = []  # [P / 8] a shard, where blocks may begin
        self.learned: list[np.ndarray] = []  # [P / 8] a shard, where slots teach something
        columns = []
        beginnings = Beginnings(shards, without) if everywhere else None
        for number, shard in enumerate(shards):
            shard = copy(shard)
            ids_P, mask_P = shard.tokens()
            lengths = np.asarray(shard.lengths, np.int32)
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            masks = np.split(mask_P, starts[1:])
            if beginnings is not None:
                parts = zip(shard.sample_ids, np.split(ids_P, starts[1:]), masks, strict=True)
                masks = [supervised(m, True, beginnings.shared(*of)) for *of, m in parts]
            mask_P = np.concatenate(masks)
            self.masks.append(np.packbits(mask_P))
            teaches_P = mask_P if kept is None else mask_P & np.isin(ids_P, kept)
            self.learned.append(self.masks[-1] if kept is None else np.packbits(teaches_P))
            possible = np.array([len(anchors.candidates(m)) for m in masks], np.int32)
            longest = np.array([np.diff(responses(m)).max(initial=0) for m in masks], np.int32)
            where = np.full(len(lengths), number, np.int32), np.arange(len(lengths), dtype=np.int32)
            of_document = *where, starts, lengths, longest, possible
            columns.append((np.array(shard.sample_ids, "S"), *of_document))
        ids, *numbers = map(np.concatenate, zip(*columns, strict=True))
        read = ~np.isin(ids, np.array(list(without), "S"))
        ids, numbers = ids[read], [x[read] for x in numbers]
        usable = numbers[-1] > 0
        # Sorted by id, so that the order does not depend on how documents lie in shards.
        order = np.argsort(ids, kind="stable")
        final = np.append(ids[order][1:] != ids[order][:-1], True)
        chosen = order[final[: len(ids)]]
        self.repeated = len(ids) - len(chosen)
        self.unusable = int(len(chosen) - usable[chosen].sum())
        chosen = chosen[usable[chosen]]
        if not len(chosen):
            raise UserError(
                f"the features hold no supervised block: all {self.unusable} documents have responses "
                "of fewer than two tokens; raise regenerate.max_new_tokens or check the prompts"
            )
        self.ids = ids[chosen]
        self.shard, self.row, self.start, self.length, longest, possible = (
            x[chosen] for x in numbers
        )
        self.longest = int(longest.max())
        self.blocks = np.minimum(possible, anchors_per_document)
        widest = max(len(s.taps) for s in shards) + last_hidden
        self.row_bytes = 2 * shards[0].attributes["hidden_size"] * widest  # as read
        self._orders: dict[int, np.ndarray] = {}
        # What falls out of the cache is freed when the last thread that reads from it is done.
        self._opened = lru_cache(OPEN_SHARDS)(lambda i: copy(shards[i]))

    def __len__(self) -> int:
        """Documents in one epoch."""
        return len(self.ids)

    def place(self, position: int, block: int | None = None) -> Place:
        """Document number `position` of the stream, with blocks of so many slots."""
        epoch, i = divmod(position, len(self))
        i = self._order(epoch)[i]
        shard, start, length = int(self.shard[i]), int(self.start[i]), int(self.length[i])
        sample_id = self.ids[i].decode()
        mask_S = _bits(self.masks[shard], start, length)
        chosen_N = anchors.choose(mask_S, self.anchors_per_document, self.seed, epoch, sample_id)
        slots_NB = supervised_slots(
            _bits(self.learned[shard], start, length), chosen_N, block or self.block
        )
        return Place(sample_id, shard, int(self.row[i]), length, chosen_N, slots_NB.sum(0))

    def _order(self, epoch: int) -> np.ndarray:
        """The documents in the order of an epoch; int64."""
        if epoch not in self._orders:
            self._orders = {epoch: anchors.permutation(len(self), "documents", self.seed, epoch)}
        return self._orders[epoch]

    def largest_pack(
        self, first: int, last: int, documents_per_step: int, micro_batch: int, world: int = 1
    ) -> tuple[int, int]:
        """The most rows, and the most blocks, of any pack of steps first to last - 1 on any rank."""
        bounds = [r * documents_per_step // world for r in range(world + 1)]
        parts = [
            slice(i, min(i + micro_batch, end))
            for begin, end in pairwise(bounds)
            for i in range(begin, end, micro_batch)
        ]
        rows = blocks = 0
        for step in range(first, last):
            begin = step * documents_per_step
            epochs = range(begin // len(self), (begin + documents_per_step - 1) // len(self) + 1)
            at = np.concatenate(
                [
                    self._order(e)[max(0, begin - e * len(self)) :][:documents_per_step]
                    for e in epochs
                ]
            )[:documents_per_step]
            for part in parts:
                rows = max(rows, int(self.length[at[part]].sum()))
                blocks = max(blocks, int(self.blocks[at[part]].sum()))
        return rows, blocks

    def plan(
        self,
        step: int,
        documents_per_step: int,
        slot_weights_B: torch.Tensor,
        rank: int = 0,
        world: int = 1,
    ) -> Plan:
        """Step number `step`, of which each of `world` ranks reads a run of its own.

        Its blocks have as many slots as there are weights. The ranks' documents, one rank after the
        other, are those of one rank alone. Counting slots before weighing them makes the mass the same
        however a step is split.
        """
        begin, block = step * documents_per_step, len(slot_weights_B)
        places = [self.place(p, block) for p in range(begin, begin + documents_per_step)]
        slots_B = sum(p.slots_B for p in places)
        ends = [r * documents_per_step // world for r in (rank, rank + 1)]
        mass = float(slots_B @ slot_weights_B.double().numpy())
        return Plan(step, mass, places[slice(*ends)])

    def read(self, place: Place) -> Document:
        """The document with its hidden states. Raises UserError when the store is damaged there."""
        shard = self._opened(place.shard)
        # Asking for all taps by name would copy the document once more.
        taps = None if self.taps == list(range(len(shard.taps))) else self.taps
        document = shard.read(place.row, taps, self.last_hidden)
        if self.everywhere:
            document = replace(document, loss_mask=supervised(document.loss_mask, True))
        return document


def _bits(packed: np.ndarray, start: int, length: int) -> np.ndarray:
    """`length` bits from number `start`; bool [length]."""
    first = start % 8
    part = packed[start // 8 : (start + length + 7) // 8]
    return np.unpackbits(part, count=first + length)[first:].view(bool)


def supervised(loss_mask_S: np.ndarray, everywhere: bool, shared: int = 1) -> np.ndarray:
    """Where a document's tokens may be learned: its response, or all but its first token and those of
    the prompt that it shares with other documents; bool [S]."""
    if not everywhere:
        return loss_mask_S
    prompt = int(loss_mask_S.argmax()) if loss_mask_S.any() else len(loss_mask_S)
    return np.arange(len(loss_mask_S)) >= max(1, min(shared, prompt))


class Beginnings:
    """The token ids of a few documents, to which the beginnings of all others are compared.

    They are those with the smallest sample ids, so that neither the order of documents nor the way
    they lie in shards has a say. Documents of ids in `without` are not asked.
    """

    def __init__(self, shards: list[Shards], without: Collection[str] = ()):
        left_out = set(without)
        found = (
            (sample_id, number, row)
            for number, shard in enumerate(shards)
            for row, sample_id in enumerate(shard.sample_ids)
            if sample_id not in left_out
        )
        chosen = sorted(heapq.nsmallest(REFERENCES, found), key=lambda of: of[1])
        self.ids: dict[str, np.ndarray] = {}
        for number, group in itertools.groupby(chosen, key=lambda of: of[1]):
            shard = copy(shards[number])
            ids_P, _ = shard.tokens()
            ends = np.cumsum(shard.lengths, dtype=np.int64)
            for sample_id, _, row in group:
                start, end = ends[row] - shard.lengths[row], ends[row]
                self.ids[sample_id] = ids_P[start:end].copy()

    def shared(self, sample_id: str, ids_S: np.ndarray) -> int:
        """How many of its first tokens a document has in common with one of the others."""
        return max((_alike(ids_S, b) for a, b in self.ids.items() if a != sample_id), default=0)


def _alike(a_S: np.ndarray, b_S: np.ndarray) -> int:
    """How many tokens two documents begin alike with."""
    length = min(len(a_S), len(b_S))
    differ = a_S[:length] != b_S[:length]
    return int(differ.argmax()) if differ.any() else length


def frequent_tokens(
    shards: list[Shards], count: int, vocab_size: int, everywhere: bool = False
) -> np.ndarray:
    """Ids of the `count` most frequent supervised tokens, ties to the smaller id; sorted int64."""
    seen = np.zeros(vocab_size, np.int64)
    for shard in shards:
        ids, mask = copy(shard).tokens()
        seen += np.bincount(ids if everywhere else ids[mask], minlength=vocab_size)
    order = np.argsort(-seen, kind="stable")[:count]
    return np.sort(order[seen[order] > 0])


class Timed(Iterator[T]):
    """An iterator that knows for how many seconds it was waited for."""

    def __init__(self, items: Iterator[T]):
        self.items, self.seconds = items, 0.0

    def __next__(self) -> T:
        begun = time.perf_counter()
        try:
            return next(self.items)
        finally:
            self.seconds += time.perf_counter() - begun


def load(
    stream: Stream,
    plans: Iterable[Plan],
    machine: config.TrainMachine,
    make: Callable[[list[Document], list[Place]], Pack],
    pinned: bool = False,
) -> Iterator[tuple[Plan, Timed[Pack]]]:
    """Each step with its packs of `machine.micro_batch` documents, which threads read and `make` ahead.

    A step's packs have to be used up before the next step is asked for. A pack counts twice against
    `machine.loader_mb` until it is handed over: its documents as read, and laid end to end. Close
    the generator to end the threads (each after the document that it is reading). An error in a
    thread is raised where its pack is asked for. `pinned`: packs lie in pinned memory, of which torch
    takes a power of two at a time.
    """
    stop = Event()
    size = machine.micro_batch

    def job(part: list[Place]) -> Pack:
        documents = []
        for place in part:
            if stop.is_set():
                raise CancelledError
            documents.append(stream.read(place))
        return make(documents, part)

    def cost(part: list[Place]) -> int:
        rows = sum(p.length for p in part)
        packed = max(rows, machine.pad_context or 0) * stream.row_bytes
        if pinned:  # torch's CachingHostAllocator rounds up, and keeps what it once had
            packed = 1 << (packed - 1).bit_length()
        return rows * stream.row_bytes + packed

    plans, again = itertools.tee(plans)
    parts = (p.places[i : i + size] for p in plans for i in range(0, len(p.places), size))
    jobs = ((cost(part), partial(job, part)) for part in parts)
    with closing(prefetch(jobs, machine.loader_threads, machine.loader_mb << 20)) as packs:
        try:
            for plan in again:
                count = math.ceil(len(plan.places) / size)
                yield plan, Timed(next(packs) for _ in range(count))
        finally:
            stop.set()


def prefetch(jobs: Iterable[tuple[int, Callable[[], T]]], threads: int, limit: int) -> Iterator[T]:
    """Results of (cost, job) in order, made ahead by threads (0: when they are asked for).

    What is being made or waits to be taken costs at most `limit`, but for a job that alone costs more.
    """
    if threads == 0:
        for _, job in jobs:
            yield job()
        return
    jobs, held = iter(jobs), 0
    upcoming = next(jobs, None)
    ahead: deque[tuple[int, Future[T]]] = deque()
    pool = ThreadPoolExecutor(threads, "loader")

    def fill() -> None:
        nonlocal upcoming, held
        while (
            upcoming is not None
            and len(ahead) < AHEAD * threads
            and (not ahead or held + upcoming[0] <= limit)
        ):
            cost, job = upcoming
            ahead.append((cost, pool.submit(job)))
            held += cost
            upcoming = next(jobs, None)

    try:
        fill()
        while ahead:
            cost, future = ahead.popleft()
            wait([future])
            held -= cost
            fill()  # threads go on while the caller works
            yield future.result()  # kept by the future only, which the next turn lets go of
    finally:
        pool.shutdown(cancel_futures=True)
