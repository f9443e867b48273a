"""Whether vLLM loads what we export, and accepts in each slot what our own decoding accepts.

    python benchmarks/serve_vllm.py --vllm vllm-venv/bin/python [--results results] [--drafter demo]
                                    [--prompts 120] [--no-demo] [--quick] [--json]

vLLM (the CPU build, in an environment of its own: docs/export.md) decodes greedily with and without
the drafter, each in a fresh process; ours decodes the same prompts, as it should be and as vLLM's CPU
build computes (see `served.first_key_norm_for_context`). In float32 tokens and, with the latter, every
counter must be equal; in bfloat16 near-ties differ, so its slots must lie within the 95 % interval of
ours (responses drawn with replacement).
Exit status 1 if they do not. Cases: the demo's export in
both precisions, and tiny random targets with tied and own heads, block 8 and 16, sliding layers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from pairs import END, Pair, make_pair
from served import first_key_norm_for_context
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dflash.corpus import read_prompts, select_per_kind
from dflash.decode import generate
from dflash.drafter import DTYPES, load_drafter
from dflash.target import read_identity

ROOT = Path(__file__).parent.parent


def vllm(args, pair: Pair, stops: list[int], dtype: str, block: int | None) -> dict:
    """What vLLM decodes, with the drafter or (block None) without."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "prompts.json").write_text(json.dumps(pair.prompts))
        command = [
            *(args.vllm, str(ROOT / "tests/peers/vllm_decode.py"), "--target", str(pair.target)),
            *("--prompts", f"{scratch}/prompts.json", "--out", f"{scratch}/out.json"),
            *("--max-new-tokens", str(args.max_new_tokens), "--dtype", dtype),
            *("--stop", *map(str, stops), "--sequences", str(args.sequences)),
            *(["--drafter", str(pair.drafter), "--block-size", str(block)] if block else []),
        ]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"vLLM failed on {pair.case}:\n{done.stderr[-3000:]}")
        return json.loads((Path(scratch) / "out.json").read_text())


def ours(args, pair: Pair, stops: list[int], dtype: str) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each prompt, and the tokens that each of its cycles accepted, counted as vLLM counts.

    vLLM drafts whole blocks to the end and counts what it accepts before it cuts at a stop token or
    the limit: so ours decodes a block further, without stop tokens, and is cut here.
    """
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=DTYPES[dtype]).eval()
    drafter = load_drafter(pair.drafter).to(DTYPES[dtype])
    limit, block = args.max_new_tokens, drafter.config.block_size
    tokens, accepted = [], []
    for start in range(0, len(pair.prompts), 8):
        part = pair.prompts[start : start + 8]
        for response in generate(model, part, limit + block, [], drafter)[0]:
            ends = [i + 1 for i, t in enumerate(response.tokens) if t in stops]
            length = min([*ends, limit])
            done, own = 1, []
            for gained in response.cycles:
                if done >= length:
                    break
                own.append(gained - 1)
                done += gained
            tokens.append(response.tokens[:length])
            accepted.append(own)
    return tokens, accepted


def counters(accepted: list[list[int]], block: int) -> list[int]:
    """Cycles, then how many of them accepted slot k, k = 1..B-1."""
    cycles = [x for own in accepted for x in own]
    return [sum(x >= k for x in cycles) for k in range(block)]


def per_slot(accepted: list[list[int]], block: int) -> list[float]:
    """Share of cycles in which slot k was accepted, k = 1..B-1."""
    cycles = [x for own in accepted for x in own]
    return [sum(x >= k for x in cycles) / max(len(cycles), 1) for k in range(1, block)]


def interval(accepted: list[list[int]], block: int, draws: int = 1000) -> list[tuple[float, float]]:
    """95 % interval of each slot's share, responses drawn with replacement."""
    rng = random.Random(0)
    drawn = [per_slot(rng.choices(accepted, k=len(accepted)), block) for _ in range(draws)]
    slots = [sorted(shares) for shares in zip(*drawn, strict=True)]
    return [(s[int(0.025 * draws)], s[int(0.975 * draws) - 1]) for s in slots]


def compare(args, pair: Pair, stops: list[int], dtype: str) -> bool:
    """Run one case, print its row, and say whether the two agree."""
    tokens, accepted = ours(args, pair, stops, dtype)
    block = load_drafter(pair.drafter).config.block_size
    with_drafter = vllm(args, pair, stops, dtype, block)
    without = vllm(args, pair, stops, dtype, None)
    with first_key_norm_for_context():
        as_built = counters(ours(args, pair, stops, dtype)[1], block)
    drafts, *counts = counters(accepted, block)
    shares = [n / max(with_drafter["drafts"], 1) for n in with_drafter["accepted"]]
    same = sum(a == b for a, b in zip(with_drafter["tokens"], without["tokens"], strict=True))
    like_ours = sum(a == b for a, b in zip(with_drafter["tokens"], tokens, strict=True))
    if dtype == "float32":
        agree = [with_drafter["drafts"], *with_drafter["accepted"]] == as_built
        agree = agree and same == like_ours == len(tokens)
    else:
        bounds = interval(accepted, block)
        agree = all(low <= s <= high for s, (low, high) in zip(shares, bounds, strict=True))
    tau, theirs = 1 + sum(counts) / max(drafts, 1), 1 + sum(shares)
    name = f"{pair.case}, {dtype}"
    row = {
        "case": name, "prompts": len(tokens), "same_with_and_without": same,
        "same_as_ours": like_ours, "vllm_drafts": with_drafter["drafts"], "ours_drafts": drafts,
        "vllm_accepted": with_drafter["accepted"], "ours_accepted": counts, "vllm_tau": theirs,
        "as_cpu_build": as_built, "ours_tau": tau, "ratio": theirs / tau, "agree": agree,
        "vllm_seconds": with_drafter["seconds"], "vllm_plain_seconds": without["seconds"],
    }  # fmt: skip
    if args.json:
        print(json.dumps(row), flush=True)
    else:
        print(
            f"{name:36} {len(tokens):7} {same:9} {like_ours:7} {theirs:7.4f} {tau:7.4f} "
            f"{'yes' if agree else 'NO':5}\n    vLLM {with_drafter['drafts']:6} drafts, accepted "
            f"{with_drafter['accepted']}\n    ours {drafts:6} drafts, accepted {counts}\n"
            f"      as the CPU build computes: {as_built[0]} drafts, accepted {as_built[1:]}",
            flush=True,
        )
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--prompts", type=int, default=120, help="of the demo")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=1, help="decoded together by vLLM")
    parser.add_argument("--no-demo", action="store_true", help="tiny random targets only")
    parser.add_argument("--quick", action="store_true", help="one tiny pair only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    if not args.json:
        print(
            f"{'case':36} {'prompts':>7} {'with=w/o':>9} {'=ours':>7} {'tau':>7} {'ours':>7} agree"
        )
    agree = True
    shapes = [
        dict(tied=True, block=8), dict(tied=False, block=8), dict(tied=True, block=16),
        dict(tied=False, block=16), dict(tied=False, block=8, sliding=12),
        dict(tied=True, block=8, sliding=12, is_causal=False),
    ]  # fmt: skip
    for shape in shapes[:1] if args.quick else shapes:
        with tempfile.TemporaryDirectory() as scratch:
            pair = make_pair(Path(scratch), **shape, new_tokens=args.max_new_tokens)
            agree &= compare(args, pair, [END], "float32")
    if not (args.no_demo or args.quick):
        identity = read_identity(args.results / "target/identity.json")
        parquets = sorted((args.results / "corpus").glob("*.parquet"))
        held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
        chosen = select_per_kind(held, -(-args.prompts // len({p.kind for p in held})))
        ids = [p.prompt_ids for p in chosen[: args.prompts]]
        folder = args.results / "export" / args.drafter
        pair = Pair(args.drafter, Path(identity.folder), folder, ids)
        for dtype in ("float32", "bfloat16"):
            agree &= compare(args, pair, identity.eos_token_ids, dtype)
    return 0 if agree else 1


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    sys.exit(main())
