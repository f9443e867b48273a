"""A drafter learns eight documents by heart, and by their hidden states: not without them."""

# ruff: noqa: F811 (fixtures of test_train)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train import drafter_settings, features  # noqa: F401

from dflash import config, ranks, train, validate
from dflash.drafter import Drafter
from dflash.features import Document
from dflash.target import load_embedding_and_head

BLOCK, TAPS = 4, [0, 1, 2]


@dataclass
class Memory:
    """A feature shard in memory. `changed` is what reading makes of a document."""

    documents: list[Document]
    taps: list[int]
    attributes: dict[str, Any]
    changed: Callable[[Document], Document] = lambda document: document

    @property
    def sample_ids(self) -> list[str]:
        return [d.sample_id for d in self.documents]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(d.input_ids) for d in self.documents])

    def read(self, i: int, taps=None, last_hidden: bool = False) -> Document:
        return self.changed(self.documents[i])

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        read = [self.changed(d) for d in self.documents]
        return tuple(
            np.concatenate([getattr(d, name) for d in read]) for name in ("input_ids", "loss_mask")
        )


@pytest.fixture(scope="module")
def eight(features) -> Memory:
    """The eight documents with the longest responses of the tiny workflow."""
    _, _, shards, _ = features
    documents = [s.read(i, TAPS) for s in shards for i in range(len(s.sample_ids))]
    documents.sort(key=lambda d: (-d.loss_mask.sum(), d.sample_id))
    return Memory(documents[:8], TAPS, shards[0].attributes)


def trained(features, shard: Memory, folder: Path) -> Drafter:
    """A drafter of two layers that has seen every block of these documents 60 times."""
    folder.mkdir()
    training = {"epochs": 60.0, "documents_per_step": 8, "anchors_per_document": 32, "lr": 6e-3}
    settings = drafter_settings(**training, schedule="wsd", loss={"gamma": 8.0})
    settings = settings.model_copy(update={"num_hidden_layers": 2})
    one = ranks.one(torch.device("cpu"))
    machine = config.TrainMachine(checkpointing="none")
    return train.Trainer(settings, machine, features[0], [shard], TAPS, folder, one).run()[0]


def learned(features, drafter: Drafter, documents: list[Document]) -> float:
    """Mean tau of the responses, walked as decoding would, as a share of the most there can be: every
    cycle gains B tokens, or what is left of its response."""
    found = validate.measure(
        drafter, documents, *load_embedding_and_head(features[0]), BLOCK, {}, torch.float32
    )
    most = [
        replace(r, runs=[min(BLOCK - 1, left) for left in range(len(r.runs), 0, -1)]) for r in found
    ]
    got, possible = (validate.summary(some, BLOCK)["tau_mean"] for some in (found, most))
    return got / possible


def exchanged(shard: Memory, seed: int) -> Callable[[Document], Document]:
    """What gives a document the hidden states of another, drawn anew each time."""
    rng = np.random.default_rng(seed)

    def change(document: Document) -> Document:
        others = [d for d in shard.documents if d.sample_id != document.sample_id]
        rows = others[rng.integers(len(others))].hidden
        return replace(document, hidden=np.resize(rows, document.hidden.shape))

    return change


def test_eight_documents_are_learned_by_heart_and_by_their_hidden_states(features, eight, tmp_path):
    drafter = trained(features, eight, tmp_path / "r")
    assert learned(features, drafter, eight.documents) >= 0.98
    others = list(map(exchanged(eight, 0), eight.documents))
    assert learned(features, drafter, others) < 0.5
    rng = np.random.default_rng(0)
    mixed = [replace(d, hidden=rng.permutation(d.hidden)) for d in eight.documents]
    assert learned(features, drafter, mixed) < 0.5


def test_with_the_hidden_states_of_others_they_are_not(features, eight, tmp_path):
    """Though the anchors' tokens alone tell much of texts that repeat themselves."""
    shard = replace(eight, changed=exchanged(eight, 1))
    drafter = trained(features, shard, tmp_path / "r")
    assert 0.5 < learned(features, drafter, eight.documents) < 0.9


def test_with_the_loss_mask_inverted_they_are_not(features, eight, tmp_path):
    shard = replace(eight, changed=lambda d: replace(d, loss_mask=~d.loss_mask))
    drafter = trained(features, shard, tmp_path / "r")
    assert learned(features, drafter, eight.documents) < 0.5
