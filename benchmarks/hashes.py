"""Hashes of what the test-sized workflow makes: tokens, features, drafters, evaluations, exports.

    benchmarks/hashes.py [--json]

A change that is to leave results as they are prints the same lines before and after it, on one machine
(another machine's vector units round differently). The drafters train in float32 and in bfloat16, with
each kind of label and weight, with AdamW and Muon, a moving average, and in one and in several groups.
Times, and versions of the package, are taken out first. About two minutes on two cores; needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

TIMED = ("seconds", "timing", "speed", "per_second", "shares", "history", "validations", "made_on")
VOLATILE = ("measured_on", "run", "timed", "draft_share", "versions", "folder", "settings_sha256")


def run(folder: Path) -> None:
    """The whole workflow in `folder`. Raises RuntimeError with its output where it fails."""
    import tiny
    import torch
    from support import targets
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**targets.SHAPE, tie_word_embeddings=True))
    target = targets.save_tiny(model, folder / "target-model", end_factor=1.4)
    config = tiny.settings(folder, target) | {"drafters": tiny.drafters()}
    done = tiny.snakemake(folder, config)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def plain(value: Any) -> Any:
    """JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {
            k: plain(v)
            for k, v in value.items()
            if k not in VOLATILE and not any(word in k for word in TIMED)
        }
    return [plain(v) for v in value] if isinstance(value, list) else value


def digest(path: Path) -> str:
    """The hash of a file, of JSON without times."""
    data = path.read_bytes()
    if path.suffix == ".json" and "evaluate" in path.parts:
        data = json.dumps(plain(json.loads(data)), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def found(results: Path) -> dict[str, str]:
    """Each file that has to be the same, and its hash."""
    patterns = (
        *("tokens/*/*.parquet", "drafters/*/model.safetensors", "evaluate/*/*.json"),
        *("features/*/*.zarr/**/c/**/*", "export/*/model.safetensors", "export/*/config.json"),
    )
    files = sorted(p for pattern in patterns for p in results.glob(pattern) if p.is_file())
    out: dict[str, str] = {}
    shards: dict[str, list[str]] = {}
    for path in files:
        name = str(path.relative_to(results))
        if ".zarr/" in name:  # a hash for a whole shard
            shard, inside = name.split(".zarr/")
            shards.setdefault(shard + ".zarr", []).append(f"{inside} {digest(path)}")
        else:
            out[name] = digest(path)
    for shard, lines in shards.items():
        out[shard] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return dict(sorted(out.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a line a file, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run(Path(name))
        hashes = found(Path(name) / "results")
    for file, value in hashes.items():
        line = json.dumps({"case": file, "sha256": value}) if args.json else f"{value}  {file}"
        print(line)
    everything = hashlib.sha256("\n".join(f"{v} {k}" for k, v in hashes.items()).encode())
    if not args.json:
        print(f"{everything.hexdigest()[:16]}  all {len(hashes)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
