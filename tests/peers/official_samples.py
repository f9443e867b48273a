"""Responses that the official package samples to one prompt, again and again; run in a process of its own.

    PYTHONPATH=FOLDER python tests/peers/official_samples.py SETTINGS.json

SETTINGS  target, drafter (folders), prompt (ids), tokens (new ones each), draws, temperature, top_k, top_p.
stdout    JSON, a list of lists of token ids. Which package runs, and how it is loaded, is `official.py`'s.
"""

import json
import pathlib
import sys

import official as peer
import torch


def main():
    s = json.loads(pathlib.Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    package = peer.official()
    target = peer.load_target(s["target"], torch.float32, "sdpa")
    drafter = peer.load_drafter(package, s["drafter"], torch.float32)
    ids, shape = torch.tensor([s["prompt"]]), ("temperature", "top_k", "top_p")
    out = [
        package.dflash_generate(
            *(drafter, target, ids, s["tokens"], None), **{k: s[k] for k in shape}
        )[0, ids.shape[1] :].tolist()
        for _ in range(s["draws"])
    ]
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
