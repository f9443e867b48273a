"""What the processes of tests/cuda/test_cuda_ranks.py run, two of them under torchrun: trainings on two
emulated devices, with what goes over NCCL and over gloo written down.

    torchrun ... program.py FOLDER IDENTITY MANIFEST ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from dflash import config, ranks, train
from dflash.target import read_identity
from support.cuda import device
from support.trainings import CASES, SETTINGS, settings_of


def main(folder: Path, identity_file: str, manifests: list[str]) -> None:
    identity = read_identity(identity_file)
    with ranks.joined() as of:
        shards, positions = train.open_features(manifests, identity, [0, 1, 2])
        for name, (training, machine) in CASES.items():
            where = folder / name
            if of.first:
                where.mkdir(exist_ok=True)
            of.meet()
            how = config.TrainMachine(gpu=1, micro_batch=2, **machine)
            trainer = train.Trainer(
                settings_of(**training), how, identity, shards, positions, where, of
            )
            with device.collectives() as calls, device.waits() as waits:
                drafter, facts = trainer.run()
            torch.cuda.synchronize()
            found = {
                "device": str(of.device),
                "calls": calls,
                "waits": len(waits),
                "faults": device.faults(),
                "loss": [row["loss"] for row in facts["history"]],
            }
            (where / f"rank-{of.rank}.json").write_text(json.dumps(found))
            if of.first:
                torch.save(drafter.state_dict(), where / "weights.pt")


if __name__ == "__main__":
    assert SETTINGS
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
