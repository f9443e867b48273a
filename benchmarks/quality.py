"""What recipes accept on held-out prompts, trained on equal documents for equal steps.

    python benchmarks/quality.py [--results results] [--work FOLDER] [--cases NAME ...] [--steps 250]
                                 [--seeds 3] [--jobs 2] [--finished] [--quick] [--json]

Needs a finished demo (make demo), whose stored features all cases train on: the demo's recipe, those
of other trainers in our settings, and one change each to the base, which is the demo's recipe with a
cosine instead of the schedule that won. The target answers the demo's evaluation prompts once; on its
answers every drafter is measured at every position, and what greedy decoding would accept is read off
(`dflash.validate`), by the target's whole head and with weights as exported. Steps, documents of a
step, blocks of a document, seeds and the training's reduced head are the same for all. No document is
kept for validation, and the last weights count.

`ratio` is the demo's τ (mean over responses) over the case's: above 1 the demo accepts more;
`difference` is the case's less the demo's, `to_base` the case's less the base's, of the same seeds. A
process of one thread a training. With --work, finished trainings are kept, a line each in runs.jsonl,
and an interrupted benchmark goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash import config
from dflash.corpus import Prompt, read_prompts, select_per_kind, write_prompts
from dflash.files import text_sha256

DEFAULT = "default"  # the demo's recipe, to which all are compared
BASE = "base"  # what the others change


def training(**changes: Any) -> dict[str, Any]:
    """Drafter settings that change these of its training."""
    return {"training": changes}


def loss(**changes: Any) -> dict[str, Any]:
    """Drafter settings that change these of its loss."""
    return training(loss=changes)


# What others train on: the answers' tokens, in the answers. The paper's decay for the block size.
OF_DATA = {"labels": "data", "positions": "response", "gamma": None}

# Settings over the base, or over the case that `extends` names; what matters most first.
CASES: dict[str, dict[str, Any]] = {
    DEFAULT: {"extends": "equal"},
    BASE: {"extends": "equal", **training(schedule="cosine")},
    # DFlash paper, section 6 of its training recipe; betas and decay are not published.
    "published": {
        "start": "random",
        **training(lr=6e-4, warmup_share=0.04, schedule="cosine", clip=1.0, loss=OF_DATA),
    },
    # speculators 0.9.0 as its train/config/schema.py resolves `--speculator-type dflash`: one rate for
    # Muon and AdamW, labels by the target's argmax, windowed layers, causal inside the block.
    "speculators": {
        "start": "random",
        "sliding_window": 2048,
        **training(
            optimizer="muon",
            lr=1e-3,
            muon={"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "steps": 5},
            betas=[0.9, 0.999],
            weight_decay=0.01,
            schedule="linear",
            warmup_share=0.01,
            clip=1.0,
            loss={
                "labels": "argmax",
                "positions": "response",
                "weights": "dpace",
                "dpace_alpha": 0.5,
            },
        ),
    },
    # SpecForge 0.2.0, examples/configs/qwen3-8b-dflash-online.yaml and optimizer.py; its decay is that
    # of block size 16, here the one for the block size.
    "specforge": {"extends": "published", **training(betas=[0.9, 0.999], weight_decay=0.0)},
    "dpace": loss(weights="dpace", dpace_alpha=0.5),
    # Its rate moves the entries of a matrix about as much as AdamW's does (dflash.recipe).
    "muon": training(optimizer="muon", muon={"lr": 3e-3}),
    "labels-data": loss(labels="data", positions="response"),
    "start-random": {"start": "random"},
    "published-b16": {"extends": "published", "block_size": 16, "num_hidden_layers": 5},
    "taps-3": {"taps": 3},
    "layers-1": {"num_hidden_layers": 1},
    "layers-3": {"num_hidden_layers": 3},
    "ema": training(ema=0.99),
    "labels-argmax": loss(labels="argmax"),
    "response-only": loss(positions="response"),
    "lr-6e-4": training(lr=6e-4),
    "wsd": training(schedule="wsd"),
    "constant": training(schedule="constant"),
    # speculators' August 2026 default and RFC #979: AdamW at a tenth of Muon's rate.
    "speculators-10": {"extends": "speculators", **training(lr=1e-4)},
    "block-8": {"block_size": 8},
    "block-16": {"block_size": 16},
    "whole-head": loss(head_tokens=None),
}
QUICK = (DEFAULT, "published")


def workflow_of(steps: int) -> config.Workflow:
    """The demo's settings with a drafter a case, each trained for `steps`."""
    own = {"epochs": 1e4, "max_steps": steps, "validation": {"share": 0.0}}
    drafters = {
        "demo": config.DEMO["drafters"]["demo"],
        "equal": {"extends": "demo", **training(**own)},
        **{name: {"extends": BASE, **changes} for name, changes in CASES.items()},
    }
    workflow = config.load(config.DEMO | {"drafters": drafters})
    return workflow.model_copy(update={"drafters": {k: workflow.drafters[k] for k in CASES}})


# --- the documents to measure on ------------------------------------------------------------------


def prompts_of(results: Path, per_kind: int) -> list[Prompt]:
    """The prompts that the demo's evaluation takes."""
    paths = sorted((results / "corpus").glob("*.parquet"))
    heldout = [p for path in paths for p in read_prompts(path) if p.split == "heldout"]
    return select_per_kind(heldout, per_kind)


def answer(workflow: config.Workflow, results: Path, folder: Path, per_kind: int) -> None:
    """Let the target answer the evaluation's prompts as the evaluation does, and store its states
    there; what is stored already stays."""
    limit = workflow.evaluate.max_new_tokens
    asked = config.Regenerate(max_new_tokens=limit)
    workflow = workflow.model_copy(update={"regenerate": asked})
    folder.mkdir(parents=True, exist_ok=True)
    prompts, tokens = folder / "prompts.parquet", folder / "tokens.parquet"
    identity = ("--identity", results / "target/identity.json")
    source = workflow.corpus.sources[0].name
    if not tokens.exists():
        # The stage answers the prompts of training.
        chosen = [replace(p, split="train") for p in prompts_of(results, per_kind)]
        write_prompts(prompts, chosen)
        stage(
            *("regenerate", "--settings", config.stage_settings(workflow, "regenerate", source)),
            *("--machine", config.machine_settings(workflow, "regenerate"), *identity),
            *("--prompts", prompts, "--out", tokens, "--stats", folder / "tokens.json"),
        )
    stage(
        *("extract", "--settings", config.stage_settings(workflow, "extract")),
        *("--machine", config.machine_settings(workflow, "extract"), *identity),
        *("--tokens", tokens, "--out", folder / "heldout.zarr"),
    )


def stage(module: str, *args: object) -> None:
    call("-m", f"dflash.{module}", *args)


def call(*args: object) -> str:
    """Run Python; what it printed."""
    done = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, args[:3]))} failed: {done.stderr[-3000:]}")
    return done.stdout


# --- one training ---------------------------------------------------------------------------------


def one(settings: str, machine: str, name: str, results: Path, heldout: Path, run: Path) -> dict:
    """Train and measure, in this process."""
    from dflash import train

    begun = time.process_time()
    train.main(
        [
            *("--settings", settings, "--machine", machine, "--name", name, "--threads", "1"),
            *("--identity", str(results / "target/identity.json"), "--features"),
            *map(str, sorted((results / "features").glob("*/*.json"))),
            *("--runs", str(run / "run"), "--out", str(run / "drafter")),
        ]
    )
    seconds = time.process_time() - begun
    return {**measure(results, heldout, run / "drafter"), "cpu_seconds": round(seconds, 1)}


def measure(results: Path, heldout: Path, drafter: Path) -> dict[str, Any]:
    """What a drafter accepts of the target's answers, as `validate.summary` says it."""
    import torch

    from dflash import validate
    from dflash.drafter import load_drafter
    from dflash.features import open_shard
    from dflash.target import load_embedding_and_head, read_identity

    rounded = load_drafter(drafter).bfloat16().float()  # as exported
    shard = open_shard(heldout / "heldout.zarr")
    taps = shard.tap_positions(rounded.config.target_layer_ids)
    embed_VH, head_VH = load_embedding_and_head(read_identity(results / "target/identity.json"))
    kinds = {p.sample_id: p.kind for p in read_prompts(heldout / "prompts.parquet")}
    block = rounded.config.block_size
    responses = validate.measure(
        rounded,
        validate.read([shard], taps, shard.sample_ids),
        embed_VH.float(),
        head_VH.float(),
        block,
        kinds,
        torch.float32,
    )
    return validate.summary(responses, block)


# --- all of them ----------------------------------------------------------------------------------


class Runs:
    """Finished trainings, a line each in a file."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def find(self, key: str) -> dict | None:
        return next((row for row in self.rows if row["settings_sha256"] == key), None)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:  # a single write, whichever thread it comes from
            file.write(json.dumps(row) + "\n")


def train_all(args: argparse.Namespace, work: Path) -> dict[str, list[dict]]:
    """The trainings of each case, in the order of seeds; with `finished` those there are."""
    workflow = workflow_of(args.steps)
    runs = Runs(work / "runs.jsonl")
    heldout = work / f"heldout-{args.per_kind}"
    machine = json.loads(config.machine_settings(workflow, "train"))
    machine |= {"threads": 1, "save_minutes": 1e4}

    def settings(case: str, seed: int) -> tuple[str, str]:
        """Those of a training, and the key of its line."""
        found = json.loads(config.stage_settings(workflow, "train", case))
        found["training"]["seed"] = seed
        text = config.canonical(found)
        return text, text_sha256(f"{args.per_kind}/{text}")

    def finish(case: str, seed: int) -> dict:
        text, key = settings(case, seed)
        if row := runs.find(key):
            return row
        folder = work / "trainings" / key[:12]
        asked = (text, config.canonical(machine), case, args.results, heldout, folder)
        printed = call(__file__, "--one", *asked).splitlines()[-1]
        row = {"case": case, "seed": seed, "steps": args.steps, **json.loads(printed)}
        runs.add({**row, "settings_sha256": key})
        shutil.rmtree(folder)
        print(f"{case} seed {seed}: tau {row['tau_mean']:.3f}", file=sys.stderr, flush=True)
        return row

    if args.finished:
        rows = {c: [runs.find(settings(c, s)[1]) for s in range(args.seeds)] for c in args.cases}
        return {case: list(filter(None, found)) for case, found in rows.items() if any(found)}
    answer(workflow, args.results, heldout, args.per_kind)
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {c: [pool.submit(finish, c, s) for s in range(args.seeds)] for c in args.cases}
        try:
            return {case: [future.result() for future in found] for case, found in waiting.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def figures(case: str, found_of: dict[str, list[dict]]) -> dict[str, Any]:
    """Averages over seeds, and their spread: the standard deviation between trainings. Trainings of
    the demo's recipe and of the base with the same seeds are compared to."""
    rows = found_of[case]
    taus = {key: [row[key] for row in rows] for key in ("tau_mean", "tau_pooled", "by_position")}
    seeds = {row["seed"] for row in rows}

    def of(other: str) -> float:
        return statistics.mean(row["tau_mean"] for row in found_of[other] if row["seed"] in seeds)

    tau = statistics.mean(taus["tau_mean"])
    found: dict[str, Any] = {"case": case, "steps": rows[0]["steps"], "seeds": len(rows)}
    for key, values in taus.items():
        found[key] = round(statistics.mean(values), 4)
        found[f"{key}_spread"] = round(statistics.stdev(values), 4) if len(values) > 1 else None
    return {
        **found,
        "tau_mean_of_seeds": taus["tau_mean"],
        "difference": round(tau - of(DEFAULT), 4),
        "to_base": round(tau - of(BASE), 4),
        "ratio": round(of(DEFAULT) / tau, 4),
        "cpu_seconds": round(statistics.mean(row["cpu_seconds"] for row in rows), 1),
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        settings, machine, name, *folders = sys.argv[2:]
        print(json.dumps(one(settings, machine, name, *map(Path, folders))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="of a finished demo")
    parser.add_argument("--work", type=Path, help="keep what is made here (default: temporary)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    parser.add_argument(
        "--quick", action="store_true", help="three cases, 3 steps, one seed, a prompt of each kind"
    )
    parser.add_argument(
        "--finished", action="store_true", help="train nothing: tell what --work holds"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON a case")
    args = parser.parse_args()
    args.per_kind = config.Task().prompts_per_kind
    if args.quick:
        args.cases, args.steps, args.seeds, args.per_kind = QUICK, 3, 1, 1
    args.cases = list(dict.fromkeys([DEFAULT, BASE, *args.cases]))
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        found = train_all(args, args.work or Path(temporary))
    if not found.keys() >= {DEFAULT, BASE}:
        raise SystemExit(f"{args.work}: lacks a finished training of the demo's recipe or the base")
    if not args.json:
        print(
            f"{'case':16} {'seeds':>5} {'tau mean':>15} {'tau pooled':>15} {'difference':>10} "
            f"{'to base':>7} {'ratio':>6} {'cpu s':>6}"
        )
    for case in found:
        f = figures(case, found)
        if args.json:
            print(json.dumps(f))
            continue
        mean, pooled = (
            f"{f[key]:.3f}" + (f" ± {f[f'{key}_spread']:.3f}" if f[f"{key}_spread"] else "")
            for key in ("tau_mean", "tau_pooled")
        )
        print(
            f"{case:16} {f['seeds']:5} {mean:>15} {pooled:>15} {f['difference']:+10.3f} "
            f"{f['to_base']:+7.3f} {f['ratio']:6.3f} {f['cpu_seconds']:6.0f}"
        )


if __name__ == "__main__":
    main()
