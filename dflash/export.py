"""Write a trained drafter as the published checkpoint: what vLLM, SGLang and the official package load.

    python -m dflash.export --drafter results/drafters/demo --out results/export/demo

The folder holds `config.json` and `model.safetensors` (bfloat16, one file, no prefix). Embedding and
head are the target's and are not in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash.drafter import config_text, load_drafter, save_drafter
from dflash.errors import entrypoint
from dflash.files import whole


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash.export", description=__doc__)
    parser.add_argument("--settings", default="{}", help="JSON; the export has no settings yet")
    parser.add_argument("--drafter", required=True, type=Path, help="folder of the trained drafter")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    args = parser.parse_args(argv)
    drafter = load_drafter(args.drafter)
    with whole(args.out, folder=True) as folder:
        save_drafter(folder, drafter, "bfloat16")
    size = (args.out / "model.safetensors").stat().st_size / 1e6
    print(f"exported {args.out}: {config_text(drafter.config)}; {size:.1f} MB")


if __name__ == "__main__":
    entrypoint(main)
