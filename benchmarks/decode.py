"""Tokens a second of decoding: our loop, the official package's and transformers', in turn.

    python benchmarks/decode.py [--results results] [--drafter results/export/demo] [--prompts 8]
                                [--official .venv/official] [--quick] [--json]

Same target, drafter, held-out prompts and new tokens; greedy, one thread. Each system lives in a fresh
process of its own that loads once and then waits for its turn, prompt by prompt, so that what else the
machine does strikes all alike. Prefill is left out of the times. A figure is the median over the turns
of tokens a second over all prompts; `ratio` is the median over the turns of our rate by the peer's (of
the batch's by that of batch 1): above 1 we are faster. `cpu` is the same ratio in seconds that the
process had a core, which on a busy machine says more. `same` says whether the tokens are equal.
transformers has no smaller model to draft with here: it looks up the prompt, or leaves the target
after a few layers. Needs a finished run (make demo) and, for its rows, the official package (make test).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXIT_LAYER = 10  # of transformers' early exit
DRAFTS = 7  # tokens a prompt lookup proposes, ours and theirs
# name of a case, the system that runs it, what is asked of it, and the case it is compared with
CASES = [
    ("plain", "ours", {}, None),
    ("plain, official", "official", {"block": 1}, "plain"),
    ("plain, transformers", "transformers", {}, "plain"),
    ("drafted", "ours", {"drafter": True}, None),
    ("drafted, official", "official", {}, "drafted"),
    ("early exit, transformers", "transformers", {"assistant_early_exit": EXIT_LAYER}, "drafted"),
    ("lookup", "ours", {"lookup": True}, None),
    ("lookup, transformers", "transformers", {"prompt_lookup_num_tokens": DRAFTS}, "lookup"),
    ("plain, batch 8", "ours", {"batch": 8}, "plain"),
    ("drafted, batch 8", "ours", {"drafter": True, "batch": 8}, "drafted"),
]


def ours(args):
    """A function that answers prompts with this package's loop."""
    import torch

    from dflash.decode import PromptLookup, generate
    from dflash.drafter import DTYPES, load_drafter
    from dflash.target import load_model, read_identity

    identity = read_identity(args.results / "target/identity.json")
    model = load_model(identity, args.dtype)
    drafter = load_drafter(args.drafter).to(torch.bfloat16).to(DTYPES[args.dtype])

    def answer(prompts, limit, drafter_too=False, lookup=False):
        clock = Clock()
        responses, timing = generate(
            *(model, prompts, limit, identity.eos_token_ids, drafter if drafter_too else None),
            propose=PromptLookup() if lookup else None,
            block_size=1 + DRAFTS if lookup else None,
        )
        wall, cpu = clock.spent()
        rest = 1 - timing.prefill / wall
        return [r.tokens for r in responses], wall * rest, cpu * rest

    return answer


def official(args):
    """The same with the official package, which has to be first in PYTHONPATH."""
    sys.path.insert(0, str(ROOT / "tests/peers"))
    import official as peer
    import torch

    package = peer.official()
    torch.cuda.synchronize = lambda device=None: None  # it times with that, GPU or not
    dtype = getattr(torch, args.dtype)
    folder = json.loads((args.results / "target/identity.json").read_text())["folder"]
    target = peer.load_target(folder, dtype, "sdpa")
    drafter = peer.load_drafter(package, str(args.drafter), dtype)
    stops = peer.stop_ids(target)

    def answer(prompts, limit, block=None):
        (prompt,) = prompts
        clock = Clock()
        r = package.dflash_generate(
            *(drafter, target, torch.tensor([prompt]), limit, stops),
            temperature=0.0,
            block_size=block or drafter.block_size,
            return_stats=True,
        )
        wall, cpu = clock.spent()
        rest = r.time_per_output_token * r.num_output_tokens / wall
        return [r.output_ids[0, len(prompt) :].tolist()], wall * rest, cpu * rest

    return answer


def transformers(args):
    """The same with `generate` of transformers; its prefill is timed by a response of one token."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    identity = json.loads((args.results / "target/identity.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        identity["folder"], dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config = GenerationConfig()  # which may ask for more than greedy decoding
    ends = identity["eos_token_ids"]

    def generate(prompt, limit, **more):
        clock = Clock()
        asked = GenerationConfig(
            do_sample=False, max_new_tokens=limit, eos_token_id=ends, pad_token_id=ends[0], **more
        )
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
        return out[0, len(prompt) :].tolist(), *clock.spent()

    def answer(prompts, limit, **more):
        (prompt,) = prompts
        _, *first = generate(prompt, 1)
        tokens, *spent = generate(prompt, limit, **more)
        return [tokens], *(s - f for s, f in zip(spent, first, strict=True))

    return answer


class Clock:
    """Seconds since it was made: on the wall, and of a core."""

    def __init__(self):
        self.begun = time.perf_counter(), time.process_time()

    def spent(self) -> tuple[float, float]:
        return time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]


def work(args) -> None:
    """Answer what comes as lines of JSON on stdin, until it ends."""
    import torch

    torch.set_num_threads(args.threads)
    answer = {"ours": ours, "official": official, "transformers": transformers}[args.work](args)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


class Worker:
    """A system in a process of its own."""

    def __init__(self, system: str, args):
        python = args.official_python if system == "official" else sys.executable
        first = str(args.official) if system == "official" else str(ROOT)
        command = [
            *(python, __file__, "--work", system, "--results", str(args.results)),
            *(
                "--drafter",
                str(args.drafter),
                "--dtype",
                args.dtype,
                "--threads",
                str(args.threads),
            ),
        ]
        threads = {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": first} | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if args.json else None,
            text=True,
        )

    def __call__(self, **asked):
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--drafter", type=Path, help="default: RESULTS/export/demo")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--official", type=Path, default=ROOT / ".venv/official")
    parser.add_argument("--official-python", default=sys.executable)
    parser.add_argument("--quick", action="store_true", help="two prompts, few tokens, once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.drafter = (args.drafter or args.results / "export/demo").resolve()
    args.results, args.official = args.results.resolve(), args.official.resolve()
    if args.work:
        work(args)
        return 0
    if args.quick:
        args.prompts, args.max_new_tokens, args.turns = 2, 16, 1

    from dflash.corpus import read_prompts, select_per_kind

    every = [
        p for f in sorted((args.results / "corpus").glob("*.parquet")) for p in read_prompts(f)
    ]
    held = [p for p in every if p.split == "heldout"]
    kinds = len({p.kind for p in held})
    chosen = select_per_kind(held, -(-args.prompts // kinds))[: args.prompts]
    prompts = [p.prompt_ids for p in chosen]
    cases = [c for c in CASES if c[1] != "official" or args.official.is_dir()]
    workers = {system: Worker(system, args) for system in dict.fromkeys(c[1] for c in cases)}
    limit = args.max_new_tokens
    for worker in workers.values():
        worker(prompts=prompts[:1], limit=4)

    tokens: dict[str, list] = {}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in cases}
    for turn in range(args.turns):
        sums = {name: [0.0, 0.0] for name, *_ in cases}
        for place in range(len(prompts)):
            for name, system, asked, _ in cases if (turn + place) % 2 == 0 else cases[::-1]:
                asked = dict(asked)
                batch = asked.pop("batch", 1)
                if "drafter" in asked:
                    asked["drafter_too"] = asked.pop("drafter")
                if place % batch:
                    continue
                part = prompts[place : place + batch]
                found, *seconds = workers[system](prompts=part, limit=limit, **asked)
                tokens.setdefault(name, [None] * len(prompts))[place : place + batch] = found
                sums[name] = [a + b for a, b in zip(sums[name], seconds, strict=True)]
        for name, total in sums.items():
            spent[name].append(tuple(total))
    for worker in workers.values():
        worker.process.stdin.close()
        worker.process.wait()

    if not args.json:
        print(f"{'case':26} {'tokens/s':>8} {'ratio':>6} {'cpu':>6}  same")
    for name, _, asked, other in cases:
        count = sum(len(t) - 1 for t in tokens[name])
        row = {
            "case": name,
            "tokens_per_second": count / statistics.median(w for w, _ in spent[name]),
        }
        if other:
            pairs = list(zip(spent[name], spent[other], strict=True))
            sign = -1 if "batch" in asked else 1
            for key, i in (("ratio", 0), ("cpu_ratio", 1)):
                row[key] = statistics.median((a[i] / b[i]) ** sign for a, b in pairs)
            row["same"] = tokens[name] == tokens[other]
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            compared = ""
            if other:
                compared = (
                    f"{row['ratio']:6.2f} {row['cpu_ratio']:6.2f}  {'yes' if row['same'] else 'NO'}"
                )
            print(f"{name:26} {row['tokens_per_second']:8.1f} {compared}".rstrip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
