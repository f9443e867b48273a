"""Packing: labels, supervision and layout of blocks, against a loop over slots."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dflash import anchors, data
from dflash.errors import UserError
from dflash.loss import slot_weights


@dataclass
class Doc:
    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: np.ndarray
    last_hidden: np.ndarray | None = None


def document(name: str, mask: str, seed=0) -> Doc:
    rng = np.random.default_rng(seed)
    n = len(mask)
    hidden = torch.randn(n, 2, 3, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return Doc(
        name,
        rng.integers(1, 99, n).astype(np.int32),
        np.array([c == "1" for c in mask]),
        hidden.view(torch.uint16).numpy(),
    )


class Shard:
    def __init__(self, documents):
        self.documents = documents
        self.sample_ids = [d.sample_id for d in documents]

    def read(self, i, taps=None, last_hidden=False):
        self.asked = last_hidden
        return self.documents[i]

    def loss_mask(self, i):
        return self.documents[i].loss_mask

    def tokens(self):
        ids = np.concatenate([d.input_ids for d in self.documents])
        return ids, np.concatenate([d.loss_mask for d in self.documents])


def test_labels_are_the_tokens_at_the_slots_own_positions():
    docs = [document("a", "0001111"), document("b", "00110111", seed=1)]
    chosen = [np.array([3, 5]), np.array([2, 6])]
    weights = slot_weights(4, 2.0)
    pack = data.pack(docs, chosen, weights)
    n = 0
    for doc, own, start in zip(docs, chosen, (0, 7), strict=True):
        for a in own:
            assert pack.anchor_tokens_N[n] == doc.input_ids[a]
            assert pack.layout.anchors[n] == start + a
            assert pack.layout.block_positions_NB[n].tolist() == [a, a + 1, a + 2, a + 3]
            for k in range(4):
                at = a + k
                on = k > 0 and at < len(doc.input_ids) and doc.loss_mask[at]
                assert pack.labels_NB[n, k] == (doc.input_ids[at] if on else -1)
                assert pack.weights_NB[n, k] == (weights[k] if on else 0)
            n += 1
    assert pack.layout.context_positions_S.tolist() == [*range(7), *range(8)]
    want = np.concatenate([d.hidden.reshape(len(d.hidden), -1) for d in docs])
    assert (pack.taps_SD.view(torch.uint16).numpy() == want).all()


def test_each_slot_knows_the_state_that_decided_its_token():
    docs = [document("a", "0001111"), document("b", "00110111", seed=1)]
    chosen = [np.array([3, 5]), np.array([2, 6])]
    assert data.pack(docs, chosen, slot_weights(4, 2.0)).last_SH is None
    for doc in docs:
        positions = np.arange(len(doc.input_ids), dtype=np.uint16)
        doc.last_hidden = np.stack([doc.input_ids.astype(np.uint16), positions], 1)
    pack = data.pack(docs, chosen, slot_weights(4, 2.0))
    last = pack.last_SH.view(torch.uint16).numpy()
    n = 0
    for doc, own in zip(docs, chosen, strict=True):
        for a in own:
            for k in range(4):
                if pack.labels_NB[n, k] >= 0:
                    token, position = last[pack.target_rows_NB[n, k]].tolist()
                    assert position == a + k - 1 and token == doc.input_ids[position]
            n += 1


def test_the_last_hidden_state_is_read_only_if_asked_for():
    docs = [document("a", "001111")]
    for asked in (False, True):
        shard = Shard(docs)
        data.Stream([shard], [0, 1], 0, 2, asked).at(0)
        assert shard.asked is asked


def make_stream(**changes):
    docs = [document(f"{i:02d}", "001111", seed=i) for i in range(7)]
    shards = [Shard(docs[3:]), Shard(docs[:3])]
    return data.Stream(shards, [0, 1], **({"seed": 0, "anchors_per_document": 2} | changes))


def test_every_epoch_holds_every_document_once_in_another_order():
    stream = make_stream()
    epochs = [[stream.at(e * 7 + i)[0].sample_id for i in range(7)] for e in range(3)]
    assert all(sorted(e) == [f"{i:02d}" for i in range(7)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [make_stream(seed=1).at(i)[0].sample_id for i in range(7)]


def test_order_does_not_depend_on_shards():
    docs = [document(f"{i:02d}", "001111", seed=i) for i in range(7)]
    one = data.Stream([Shard(docs)], [0, 1], 0, 2)
    several = make_stream()
    for p in range(20):
        (a, chosen), (b, other) = one.at(p), several.at(p)
        assert a.sample_id == b.sample_id and chosen.tolist() == other.tolist()


def test_steps_continue_where_they_are_told_to():
    def ids(steps):
        return [(s, [d.sample_id for d, _ in docs]) for s, docs in steps]

    whole = ids(make_stream().steps(0, 5, 3))
    assert whole[2:] == ids(make_stream().steps(2, 5, 3))
    assert ids(make_stream().steps(5, 5, 3)) == []


def test_documents_without_a_block_are_left_out_and_counted():
    docs = [document("a", "0001"), document("b", "0011"), document("c", "0000")]
    stream = data.Stream([Shard(docs)], [0, 1], 0, 2)
    assert stream.drop_unusable() == 2 and stream.ids == ["b"]
    nothing = data.Stream([Shard(docs[:1])], [0, 1], 0, 2)
    with pytest.raises(UserError, match="fewer than two tokens"):
        nothing.drop_unusable()


def test_frequent_tokens():
    doc = document("a", "01111111")
    doc.input_ids[:] = [9, 5, 5, 7, 7, 7, 3, 4]
    shards = [Shard([doc])]
    assert data.frequent_tokens(shards, 2, 100).tolist() == [5, 7]
    assert data.frequent_tokens(shards, 3, 100).tolist() == [3, 5, 7]  # tie: the smaller id
    assert data.frequent_tokens(shards, 50, 100).tolist() == [3, 4, 5, 7]  # 9 is not supervised


def test_anchors_follow_the_epoch():
    stream = make_stream()
    doc, chosen = stream.at(7 + 2)
    want = anchors.choose(doc.loss_mask, 2, 0, 1, doc.sample_id)
    assert chosen.tolist() == want.tolist()


def test_padding_adds_a_document_of_zeros_that_sees_and_teaches_nothing():
    docs = [document("a", "0011111"), document("b", "001111")]
    anchors_of = [np.array([2, 4]), np.array([3])]
    weights = torch.tensor([0.0, 1.0, 0.5])
    plain = data.pack(docs, anchors_of, weights)
    fixed = data.pack(docs, anchors_of, weights, pad_context=20, pad_blocks=5)
    assert fixed.taps_SD.shape[0] == fixed.layout.num_context == 20
    assert fixed.layout.num_blocks == 5 and fixed.real_blocks == 3
    assert torch.equal(fixed.taps_SD[:13].view(torch.int16), plain.taps_SD.view(torch.int16))
    assert not fixed.taps_SD[13:].any()
    assert torch.equal(fixed.labels_NB[:3], plain.labels_NB) and (fixed.labels_NB[3:] == -1).all()
    assert fixed.mass == plain.mass
    assert fixed.layout.start_N.tolist()[3:] == [13, 13]  # a document of their own
    assert fixed.layout.block_positions_NB[3:].tolist() == [[0, 1, 2]] * 2


def test_blocks_everywhere_lie_in_prompts_too():
    docs = [document("a", "0000001"), document("b", "0001111")]
    stream = data.Stream([Shard(docs)], [0], 0, 99)
    assert stream.drop_unusable() == 1 and len(stream) == 1
    everywhere = data.Stream([Shard(docs)], [0], 0, 99, everywhere=True)
    assert everywhere.drop_unusable() == 0
    for position in range(2):
        doc, chosen = everywhere.at(position)
        assert doc.loss_mask.tolist() == [False] + [True] * 6  # the first token has no context
        assert chosen.tolist() == [1, 2, 3, 4, 5]
    assert docs[0].loss_mask.sum() == 1  # the stored one is left alone
