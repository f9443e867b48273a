"""What a codec of the feature store does to acceptance: the same training on each codec's features.

    python benchmarks/codecs.py [--results results] [--work DIR] [--config FILE] [--quick] [--json]

Needs a finished `extract` and `corpus` stage (make demo) whose features were stored losslessly. They
are stored once more with every codec; then the drafter `demo` of the settings is trained on each by
the train stage and decodes the held-out prompts as the evaluate stage does. `raw` and `int8` train with three
seeds. `compact` gives the very same bits, so one seed is enough to see that it does. `ratio` is the
pooled tau with raw features over that with the codec's. With --work, finished parts are kept and an
interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dflash import config
from dflash.features import open_shard, write_shard
from dflash.files import read_json, write_json

SEEDS = {"raw": (0, 1, 2), "compact": (0,), "int8": (0, 1, 2)}


def store(results: Path, work: Path, codec: str) -> list[Path]:
    """The features stored again with a codec (those of the run are `raw`); returns the manifests."""
    if codec == "raw":
        return sorted((results / "features").glob("*/*.json"))
    manifests = []
    for path in sorted((results / "features").glob("*/*.zarr")):
        out = work / codec / path.parent.name / path.name
        manifests.append(out.with_suffix(".json"))
        if manifests[-1].exists():
            continue
        shard = open_shard(path)
        totals, last = shard.counts, shard.attributes["last_hidden"] is not None
        documents, tokens = totals["documents"], totals["tokens"]
        with write_shard(out, shard.identity, documents, tokens, codec=codec) as writer:
            for i in range(len(shard)):
                writer.add(shard.read(i, last_hidden=last))
    return manifests


def stage(module: str, *args: object) -> None:
    command = [sys.executable, "-m", f"dflash.{module}", *map(str, args)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def one(
    workflow: config.Workflow,
    results: Path,
    work: Path,
    codec: str,
    seed: int,
    steps: int | None,
    threads: int,
) -> dict:
    """Train and evaluate; the evaluation's figures."""
    manifests = store(results, work, codec)
    folder = work / f"{codec}-{seed}"
    identity = results / "target" / "identity.json"
    settings = json.loads(config.stage_settings(workflow, "train", "demo"))
    settings["training"]["seed"] = seed
    if steps:
        settings["training"]["max_steps"] = steps
    if not (folder / "drafter").exists():
        stage(
            *("train", "--settings", json.dumps(settings), "--name", "demo"),
            *("--machine", config.machine_settings(workflow, "train"), "--threads", threads),
            *("--identity", identity, "--features", *manifests),
            *("--runs", folder / "run", "--out", folder / "drafter"),
        )
    out = folder / "heldout.json"
    if not out.exists():
        asked = [str(x) for x in (results, folder / "drafter", out, threads)]
        asked_of = json.loads(config.stage_settings(workflow, "evaluate", "heldout"))
        if steps:
            asked_of["task"]["prompts_per_kind"] = 1
        settings = json.dumps(asked_of)
        subprocess.run([sys.executable, __file__, "--one", settings, *asked], check=True)
    overall = read_json(out)
    size = sum(open_shard(m.with_suffix(".zarr")).size for m in manifests)
    return {"mean": overall["tau_mean"], "pooled": overall["tau_pooled"], "bytes": size}


def evaluate(settings: str, results: Path, drafter: Path, out: Path, threads: int) -> None:
    """The acceptance pass of the evaluate stage alone: speed and losslessness are not asked here."""
    import torch

    from dflash import acceptance
    from dflash import evaluate as stage
    from dflash.drafter import load_drafter
    from dflash.target import load_model, read_identity

    torch.set_num_threads(threads)
    asked = config.check(stage.StageSettings, json.loads(settings), "evaluate")
    identity = read_identity(results / "target" / "identity.json")
    corpus = sorted(map(str, (results / "corpus").glob("*.parquet")))
    prompts = stage.task_prompts("heldout", asked, corpus, identity)
    decode = stage.Decoder(load_model(identity, asked.dtype), asked, identity.eos_token_ids)
    rounded = load_drafter(drafter).to(torch.bfloat16).to(getattr(torch, asked.dtype))
    cycles = [r.cycles for r in stage.decode_all(decode, rounded, prompts, 40)]
    write_json(out, acceptance.figures(cycles, rounded.config.block_size))


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        settings, results, drafter, out, threads = sys.argv[2:]
        return evaluate(settings, Path(results), Path(drafter), Path(out), int(threads))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="of a finished run")
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"))
    parser.add_argument("--work", type=Path, help="keep what is made here (default: temporary)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", choices=list(SEEDS))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="raw and int8, 10 steps, one seed, a prompt of each kind",
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON a case")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    workflow = config.load(args.config)
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        found: dict[str, list[dict]] = {}
        for codec in args.codecs or (["raw", "int8"] if args.quick else SEEDS):
            for seed in SEEDS[codec][: 1 if args.quick else None]:
                steps = 10 if args.quick else None
                row = one(workflow, args.results, work, codec, seed, steps, args.threads)
                found.setdefault(codec, []).append(row)
                print(f"{codec} seed {seed}: {row}", file=sys.stderr, flush=True)
    if not args.json:
        print(
            f"{'codec':8} {'seeds':>5} {'bytes':>14} {'tau mean':>20} {'tau pooled':>20} {'ratio':>6}"
        )
    for codec, rows in found.items():
        same = found["raw"][: len(rows)] if "raw" in found else rows
        pooled = [r["pooled"] for r in rows]
        ratio = statistics.mean(r["pooled"] for r in same) / statistics.mean(pooled)
        if args.json:
            print(json.dumps({"case": codec, "seeds": rows, "ratio": round(ratio, 4)}))
            continue
        texts = [" ".join(f"{r[key]:.3f}" for r in rows) for key in ("mean", "pooled")]
        print(
            f"{codec:8} {len(rows):5} {rows[0]['bytes']:14,} {texts[0]:>20} {texts[1]:>20} {ratio:6.3f}"
        )


if __name__ == "__main__":
    main()
