"""Packing: labels, supervision and layout of blocks, against a loop over slots."""

from dataclasses import dataclass

import numpy as np
import torch

from dflash import data
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


def test_padding_adds_a_document_of_zeros_that_sees_and_teaches_nothing():
    docs = [document("a", "0011111"), document("b", "001111")]
    anchors_of = [np.array([2, 4]), np.array([3])]
    weights = torch.tensor([0.0, 1.0, 0.5])
    plain = data.pack(docs, anchors_of, weights)
    fixed = data.pack(docs, anchors_of, weights, pad_context=20, pad_blocks=5)
    assert fixed.taps_SD.shape[0] == fixed.layout.num_context == 20
    assert fixed.layout.num_blocks == 5
    assert (fixed.real_rows, fixed.real_blocks) == (plain.real_rows, plain.real_blocks) == (13, 3)
    assert torch.equal(fixed.taps_SD[:13].view(torch.int16), plain.taps_SD.view(torch.int16))
    assert not fixed.taps_SD[13:].any()
    assert torch.equal(fixed.labels_NB[:3], plain.labels_NB) and (fixed.labels_NB[3:] == -1).all()
    assert fixed.mass == plain.mass
    assert fixed.layout.start_N.tolist()[3:] == [13, 13]  # a document of their own
    assert fixed.layout.block_positions_NB[3:].tolist() == [[0, 1, 2]] * 2


def test_responses_are_runs_of_supervised_tokens():
    def found(mask: str) -> list[list[int]]:
        return data.responses(document("a", mask).loss_mask).tolist()

    assert found("0011101") == [[2, 5], [6, 7]]
    assert found("1100110") == [[0, 2], [4, 6]]
    assert found("111") == [[0, 3]]
    assert found("000") == found("") == []
