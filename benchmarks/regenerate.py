"""Tokens a second of greedy answers: our loop against Hugging Face's `generate`, same prompts.

    python benchmarks/regenerate.py [--results results] [--quick] [--json]

Fresh processes in turn, medians, two threads. Needs a finished `target` and `corpus` stage (make demo).
`ratio` is peer time ÷ our time: above 1 we are faster. That both give the same tokens is checked too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = [(16, 32), (64, 64), (128, 64)]  # prompts, new tokens


def own_greedy(
    model, prompts: list, limit: int, eos: list[int], batch_size: int
) -> dict[str, list[int]]:
    """Greedy responses by sample id from Hugging Face's `generate`."""
    import torch
    from transformers import GenerationConfig

    # The model's own generation_config may sample or penalise, and fills whatever is left unset.
    model.generation_config = GenerationConfig()
    asked = GenerationConfig(
        do_sample=False, max_new_tokens=limit, eos_token_id=eos, pad_token_id=eos[0]
    )
    found = {}
    order = sorted(prompts, key=lambda p: len(p.prompt_ids))
    for i in range(0, len(order), batch_size):
        batch = order[i : i + batch_size]
        width = max(len(p.prompt_ids) for p in batch)
        ids = torch.full((len(batch), width), eos[0])
        mask = torch.zeros_like(ids)
        for row, p in enumerate(batch):
            ids[row, width - len(p.prompt_ids) :] = torch.tensor(p.prompt_ids)
            mask[row, width - len(p.prompt_ids) :] = 1
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=asked,
        )
        for p, row in zip(batch, out[:, width:].tolist(), strict=True):
            found[p.sample_id] = until_end(row, eos)
    return found


def until_end(ids: list[int], ends: list[int]) -> list[int]:
    """The ids up to and including the first end token; what follows is padding."""
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: stop + 1]


def one(system: str, results: Path, prompts: int, tokens: int, threads: int) -> dict:
    """Answer the prompts with one system, in this process."""
    import torch

    from dflash import config, regenerate
    from dflash.corpus import read_prompts
    from dflash.target import load_model, read_identity

    torch.set_num_threads(threads)
    identity = read_identity(results / "target/identity.json")
    every = read_prompts(sorted((results / "corpus").glob("*.parquet"))[0])
    chosen = sorted(every, key=lambda p: len(p.prompt_ids))[len(every) // 4 :][:prompts]
    model = load_model(identity, "float32")
    ends = identity.eos_token_ids
    own_greedy(model, chosen[:2], 2, ends, 2)  # warm up
    begun = time.perf_counter()
    if system == "ours":
        greedy = config.Regenerate(max_new_tokens=tokens)
        found = regenerate.answers(model, identity, chosen, greedy, prompts)
    else:
        found = own_greedy(model, chosen, tokens, ends, prompts)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens": sum(map(len, found.values())), "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one small case, once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        system, prompts, tokens = args.one
        print(json.dumps(one(system, args.results, int(prompts), int(tokens), args.threads)))
        return 0
    if not args.json:
        print(f"{'prompts x tokens':>18} {'ours tok/s':>11} {'HF tok/s':>9} {'ratio':>6}  same")
    for prompts, tokens in CASES[:1] if args.quick else CASES:
        runs: dict[str, list[dict]] = {"ours": [], "hf": []}
        for turn in range(1 if args.quick else 3):
            for system in ("ours", "hf") if turn % 2 == 0 else ("hf", "ours"):
                command = [
                    *(sys.executable, __file__, "--results", str(args.results)),
                    *("--threads", str(args.threads), "--one", system, str(prompts), str(tokens)),
                ]
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                runs[system].append(json.loads(done.stdout.splitlines()[-1]))
        rate = {
            k: r[0]["tokens"] / statistics.median(x["seconds"] for x in r) for k, r in runs.items()
        }
        same = runs["ours"][0]["found"] == runs["hf"][0]["found"]
        row = {
            "case": f"{prompts}x{tokens}",
            **rate,
            "ratio": rate["ours"] / rate["hf"],
            "same": same,
        }
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['case']:>18} {row['ours']:11.0f} {row['hf']:9.0f} {row['ratio']:6.2f}  {same}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
