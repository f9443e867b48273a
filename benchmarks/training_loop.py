"""Where a training run's time goes, and whether its memory stays flat.

    python benchmarks/training_loop.py [--results results] [--config FILE] [--steps 500] [--threads N]
                                       [--quick] [--json]

Needs a finished demo (make demo). The drafter `demo` of the settings is trained on its features by the
train stage, in a fresh process, for so many steps with validation at its usual distances. Two cases:

    overhead  the share of the run's time that is neither forward nor backward pass: waiting for data,
              optimiser, validation, checkpoints, log and all else, by the stage's own clock. The goal is
              under 15 %; `ratio` is that budget over the share.
    memory    peak resident memory of each fifth of the steps, after the first, sampled from outside every
              0.1 s. The goal is within 2 % of one another; `ratio` is the least over the largest.

`--quick` takes 40 steps. There is no peer: the others' loops cannot run on stored features here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dflash import config
from dflash.files import read_json

BUDGET = 0.15
WINDOWS = 5


def resident(pid: int) -> int:
    """Bytes of a process in memory now; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmRSS")), 0)


def train(
    workflow: config.Workflow, results: Path, folder: Path, steps: int, threads: int
) -> tuple[dict, list[int]]:
    """The finished training's facts, and its peak resident bytes in each window of steps."""
    settings = json.loads(config.stage_settings(workflow, "train", "demo"))
    # The whole training's share of validation: as many a step as in the demo.
    whole = settings["training"]["max_steps"] or steps
    times = max(1, round(settings["training"]["validation"]["times"] * steps / whole))
    settings["training"] |= {"max_steps": steps}
    settings["training"]["validation"] |= {"times": times}
    command = [
        *(sys.executable, "-m", "dflash.train", "--settings", json.dumps(settings)),
        *("--machine", config.machine_settings(workflow, "train"), "--threads", threads),
        *("--identity", results / "target" / "identity.json", "--name", "demo"),
        *("--features", *sorted((results / "features").glob("*/*.json"))),
        *("--runs", folder / "run", "--out", folder / "out"),
    ]
    process = subprocess.Popen([str(x) for x in command], stdout=subprocess.DEVNULL)
    peaks, lines = [0] * WINDOWS, None
    while process.poll() is None:
        if lines is None:
            lines = next((folder / "run").glob("*/metrics.jsonl"), None)
        rows = lines.read_text().splitlines() if lines else []
        step = max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=0)
        window = min(WINDOWS - 1, step * WINDOWS // steps)
        peaks[window] = max(peaks[window], resident(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return read_json(folder / "out" / "training.json"), peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="of a finished run")
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="40 steps")
    parser.add_argument("--json", action="store_true", help="a line of JSON a case")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    steps = 40 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as temporary:
        workflow = config.load(args.config)
        known, peaks = train(workflow, args.results, Path(temporary), steps, args.threads)
    shares = known["shares"]
    over = 1 - shares["forward"] - shares["backward"]
    parts = {part: share for part, share in shares.items() if part not in ("forward", "backward")}
    parts["other"] = round(over - sum(parts.values()), 4)
    later = peaks[1:]
    cases = [
        {"case": "overhead", "share": round(over, 4), **parts, "ratio": round(BUDGET / over, 3)},
        {
            "case": "memory",
            "peak_mb": [round(p / 1e6, 1) for p in peaks],
            "spread": round(max(later) / min(later) - 1, 4),
            "ratio": round(min(later) / max(later), 4),
        },
    ]
    if args.json:
        for case in cases:
            print(json.dumps(case))
        return
    named = ", ".join(f"{part} {share:.1%}" for part, share in parts.items())
    print(f"{steps} steps: forward {shares['forward']:.1%}, backward {shares['backward']:.1%}")
    print(f"overhead  {over:.1%} of the time, {BUDGET:.0%} allowed: {named}")
    print(
        f"memory    peak of each fifth of the steps: {', '.join(f'{p / 1e6:.0f}' for p in peaks)} MB; "
        f"from the second on within {cases[1]['spread']:.1%}"
    )


if __name__ == "__main__":
    main()
