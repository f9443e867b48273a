"""The whole workflow at a size for tests: a tiny target, thirty prompts, a drafter of one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
WORDS = "what is the answer to this question and how does it work there user system".split()


SMALL = {
    "block_size": 4,
    "num_hidden_layers": 1,
    "taps": [0, 1, 2],
    "mask_token_id": 3,
    "training": {
        "epochs": 20,
        "documents_per_step": 4,
        "anchors_per_document": 8,
        "lr": 3e-3,
        "dtype": "float32",
    },
}


def drafters() -> dict[str, Any]:
    """Settings of drafters that together use every kind of label, weight, optimiser and dtype."""
    soft = {
        **SMALL,
        "num_hidden_layers": 2,
        "training": {
            **SMALL["training"],
            "dtype": "bfloat16",
            "epochs": 8,
            "ema": 0.9,
            "loss": {"labels": "soft", "weights": "dpace"},
        },
    }
    muon = {
        **SMALL,
        "num_hidden_layers": 2,
        "sliding_window": 24,
        "training": {
            **SMALL["training"],
            "epochs": 8,
            "optimizer": "muon",
            "loss": {"labels": "argmax", "head_tokens": 100},
        },
    }
    return deepcopy({"small": SMALL, "soft": soft, "muon": muon})


def prompts(count: int = 30) -> list[dict[str, str]]:
    """Different prompts in two kinds."""
    return [
        {
            "id": f"p{i}",
            "kind": "odd" if i % 2 else "even",
            "prompt": " ".join(
                WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(3 + i % 6)
            ),
        }
        for i in range(count)
    ]


def settings(folder: Path, target: Path) -> dict[str, Any]:
    """Settings of the whole workflow, with prompts written into `folder`."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in prompts()))
    return {
        "target": {"model": str(target), "dtype": "float32"},
        "corpus": {
            "sources": [{"name": "toy", "path": str(path), "shards": 2}],
            "heldout_share": 0.3,
        },
        "regenerate": {"max_new_tokens": 24},
        "drafters": {"small": deepcopy(SMALL)},
        "evaluate": {"max_new_tokens": 16, "timed_prompts_per_kind": 1},
        "machine": {"train": {"gpu": 1, "save_minutes": 0.0005}},
    }


def snakemake(
    folder: Path,
    config: dict[str, Any] | Path,
    *args: str,
    profile: str = "default",
    env: dict[str, str] | None = None,
    wait: bool = True,
) -> subprocess.CompletedProcess[str] | subprocess.Popen[str]:
    """Run the workflow in `folder` with its results there."""
    if isinstance(config, dict):
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        config = path
    command = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")),
        *("--directory", str(folder), "--configfile", str(config)),
        *("--workflow-profile", str(ROOT / "profiles" / profile)),
        *(["--cores", "2", "--resources", "gpu=4"] if profile == "default" else []),
        *args,
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | (env or {})
    if not wait:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=540)


def planned(folder: Path, config: dict[str, Any] | Path, *args: str) -> list[str]:
    """Rules that a dry run would execute, one entry a job, sorted; without `all`."""
    done = snakemake(folder, config, "--dry-run", *args)
    assert done.returncode == 0, done.stderr + done.stdout
    text = done.stdout + done.stderr
    if "Job stats:" not in text:
        return []
    rows = text.split("Job stats:")[1].strip().splitlines()[2:]
    jobs: list[str] = []
    for row in rows:
        name, _, count = row.partition(" ")
        if name == "total" or not count:
            break
        jobs += [name] * int(count)
    return sorted(set(jobs) - {"all"} and [j for j in jobs if j != "all"])
