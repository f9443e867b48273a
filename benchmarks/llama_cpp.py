"""Ask a running llama-server for held-out prompts and compare its acceptance with ours.

    python benchmarks/llama_cpp.py RESULTS DRAFTER URL      (called by llama_cpp.sh, which starts it)

The server, in bfloat16, is asked by the product's own `dflash.served`; offline decoding, in float32,
answers the same prompts. Exit status 1 unless the server's pooled tau lies in our 95 % interval.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from dflash import acceptance, config, served
from dflash.corpus import read_prompts, select_per_kind
from dflash.decode import generate
from dflash.drafter import load_drafter
from dflash.errors import UserError
from dflash.files import text_sha256
from dflash.target import load_model, read_identity

PROMPTS, NEW_TOKENS = 20, 48


def wait_for(url: str, seconds: float = 300) -> None:
    """Return once the server answers that it is ready."""
    end = time.monotonic() + seconds
    while True:
        try:
            served.request(f"{url}/health", seconds=5)
            return
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def main() -> int:
    results, name, url = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    identity = read_identity(results / "target/identity.json")
    parquets = sorted((results / "corpus").glob("*.parquet"))
    held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
    prompts = select_per_kind(held, -(-PROMPTS // len({p.kind for p in held})))[:PROMPTS]
    drafter = load_drafter(results / "export" / name)

    wait_for(url)
    settings = served.StageSettings(server=config.Server(url=url), max_new_tokens=NEW_TOKENS)
    found = served.measure(settings, prompts, identity)
    ids = [p.prompt_ids for p in prompts]
    model = load_model(identity, "float32")
    responses, _ = generate(model, ids, NEW_TOKENS, identity.eos_token_ids, drafter)

    theirs, block = found["overall"], drafter.config.block_size
    ours = acceptance.figures([r.cycles for r in responses], block)
    hashes = [text_sha256(config.canonical(r.tokens)) for r in responses]
    same = sum(a["tokens_sha256"] == b for a, b in zip(found["responses"], hashes, strict=True))
    low, high = ours["tau_pooled_interval"]
    agrees = low <= theirs["tau_pooled"] <= high
    print(f"{len(prompts)} prompts, at most {NEW_TOKENS} new tokens, blocks of {block}")
    for where, x in ((f"{found['engine']}, bfloat16", theirs), ("offline, float32", ours)):
        cycles = x["cycles"]
        print(
            f"  {where:<20} {cycles:>5} cycles, {round((x['tau_pooled'] - 1) * cycles):>4} drafts "
            f"accepted, tau {x['tau_mean']:.4f} mean {x['tau_pooled']:.4f} pooled"
        )
    print(
        f"  offline: pooled interval {low:.3f} to {high:.3f}, {same} of {len(prompts)} answers the "
        f"same: {'agrees' if agrees else 'DIFFERS'}"
    )
    row = {"case": name, "llama_cpp_tau": theirs["tau_pooled"], "ours_tau": ours["tau_pooled"],
           "low": low, "high": high, "same": same, "agrees": agrees,
           "ratio": theirs["tau_pooled"] / ours["tau_pooled"]}  # fmt: skip
    print(json.dumps(row))
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
