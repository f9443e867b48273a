"""Hidden states from vLLM against those from transformers: how much they differ, and how fast each is.

    python benchmarks/vllm_extract.py --vllm PYTHON [--target FOLDER] [--tensor-parallel N]
                                       [--quick] [--json]

PYTHON is the interpreter of an environment that holds vLLM (envs/vllm.sh makes one). Two small random
targets of two families, and the target in FOLDER if given, read the same documents of 2 to 600 tokens, of
which vLLM has several in a step and long ones in chunks. Compared are, tap by tap and for the last
layer's output before the final norm:

- `cosine` and `relative`: the least cosine and the largest ‖difference‖ ÷ ‖state‖ of any token, in float32
  as computed, against one forward of each document alone;
- `stored`: the least cosine between the shards that the extract stage writes with either backend, in bf16,
  and `equal`, the share of equal values in them.

With FOLDER, both backends' stages run three times in turn, in fresh processes, and the medians of the
tokens a second that they report are printed: without loading. `ratio` is vLLM ÷ transformers.

Exit status 1 for any cosine below 0.9999.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash import config, extract, extract_vllm
from dflash.features import open_shard
from dflash.regenerate import TokenRow, write_tokens
from dflash.taps import Taps, run_decoder
from dflash.target import Identity, identify, load_model

LIMIT = 0.9999
VOCAB = 1000
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=192,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    initializer_range=0.15,  # large enough that a token's state depends on all before it
)
LENGTHS = [
    600,
    2,
    3,
    599,
    129,
    128,
    127,
    64,
    17,
    300,
]  # around the tokens of a step, then random ones
STEP = 128  # tokens of one step of vLLM's, so that most documents are read in chunks


def small_target(family: str, folder: Path) -> Identity:
    """A random target of that family, saved with a tokenizer that only has to exist."""
    torch.manual_seed(0)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True, eos_token_id=1))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False, eos_token_id=1))
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="w1",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    ).save_pretrained(folder)
    return identify(family, folder, "local")


def ragged(count: int, vocab: int) -> list[TokenRow]:
    """Documents of 2 to 600 random tokens, in the order in which the stage stores them."""
    rng = np.random.default_rng(0)
    lengths = (LENGTHS + rng.integers(2, 601, max(0, count - len(LENGTHS))).tolist())[:count]
    rows = [
        TokenRow(
            f"{i:016x}",
            "bench",
            "random",
            "train",
            rng.integers(0, vocab, n).astype(np.int32),
            np.ones(n, bool),
        )
        for i, n in enumerate(lengths)
    ]
    return extract.select(rows, 600, vocab, "the benchmark's documents")[0]


def settings_of(target: Identity, backend: str) -> dict:
    """The stage's settings: three taps and the last layer."""
    last = target.num_hidden_layers - 1
    return {
        "stage": "extract",
        "version": config.STAGE_VERSION["extract"],
        "taps": [0, last // 2, last - 1],
        "dtype": "float32",
        "max_tokens": 600,
        "backend": backend,
        "last_hidden": True,
    }


def machine_of(args: argparse.Namespace, step: int) -> dict:
    vllm = {"python": args.vllm, "tensor_parallel": args.tensor_parallel}
    return {"batch_tokens": step, "vllm": vllm | {"gpu_memory_utilization": 0.1}}


@torch.inference_mode()
def difference(
    target: Identity, rows: list[TokenRow], machine: dict, scratch: Path
) -> dict[int, tuple[float, float]]:
    """Layer -> least cosine and largest relative difference of any token, as computed."""
    settings = extract.StageSettings.model_validate(settings_of(target, "vllm"))
    how = config.ExtractMachine.model_validate(machine)
    layers = extract_vllm.layers_of(settings.taps, True, target.num_hidden_layers)
    model = load_model(target, "float32", device="cpu")
    cosines, relatives = [], []
    with (
        redirect_stdout(sys.stderr),
        extract_vllm.states(target, settings, how, rows, scratch / "bench", 1) as handed,
        Taps(model, layers) as taps,
    ):
        for row, theirs_SLH in zip(rows, handed, strict=True):
            run_decoder(
                model, input_ids=torch.from_numpy(row.input_ids).long()[None], use_cache=False
            )
            ours_SLH = taps.stack()[0]
            cosines.append(torch.cosine_similarity(ours_SLH.double(), theirs_SLH.double(), dim=-1))
            relatives.append((ours_SLH - theirs_SLH).norm(dim=-1) / ours_SLH.norm(dim=-1))
    least, largest = torch.cat(cosines).amin(0), torch.cat(relatives).amax(0)
    return dict(zip(layers, zip(least.tolist(), largest.tolist(), strict=True), strict=True))


def run_stage(
    target: Identity, rows: list[TokenRow], backend: str, machine: dict, folder: Path
) -> float:
    """Write the shard with one backend, in a fresh process; the tokens a second that it reports."""
    folder.mkdir(parents=True)
    write_tokens(folder / "tokens.parquet", rows)
    (folder / "identity.json").write_text(json.dumps(asdict(target)))
    command = [
        *(sys.executable, "-m", "dflash.extract", "--threads", "1"),
        *("--settings", json.dumps(settings_of(target, backend)), "--machine", json.dumps(machine)),
        *("--identity", f"{folder}/identity.json", "--tokens", f"{folder}/tokens.parquet"),
        *("--out", f"{folder}/shard.zarr"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(re.search(r"(\d+) tokens/s", done.stdout)[1])


def stored(one: Path, other: Path, layers: list[int]) -> dict[int, tuple[float, float]]:
    """Layer -> least cosine of any token and share of equal values, in two shards."""
    shards = [open_shard(path / "shard.zarr") for path in (one, other)]
    cosines, equals = [], []
    for i in range(len(shards[0])):
        a_SLH, b_SLH = (
            torch.from_numpy(np.concatenate([d.hidden, d.last_hidden[:, None]], 1))
            for d in (shard.read(i, last_hidden=True) for shard in shards)
        )
        equals.append((a_SLH == b_SLH).double().mean(-1))
        a_SLH, b_SLH = (x.view(torch.bfloat16).double() for x in (a_SLH, b_SLH))
        cosines.append(torch.cosine_similarity(a_SLH, b_SLH, dim=-1))
    least, equal = torch.cat(cosines).amin(0), torch.cat(equals).mean(0)
    return dict(zip(layers, zip(least.tolist(), equal.tolist(), strict=True), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--target", type=Path, help="folder of a saved model to compare and time too"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of vLLM's")
    parser.add_argument("--quick", action="store_true", help="one family, few documents")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cosines = []
    if not args.json:
        print(
            f"{'case':<10} {'layer':>5} {'cosine':>12} {'relative':>9} {'stored':>12} {'equal':>7}"
        )
    with tempfile.TemporaryDirectory(prefix="vllm_extract-") as name:
        scratch = Path(name)
        cases = [(f, small_target(f, scratch / f)) for f in ("llama", "qwen3")][
            : 1 if args.quick else 2
        ]
        if args.target:
            cases.append(("target", identify("target", args.target, "local")))
        for case, target in cases:
            rows = ragged(10 if args.quick else 40, target.vocab_size)
            machine = machine_of(args, STEP)
            computed = difference(target, rows, machine, scratch)
            for backend in ("transformers", "vllm"):
                run_stage(target, rows, backend, machine, scratch / case / backend)
            kept = stored(scratch / case / "transformers", scratch / case / "vllm", list(computed))
            for layer, (cosine, relative) in computed.items():
                row = {"case": case, "layer": layer, "cosine": cosine, "relative": relative}
                row |= {"stored": kept[layer][0], "equal": kept[layer][1]}
                cosines += [cosine, kept[layer][0]]
                if args.json:
                    print(json.dumps(row), flush=True)
                else:
                    print(
                        f"{case:<10} {layer:>5} {cosine:>12.9f} {relative:>9.1e} {row['stored']:>12.9f} "
                        f"{row['equal']:>7.2%}",
                        flush=True,
                    )
        if args.target:
            timed(target, rows, args, scratch)
    if not args.json:
        tokens = sum(len(row.input_ids) for row in rows)
        print(
            f"{len(rows)} documents of 2 to 600 tokens, {tokens} together, in steps of {STEP}; least cosine "
            f"{min(cosines):.9f}, allowed {LIMIT}"
        )
    return 0 if all(cosine >= LIMIT for cosine in cosines) else 1


def timed(target: Identity, rows: list[TokenRow], args: argparse.Namespace, scratch: Path) -> None:
    """Tokens a second of both backends on one target, with steps as large as their default."""
    machine = machine_of(args, 4096)
    rates: dict[str, list[float]] = {"transformers": [], "vllm": []}
    for turn in range(1 if args.quick else 3):
        for backend in sorted(rates, reverse=turn % 2 == 1):
            folder = scratch / f"{backend}-{turn}"
            rates[backend].append(run_stage(target, rows, backend, machine, folder))
    rate = {k: statistics.median(v) for k, v in rates.items()}
    ratio = rate["vllm"] / rate["transformers"]
    if args.json:
        print(json.dumps({"case": "speed", **rate, "ratio": ratio}), flush=True)
    else:
        print(
            f"tokens/s on the target in steps of 4096: transformers {rate['transformers']:.0f}, vLLM "
            f"{rate['vllm']:.0f}, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
