"""Whether the speculators library computes from its layout what we compute from the published one.

    python benchmarks/layouts.py --peers PYTHON [--results results] [--drafter demo] [--json]

Its own loader reads `export/NAME/speculators` (`export.formats: [dflash, speculators]`) in a process of
its own; both get the hidden states of held-out prompts with blocks at every eighth token. Prints
the largest difference of a slot's hidden state, absolute and relative to the largest value, and how many
drafted tokens differ; exit status 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash.attention import Layout
from dflash.corpus import read_prompts, select_per_kind
from dflash.drafter import block_input, load_drafter
from dflash.taps import Taps, run_decoder
from dflash.target import load_model, read_identity

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="interpreter that imports speculators 0.9.0")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    identity = read_identity(args.results / "target/identity.json")
    folder = args.results / "export" / args.drafter
    drafter, model = load_drafter(folder), load_model(identity, "float32")
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    parquets = sorted((args.results / "corpus").glob("*.parquet"))
    held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
    wrong = 0
    if not args.json:
        print(
            f"{'prompt':16} {'rows':>5} {'blocks':>6} {'difference':>10} {'relative':>9} drafts differ"
        )
    for prompt in select_per_kind(held, 1):
        ids = torch.tensor(prompt.prompt_ids)
        anchors = torch.arange(4, len(ids) - 1, 8)
        with Taps(model, drafter.config.target_layer_ids) as taps, torch.no_grad():
            run_decoder(model, input_ids=ids[None])
        features = taps.stack()[0].flatten(1).contiguous()
        with tempfile.TemporaryDirectory() as scratch:
            save_file({"taps": features, "ids": ids, "anchors": anchors}, f"{scratch}/x.st")
            command = [
                *(args.peers, str(ROOT / "tests/peers/speculators_hidden.py")),
                *("--drafter", str(folder / "speculators"), "--target", identity.folder),
                *("--input", f"{scratch}/x.st", "--out", f"{scratch}/y.st"),
            ]
            env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            subprocess.run(command, env=env, check=True, capture_output=True)
            theirs = load_file(f"{scratch}/y.st")["hidden"]
        with torch.no_grad():
            c = drafter.config
            block = block_input(embed, ids[anchors], c.block_size, c.mask_token_id)
            ours = drafter(
                features, block, Layout(torch.tensor([0, len(ids)]), anchors, c.block_size)
            )
            differ = int((head(ours).argmax(-1) != head(theirs).argmax(-1))[:, 1:].sum())
        off = float((ours - theirs).abs().max())
        relative = off / float(ours.abs().max())
        wrong += differ
        if args.json:
            row = {"case": prompt.id, "rows": len(ids), "blocks": len(anchors), "difference": off,
                   "relative": relative, "drafts_differ": differ}  # fmt: skip
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{prompt.id:16} {len(ids):5} {len(anchors):6} {off:10.1e} {relative:9.1e} {differ}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
