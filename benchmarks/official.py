"""Compare our decoding with the official package's, cycle by cycle, and read what it saves.

    python benchmarks/official.py [--results results] [--drafter demo] [--prompts 20] [--no-demo]
                                  [--official .venv/official] [--quick] [--json]

The official package (PyPI `dflash` 0.1.0; `make test` installs it into .venv/official) decodes each
case's prompts with the exported drafter in a process of its own, greedily, in float32; ours decodes
the same. Tokens and accepted lengths of every cycle must be equal, and the folder that the package
writes of the drafter must load here with the same weights and the same behaviour. Cases: the demo, and
tiny random targets with tied and own heads, block 8 and 16, full and sliding layers. Exit status 1
if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from pairs import END, Pair, make_pair
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dflash.corpus import read_prompts, select_per_kind
from dflash.decode import generate
from dflash.drafter import Drafter, load_drafter
from dflash.target import read_identity

ROOT = Path(__file__).parent.parent


def official(args, pair: Pair, block: int, scratch: Path) -> list[dict]:
    """What the official package decodes; it saves the drafter in `scratch`/saved."""
    (scratch / "prompts.json").write_text(json.dumps(pair.prompts))
    command = [
        *(sys.executable, str(ROOT / "tests/peers/official.py"), "--target", str(pair.target)),
        *("--drafter", str(pair.drafter), "--dtype", "float32", "--block-size", str(block)),
        *("--prompts", str(scratch / "prompts.json"), "--out", str(scratch / "out.json")),
        *("--max-new-tokens", str(args.max_new_tokens), "--threads", str(args.threads)),
        *("--save", str(scratch / "saved")),
    ]
    env = os.environ | {"PYTHONPATH": str(args.official), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the official package failed on {pair.case}:\n{done.stderr[-3000:]}")
    return json.loads((scratch / "out.json").read_text())


def saved_alike(drafter: Drafter, folder: Path) -> bool:
    """Whether a drafter that the package saved is the same one here."""
    again, theirs = load_drafter(folder), drafter.state_dict()
    same = all(torch.equal(value, theirs[name]) for name, value in again.state_dict().items())
    # its config class fills in a window where none is used
    return same and replace(again.config, sliding_window=drafter.config.sliding_window) == (
        drafter.config
    )


def compare(args, pair: Pair, stops: list[int]) -> bool:
    """Run one case, print its row, and say whether all of it is equal."""
    drafter = load_drafter(pair.drafter)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as scratch:
        theirs = official(args, pair, drafter.config.block_size, Path(scratch))
        alike = saved_alike(drafter, Path(scratch) / "saved")
    same, cycles, seconds, tokens = 0, [], 0.0, 0
    for ids, row in zip(pair.prompts, theirs, strict=True):
        begun = time.perf_counter()
        (own,), timing = generate(model, [ids], args.max_new_tokens, stops, drafter)
        seconds += time.perf_counter() - begun - timing.prefill
        tokens += max(len(own.tokens) - 1, 0)
        same += own.tokens == row["tokens"] and own.cycles == row["accepted_plus_one"]
        cycles += own.cycles
    theirs_s = sum(r["seconds_per_token"] * len(r["tokens"]) for r in theirs) / tokens
    tau, count = sum(cycles) / len(cycles), len(pair.prompts)
    if args.json:
        row = {"case": pair.case, "prompts": count, "same": same, "saved_alike": alike, "tau": tau,
               "cycles": len(cycles), "ours_s_per_token": seconds / tokens,
               "official_s_per_token": theirs_s, "ratio": theirs_s * tokens / seconds}  # fmt: skip
        print(json.dumps(row), flush=True)
    else:
        print(
            f"{pair.case:36} {count:7} {same:5} {len(cycles):6} {tau:6.3f}  {'yes' if alike else 'NO':6}"
            f" {seconds / tokens:12.4f} {theirs_s:.4f}",
            flush=True,
        )
    return alike and same == count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--official", type=Path, default=ROOT / ".venv/official")
    parser.add_argument("--no-demo", action="store_true", help="tiny random targets only")
    parser.add_argument("--quick", action="store_true", help="two tiny pairs only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    if not args.json:
        print(
            f"{'case':36} {'prompts':>7} {'same':>5} {'cycles':>6} {'tau':>6}  saved  "
            f"{'ours s/token':>12} theirs"
        )
    equal = True
    shapes = [
        dict(tied=tied, block=block, **slide)
        for slide in ({}, dict(sliding=12), dict(sliding=12, is_causal=False))
        for tied in (True, False)
        for block in (8, 16)
    ]
    for shape in shapes[1:7:5] if args.quick else shapes:
        with tempfile.TemporaryDirectory() as scratch:
            pair = make_pair(
                Path(scratch), **shape, prompts=args.prompts, new_tokens=args.max_new_tokens
            )
            equal &= compare(args, pair, [END])
    if not (args.no_demo or args.quick):
        identity = read_identity(args.results / "target/identity.json")
        parquets = sorted((args.results / "corpus").glob("*.parquet"))
        held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
        chosen = select_per_kind(held, -(-args.prompts // len({p.kind for p in held})))
        ids = [p.prompt_ids for p in chosen[: args.prompts]]
        folder = args.results / "export" / args.drafter
        pair = Pair(args.drafter, Path(identity.folder), folder, ids)
        equal &= compare(args, pair, identity.eos_token_ids)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
