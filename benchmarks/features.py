"""What the feature store costs: CPU time of reads and writes, bytes, files; ours against its peers.

    python benchmarks/features.py [--features results/features] [--documents 2000] [--quick] [--json]

The documents are those of a finished `extract` stage (make demo), over and over until there are enough.
Each store is written and then read in a fresh process, one store after the other, in alternating order;
figures are medians, times are CPU seconds of all threads per GiB of bf16 hidden states. A read is one
whole document with its token ids and mask, all documents once in random order, from the page cache.

    raw, compact, int8      our store with each codec
    ... by zarr-python      the same arrays, read and written by zarr-python's own pipeline
    ... by zarrs            the same with the pipeline of the package zarrs, one thread
    flat                    one memory map of everything
    safetensors, torch      a file a document, by safetensors.torch and by torch.save

`ratio` is peer ÷ ours: reads and writes of flat ÷ raw, bytes of flat ÷ compact, files of safetensors ÷ raw.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash.errors import UserError
from dflash.features import Document, Shard, open_shard, write_shard
from dflash.quantise import dequantise

CODECS = ("raw", "compact", "int8")
PIPELINES = {
    "zarr-python": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarrs": "zarrs.ZarrsCodecPipeline",
}
PEERS = ("flat", "safetensors", "torch")


def systems() -> list[str]:
    from importlib.util import find_spec

    others = [p for p in PIPELINES if find_spec("zarrs" if p == "zarrs" else "zarr")]
    return [*CODECS, *(f"{c} by {p}" for c in CODECS for p in others), *PEERS]


def source(folder: Path) -> list[Shard]:
    shards = [open_shard(p) for p in sorted(folder.glob("**/*.zarr"))]
    if not shards:
        raise UserError(
            f"{folder}: no feature shards below it; run the demo first, or give --features DIR"
        )
    return shards


def documents(shards: list[Shard], count: int) -> list[Document]:
    """So many documents, those of the shards again and again under other ids."""
    found = [s.read(i) for s in shards for i in range(len(s))]
    found = [replace(d, hidden=np.ascontiguousarray(d.hidden)) for d in found[:count]]
    return [replace(found[i % len(found)], sample_id=f"{i:016x}") for i in range(count)]


# --- the stores ---------------------------------------------------------------------------------


def zarr_config(system: str) -> None:
    import zarr

    pipeline = PIPELINES[system.split(" by ")[1]]
    zarr.config.set({"codec_pipeline.path": pipeline, "threading.max_workers": 1})


def write(system: str, folder: Path, docs: list[Document], identity: dict) -> None:
    tokens = sum(len(d.input_ids) for d in docs)
    if system in CODECS:
        with write_shard(folder / "a.zarr", identity, len(docs), tokens, codec=system) as writer:
            for d in docs:
                writer.add(d)
    elif " by " in system:
        write_zarr(system, folder, docs)
    elif system == "flat":
        with open(folder / "hidden", "wb") as f:
            for d in docs:
                d.hidden.tofile(f)
        np.save(folder / "input_ids.npy", np.concatenate([d.input_ids for d in docs]))
        np.save(folder / "loss_mask.npy", np.concatenate([d.loss_mask for d in docs]))
    else:
        import torch
        from safetensors.torch import save_file

        save = save_file if system == "safetensors" else torch.save
        for d in docs:
            tensors = {
                "hidden": torch.from_numpy(d.hidden).view(torch.bfloat16),
                "input_ids": torch.from_numpy(d.input_ids),
                "loss_mask": torch.from_numpy(d.loss_mask),
            }
            save(tensors, folder / d.sample_id)


def write_zarr(system: str, folder: Path, docs: list[Document]) -> None:
    """The arrays of our shard (which is there already), a file at a time, as zarr-python likes it.

    Not for int8: that is quantising, not writing.
    """
    import zarr

    ours = zarr.open_group(str(folder / "a.zarr"), mode="r")["hidden"]
    array = zarr.create_array(
        str(folder / "b.zarr"),
        shape=ours.shape,
        dtype=ours.dtype,
        chunks=ours.chunks,
        shards=ours.shards,
        compressors=ours.compressors,
        filters=None,
        fill_value=ours.fill_value,
        config={"write_empty_chunks": True},
    )
    slab = np.empty(ours.shards, ours.dtype)
    filled = written = 0
    for d in docs:
        done = 0
        while done < len(d.hidden):
            take = min(len(d.hidden) - done, len(slab) - filled)
            slab[filled : filled + take] = d.hidden[done : done + take]
            filled, done = filled + take, done + take
            if filled == len(slab):
                array[written : written + filled] = slab
                filled, written = 0, written + filled
    array[written : written + filled] = slab[:filled]


def reader(system: str, folder: Path, docs: list[Document]) -> Callable[[int], tuple]:
    """A function that gives hidden states, ids and mask of document `i`."""
    offsets = np.cumsum([0, *(len(d.input_ids) for d in docs)])
    if system in CODECS:
        shard = open_shard(folder / "a.zarr")

        def read(i: int) -> tuple:
            d = shard.read(i)
            return d.hidden, d.input_ids, d.loss_mask

    elif " by " in system:
        import zarr

        group = zarr.open_group(str(folder / "a.zarr"), mode="r")
        arrays = {name: group[name] for name in group.array_keys()}
        hidden, chunk = arrays["hidden"], arrays["hidden"].chunks[0]
        ids, mask = arrays["input_ids"][:], arrays["loss_mask"][:]

        def read(i: int) -> tuple:
            start, stop = int(offsets[i]), int(offsets[i + 1])
            states = hidden[start:stop]
            if system.startswith("int8"):
                scale = arrays["channel_scale"][start // chunk : -(-stop // chunk)]
                rows = np.arange(start, stop) // chunk - start // chunk
                token, q = arrays["token_scale"][start:stop], states
                states = np.empty(q.shape, np.uint16)
                for k in range(len(scale)):
                    states[rows == k] = dequantise(q[rows == k], token[rows == k], scale[k])
            return states, ids[start:stop].copy(), mask[start:stop].copy()

    elif system == "flat":
        shape = (int(offsets[-1]), *docs[0].hidden.shape[1:])
        map_ = np.memmap(folder / "hidden", np.uint16, "r", shape=shape)
        ids, mask = np.load(folder / "input_ids.npy"), np.load(folder / "loss_mask.npy")

        def read(i: int) -> tuple:
            span = slice(offsets[i], offsets[i + 1])
            return np.array(map_[span]), ids[span].copy(), mask[span].copy()

    else:
        import torch
        from safetensors.torch import load_file

        load = load_file if system == "safetensors" else torch.load

        def read(i: int) -> tuple:
            tensors = load(folder / docs[i].sample_id)
            states = tensors["hidden"].view(torch.uint16).numpy()
            return states, tensors["input_ids"].numpy(), tensors["loss_mask"].numpy()

    return read


# --- measuring ----------------------------------------------------------------------------------


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one(system: str, args: argparse.Namespace) -> dict:
    """Write and read one store, in this process."""
    import torch

    torch.set_num_threads(1)
    shards = source(args.features)
    docs = documents(shards, args.documents)
    gib = sum(d.hidden.nbytes for d in docs) / 2**30
    identity = shards[0].identity | {"last_hidden": None}
    folder = Path(tempfile.mkdtemp(dir=args.scratch))
    try:
        if " by " in system:
            write(system.split(" by ")[0], folder, docs, identity)
            zarr_config(system)
        wrote = None
        if not system.startswith("int8 by"):
            begun = cpu_seconds()
            write(system, folder, docs, identity)
            wrote = (cpu_seconds() - begun) / gib
        shutil.rmtree(folder / "b.zarr", ignore_errors=True)
        files = [f.stat().st_size for f in folder.rglob("*") if f.is_file()]
        read = reader(system, folder, docs)
        order = np.random.default_rng(0).permutation(len(docs))
        read(0)
        begun = cpu_seconds()
        for i in order:
            read(int(i))
        seconds = (cpu_seconds() - begun) / gib
        exact, error = True, []
        for i in order[:: max(1, len(order) // 100)]:
            hidden, ids, mask = read(int(i))
            d = docs[i]
            assert np.array_equal(ids, d.input_ids) and np.array_equal(mask, d.loss_mask)
            exact &= np.array_equal(hidden, d.hidden)
            x, y = (torch.from_numpy(a).view(torch.bfloat16).float() for a in (d.hidden, hidden))
            error.append((x - y).norm(dim=2) / x.norm(dim=2))
    finally:
        shutil.rmtree(folder)
    return {
        "read": seconds,
        "write": wrote,
        "bytes": sum(files),
        "files": len(files),
        "exact": bool(exact),
        "error": torch.cat(error).square().mean(0).sqrt().tolist(),
        "tokens": sum(len(d.input_ids) for d in docs),
        "gib": gib,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path, default=Path("results/features"))
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--scratch", type=Path, help="where the stores are written (default: /tmp)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="100 documents, once")
    parser.add_argument("--json", action="store_true", help="lines of JSON; the table on stderr")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.documents, args.turns = 100, 1
    if args.one:
        print(json.dumps(one(args.one, args)))
        return 0
    names = systems()
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for turn in range(args.turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            command = [sys.executable, __file__, "--one", name, "--features", str(args.features)]
            command += ["--documents", str(args.documents)]
            command += ["--scratch", str(args.scratch)] if args.scratch else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    median = {
        name: rows[0]
        | {k: statistics.median(r[k] for r in rows) for k in ("read", "write") if rows[0][k]}
        for name, rows in runs.items()
    }
    ours = median["raw"]
    cases = [
        ("read, CPU s/GiB", "read", "flat", "raw"),
        ("write, CPU s/GiB", "write", "flat", "raw"),
        ("bytes", "bytes", "flat", "compact"),
        ("files", "files", "safetensors", "raw"),
    ]
    ratios = {case: median[peer][key] / median[own][key] for case, key, peer, own in cases}
    if args.json:
        for case, key, _, _ in cases:
            row = {"case": case, "documents": args.documents, "ratio": ratios[case]}
            print(json.dumps(row | {name: m[key] for name, m in median.items()}))
        print(json.dumps({"case": "int8 error by tap", "int8": median["int8"]["error"]}))
    show = functools.partial(print, file=sys.stderr if args.json else sys.stdout)
    show(
        f"{args.documents} documents, {ours['tokens']} tokens, {ours['gib']:.2f} GiB of hidden states; "
        f"median of {args.turns}"
    )
    show(
        f"{'':24}{'read':>10}{'/ flat':>8}{'write':>10}{'/ flat':>8}{'bytes':>8}{'files':>8}  exact"
    )
    show(f"{'':24}{'CPU s/GiB':>10}{'':8}{'CPU s/GiB':>10}{'':8}{'/ flat':>8}")
    flat = median["flat"]
    for name, m in median.items():
        wrote = (
            f"{m['write']:10.2f}{m['write'] / flat['write']:8.2f}"
            if m["write"]
            else f"{'-':>10}{'':8}"
        )
        show(
            f"{name:24}{m['read']:10.3f}{m['read'] / flat['read']:8.2f}{wrote}"
            f"{m['bytes'] / flat['bytes']:8.3f}{m['files']:8}  {'yes' if m['exact'] else 'no'}"
        )
    taps = ", ".join(f"{100 * e:.2f}" for e in median["int8"]["error"])
    show(f"int8: root mean square over tokens of the relative error, % by tap: {taps}")
    for case, _, peer, own in cases:
        show(f"{case}: {peer} / {own} = {ratios[case]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
