"""Ask a running llama-server for held-out prompts and compare its acceptance with ours.

python benchmarks/llama_cpp.py RESULTS DRAFTER URL      (called by llama_cpp.sh, which starts it)
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch

from dflash.corpus import read_prompts, select_per_kind
from dflash.decode import generate
from dflash.drafter import load_drafter
from dflash.errors import UserError
from dflash.served import request, request_json
from dflash.target import load_model, read_identity

PROMPTS, NEW_TOKENS = 20, 48


def wait_for(url: str, seconds: float = 300) -> None:
    """Return once the server answers that it is ready."""
    end = time.monotonic() + seconds
    while True:
        try:
            request(f"{url}/health", seconds=5)
            return
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def interval(rows: list[list[int]], draws: int = 1000) -> tuple[float, float]:
    """95 % interval of the pooled tau of some responses' cycles."""
    rng = random.Random(0)
    taus = []
    for _ in range(draws):
        cycles = [x for row in rng.choices(rows, k=len(rows)) for x in row]
        taus.append(sum(cycles) / len(cycles))
    taus.sort()
    return taus[int(0.025 * draws)], taus[int(0.975 * draws) - 1]


def main() -> int:
    results, name, url = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    identity = read_identity(results / "target/identity.json")
    parquets = sorted((results / "corpus").glob("*.parquet"))
    held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
    prompts = select_per_kind(held, -(-PROMPTS // len({p.kind for p in held})))[:PROMPTS]
    drafter = load_drafter(results / "export" / name)
    wait_for(url)
    drafted = accepted = same = 0
    tokens = []
    for prompt in prompts:
        answer = request_json(
            f"{url}/completion",
            {"prompt": prompt.prompt_ids, "n_predict": NEW_TOKENS, "temperature": 0, "top_k": 1,
             "return_tokens": True, "cache_prompt": False},
        )  # fmt: skip
        drafted += answer["timings"].get("draft_n", 0)
        accepted += answer["timings"].get("draft_n_accepted", 0)
        tokens.append(answer["tokens"])
    with torch.inference_mode():
        ids = [p.prompt_ids for p in prompts]
        model = load_model(identity, "float32")
        ours, _ = generate(model, ids, NEW_TOKENS, identity.eos_token_ids, drafter)
    for own, theirs in zip(ours, tokens, strict=True):
        ended = [t for t in own.tokens if t not in identity.eos_token_ids]
        same += theirs[: len(ended)] == ended
    rows = [r.cycles for r in ours if r.cycles]
    cycles = [x for row in rows for x in row]
    low, high = interval(rows)
    theirs_tau = 1 + accepted / max(drafted, 1) * (drafter.config.block_size - 1)
    tau = sum(cycles) / len(cycles)
    print(
        f"llama.cpp, bfloat16: {accepted} accepted of {drafted} drafted, pooled tau {theirs_tau:.3f}"
    )
    print(
        f"ours, float32: {len(cycles)} cycles, pooled tau {tau:.3f} (95 % {low:.3f} to {high:.3f})"
    )
    print(f"{same} of {len(prompts)} answers the same")
    agree = low <= theirs_tau <= high
    print(json.dumps({"case": name, "llama_cpp_tau": theirs_tau, "ours_tau": tau, "low": low,
                      "high": high, "same": same, "ratio": theirs_tau / tau, "agree": agree}))  # fmt: skip
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
