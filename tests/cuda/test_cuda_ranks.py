"""Two processes on two emulated devices, NCCL between them: the training of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.trainings import CASES, settings_of

from dflash import config, ranks, train
from dflash.errors import UserError

PROGRAM = Path(__file__).parents[1] / "support/cuda/program.py"


@pytest.fixture(scope="module")
def two(features, finished, tmp_path_factory) -> Path:
    """A folder with all trainings by two processes that torchrun started."""
    folder = tmp_path_factory.mktemp("two")
    identity = finished[0] / "results/target/identity.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [str(PROGRAM), str(folder), str(identity), *features.manifests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


def found(two: Path, case: str) -> list[dict]:
    return [json.loads((two / case / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_a_process_without_a_device_of_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "9")
    with pytest.raises(UserError, match="process 9 of this node, counted from 0, has no GPU"):
        ranks.device_of_rank()


@pytest.mark.parametrize("case", CASES)
def test_the_training_is_that_of_one_process(two, case, features, tmp_path):
    training, machine = CASES[case]
    how = config.TrainMachine(gpu=1, micro_batch=2, **machine | {"sharding": "none"})
    one = ranks.one(torch.device("cuda", 0))
    of_features = features.identity, features.shards, features.positions
    drafter, facts = train.Trainer(settings_of(**training), how, *of_features, tmp_path, one).run()
    weights = torch.load(two / case / "weights.pt", weights_only=True)
    exact = training.get("dtype") == "float32"
    for name, want in drafter.state_dict().items():
        off = (weights[name] - want).norm() / want.norm()
        assert off < (1e-4 if exact else 2e-2), (name, float(off))
    near = 1e-5 if exact else 2e-2
    loss = [row["loss"] for row in facts["history"]]
    assert found(two, case)[0]["loss"] == pytest.approx(loss, rel=near)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_its_device_and_nothing_went_wrong(two, case):
    both = found(two, case)
    assert [r["device"] for r in both] == ["cuda:0", "cuda:1"]
    assert [r["faults"] for r in both] == [[], []]


@pytest.mark.parametrize("case", CASES)
def test_gradients_go_over_nccl_in_one_order(two, case):
    """A sum for each weight a step, or FSDP's gathers and scatters; the same on both ranks."""
    mine, others = (r["calls"] for r in found(two, case))
    assert mine == others
    kinds = {call.split()[0] for call in mine}
    if CASES[case][1].get("sharding") == "fsdp":
        assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= kinds, kinds
        return
    assert kinds == {"all_reduce"}
    weights = torch.load(two / case / "weights.pt", weights_only=True)
    sums = [f"all_reduce {w.numel()} Float" for w in weights.values()]
    assert sorted(mine) == sorted(3 * sums)
