"""Compare a finished run with the official package, prompt by prompt and cycle by cycle.

    python benchmarks/official.py [--results results] [--drafter demo] [--prompts 10]
                                  [--official .venv/official] [--json]

The official package (PyPI `dflash` 0.1.0; `make test` installs it into .venv/official) decodes
held-out prompts with the exported drafter in a process of its own, greedily, in float32; ours decodes
the same. Tokens and accepted lengths of every cycle must be equal. Exit status 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dflash.corpus import read_prompts, select_per_kind
from dflash.decode import generate
from dflash.drafter import load_drafter
from dflash.target import load_model, read_identity

ROOT = Path(__file__).parent.parent


def official(args, target: str, folder: Path, ids: list[list[int]], block: int) -> list[dict]:
    """What the official package decodes."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "prompts.json").write_text(json.dumps(ids))
        command = [
            *(sys.executable, str(ROOT / "tests/peers/official.py"), "--target", target),
            *("--drafter", str(folder), "--dtype", "float32", "--block-size", str(block)),
            *("--prompts", f"{scratch}/prompts.json", "--out", f"{scratch}/out.json"),
            *("--max-new-tokens", str(args.max_new_tokens), "--threads", str(args.threads)),
        ]
        env = os.environ | {"PYTHONPATH": str(args.official), "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(command, env=env, check=True)
        return json.loads((Path(scratch) / "out.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--official", type=Path, default=ROOT / ".venv/official")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    identity = read_identity(args.results / "target/identity.json")
    parquets = sorted((args.results / "corpus").glob("*.parquet"))
    held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
    kinds = len({p.kind for p in held})
    prompts = select_per_kind(held, -(-args.prompts // kinds))[: args.prompts]
    folder = args.results / "export" / args.drafter
    drafter = load_drafter(folder)
    model = load_model(identity, "float32")
    rows = official(args, identity.folder, folder, [p.prompt_ids for p in prompts],
                    drafter.config.block_size)  # fmt: skip
    same = 0
    if not args.json:
        print(
            f"{'prompt':24} {'tokens':>6} {'cycles':>6} {'tau':>6}  same  {'ours s/token':>12} theirs"
        )
    for prompt, theirs in zip(prompts, rows, strict=True):
        begun = time.perf_counter()
        (ours,), timing = generate(
            model, [prompt.prompt_ids], args.max_new_tokens, identity.eos_token_ids, drafter
        )
        seconds = (time.perf_counter() - begun - timing.prefill) / max(len(ours.tokens) - 1, 1)
        equal = ours.tokens == theirs["tokens"] and ours.cycles == theirs["accepted_plus_one"]
        same += equal
        tau = sum(ours.cycles) / max(len(ours.cycles), 1)
        if args.json:
            row = {"case": prompt.id, "same": equal, "tokens": len(ours.tokens), "tau": tau,
                   "ours_s_per_token": seconds, "official_s_per_token": theirs["seconds_per_token"],
                   "ratio": theirs["seconds_per_token"] / seconds}  # fmt: skip
            print(json.dumps(row))
        else:
            print(
                f"{prompt.id:24} {len(ours.tokens):6} {len(ours.cycles):6} {tau:6.2f}  "
                f"{'yes' if equal else 'NO':4}  {seconds:12.4f} {theirs['seconds_per_token']:.4f}"
            )
    if not args.json:
        print(f"{same} of {len(prompts)} prompts give the same tokens and accepted lengths")
    return 0 if same == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
