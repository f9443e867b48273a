"""Does `dflash.plan` predict the memory of a training step? Predicted and measured peaks on the CPU.

    python benchmarks/plan_check.py [--cases NAME ...] [--tensors] [--out results/plan_check.jsonl]

Each case is a fresh process with one thread. It makes the documents and takes two steps of a tiny drafter,
so that code is resident; then VmRSS is the base, VmHWM is reset through /proc/self/clear_refs, the
real drafter, head and optimiser are made and two steps of the training loop run (in the second
AdamW's moments exist). Measured is VmHWM minus the base. glibc is told to map every larger buffer on
its own and to return it at once, so that the resident set follows the tensors that are alive.

`--tensors` adds the peak of live tensors by the profiler's records (slower). Exits with 1 when a case
is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from training_step import quiet_environment, status_mib, tensor_peak  # noqa: E402

from dflash.plan import Shape, estimate  # noqa: E402

ALLOWED = 0.15
# glibc: buffers from 64 KiB on are mapped on their own, free memory goes back at once
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

BASE = Shape(
    tokens=2048,
    anchors=256,
    block=16,
    layers=2,
    hidden=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    intermediate=768,
    vocab=8192,
    taps=5,
    dtype="float32",
    device="cpu",
    target_dtype="float32",
)
CASES = {
    "split none": replace(BASE, backend="split", checkpointing="none"),
    "chunked layer": replace(
        BASE, backend="chunked", checkpointing="layer", tokens=4096, anchors=512, layers=4
    ),
    "split selective, 5 layers": replace(
        BASE, backend="split", checkpointing="selective", layers=5, hidden=384
    ),
    "split layer, vocabulary 49,152": replace(
        BASE, backend="split", checkpointing="layer", anchors=128, vocab=49152, loss_rows=512
    ),
    "chunked both, soft labels, 4 documents": replace(
        BASE,
        backend="chunked",
        checkpointing="both",
        labels="soft",
        documents=4,
        tokens=4096,
        loss_rows=1024,
    ),
    "gather none": replace(BASE, backend="gather", checkpointing="none", anchors=192),
    "gather group": replace(BASE, backend="gather", checkpointing="group", tokens=4096),
    "dense none": replace(BASE, backend="dense", checkpointing="none", tokens=1024, anchors=96),
    "dense layer": replace(BASE, backend="dense", checkpointing="layer", tokens=1024, anchors=96),
    "split none, bfloat16, 2 packs": replace(
        BASE,
        backend="split",
        checkpointing="none",
        dtype="bfloat16",
        target_dtype="bfloat16",
        packs=2,
    ),
    "split layer, wide, short": replace(
        BASE,
        backend="split",
        checkpointing="layer",
        tokens=512,
        anchors=32,
        layers=4,
        hidden=1024,
        heads=16,
        kv_heads=4,
        head_dim=64,
        intermediate=3072,
    ),
}


def documents_of(s: Shape) -> list:
    """Documents with anchors for the packs of a step, spread evenly as the plan assumes them."""
    import numpy as np

    from dflash.features import Document

    rng = np.random.default_rng(0)
    out = []
    for i in range(s.documents * s.packs):
        rank = i % s.documents
        length = s.tokens // s.documents + (rank < s.tokens % s.documents)
        count = s.anchors // s.documents + (rank < s.anchors % s.documents)
        states = rng.normal(size=(length, s.taps + 1, s.hidden)).astype(np.float32)
        bits = (states.view(np.uint32) >> 16).astype(np.uint16)  # bf16, cut off
        document = Document(
            f"{i:016x}",
            rng.integers(s.vocab, size=length).astype(np.int32),
            np.ones(length, bool),
            bits[:, :-1].copy(),
            bits[:, -1].copy(),
        )
        out.append((document, np.arange(count) * length // count))
    return out


class Steps:
    """A drafter, head and optimiser of a shape; `run` takes one step of dflash.train on documents."""

    def __init__(self, s: Shape):
        import torch

        from dflash import config, gradient, recipe
        from dflash.drafter import DTYPES, Drafter, DrafterConfig, RMSNorm

        self.settings = config.Drafter(
            block_size=s.block,
            num_hidden_layers=s.layers,
            mask_token_id=s.vocab - 1,
            training=config.Training(
                dtype=s.dtype,
                documents_per_step=s.documents * s.packs,
                loss=config.Loss(labels=s.labels),
            ),
        )
        self.machine = config.TrainMachine(
            micro_batch=s.documents,
            attention=s.backend,
            checkpointing=s.checkpointing,
            loss_rows=s.loss_rows,
            group_rows=s.group_rows,
            group_mb=s.group_mb,
        )
        shape = DrafterConfig(
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            max_position_embeddings=1 << 20,
            vocab_size=s.vocab,
            block_size=s.block,
            mask_token_id=s.vocab - 1,
            target_layer_ids=tuple(range(s.taps)),
            num_target_layers=s.taps + 4,
            layer_types=("full_attention",) * s.layers,
        )
        self.drafter = Drafter(shape)
        self.drafter.init_weights(0)
        g = torch.Generator().manual_seed(1)
        stored = DTYPES[s.target_dtype]
        table = torch.empty(s.vocab, s.hidden, dtype=stored).normal_(generator=g)
        head = torch.empty(s.vocab, s.hidden, dtype=stored).normal_(generator=g).mul_(0.05)
        norm = RMSNorm(s.hidden, 1e-6).requires_grad_(False) if s.labels != "data" else None
        self.head = gradient.Head(table, head, DTYPES[s.dtype], norm)
        (self.optimizer,) = recipe.make_optimizers(self.drafter, self.settings.training)
        self.weights = gradient.weights_of_slots(self.settings)

    def run(self, documents: list, step: int) -> None:
        import torch

        from dflash import gradient, monitor, recipe
        from dflash.data import supervised_slots
        from dflash.drafter import DTYPES

        size, dtype = self.machine.micro_batch, DTYPES[self.settings.training.dtype]
        parts = [documents[i : i + size] for i in range(0, len(documents), size)]
        slots = [supervised_slots(d.loss_mask, a, len(self.weights)).sum(0) for d, a in documents]
        packs = (
            gradient.make_pack(
                *zip(*part, strict=True), self.weights, self.drafter, self.machine, dtype
            )
            for part in parts
        )
        self.optimizer.zero_grad(set_to_none=True)
        mass = float(sum(slots) @ self.weights.double().numpy())
        training = self.settings.training
        clock = monitor.Clock(torch.device("cpu"))
        gradient.accumulate(self.drafter, packs, mass, self.head, training, self.machine, clock)
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), training.clip)
        recipe.set_rates([self.optimizer], recipe.rate(step, 100, training))
        self.optimizer.step()


def tiny_of(s: Shape) -> Shape:
    """The same kind of step at a size that takes next to nothing; with the same kernels."""
    small = replace(s, tokens=256, anchors=16, hidden=32, intermediate=32, vocab=64, loss_rows=16)
    return replace(small, heads=2, kv_heads=1, documents=1, packs=1, group_rows=64)


def live_tensor_bytes(s: Shape) -> float:
    """Peak bytes of tensors alive while a drafter is made and takes two steps, by the profiler."""
    documents = documents_of(s)

    def both() -> None:
        steps = Steps(s)
        for step in range(2):
            steps.run(documents, step)

    return tensor_peak(both) * 2**20


def measure(s: Shape, tensors: bool) -> dict[str, float]:
    """Peak MiB of this process over its base, and perhaps of its tensors."""
    import torch

    torch.set_num_threads(1)
    documents = documents_of(s)
    # the first step without checkpointing: kernels are tried at first use, better outside a checkpoint
    for checkpointing in ("none", s.checkpointing):
        small = replace(tiny_of(s), checkpointing=checkpointing)
        Steps(small).run(documents_of(small), 0)
    gc.collect()
    base = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    steps = Steps(s)
    for step in range(2):
        steps.run(documents, step)
    out = {"measured_mib": status_mib("VmHWM") - base}
    if tensors:
        del steps
        out["tensor_mib"] = live_tensor_bytes(s) / 2**20
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, help="only these")
    parser.add_argument("--tensors", action="store_true", help="count live tensors too (slow)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/plan_check.jsonl", help="JSON lines"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:  # a process that was started below
        print(json.dumps(measure(CASES[args.case], args.tensors)))
        return 0
    rows: list[dict[str, Any]] = []
    print(f"{'case':<40}{'predicted':>10}{'measured':>10}{'MiB off by':>12}")
    for name in args.cases or CASES:
        command = [sys.executable, __file__, "--case", name]
        command += ["--tensors"] if args.tensors else []
        done = subprocess.run(
            command, capture_output=True, text=True, env=quiet_environment() | MALLOC
        )
        if done.returncode:
            raise SystemExit(f"error: case {name} failed:\n{done.stderr[-2000:]}")
        ledger = estimate(CASES[name])
        found = json.loads(done.stdout.strip().splitlines()[-1])
        predicted = ledger.peak / 2**20
        off = predicted / found["measured_mib"] - 1
        row = {"case": name, "predicted_mib": predicted, **found, "off": off, "when": ledger.when}
        row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        row["terms_mib"] = {k: round(v / 2**20, 1) for k, v in ledger.at_peak.items()}
        rows.append(row)
        print(
            f"{name:<40}{predicted:>10.1f}{found['measured_mib']:>10.1f}{100 * off:>10.1f} %",
            flush=True,
        )
    if not args.cases:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    worst = max(abs(row["off"]) for row in rows)
    print(f"largest difference {100 * worst:.1f} % (allowed {100 * ALLOWED:.0f} %)")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
