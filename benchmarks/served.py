"""Serve a finished run's drafter with a real vLLM, and compare what it counts with offline decoding.

    python benchmarks/served.py --vllm VLLM_ENVIRONMENT/bin/python [--results results]
                                [--drafter demo] [--dtypes float32 bfloat16] [--quick] [--json]

For each precision `vllm serve` is started with the exported drafter and stopped again; the held-out
prompts go through the product's own `dflash.served`. Its counters stand beside offline
decoding of the same prompts, counted as an engine counts: also the drafts beyond the end of an answer.
Exit status 1 unless float32 agrees exactly and bfloat16 within the bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash import acceptance, config, served
from dflash.corpus import Prompt, read_prompts, select_per_kind
from dflash.decode import generate
from dflash.drafter import DTYPES, load_drafter
from dflash.errors import UserError
from dflash.files import text_sha256
from dflash.target import Identity, load_model, read_identity

START_SECONDS = 900  # importing, loading and warming up, on a busy machine
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def vllm_serve(
    args: argparse.Namespace, model: str, drafter: Path, block: int, dtype: str
) -> Iterator[str]:
    """A running server; its URL."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        # what `vllm serve` runs; that command itself does not start where the CPU build is installed
        *(str(args.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", "target"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager"),
        *("--max-model-len", "1024", "--max-num-seqs", "1", "--generation-config", "vllm"),
    ]
    method = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": block - 1}
    command += ["--speculative-config", json.dumps(method)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | QUIET
    env["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                try:
                    served.request(f"{url}/health", seconds=5)
                    break
                except UserError as e:
                    if server.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        raise SystemExit(f"vllm serve did not start: {log.read()[-3000:]}") from e
                time.sleep(1)
            yield url
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def settings(url: str, args: argparse.Namespace) -> served.StageSettings:
    """What the stage is told."""
    return served.StageSettings(server=config.Server(url=url), max_new_tokens=args.max_new_tokens)


def offline(
    args: argparse.Namespace, identity: Identity, prompts: list[Prompt], dtype: str
) -> dict[str, Any]:
    """Our decoding, counted as an engine counts: a cycle that begins before an answer's end counts
    whole."""
    model = load_model(identity, dtype, device=torch.device("cpu"))
    drafter = load_drafter(args.results / "export" / args.drafter).to(DTYPES[dtype])
    block, limit, eos = drafter.config.block_size, args.max_new_tokens, identity.eos_token_ids
    counts, slots, hashes = [], [0] * (block - 1), []
    for at in range(0, len(prompts), 20):
        ids = [p.prompt_ids for p in prompts[at : at + 20]]
        responses, _ = generate(model, ids, limit + block, [], drafter)
        for r in responses:
            ends = [i + 1 for i, token in enumerate(r.tokens) if token in eos]
            end = min([limit, *ends])
            hashes.append(text_sha256(config.canonical(r.tokens[:end])))
            counted = [c for i, c in enumerate(r.cycles) if 1 + sum(r.cycles[:i]) < end]
            counts.append((sum(counted), len(counted)))
            slots = [n + sum(c > k for c in counted) for k, n in enumerate(slots, start=1)]
    return {**acceptance.averages(counts), "slots": slots, "hashes": hashes, "counts": counts}


def compare(
    args: argparse.Namespace, identity: Identity, prompts: list[Prompt], dtype: str
) -> dict[str, Any]:
    """One line of the table."""
    export = args.results / "export" / args.drafter
    block = json.loads((export / "config.json").read_text())["block_size"]
    with vllm_serve(args, identity.folder, export, block, dtype) as url:
        found = served.measure(settings(url, args), prompts, identity)
    ours = offline(args, identity, prompts, dtype)
    o, rows = found["overall"], found["responses"]
    slots = [sum(column) for column in zip(*(r["accepted_per_slot"] for r in rows), strict=True)]
    counts = [(r["accepted"] + r["cycles"], r["cycles"]) for r in rows]
    exact = slots == ours["slots"] and o["cycles"] == ours["cycles"]
    low, high = o["tau_pooled_interval"]
    within = low <= ours["tau_pooled"] <= high
    return {
        "case": dtype,
        "prompts": len(prompts),
        "served": {key: o[key] for key in ("cycles", "tau_mean", "tau_pooled", "tokens_per_second")}
        | {"slots": slots, "interval": [low, high]},
        "offline": {key: ours[key] for key in ("cycles", "tau_mean", "tau_pooled", "slots")},
        "ratio": o["tau_pooled"] / ours["tau_pooled"],
        "same_counts": same(counts, ours["counts"]),
        "same_answers": same([r["tokens_sha256"] for r in rows], ours["hashes"]),
        "agrees": exact if dtype == "float32" else within,
    }


def same(a: list[Any], b: list[Any]) -> int:
    """How many are equal, one by one."""
    return sum(x == y for x, y in zip(a, b, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm", type=Path, required=True, help="Python of an environment with vLLM"
    )
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--prompts-per-kind", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="float32, one prompt of each kind")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.dtypes, args.prompts_per_kind, args.max_new_tokens = ["float32"], 1, 16
    torch.set_num_threads(args.threads)
    identity = read_identity(args.results / "target/identity.json")
    parquets = sorted((args.results / "corpus").glob("*.parquet"))
    held = [p for path in parquets for p in read_prompts(path) if p.split == "heldout"]
    prompts = select_per_kind(held, args.prompts_per_kind)
    lines = []
    for dtype in args.dtypes:
        line = compare(args, identity, prompts, dtype)
        lines.append(line)
        if args.json:
            print(json.dumps(line), flush=True)
            continue
        n = line["prompts"]
        print(f"{dtype}, {n} prompts, at most {args.max_new_tokens} new tokens")
        for where in ("served", "offline"):
            x = line[where]
            rate = f", {x['tokens_per_second']:.1f} tokens/s" if where == "served" else ""
            print(
                f"  {where:<8} {x['cycles']:>5} cycles, accepted per slot {x['slots']}, tau "
                f"{x['tau_mean']:.4f} mean {x['tau_pooled']:.4f} pooled{rate}"
            )
        low, high = line["served"]["interval"]
        print(
            f"  pooled interval {low:.3f} to {high:.3f}; {line['same_counts']} of {n} prompts with the "
            f"same counts, {line['same_answers']} with the same tokens: "
            f"{'agrees' if line['agrees'] else 'DIFFERS'}",
            flush=True,
        )
    return 0 if all(line["agrees"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
