"""Feeding training: memory against the number of shards, documents a second, waiting, CPU time.

    python benchmarks/loader.py [--quick] [--json] [--scratch FOLDER]

Synthetic shards are written to a temporary folder (5 GB, with --quick 0.5 GB), then each case is a
fresh process that takes packs from `dflash.loader` as training does, without computing with them.

1. Memory: the same number of documents with the same `loader_mb` out of 10, 100 and 1,000 shards of
   equal size. `MiB` is the peak resident set over that after the imports; opening and indexing
   all shards is in it. `ratio` is the peak of the fewest shards ÷ this one: 1 is flat.
2. Speed: documents of the demo's width from ten shards with 0, 1 and 4 threads, against
   torch's DataLoader with as many workers over a safetensors file a document (what others do),
   which lays the same packs end to end. CPU seconds are those of all processes and threads, a GiB of hidden
   states. `waiting` is the share of time without data in a second pass, in which the trainer sleeps
   `TRAIN_SECONDS` a pack, as if a GPU were at work. `ratio` is the peer's seconds a document ÷ ours.

Systems take turns; figures are medians. Files are in the page cache.
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
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from training_step import quiet_environment, status_mib  # noqa: E402

SHARD_DOCUMENTS = 16
LENGTHS = (64, 448)  # tokens of a document, evenly spread
NARROW, WIDE = (2, 256), (5, 576)  # taps and width of the two parts
LOADER_MB = 64
TRAIN_SECONDS = 0.1
MICRO_BATCH = 4
THREADS = (0, 1, 4)


def write_shards(folder: Path, first: int, count: int, width: tuple[int, int]) -> None:
    """Shards number `first` and up, with ids of their own."""
    import numpy as np

    from dflash import features

    taps, hidden = width
    identity = {
        **dict.fromkeys(features.TARGET_FIELDS, "synthetic"),
        "hidden_size": hidden,
        "tap_convention": features.TAP_CONVENTION,
        "logical_dtype": "bfloat16",
        "taps": list(range(taps)),
        "last_hidden": None,
        "compute_dtype": "bfloat16",
        "settings_sha256": "0" * 64,
        "tokens_sha256": "0" * 64,
    }
    rng = np.random.default_rng(0)
    states = rng.integers(0x3F00, 0x4000, (LENGTHS[1], taps, hidden), np.uint16)
    lengths = np.linspace(*LENGTHS, SHARD_DOCUMENTS).astype(int)
    for shard in range(first, first + count):
        path = folder / f"{shard:05d}.zarr"
        with features.write_shard(path, identity, len(lengths), int(lengths.sum())) as writer:
            for i, n in enumerate(lengths):
                writer.add(
                    features.Document(
                        f"{shard * SHARD_DOCUMENTS + i:016x}",
                        rng.integers(0, 300, n).astype(np.int32),
                        np.arange(n) >= n // 4,
                        states[:n],
                    )
                )


def write_files(shards: Path, folder: Path) -> None:
    """The documents of some shards, a safetensors file each."""
    import torch
    from safetensors.torch import save_file

    from dflash.features import open_shard

    folder.mkdir()
    for path in sorted(shards.glob("*.zarr")):
        shard = open_shard(path)
        for i in range(len(shard)):
            d = shard.read(i)
            tensors = {
                "hidden": torch.from_numpy(d.hidden).view(torch.bfloat16),
                "input_ids": torch.from_numpy(d.input_ids),
                "loss_mask": torch.from_numpy(d.loss_mask),
            }
            save_file(tensors, folder / f"{d.sample_id}.safetensors")


# --- one case, in a process of its own ------------------------------------------------------------


def ours(shards: Path, documents: int, threads: int):
    """Packs of that many documents, as training takes them."""
    from dflash import config, data, features, loader
    from dflash.loss import slot_weights

    opened = []
    for path in sorted(shards.glob("*.zarr")):
        opened.append(features.open_shard(path))
        opened[-1].close()
    taps = list(range(len(opened[0].taps)))
    stream = loader.Stream(opened, taps, seed=0, anchors_per_document=32, block=16)
    weights = slot_weights(16, 7.0)
    machine = config.TrainMachine(
        micro_batch=MICRO_BATCH, loader_threads=threads, loader_mb=LOADER_MB
    )
    plans = (stream.plan(s, 4 * MICRO_BATCH, weights) for s in range(documents // MICRO_BATCH // 4))
    loaded = loader.load(
        stream, plans, machine, lambda d, p: data.pack(d, [x.anchors_N for x in p], weights)
    )
    with closing(loaded):
        for _, packs in loaded:
            yield from packs


def peer(files: Path, documents: int, workers: int):
    """The same from a file a document by torch's DataLoader, epoch after epoch."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from torch.utils.data import DataLoader, Dataset

    from dflash import anchors, data
    from dflash.features import Document
    from dflash.loss import slot_weights

    weights = slot_weights(16, 7.0)

    class Files(Dataset):
        paths = sorted(files.iterdir())

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, i: int) -> tuple[Document, np.ndarray]:
            t = load_file(self.paths[i])
            mask, name = t["loss_mask"].numpy(), self.paths[i].stem
            states = t["hidden"].view(torch.uint16).numpy()
            return Document(name, t["input_ids"].numpy(), mask, states), anchors.choose(
                mask, 32, 0, 0, name
            )

    def collate(batch: list) -> data.Pack:
        return data.pack(*map(list, zip(*batch, strict=True)), weights)

    batches = DataLoader(
        Files(),
        MICRO_BATCH,
        shuffle=True,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
    )
    left = documents // MICRO_BATCH
    while left > 0:
        for packed, _ in zip(batches, range(left), strict=False):
            left -= 1
            yield packed


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(
        r.ru_utime + r.ru_stime
        for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(
    system: str, folder: str, documents: int, threads: int, trained_packs: int
) -> dict[str, float]:
    """One pass as fast as data come, and one with a trainer that takes its time."""
    import gc

    import torch

    import dflash.features
    import dflash.loader  # noqa: F401  not part of what is measured

    torch.set_num_threads(1)
    take = {"ours": ours, "peer": peer}[system]
    base = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    items = take(Path(folder), documents, threads)
    begun = time.perf_counter()
    packed = next(items)
    started = time.perf_counter() - begun
    count = size = 0
    begun, before = time.perf_counter(), cpu_seconds()
    for packed in items:
        count, size = count + 1, size + packed.taps_SD.nbytes
    seconds = time.perf_counter() - begun
    mib = status_mib("VmHWM") - base
    del items, packed
    gc.collect()  # ends the peer's workers, whose time then counts
    out = {
        "mib": mib,
        "start_seconds": started,
        "documents_per_second": count * MICRO_BATCH / seconds,
        "cpu_seconds_per_gib": (cpu_seconds() - before) / (size / 2**30),
    }
    waited = trained = 0.0
    items = take(Path(folder), trained_packs * MICRO_BATCH, threads)
    next(items)  # the start is told apart
    begun = time.perf_counter()
    for _ in items:
        waited += time.perf_counter() - begun
        time.sleep(TRAIN_SECONDS)
        trained += TRAIN_SECONDS
        begun = time.perf_counter()
    return out | {"waiting": waited / (waited + trained)}


# --- all cases ------------------------------------------------------------------------------------


def run(
    system: str, folder: Path, documents: int, threads: int, trained_packs: int
) -> dict[str, float]:
    asked = json.dumps([system, str(folder), documents, threads, trained_packs])
    done = subprocess.run(
        [sys.executable, __file__, "--one", asked],
        capture_output=True,
        text=True,
        env=quiet_environment(),
    )
    if done.returncode:
        raise SystemExit(f"error: {asked} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {k: round(statistics.median(r[k] for r in runs), 4) for k in runs[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, help="where to make the temporary folder")
    parser.add_argument(
        "--rounds", type=int, default=3, help="fresh processes a figure (default 3)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="10 and 100 shards, 0 and 4 threads, one round"
    )
    parser.add_argument("--json", action="store_true", help="a line a case instead of tables")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return 0
    rounds = 1 if args.quick else args.rounds
    documents, trained_packs = (320, 16) if args.quick else (1600, 64)

    def say(row: dict[str, Any], text: str) -> None:
        print(json.dumps(row) if args.json else text, flush=True)

    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        if not args.json:
            print(f"{documents} documents, loader_mb {LOADER_MB}, 2 threads")
            print(f"{'shards':>8}{'MiB':>8}{'ratio':>7}{'start s':>9}{'documents/s':>13}")
        written, fewest = 0, 0.0
        (folder / "narrow").mkdir()
        for shards in (10, 100) if args.quick else (10, 100, 1000):
            write_shards(folder / "narrow", written, shards - written, NARROW)
            written = shards
            found = medians(
                [run("ours", folder / "narrow", documents, 2, 8) for _ in range(rounds)]
            )
            fewest = fewest or found["mib"]
            row = {"case": f"{shards} shards", **found, "ratio": round(fewest / found["mib"], 3)}
            say(row, f"{shards:>8}{found['mib']:>8.0f}{row['ratio']:>7.2f}"
                     f"{found['start_seconds']:>9.2f}{found['documents_per_second']:>13.0f}")  # fmt: skip
        write_shards(folder / "wide", 0, 10, WIDE)
        write_files(folder / "wide", folder / "files")
        if not args.json:
            print(f"\n{'':8}{'documents/s':>16}{'CPU s/GiB':>16}{'waiting':>18}{'MiB':>14}")
            print(f"{'threads':>8}" + f"{'ours':>8}{'peer':>8}" * 2
                  + f"{'ours':>9}{'peer':>9}" + f"{'ours':>7}{'peer':>7}" + f"{'ratio':>7}")  # fmt: skip
        for threads in THREADS[::2] if args.quick else THREADS:
            runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
            for turn in range(rounds):
                for system in sorted(runs, reverse=bool(turn % 2)):
                    place = folder / ("wide" if system == "ours" else "files")
                    runs[system].append(run(system, place, documents // 2, threads, trained_packs))
            a, b = medians(runs["ours"]), medians(runs["peer"])
            row = {"case": f"{threads} threads", "ours": a, "peer": b}
            row["ratio"] = round(a["documents_per_second"] / b["documents_per_second"], 3)
            say(row, f"{threads:>8}" + "".join(f"{x['documents_per_second']:>8.0f}" for x in (a, b))
                     + "".join(f"{x['cpu_seconds_per_gib']:>8.2f}" for x in (a, b))
                     + "".join(f"{x['waiting']:>9.1%}" for x in (a, b))
                     + "".join(f"{x['mib']:>7.0f}" for x in (a, b)) + f"{row['ratio']:>7.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
