"""The stream of documents: one order whoever reads, bounded memory, errors that arrive, no thread left."""

from __future__ import annotations

import os
import resource
import threading
import types
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_data import document
from test_features import some_documents, write

from dflash import anchors, config, data, loader
from dflash.errors import UserError
from dflash.features import open_shard
from dflash.loss import slot_weights

B = 4
WEIGHTS = slot_weights(B, 2.0)


class Shard:
    """A shard in memory whose copies, as those of a real one, are what is opened."""

    taps, attributes = [0, 1], {"hidden_size": 3}

    def __init__(self, documents, on_read=lambda document: None):
        self.documents, self.on_read = documents, on_read
        self.sample_ids = [d.sample_id for d in documents]
        self.lengths = np.array([len(d.input_ids) for d in documents])
        self.asked: list[bool] = []
        self.copies: weakref.WeakSet[Shard] = weakref.WeakSet()
        self.is_copy = False

    def __copy__(self):
        other = Shard.__new__(Shard)
        other.__dict__ |= self.__dict__ | {"is_copy": True}
        self.copies.add(other)
        return other

    def read(self, i, taps=None, last_hidden=False):
        assert self.is_copy, "the one all copies come from would keep what it reads"
        self.asked.append(last_hidden)
        self.on_read(self.documents[i])
        return self.documents[i]

    def tokens(self):
        assert self.is_copy
        ids = np.concatenate([d.input_ids for d in self.documents])
        return ids, np.concatenate([d.loss_mask for d in self.documents])


def split(documents, shards: int) -> list[Shard]:
    return [Shard(documents[i::shards]) for i in range(shards)]


def make_stream(documents=None, shards=2, on_read=None, **changes):
    """A stream over some documents in so many shards, or in the given ones."""
    if documents is None:
        documents = [document(f"{i:02d}", "00111" + i % 5 * "01", seed=i) for i in range(7)]
    if isinstance(shards, int):
        shards = split(documents, shards)
    for shard in shards:
        shard.on_read = on_read or shard.on_read
    settings = {"seed": 0, "anchors_per_document": 2, "block": B}
    return loader.Stream(shards, [0, 1], **(settings | changes))


def plans(stream, first, last, documents_per_step=3, rank=0, world=1):
    return (stream.plan(s, documents_per_step, WEIGHTS, rank, world) for s in range(first, last))


def make(documents, places):
    return data.pack(documents, [p.anchors_N for p in places], WEIGHTS)


def loaded(stream, wanted, **machine) -> list[tuple[int, list[data.Pack]]]:
    settings = config.TrainMachine(**({"micro_batch": 2} | machine))
    return [(p.step, list(packs)) for p, packs in loader.load(stream, wanted, settings, make)]


def names(steps: list[tuple[int, list[data.Pack]]]) -> list[tuple[int, list[list[str]]]]:
    return [(step, [p.sample_ids for p in packs]) for step, packs in steps]


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.fixture
def store(tmp_path):
    """Twelve documents in three shards on disk, opened."""
    shards = []
    for i in range(3):
        documents = some_documents([9, 17, 30, 41], seed=i)
        for d in documents:
            d.loss_mask[3:] = True
        write(tmp_path / f"{i}.zarr", documents)
        shards.append(open_shard(tmp_path / f"{i}.zarr"))
        shards[-1].close()
    return shards


# --- order --------------------------------------------------------------------------------------


def test_the_order_is_that_of_earlier_versions():
    documents = [document(f"{i:02d}", "00111111111", seed=i) for i in range(5)]
    stream = make_stream(documents, seed=3)
    places = [stream.place(i) for i in range(10)]
    order = ["00", "01", "04", "02", "03", "00", "03", "02", "01", "04"]
    assert [p.sample_id for p in places] == order
    chosen = [[2, 7], [2, 8], [2, 9], [4, 9], [4, 9], [2, 8], [2, 5], [3, 5], [2, 3], [6, 7]]
    assert [p.anchors_N.tolist() for p in places] == chosen


def test_every_epoch_holds_every_document_once_in_another_order():
    stream = make_stream()
    epochs = [[stream.place(e * 7 + i).sample_id for i in range(7)] for e in range(3)]
    assert all(sorted(e) == [f"{i:02d}" for i in range(7)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [make_stream(seed=1).place(i).sample_id for i in range(7)]


def test_order_does_not_depend_on_shards():
    one, several = make_stream(shards=1), make_stream(shards=4)
    for i in range(20):
        a, b = one.place(i), several.place(i)
        assert a.sample_id == b.sample_id and a.anchors_N.tolist() == b.anchors_N.tolist()
        assert one.read(a).input_ids.tolist() == several.read(b).input_ids.tolist()


def test_a_place_says_what_the_document_itself_would():
    """Masks are kept in bits, and documents begin anywhere in a byte."""
    documents = [document(f"{i:02d}", "0011" + "101101" * i, seed=i) for i in range(9)]
    kept = np.arange(0, 99, 2)
    stream = make_stream(documents, kept=kept, anchors_per_document=3)
    for i in range(18):
        place = stream.place(i)
        d = stream.read(place)
        assert d.sample_id == place.sample_id and len(d.input_ids) == place.length
        want = anchors.choose(d.loss_mask, 3, 0, i // 9, d.sample_id)
        assert place.anchors_N.tolist() == want.tolist()
        learned = d.loss_mask & np.isin(d.input_ids, kept)
        assert place.slots_B.tolist() == data.supervised_slots(learned, want, B).sum(0).tolist()


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_order_is_the_same_for_any_number_of_threads_and_across_a_resume(store, threads):
    def stream():
        return loader.Stream(store, [0], 0, 2, B)

    whole = names(loaded(stream(), plans(stream(), 0, 9, 5), loader_threads=0))
    assert [len(i) for _, parts in whole for i in parts] == [2, 2, 1] * 9
    of_threads = stream()
    assert names(loaded(of_threads, plans(of_threads, 0, 9, 5), loader_threads=threads)) == whole
    assert names(loaded(stream(), plans(stream(), 4, 9, 5), loader_threads=threads)) == whole[4:]
    assert loaded(stream(), plans(stream(), 9, 9, 5), loader_threads=threads) == []


def test_the_packs_are_those_made_without_a_loader(store):
    stream = loader.Stream(store, [1], 0, 2, B)
    for plan, (_, packs) in zip(
        plans(stream, 0, 6, 4), loaded(stream, plans(stream, 0, 6, 4)), strict=True
    ):
        documents = [store[p.shard].read(p.row, [1]) for p in plan.places]
        for packed, i in zip(packs, (0, 2), strict=True):
            own = make(documents[i : i + 2], plan.places[i : i + 2])
            assert torch.equal(packed.taps_SD.view(torch.int16), own.taps_SD.view(torch.int16))
            assert torch.equal(packed.labels_NB, own.labels_NB)
            assert torch.equal(packed.layout.anchors, own.layout.anchors)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_each_step_and_read_each_document_once_an_epoch(world):
    """Three documents a step and two ranks: an uneven split; five ranks: some get none."""
    read: list[str] = []
    want = names(loaded(make_stream(), plans(make_stream(), 0, 7), micro_batch=3))
    found: list[list[list[str]]] = []
    for rank in range(world):
        stream = make_stream(on_read=lambda d: read.append(d.sample_id))
        own = loaded(stream, plans(stream, 0, 7, 3, rank, world), micro_batch=3)
        assert [step for step, _ in own] == list(range(7))
        found.append([[i for p in packs for i in p.sample_ids] for _, packs in own])
    union = [[i for rank in found for i in rank[step]] for step in range(7)]
    assert union == [parts[0] for _, parts in want]
    assert sorted(read) == sorted(3 * [f"{i:02d}" for i in range(7)])  # 21 documents: three epochs
    sizes = [[len(rank[step]) for rank in found] for step in range(7)]
    assert all(max(s) - min(s) <= 1 for s in sizes) and (world < 5 or min(map(min, sizes)) == 0)


def test_the_mass_is_the_whole_steps_however_it_is_split():
    stream, kept = make_stream(anchors_per_document=9), np.arange(0, 99, 2)
    for micro_batch in (1, 2, 3):
        for plan, (_, packs) in zip(
            plans(stream, 0, 5),
            loaded(stream, plans(stream, 0, 5), micro_batch=micro_batch),
            strict=True,
        ):
            assert plan.mass == sum(p.mass for p in packs) > 0
    for rank in range(2):
        ranks = [p.mass for p in plans(stream, 0, 5, rank=rank, world=2)]
        assert ranks == [p.mass for p in plans(stream, 0, 5)]
    fewer = make_stream(anchors_per_document=9, kept=kept)
    for plan, (_, packs) in zip(plans(fewer, 0, 5), loaded(fewer, plans(fewer, 0, 5)), strict=True):
        labels, weights = (
            torch.cat([getattr(p, name) for p in packs]) for name in ("labels_NB", "weights_NB")
        )
        inside = torch.isin(labels, torch.from_numpy(kept))
        assert plan.mass == float(weights[inside].double().sum()) < float(weights.double().sum())


# --- what is in the stream ----------------------------------------------------------------------


def test_the_last_hidden_state_is_read_only_if_asked_for():
    for asked in (False, True):
        shard = Shard([document("a", "001111")])
        stream = loader.Stream([shard], [0, 1], 0, 2, B, asked)
        stream.read(stream.place(0))
        assert shard.asked == [asked]


def test_documents_without_a_block_are_left_out_and_counted():
    documents = [document("a", "0001"), document("b", "0011"), document("c", "0000")]
    stream = make_stream(documents, shards=1)
    assert stream.unusable == 2 and len(stream) == 1 and stream.place(0).sample_id == "b"
    with pytest.raises(UserError, match="all 1 documents have responses of fewer than two tokens"):
        make_stream(documents[:1], shards=1)


def test_a_sample_in_two_shards_counts_once():
    documents = [document(name, "0011", seed=i) for i, name in enumerate("abca")]
    stream = make_stream(documents)  # the shards hold a, c and b, a
    assert stream.repeated == 1 and len(stream) == 3
    found = {p.sample_id: p for p in map(stream.place, range(3))}
    assert sorted(found) == ["a", "b", "c"]
    assert stream.read(found["a"]).input_ids.tolist() == documents[3].input_ids.tolist()


def test_what_is_kept_for_validation_might_as_well_not_exist():
    documents = [document(f"{i:02d}", "00111" + i % 5 * "01", seed=i) for i in range(9)]
    documents += [document("no", "0001"), document("03", "0011")]
    kept = ["08", "03", "no", "elsewhere"]
    left = [d for d in documents if d.sample_id not in kept]
    for settings in (dict(), dict(everywhere=True), dict(kept=np.arange(0, 99, 2))):
        stream = make_stream(documents, without=kept, **settings)
        other = make_stream(left, shards=1, **settings)
        assert len(stream) == len(other) == 7
        assert (stream.unusable, stream.repeated) == (other.unusable, other.repeated) == (0, 0)
        assert stream.longest == other.longest
        for i in range(21):
            a, b = stream.place(i), other.place(i)
            assert a.sample_id == b.sample_id and a.anchors_N.tolist() == b.anchors_N.tolist()
            assert a.slots_B.tolist() == b.slots_B.tolist()
            assert stream.read(a).input_ids.tolist() == other.read(b).input_ids.tolist()
    with pytest.raises(UserError, match="hold no supervised block"):
        make_stream(documents, without=[d.sample_id for d in documents])


def test_the_longest_run_of_supervised_tokens():
    masks = {"a": "0111", "b": "00111010110", "c": "0001"}
    documents = [document(n, mask, seed=i) for i, (n, mask) in enumerate(masks.items())]
    assert make_stream(documents).longest == 3
    assert make_stream(documents, everywhere=True).longest == 10
    assert make_stream(documents, without="ab", everywhere=True).longest == 3
    # of the copy that is read
    documents = [document("a", "01111111"), document("b", "0011"), document("a", "0111")]
    assert make_stream(documents, shards=1).longest == 3


def test_steps_may_have_blocks_of_other_sizes():
    """The same documents and anchors, whatever the size; the mass is that of the step's own."""
    stream = make_stream(anchors_per_document=9)
    for size in (2, B, 9):
        weights, of_size = slot_weights(size, 2.0), make_stream(anchors_per_document=9, block=size)
        for step in range(5):
            plan = stream.plan(step, 3, weights)
            same = of_size.plan(step, 3, weights)
            assert plan.mass == same.mass > 0
            for p, q in zip(plan.places, same.places, strict=True):
                assert len(p.slots_B) == size and p.slots_B.tolist() == q.slots_B.tolist()
                assert p.anchors_N.tolist() == q.anchors_N.tolist()
            documents = [stream.read(p) for p in plan.places]
            packed = data.pack(documents, [p.anchors_N for p in plan.places], weights)
            assert plan.mass == pytest.approx(packed.mass)
        assert len(stream.place(0, size).slots_B) == size
    assert stream.block == len(stream.place(0).slots_B) == B


def test_blocks_everywhere_lie_in_prompts_too():
    documents = [document("a", "0000001", seed=1), document("b", "0001111", seed=2)]
    stream = make_stream(documents, anchors_per_document=99)
    assert stream.unusable == 1 and len(stream) == 1
    everywhere = make_stream(documents, anchors_per_document=99, everywhere=True)
    assert everywhere.unusable == 0
    for position in range(2):
        place = everywhere.place(position)
        doc = everywhere.read(place)
        assert doc.loss_mask.tolist() == [False] + [True] * 6  # the first token has no context
        assert place.anchors_N.tolist() == [1, 2, 3, 4, 5]
        assert place.slots_B.tolist() == [0, 5, 4, 3]  # blocks may reach past the end
    assert documents[0].loss_mask.sum() == 1  # the stored one is left alone


def alike(name, mask, *begins):
    """A document of its own tokens, but for its first ones."""
    doc = document(name, mask, seed=ord(name))
    doc.input_ids[:] = 1000 * ord(name) + np.arange(len(mask))
    doc.input_ids[: len(begins)] = begins
    return doc


def test_what_prompts_begin_alike_with_is_not_learned_again():
    """The template's words and a system prompt; against the longest beginning found in all pairs."""
    documents = [
        alike("a", "000000111", 7, 8, 9),
        alike("b", "000000111", 7, 8, 9, 4, 4),
        alike("c", "000000111", 7, 8, 9, 4, 5),
        alike("d", "000111111", 7, 8, 9, 4, 4),  # the response begins where others' prompts go on
        alike("e", "000000111"),
        alike("f", "00000000", 7, 8, 9, 4),  # no response
    ]
    slow = {}
    for doc in documents:
        first = doc.loss_mask.tolist().index(True) if doc.loss_mask.any() else len(doc.loss_mask)
        n = 0
        while any(
            doc.input_ids[: n + 1].tolist() == other.input_ids[: n + 1].tolist()
            for other in documents
            if other is not doc
        ):
            n += 1
        slow[doc.sample_id] = max(1, min(n, first))
    assert slow == {"a": 3, "b": 5, "c": 4, "d": 3, "e": 1, "f": 4}
    for shards in (1, 2, 3):
        settings = {"shards": shards, "anchors_per_document": 99}
        stream = make_stream(documents, everywhere=True, **settings)
        first = {p.sample_id: p.anchors_N[0] for p in map(stream.place, range(6))}
        assert first == slow
        where = {p.sample_id: p for p in map(stream.place, range(6))}
        for name, place in where.items():  # and the slots that are counted are those of the pack
            packed = data.pack([stream.read(place)], [place.anchors_N], WEIGHTS)
            weights = place.slots_B @ WEIGHTS.double().numpy()
            assert packed.mass == pytest.approx(weights), name
        # where prompts are not learned, nothing changes
        plain = make_stream(documents[:5], **settings)
        assert {p.anchors_N[0] for p in map(plain.place, range(5))} == {3, 6}
    # those kept for validation are not asked
    stream = make_stream(documents, everywhere=True, without="bd", **settings)
    first = {p.sample_id: p.anchors_N[0] for p in map(stream.place, range(4))}
    assert first == {"a": 3, "c": 4, "e": 1, "f": 4}


def test_beginnings_are_compared_with_a_few_documents_only(monkeypatch):
    monkeypatch.setattr(loader, "REFERENCES", 2)
    asked = []
    real = Shard.tokens
    monkeypatch.setattr(Shard, "tokens", lambda shard: asked.append(0) or real(shard))
    documents = [alike(n, "000011", 7, 8) for n in "dcba"] + [alike("e", "000011", 5, 6)] * 2
    stream = make_stream(documents, everywhere=True, anchors_per_document=99, shards=1)
    assert len(asked) == 2  # once for the few, once for all
    assert {p.sample_id: p.anchors_N[0] for p in map(stream.place, range(5))} == {
        **dict.fromkeys("abcd", 2),
        "e": 1,  # like itself only
    }


def test_frequent_tokens():
    doc = document("a", "01111111")
    doc.input_ids[:] = [9, 5, 5, 7, 7, 7, 3, 4]
    shards = [Shard([doc])]
    assert loader.frequent_tokens(shards, 2, 100).tolist() == [5, 7]
    assert loader.frequent_tokens(shards, 3, 100).tolist() == [3, 5, 7]  # tie: the smaller id
    assert loader.frequent_tokens(shards, 50, 100).tolist() == [3, 4, 5, 7]  # 9: not supervised


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_ahead_costs_no_more_than_the_limit(threads):
    costs = [4, 3, 3, 9, 25, 1, 1, 1, 8, 2] * 3
    given = 0

    def jobs() -> Iterator[tuple[int, object]]:
        for i, cost in enumerate(costs):
            # Asked for job i, it has started all before it; `given` is being handed over.
            held = costs[given + 1 : i]
            assert sum(held) <= 10 or len(held) == 1, (i, held)
            yield cost, lambda i=i: i

    for i, result in enumerate(loader.prefetch(jobs(), threads, 10)):
        assert result == i
        given += 1
    assert given == len(costs)


def test_documents_in_memory_stay_within_the_limit():
    """Six documents of 2 MiB, eight threads, 9 MiB: two packs of one document, each counted twice."""
    documents = [document(f"{i:02d}", "0011" + "1" * 1020, seed=i) for i in range(6)]
    lock, live, most = threading.Lock(), set(), []
    read = threading.Semaphore(0)

    def on_read(d):
        with lock:
            live.add(d.sample_id)
            most.append(len(live))
        read.release()

    stream = make_stream(documents, on_read=on_read)
    stream.row_bytes = 2048
    machine = config.TrainMachine(micro_batch=1, loader_threads=8, loader_mb=9)
    steps = plans(stream, 0, 6, 1)
    for plan, packs in loader.load(stream, steps, machine, make):
        (packed,) = packs
        for _ in range({0: 3, 4: 0, 5: 0}.get(plan.step, 1)):  # all that may be read meanwhile
            assert read.acquire(timeout=30)
        with lock:
            live.remove(packed.sample_ids[0])
    assert max(most) <= 3  # two ahead, one handed over


def test_a_pack_larger_than_the_limit_is_read_alone():
    documents = [document(f"{i:02d}", "001111", seed=i) for i in range(5)]
    stream = make_stream(documents)
    stream.row_bytes = 1 << 30
    steps = plans(stream, 0, 2, 5)
    assert len(loaded(stream, steps, loader_mb=1, loader_threads=4)[1][1]) == 3


def test_few_shards_are_open_at_once(monkeypatch):
    monkeypatch.setattr(loader, "OPEN_SHARDS", 3)
    documents = [document(f"{i:02d}", "001111", seed=i) for i in range(20)]
    shards = split(documents, 20)
    stream = make_stream(shards=shards)
    assert [len(s.copies) for s in shards] == [0] * 20  # the look at all masks left nothing open
    most = []
    for s in shards:
        s.on_read = lambda d: most.append(sum(len(x.copies) for x in shards))
    loaded(stream, plans(stream, 0, 20), micro_batch=1, loader_threads=2)
    assert len(most) == 60 and 3 <= max(most) <= 3 + 2  # a thread may hold one that fell out


def test_a_shard_that_is_shut_while_a_thread_reads_from_it(monkeypatch):
    monkeypatch.setattr(loader, "OPEN_SHARDS", 1)
    documents = [document(f"{i:02d}", "001111", seed=i) for i in range(3)]
    shards = split(documents, 3)
    stream, original, shut = make_stream(shards=shards), shards[0], []
    places = {p.shard: p for p in map(stream.place, range(3))}

    def on_read(d):
        stream.read(places[1])
        shut.append(len(original.copies))

    original.on_read = on_read
    assert stream.read(places[0]) is documents[0]
    assert shut == [1] and len(original.copies) == 0  # kept while in use, gone afterwards


def test_shards_are_opened_by_who_reads(store):
    for shard in store:
        assert "_arrays" not in vars(shard)
    stream = loader.Stream(store, [0], 0, 2, B)
    loaded(stream, plans(stream, 0, 4))
    for shard in store:
        assert not {"_arrays", "offsets", "_input_ids", "_loss_mask"} & set(vars(shard))


# --- errors and endings -------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 3])
def test_damage_stops_training_with_the_stores_own_sentence(store, threads):
    """Once, and only where the first damaged document is needed."""
    stream = loader.Stream(store, [0], 0, 2, B)
    first = {p.shard: i for i, p in reversed([(i, stream.place(i)) for i in range(12)])}
    shard, victim = max(first.items(), key=lambda x: x[1])
    for file in (store[shard].path / "hidden" / "c").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(UserError, match="hidden/c/.* is missing") as said:
        stream.read(stream.place(victim))
    machine = config.TrainMachine(micro_batch=1, loader_threads=threads)
    steps = loader.load(stream, plans(stream, 0, 12, 1), machine, make)
    seen = 0
    with pytest.raises(UserError) as raised:
        for _, packs in steps:
            seen += len(list(packs))
    assert str(raised.value) == str(said.value) and seen == victim > 0
    assert threads_left() == []
    with pytest.raises(RuntimeError):  # who goes on all the same gets no empty steps
        _ = [list(packs) for _, packs in steps]


def test_too_many_open_files_is_a_sentence(store):
    stream = loader.Stream(store, [0], 0, 2, B)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(UserError, match=r"too many open files: raise the limit \(ulimit -n\)"):
            loaded(stream, plans(stream, 0, 3), loader_threads=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert threads_left() == []
    assert len(loaded(stream, plans(stream, 0, 3), loader_threads=2)) == 3  # nothing is left broken


def test_leaving_early_ends_the_threads_after_the_document_they_read(monkeypatch):
    stop, read = threading.Event(), []
    monkeypatch.setattr(loader, "Event", lambda: stop)
    both = threading.Barrier(3)

    def on_read(d):
        read.append(d.sample_id)
        if len(read) > 3:
            both.wait(30)  # two threads are in the second and third pack now
            stop.wait(30)

    documents = [document(f"{i:02d}", "001111", seed=i) for i in range(30)]
    stream = make_stream(documents, on_read=on_read)
    machine = config.TrainMachine(micro_batch=3, loader_threads=2)
    steps = loader.load(stream, plans(stream, 0, 10), machine, make)
    plan, packs = next(steps)
    assert len(list(packs)) == 1
    both.wait(30)
    steps.close()
    assert len(read) == 3 + 2 and threads_left() == []


def test_waiting_is_timed(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(loader, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    timed = loader.Timed(iter("ab"))
    assert list(timed) == ["a", "b"] and timed.seconds == 2.75
