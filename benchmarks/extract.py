"""Speed and memory of extraction against the bare forward of the same batches, on the demo's target.

    python benchmarks/extract.py [--results results] [--documents 120] [--threads 2] [--quick] [--json]

Three systems in fresh processes in turn, medians:

    ours   the stage's own loop: read, round, write a shard into a temporary folder
    bare   the decoder's forward of the same batches, and nothing else
    all    the decoder with `output_hidden_states=True`, the taps stacked from what it returns

`wall` and `cpu` are tokens a second of each kind of time and `ratio` the peer's time ÷ ours: above 1
we are faster (on a busy machine only the CPU's says something). `memory` is the peak of the
resident set above that of the loaded model, in MiB. Needs finished `target` and `regenerate` stages
(make demo).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = [(8192, False), (8192, True), (2048, False)]  # padded tokens at once, last state stored
SYSTEMS = ("ours", "bare", "all")


def resident(key: str) -> float:
    """MiB of this process: VmRSS, or VmHWM since the last reset."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if key in x)
    return int(line.split()[1]) / 1024


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one(system: str, args: argparse.Namespace, batch_tokens: int, last_hidden: bool) -> dict:
    """Read the documents with one system, in this process."""
    import torch

    from dflash import config, extract
    from dflash.features import shard_identity, write_shard
    from dflash.regenerate import read_tokens
    from dflash.taps import Taps, run_decoder
    from dflash.target import load_model, read_identity

    torch.set_num_threads(args.threads)
    target = read_identity(args.results / "target/identity.json")
    every = read_tokens(next(args.results.glob("tokens/*/*.parquet")))
    rows, _ = extract.select(every[: args.documents], 3072, target.vocab_size, "tokens")
    tokens = sum(len(row.input_ids) for row in rows)
    ids = config.tap_ids(config.Drafter(mask_token_id=0), target.num_hidden_layers)
    caught = [*ids, target.num_hidden_layers - 1] if last_hidden else ids
    identity = shard_identity(
        target,
        ids,
        compute_dtype="float32",
        settings_sha256="0" * 64,
        tokens_sha256="0" * 64,
        last_hidden=last_hidden,
    )
    model = load_model(target, "float32")

    def ours(rows: list, path: Path) -> None:
        batches = extract.Batches(batch_tokens)
        with (
            Taps(model, caught, torch.bfloat16) as taps,
            write_shard(path, identity, len(rows), sum(len(r.input_ids) for r in rows)) as writer,
        ):
            for document in extract.documents(model, taps, rows, batches, last_hidden):
                writer.add(document)

    @torch.inference_mode()
    def peer(rows: list) -> None:
        batches, start = extract.Batches(batch_tokens), 0
        while start < len(rows):
            batch = rows[start : batches.end(rows, start)]
            batches.count(batch)
            start += len(batch)
            ids_BS = torch.zeros(len(batch), len(batch[0].input_ids), dtype=torch.long)
            for i, row in enumerate(batch):
                ids_BS[i, : len(row.input_ids)] = torch.from_numpy(row.input_ids)
            whole = system == "all"
            out = run_decoder(model, input_ids=ids_BS, use_cache=False, output_hidden_states=whole)
            if whole:
                torch.stack([out.hidden_states[i + 1] for i in caught], 2).to(torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        for part, name in ((rows[-3:], "warm"), (rows, "timed")):
            Path("/proc/self/clear_refs").write_text("5")
            base, wall, cpu = resident("VmRSS"), time.perf_counter(), cpu_seconds()
            if system == "ours":
                ours(part, Path(folder) / f"{name}.zarr")
            else:
                peer(part)
    return {
        "wall": tokens / (time.perf_counter() - wall),
        "cpu": tokens / (cpu_seconds() - cpu),
        "memory": resident("VmHWM") - base,
        "tokens": tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--documents", type=int, default=120, help="the first so many are read")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one small case, once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        system, batch_tokens, last_hidden = args.one
        print(json.dumps(one(system, args, int(batch_tokens), last_hidden == "True")))
        return 0
    if args.quick:
        args.documents, args.turns = 20, 1
    if not args.json:
        print(
            f"{'case':>22} {'system':>6} {'wall':>6} {'ratio':>6} {'cpu':>6} {'ratio':>6} {'MiB':>6}"
        )
    for batch_tokens, last_hidden in CASES[:1] if args.quick else CASES:
        runs: dict[str, list[dict]] = {system: [] for system in SYSTEMS}
        for turn in range(args.turns):
            for system in SYSTEMS if turn % 2 == 0 else SYSTEMS[::-1]:
                command = [
                    *(sys.executable, __file__, "--results", str(args.results)),
                    *("--documents", str(args.documents), "--threads", str(args.threads)),
                    *("--one", system, str(batch_tokens), str(last_hidden)),
                ]
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                runs[system].append(json.loads(done.stdout.splitlines()[-1]))
        median = {
            system: {
                key: statistics.median(run[key] for run in runs[system]) for key in runs[system][0]
            }
            for system in SYSTEMS
        }
        ours = median["ours"]
        row = {
            "case": f"{batch_tokens} tokens{', last state' if last_hidden else ''}",
            **median,
            "ratio": ours["cpu"] / median["bare"]["cpu"],
            "ratio_wall": ours["wall"] / median["bare"]["wall"],
            "memory_ratio": median["all"]["memory"] / ours["memory"],
        }
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        for system in SYSTEMS:
            own = median[system]
            print(
                f"{row['case'] if system == 'ours' else '':>22} {system:>6} {own['wall']:6.0f} "
                f"{ours['wall'] / own['wall']:6.2f} {own['cpu']:6.0f} {ours['cpu'] / own['cpu']:6.2f} "
                f"{own['memory']:6.0f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
