"""Seconds and memory of one training step (forward + backward): ours, speculators and SpecForge.

    python benchmarks/training_step.py [--peers PYTHON] [--quick] [--json] [--backend NAME]

All get the same weights, features, anchors and labels, written by shared/peers/peers.py, and the loss
and every gradient of ours are compared with both peers' before anything is reported: a difference of
more than 1e-3 is an error. Each run is a fresh process with one thread, float32; systems take turns and
figures are medians over `--repeat` rounds.

- `seconds`: one step, the median of the process's steps. A step begins with no gradients and ends with
  all of them. What ours builds once a batch (the layout and its masks) is built in every step.
- `MiB`: two tiny steps make lazily loaded code resident, then VmRSS is the base, VmHWM is reset
  through /proc/self/clear_refs, the steps run, and the peak is VmHWM minus the base, as in
  shared/peers/README.md. `tensor MiB` (JSON only, first round): peak of live tensors in one more step
  under the profiler, which the allocator's habits do not touch.
- `ratio` is the faster peer's seconds ÷ ours without checkpointing: above 1 we are faster. `memory` is
  our peak with layer checkpointing ÷ the smaller peer's peak, `layer` our seconds with layer
  checkpointing ÷ without; `selective` (JSON: and `memory_selective`) the same for layers recomputed
  without their attention.
- `arithmetic` is the time that the step's matrix products alone would take at the rate of a large
  float32 product on one thread, measured in the same round (`step_flops` says what is counted).

Without the peers' interpreter only ours is measured, and how to make it is said.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# The drafter of every case, as in the peers' table.
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, TAPS = 2, 256, 768, 8, 2, 32, 5
BLOCK, GAMMA, THETA, EPS = 16, 4.0, 10000.0, 1e-6  # γ, θ and ε: what peers.py uses unless told
TOLERANCE = 1e-3  # relative, of the loss and of each gradient's norm


@dataclass(frozen=True)
class Case:
    """One problem: S context rows, N anchors, V rows of the head, and steps in one process."""

    context: int
    anchors: int
    vocab: int = 8192
    steps: int = 1

    @property
    def name(self) -> str:
        short = f"{self.context}x{self.anchors}"
        return short if self.vocab == 8192 else f"{short}x{self.vocab}"


CASES = [
    Case(1024, 64, steps=3),
    Case(2048, 128, steps=3),
    Case(2048, 256),
    Case(4096, 256),
    Case(4096, 512),
    Case(2048, 128, vocab=49152),
]
PEERS = ("specforge", "speculators")
OURS = {"ours": "none", "ours-layer": "layer", "ours-selective": "selective"}  # -> checkpointing

ENVIRONMENT = """\
No peers' interpreter: measuring ours only. To make one (an environment of its own):
    python3 -m venv peers-venv
    peers-venv/bin/pip install torch==2.13.0
    peers-venv/bin/pip install transformers==5.19 datasets openai pydantic safetensors psutil
    peers-venv/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0
then pass --peers peers-venv/bin/python, or set DFLASH_PEERS_PYTHON."""


# --- arithmetic ---------------------------------------------------------------------------------


def step_flops(
    pairs: int,
    context: int,
    blocks: int,
    *,
    vocab: int,
    block: int = BLOCK,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    taps: int = TAPS,
) -> int:
    """Operations of the matrix products that a step without checkpointing cannot avoid.

    Every weight is multiplied three times (output, gradient of its input, its own gradient), but for
    `fc`, whose input needs none, and the frozen head, which has none (slot 0 is not supervised).
    Attention counts the `pairs` of a slot and a key it sees, nothing masked: two products forward,
    four backward, and the scores once more there, since no kernel keeps them.
    """
    fc = 2 * 2 * context * taps * hidden * hidden
    kv = hidden * 2 * kv_heads * head_dim
    rest = 2 * hidden * heads * head_dim + 3 * hidden * intermediate
    slots = blocks * block
    weights = 3 * 2 * layers * (context * kv + slots * (kv + rest))
    head = 2 * 2 * blocks * (block - 1) * vocab * hidden
    return fc + weights + head + layers * 7 * 2 * heads * head_dim * pairs


def visible_pairs(anchors: list[int], block: int = BLOCK) -> int:
    """Pairs of a slot and a key it sees, of blocks in one document from row 0 on."""
    return sum(block * (anchor + block) for anchor in anchors)


def gemm_rate() -> float:
    """Operations a second of a large float32 product with the threads set."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = []
    for _ in range(12):
        begun = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begun)
    return 2 * 1024**3 / statistics.median(seconds[2:])


# --- our step -----------------------------------------------------------------------------------


def drafter_config(vocab: int):
    """The drafter's shape; the mask token is the vocabulary's last, as peers.py has it."""
    from dflash.drafter import DrafterConfig

    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        max_position_embeddings=32768,
        vocab_size=vocab,
        block_size=BLOCK,
        mask_token_id=vocab - 1,
        target_layer_ids=tuple(range(1, 1 + TAPS)),
        num_target_layers=36,
        layer_types=("full_attention",) * LAYERS,
    )


def random_problem(case: Case) -> tuple[dict, dict]:
    """Weights and inputs where no peer is there to write them: seeded, of the same shapes."""
    import torch

    from dflash.drafter import Drafter

    drafter = Drafter(drafter_config(case.vocab))
    drafter.init_weights(0)
    g = torch.Generator().manual_seed(1)
    weights = dict(drafter.state_dict())
    weights["embed"] = torch.randn(case.vocab, HIDDEN, generator=g)
    weights["lm_head"] = torch.randn(case.vocab, HIDDEN, generator=g) / HIDDEN**0.5
    ids = torch.randint(case.vocab, (1, case.context), generator=g)
    chosen = torch.randperm(case.context - BLOCK, generator=g)[: case.anchors].sort().values
    inputs = {
        "features": torch.randn(1, case.context, TAPS * HIDDEN, generator=g),
        "input_ids": ids,
        "anchors": chosen,
        "labels": ids[0][chosen[:, None] + torch.arange(BLOCK)],
    }
    return weights, inputs


def status_mib(field: str) -> float:
    """A memory figure of this process from /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is read on Linux only")


class Step:
    """Our training step on one problem: `run` leaves gradients in the drafter."""

    def __init__(self, weights: dict, vocab: int, args: argparse.Namespace):
        from dflash.drafter import Drafter

        self.args = args
        self.drafter = Drafter(drafter_config(vocab))
        self.drafter.load_state_dict({k: weights[k] for k in self.drafter.state_dict()})
        self.embed_VH, self.head_VH = weights["embed"].clone(), weights["lm_head"].clone()

    def run(self, x: dict) -> dict[str, Any]:
        """Forward and backward; returns the loss, normalised by the weight mass, and times."""
        import torch

        from dflash.attention import Layout
        from dflash.drafter import block_input
        from dflash.loss import slot_losses, slot_weights

        args = self.args
        for p in self.drafter.parameters():
            p.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        features_SD = x["features"][0]
        layout = Layout(
            torch.tensor([0, len(features_SD)]), x["anchors"], BLOCK, group_rows(args, x)
        )
        tokens = x["input_ids"][0][x["anchors"]]
        block_NBH = block_input(self.embed_VH, tokens, BLOCK, len(self.embed_VH) - 1)
        hidden_NBH = self.drafter(
            features_SD, block_NBH, layout, args.backend, checkpointing=args.checkpointing
        )
        weights_NB = slot_weights(BLOCK, GAMMA).expand(len(tokens), -1)
        rows = weights_NB > 0
        chunk = {} if args.loss_rows is None else {"chunk": args.loss_rows}
        ce, *_ = slot_losses(hidden_NBH[rows], self.head_VH, x["labels"][rows], **chunk)
        loss = (weights_NB[rows] * ce).sum() / weights_NB.sum()
        middle = time.perf_counter()
        loss.backward()
        end, cpu_end = time.perf_counter(), time.process_time()
        return {
            "loss": loss.detach(),
            "ce": ce.detach(),
            "hidden": hidden_NBH.detach(),
            "forward": middle - wall,
            "backward": end - middle,
            "cpu": cpu_end - cpu,
        }


def group_rows(args: argparse.Namespace, x: dict) -> int | None:
    """Slots in one attention group: as asked, else what fits the package's memory target."""
    from dflash.attention import GROUP_BYTES, group_rows_within

    if args.group_rows is not None:
        return args.group_rows
    context = x["features"].shape[1]
    return group_rows_within(
        GROUP_BYTES["cpu"], context, BLOCK, HEADS, KV_HEADS, HEAD_DIM, itemsize=4
    )


def measure_ours(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Our step in this process: times, peaks and, if asked, loss and gradients in a file."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    if args.problem:
        weights, x = (load_file(args.problem / name) for name in ("W.st", "X.st"))
    else:
        weights, x = random_problem(case)
    step = Step(weights, case.vocab, args)
    del weights
    tiny = x | {
        "features": x["features"][:, : 4 * BLOCK],
        "anchors": torch.tensor([1, BLOCK]),
        "labels": x["labels"][:2],
    }
    for _ in range(2):
        step.run(tiny)
    for p in step.drafter.parameters():
        p.grad = None
    del tiny
    gc.collect()
    base = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    runs = []
    for _ in range(case.steps):
        runs.append(step.run(x))
        for big in ("hidden", "ce"):
            runs[-1].pop(big)
    peak = status_mib("VmHWM") - base
    middle, pairs = statistics.median, visible_pairs(x["anchors"].tolist())
    out: dict[str, Any] = {
        "seconds": middle(r["forward"] + r["backward"] for r in runs),
        "forward": middle(r["forward"] for r in runs),
        "backward": middle(r["backward"] for r in runs),
        "cpu_seconds": middle(r["cpu"] for r in runs),
        "mib": peak,
        "backend": args.backend,
        "group_rows": group_rows(args, x),
        "pairs": pairs,
        "flops": step_flops(pairs, case.context, case.anchors, vocab=case.vocab),
        "gemm_rate": gemm_rate(),
    }
    if args.tensor_peak:
        out["tensor_mib"] = tensor_peak(lambda: step.run(x))
    if args.dump:
        found = step.run(x)
        state = {f"grad.{name}": p.grad for name, p in step.drafter.named_parameters()}
        state |= {"loss": found["loss"].reshape(1), "hidden": found["hidden"].contiguous()}
        save_file(state, args.dump)
    return out


def tensor_peak(run) -> float:
    """Peak MiB of tensors allocated while `run` runs, from the profiler's allocation records."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    events = [e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        live += e.nbytes()
        peak = max(peak, live)
    return peak / 2**20


# --- all systems --------------------------------------------------------------------------------


def quiet_environment() -> dict[str, str]:
    """One thread for every library, no network, and our package for ours."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def run_json(command: list[str], limit: float) -> dict[str, Any]:
    """The JSON object that a fresh process prints last. Raises SystemExit with its last words."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=quiet_environment()
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"error: took more than {limit:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def own_command(case: Case, checkpointing: str, args: argparse.Namespace) -> list[str]:
    """The command of one run of ours in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(vars(case))]
    command += ["--backend", args.backend, "--checkpointing", checkpointing]
    for name in ("group_rows", "loss_rows"):
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return command


def peer_command(system: str, case: Case, steps: int, args: argparse.Namespace) -> list[str]:
    """The command of one run of a peer."""
    shape = {"ctx": case.context, "anchors": case.anchors, "vocab": case.vocab, "block": BLOCK}
    shape |= {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv": KV_HEADS}
    shape |= {"head-dim": HEAD_DIM, "inter": INTERMEDIATE, "taps": TAPS, "repeat": steps}
    shape |= {"gamma": GAMMA, "rope-theta": THETA, "rms-eps": EPS}
    words = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    script = str(args.peers_dir / "peers.py")
    return [args.peers, script, "--system", system, "--backend", "sdpa", *words]


def run_one(
    system: str, case: Case, args: argparse.Namespace, folder: Path | None, first: bool
) -> dict[str, Any]:
    """One run of one system; in the first round also its loss and gradients (SYSTEM.st)."""
    if system in OURS:
        command = own_command(case, OURS[system], args)
        if folder:
            command += ["--problem", str(folder)]
            command += ["--dump", str(folder / f"{system}.st")] if first else []
        command += ["--tensor-peak"] if first and not args.quick else []
        return run_json(command, args.limit)
    assert folder is not None
    command = peer_command(system, case, case.steps, args)
    command += ["--load", str(folder / "W.st"), "--load-inputs", str(folder / "X.st")]
    command += ["--dump", str(folder / f"{system}.st")] if first else ["--no-digest"]
    command += ["--tensor-peak"] if first and not args.quick else []
    found = run_json(command, args.limit)
    return {
        "seconds": found["step_s"],
        "forward": found["fwd_s"],
        "backward": found["bwd_s"],
        "cpu_seconds": found["cpu_s"],
        "mib": found["rss_peak_delta_mib"],
        **({"tensor_mib": found["tensor_peak_mib"]} if "tensor_peak_mib" in found else {}),
    }


def check_same(case: Case, folder: Path) -> float:
    """Compare the loss and gradients of ours with both peers'. Returns the largest difference.

    SpecForge and ours divide the weighted sum by the weight mass Σw, speculators by the number M of
    supervised slots + 1e-5: its figures times (M + 1e-5) / Σw are ours.
    Raises SystemExit naming the system and the tensor that differs.
    """
    from safetensors.torch import load_file

    from dflash.loss import slot_weights

    slots = case.anchors * (BLOCK - 1)
    mass = case.anchors * float(slot_weights(BLOCK, GAMMA).double().sum())
    scales = {"specforge": 1.0, "speculators": (slots + 1e-5) / mass}
    worst = 0.0
    for peer, scale in scales.items():
        theirs = load_file(folder / f"{peer}.st")
        for own in OURS:
            for name, value in load_file(folder / f"{own}.st").items():
                want = theirs[name].double() * (1.0 if name == "hidden" else scale)
                off = float((value.double() - want).norm() / want.norm())
                if not off <= TOLERANCE:  # NaN differs too
                    raise SystemExit(
                        f"error: {case.name}: {name} of {own} differs from {peer}'s by {off:.2e} "
                        f"(allowed {TOLERANCE}); they do not compute the same step"
                    )
                worst = max(worst, off)
    return worst


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number over rounds; other entries as the first round has them."""
    out = dict(runs[0])
    for name, value in runs[0].items():
        if isinstance(value, float):
            out[name] = round(statistics.median(r[name] for r in runs if name in r), 4)
    return out


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """All systems on one problem, in turn, and what the table says of them."""
    systems = [*(PEERS if args.peers else ()), *OURS]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    off = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if args.peers else None
        if folder:
            write = ["--no-warmup", "--no-digest", "--save", str(folder / "W.st")]
            write += ["--save-inputs", str(folder / "X.st")]
            run_json([*peer_command("specforge", case, 0, args), *write], args.limit)
        for turn in range(args.repeat):
            at = turn % len(systems)
            for system in systems[at:] + systems[:at]:
                runs[system].append(run_one(system, case, args, folder, first=turn == 0))
            if turn == 0 and folder:
                off = check_same(case, folder)
    found = {name: medians(r) for name, r in runs.items()}
    own = [found[name] for name in OURS]
    rate = statistics.median(f.pop("gemm_rate") for f in own)
    flops = [f.pop("flops") for f in own][0]
    seconds = {k: v["seconds"] for k, v in found.items()}
    row: dict[str, Any] = {"case": case.name, "rounds": args.repeat, "backend": args.backend}
    row |= found
    row["ratio"] = row["memory"] = None
    if args.peers:
        row["ratio"] = round(min(seconds[p] for p in PEERS) / seconds["ours"], 3)
        smaller = min(found[p]["mib"] for p in PEERS)
        row["memory"] = round(found["ours-layer"]["mib"] / smaller, 3)
        row["memory_selective"] = round(found["ours-selective"]["mib"] / smaller, 3)
        row["largest_difference"] = off
    row["layer"] = round(seconds["ours-layer"] / seconds["ours"], 3)
    row["selective"] = round(seconds["ours-selective"] / seconds["ours"], 3)
    row["gflop"] = round(flops / 1e9, 2)
    row["gemm_gflops"] = round(rate / 1e9, 2)
    row["arithmetic"] = round(flops / rate, 4)
    busy = [f["cpu_seconds"] / f["seconds"] for f in found.values()]
    row["busy"] = round(statistics.median(busy), 3)
    return row


# --- output -------------------------------------------------------------------------------------

COLUMNS = (*PEERS, *OURS)


def heading() -> str:
    """The table's first line."""
    systems = "".join(f"{name + ' s / MiB':>24}" for name in COLUMNS)
    ratios = f"{'ratio':>7}{'memory':>8}{'layer':>7}{'selective':>11}"
    return f"{'context x anchors':<18}{systems}{ratios}{'arithmetic':>16}"


def line(row: dict[str, Any]) -> str:
    """A case as a line of the table."""

    def figures(name: str) -> str:
        found = row.get(name)
        return f"{found['seconds']:.3f} / {found['mib']:.0f}" if found else "–"

    def times(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    share = row["arithmetic"] / row["ours"]["seconds"]
    last = f"{row['arithmetic']:.3f} ({100 * share:.0f} %)"
    systems = "".join(f"{figures(name):>24}" for name in COLUMNS)
    ratios = f"{times(row['ratio']):>7}{times(row['memory']):>8}{times(row['layer']):>7}"
    ratios += f"{times(row['selective']):>11}"
    return f"{row['case']:<18}{systems}{ratios}{last:>16}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=os.environ.get("DFLASH_PEERS_PYTHON"), metavar="PYTHON",
                        help="the peers' interpreter (default: $DFLASH_PEERS_PYTHON)")  # fmt: skip
    parser.add_argument("--peers-dir", type=Path, default=ROOT.parent / "shared/peers",
                        help="folder of peers.py (default: ../shared/peers)")  # fmt: skip
    parser.add_argument("--backend", help="attention backend of ours (default: the package's)")
    parser.add_argument("--group-rows", type=int, help="slots in one attention group of ours")
    parser.add_argument("--loss-rows", type=int, help="rows of logits of ours that exist at once")
    parser.add_argument("--cases", nargs="+", metavar="CONTEXTxANCHORS", help="only these cases")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--quick", action="store_true", help="the smallest case, one round")
    parser.add_argument("--json", action="store_true", help="a JSON object a case")
    for hidden in ("--case", "--checkpointing"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tensor-peak", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend is None:
        from dflash.drafter import Drafter

        args.backend = inspect.signature(Drafter.forward).parameters["backend"].default
    if args.case:  # a process that `run_one` started
        print(json.dumps(measure_ours(Case(**json.loads(args.case)), args)))
        return 0
    if args.quick:
        args.repeat = 1
    cases = CASES[:1] if args.quick else CASES
    if args.cases:
        known = {c.name: c for c in CASES}
        if unknown := set(args.cases) - set(known):
            parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        cases = [known[name] for name in args.cases]
    if args.quick:
        cases = [replace(c, steps=1) for c in cases]
    if not args.peers:
        print(ENVIRONMENT, file=sys.stderr)
    elif not shutil.which(args.peers):
        parser.error(f"no interpreter {args.peers}; leave --peers out to read how to make one")
    elif not (args.peers_dir / "peers.py").exists():
        parser.error(f"{args.peers_dir} holds no peers.py; name its folder with --peers-dir")
    if not args.json:
        print(heading())
    busy = []
    for case in cases:
        row = run_case(case, args)
        busy.append(row["busy"])
        print(json.dumps(row) if args.json else line(row), flush=True)
    if min(busy) < 0.95:
        print(f"The machine was not quiet: runs got {100 * min(busy):.0f} % of a core "
              "(compare cpu_seconds of --json)", file=sys.stderr)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
