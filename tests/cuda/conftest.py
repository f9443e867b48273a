"""Tests on the emulated CUDA device (tests/support/cuda). `tests/test_cuda.py` runs them in processes
that have it; in others nothing here is collected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from support.cuda import device, kernels

from dflash import config, ranks, train
from dflash.target import read_identity

collect_ignore_glob = [] if device.active() else ["test_*.py"]

SETTINGS = {
    "block_size": 4,
    "num_hidden_layers": 2,
    "taps": [0, 1, 2],
    "mask_token_id": 3,
    "training": {
        "max_steps": 3,
        "documents_per_step": 5,
        "anchors_per_document": 8,
        "lr": 3e-3,
        "dtype": "bfloat16",
        "validation": {"share": 0.0},
    },
}


@pytest.fixture(autouse=True)
def sound():
    """Nothing may have gone wrong out of sight: no race between streams, no memory freed or changed
    too early."""
    device.faults()
    kernels.calls.clear()
    kernels.plans.clear()
    yield
    torch.cuda.synchronize()
    assert device.faults() == []


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Path:
    """Where checks of this machine's kernels are noted."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)  # for the stages too
    return folder


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_llama) -> tuple[Path, dict[str, Any]]:
    """A finished run of the whole tiny workflow on the device, and its settings.

    A stage in which a stream failed to wait, or memory went too early, has ended with an error.
    """
    folder = tmp_path_factory.mktemp("workflow")
    soft = tiny.drafters()["soft"]
    soft["training"]["epochs"] = 3
    settings = tiny.settings(folder, tiny_llama) | {"drafters": {"soft": soft}}
    settings["corpus"]["sources"][0]["shards"] = 1
    done = tiny.snakemake(folder, settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, settings


@pytest.fixture(scope="session")
def features(finished) -> SimpleNamespace:
    """Identity, opened shards and tap positions of the tiny workflow, which ran on the device too."""
    folder = Path(finished[0]) / "results"
    identity = read_identity(folder / "target/identity.json")
    manifests = sorted(map(str, (folder / "features").glob("*/*.json")))
    shards, positions = train.open_features(manifests, identity, [0, 1, 2])
    return SimpleNamespace(
        identity=identity, manifests=manifests, shards=shards, positions=positions
    )


@pytest.fixture
def trainer(features, tmp_path) -> Callable[..., train.Trainer]:
    """A function: settings of the training and the machine -> a trainer on the device or the CPU."""

    def make(
        training: dict[str, Any] | None = None,
        machine: dict[str, Any] | None = None,
        on: str = "cuda",
        folder: str | None = None,
        kind: type[train.Trainer] = train.Trainer,
        **drafter: Any,
    ) -> train.Trainer:
        data = SETTINGS | drafter | {"training": SETTINGS["training"] | (training or {})}
        settings = config.Drafter.model_validate(data)
        where = tmp_path / (folder or f"run-{on}")
        where.mkdir(exist_ok=True)
        one = ranks.one(torch.device("cuda", 0) if on == "cuda" else torch.device("cpu"))
        return kind(
            settings,
            config.TrainMachine(gpu=1, **(machine or {})),
            features.identity,
            features.shards,
            features.positions,
            where,
            one,
        )

    return make
