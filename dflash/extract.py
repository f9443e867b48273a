"""Stage `extract`: the target reads one shard of documents; the outputs of its tapped layers stay.

    python -m dflash.extract --settings JSON --machine JSON --identity IDENTITY --threads 2 \\
        --tokens results/tokens/NAME/SHARD.parquet \\
        --out results/features/NAME/SHARD.zarr --manifest results/features/NAME/SHARD.json

One forward of the decoder without its head gives all features of a document. What is stored does
not depend, up to rounding, on which documents were read together. Where some drafter learns from the
target's own distribution, the last layer's output is stored too, before the final norm.

Legend: B documents · S tokens · T taps · H hidden width.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from dflash import extract_vllm
from dflash.config import DType, Extract, ExtractMachine, canonical, check
from dflash.errors import UserError, entrypoint
from dflash.features import Document, Shard, open_shard, shard_identity, write_shard
from dflash.files import read_settings, sha256, text_sha256
from dflash.progress import progress
from dflash.regenerate import TokenRow, read_tokens
from dflash.taps import Taps, decoder, final_norm, run_decoder
from dflash.target import Identity, default_device, is_out_of_memory, load_model, read_identity


class StageSettings(Extract):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["extract"]
    version: int
    taps: list[int] = Field(min_length=1)
    dtype: DType
    trust_remote_code: bool = False
    last_hidden: bool = False  # store the last layer's output, before the final norm


# --- which documents ----------------------------------------------------------------------------


def select(
    rows: Sequence[TokenRow], max_tokens: int, vocab_size: int, where: str | Path
) -> tuple[list[TokenRow], dict[str, int]]:
    """Documents as they will be stored, longest first, and counts of what was cut or left out.

    Longest first, so that memory that does not suffice shows at once; equally long ones by sample
    id. Raises UserError for a token that the target does not have, and when nothing is left.
    """
    dropped = dict.fromkeys(
        ("documents_cut", "documents_too_short", "documents_without_supervision"), 0
    )
    kept: list[TokenRow] = []
    seen: set[str] = set()
    for row in rows:
        if row.sample_id in seen:
            raise UserError(
                f"{where}: sample {row.sample_id} occurs twice, expected distinct ones: delete the "
                "file and run the regenerate stage again"
            )
        seen.add(row.sample_id)
        low, high = (row.input_ids.min(), row.input_ids.max()) if len(row.input_ids) else (0, 0)
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"{where}: sample {row.sample_id} holds tokens {low} to {high}, the target has 0 "
                f"to {vocab_size - 1}: delete the file and run the regenerate stage again"
            )
        ids, mask = row.input_ids[:max_tokens], row.loss_mask[:max_tokens]
        if len(ids) < 2:
            dropped["documents_too_short"] += 1
        elif not mask.any():
            dropped["documents_without_supervision"] += 1
        else:
            dropped["documents_cut"] += len(row.input_ids) > max_tokens
            kept.append(TokenRow(row.sample_id, row.source, row.kind, row.split, ids, mask))
    if not kept:
        raise UserError(
            f"{where}: no document is left to learn from: of {len(rows)}, "
            f"{dropped['documents_too_short']} have fewer than two tokens and "
            f"{dropped['documents_without_supervision']} no token of a response among the first "
            f"{max_tokens}; raise `extract.max_tokens`, or look at the prompts of this source"
        )
    return sorted(kept, key=lambda row: (-len(row.input_ids), row.sample_id)), dropped


def batch_end(rows: Sequence[TokenRow], start: int, batch_tokens: int) -> int:
    """Where the batch that starts at `start` ends: at most so many padded tokens, at least one row.

    The first row is the longest, so it alone decides the width.
    """
    return start + max(1, batch_tokens // len(rows[start].input_ids))


# --- the forward --------------------------------------------------------------------------------


@torch.inference_mode()
def forward(model: nn.Module, taps: Taps, rows: Sequence[TokenRow], pad_id: int) -> np.ndarray:
    """Hidden states of documents read together: uint16 [B, S, T, H], bf16 bits, padding included.

    Padding is on the right, where the causal mask already hides it from every real token, so no
    padding mask is passed: that keeps the fast attention kernels, which take none.
    """
    width = max(len(row.input_ids) for row in rows)
    ids_BS = torch.full((len(rows), width), pad_id)
    for i, row in enumerate(rows):
        ids_BS[i, : len(row.input_ids)] = torch.from_numpy(row.input_ids)
    run_decoder(model, input_ids=ids_BS.to(model.device), use_cache=False)
    hidden_BSTH = taps.stack(torch.bfloat16).cpu()
    taps.clear()
    return hidden_BSTH.view(torch.uint16).numpy()


def documents(
    model: nn.Module,
    taps: Taps,
    rows: Sequence[TokenRow],
    batch_tokens: int,
    pad_id: int,
    last_hidden: bool = False,
) -> Iterator[Document]:
    """Every row with its hidden states, in order; with `last_hidden`, the last tap is that state.

    Running out of memory halves the batch, for what is left too, and says so. Raises UserError when
    a single document does not fit.
    """
    start = 0
    while start < len(rows):
        batch = rows[start : batch_end(rows, start, batch_tokens)]
        try:
            hidden_BSTH = forward(model, taps, batch, pad_id)
        except RuntimeError as e:
            if not is_out_of_memory(e):
                raise
            hidden_BSTH = None
        if hidden_BSTH is None:  # outside of `except`, whose traceback holds the failed tensors
            taps.clear()
            batch_tokens = _halved(batch)
            continue
        for i, row in enumerate(batch):
            hidden, last = hidden_BSTH[i, : len(row.input_ids)], None
            if last_hidden:
                hidden, last = hidden[:, :-1], hidden[:, -1]
            yield Document(row.sample_id, row.input_ids, row.loss_mask, hidden, last)
        start += len(batch)


@torch.inference_mode()
def check_final_norm(model: nn.Module, taps: Taps) -> None:
    """Run two tokens: the final norm of the last tap must be what the head gets.

    Raises UserError for a model that does anything else there.
    """
    out = run_decoder(model, input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
    last_BSH = taps.stack()[:, :, -1]
    taps.clear()
    if not torch.equal(final_norm(model)(last_BSH), out.last_hidden_state):
        raise UserError(
            f"{type(model).__name__} does more than its final norm between the last layer and the head, "
            "so its distribution does not follow from the stored state; set `training.loss.labels: data`"
        )


def _halved(batch: Sequence[TokenRow]) -> int:
    """The next token budget after a batch that did not fit, told on stderr."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    width = len(batch[0].input_ids)
    if len(batch) == 1:
        raise UserError(
            f"sample {batch[0].sample_id}: not even this one document ({width} tokens) fits in "
            "memory; lower `extract.max_tokens`, or use a device with more memory"
        )
    budget = len(batch) * width // 2
    print(
        f"extract: out of memory with {len(batch) * width} tokens at once, going on with {budget}; "
        "set `machine.extract.batch_tokens` to that",
        file=sys.stderr,
        flush=True,
    )
    return budget


@contextmanager
def reading(
    target: Identity,
    settings: StageSettings,
    machine: ExtractMachine,
    rows: Sequence[TokenRow],
    threads: int,
) -> Iterator[Iterator[Document]]:
    """Load the target with transformers; yields every row with its hidden states, in order."""
    torch.set_num_threads(threads)
    model = load_model(target, settings.dtype, settings.trust_remote_code)
    caught = list(settings.taps)
    if settings.last_hidden:
        caught.append(len(decoder(model).layers) - 1)
    with Taps(model, caught) as taps:
        if settings.last_hidden:
            check_final_norm(model, taps)
        pad_id = target.pad_token_id or 0
        yield documents(model, taps, rows, machine.batch_tokens, pad_id, settings.last_hidden)


# --- the stage ----------------------------------------------------------------------------------


def finished(
    out: Path, manifest: Path, identity: dict[str, Any], rows: Sequence[TokenRow]
) -> Shard | None:
    """The shard, if it is already there, whole and exactly what would be made; else say why not."""
    if not out.exists() or not manifest.exists():
        return None
    try:
        shard = open_shard(out, identity, manifest)
    except UserError as e:
        print(f"extract: making the shard anew, because {e}", flush=True)
        return None
    return shard if shard.sample_ids == [row.sample_id for row in rows] else None


def _report(dropped: dict[str, int], max_tokens: int) -> str:
    """What was cut or left out, as the end of a sentence; nothing if nothing was."""
    texts = {
        "documents_cut": f"cut at {max_tokens} tokens",
        "documents_too_short": "of fewer than 2 tokens left out",
        "documents_without_supervision": "without a response left out",
    }
    return "".join(f", {dropped[key]} {text}" for key, text in texts.items() if dropped[key])


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.extract",
        description="Store the target's hidden states of one shard of documents.",
    )
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--machine", default="{}", help="how to run: JSON, or a file")
    parser.add_argument("--identity", required=True, help="identity.json of the target stage")
    parser.add_argument("--tokens", required=True, type=Path, help="Parquet of `regenerate`")
    parser.add_argument("--threads", type=int, help="CPU threads (default: the machine's)")
    parser.add_argument("--out", required=True, type=Path, help="SHARD.zarr to write")
    parser.add_argument("--manifest", type=Path, help="default: SHARD.json beside it")
    args = parser.parse_args(argv)
    raw = read_settings(args.settings)
    settings = check(StageSettings, raw, "--settings")
    machine = check(ExtractMachine, read_settings(args.machine), "--machine")
    manifest = args.manifest or args.out.with_suffix(".json")
    name = f"{args.out.parent.name}/{args.out.stem}"
    target = read_identity(args.identity)
    rows, dropped = select(
        read_tokens(args.tokens), settings.max_tokens, target.vocab_size, args.tokens
    )
    identity = shard_identity(
        target,
        settings.taps,
        compute_dtype=settings.dtype,
        settings_sha256=text_sha256(canonical(raw)),
        tokens_sha256=sha256(args.tokens),
        last_hidden=settings.last_hidden,
    )
    if finished(args.out, manifest, identity, rows):
        print(f"extract {name}: {args.out} is already there and whole; nothing to do")
        return
    threads = args.threads or machine.threads
    if settings.backend == "vllm":
        opened = extract_vllm.reading(target, settings, machine, rows, args.out, threads)
    else:
        opened = reading(target, settings, machine, rows, threads)
    tokens = sum(len(row.input_ids) for row in rows)
    with (
        write_shard(args.out, identity, len(rows), tokens, manifest, dropped) as writer,
        opened as documents,
        progress(desc=f"extract {name}", total=tokens, unit="tokens") as bar,
    ):
        started = time.monotonic()
        for document in documents:
            writer.add(document)
            bar.update(len(document.input_ids))
        seconds = time.monotonic() - started
    size = open_shard(args.out, identity, manifest).size
    where = "with vLLM" if settings.backend == "vllm" else f"on {default_device()}"
    print(
        f"extract {name}: {len(rows)} documents{_report(dropped, settings.max_tokens)}, {tokens} "
        f"tokens, {size / 1e6:.1f} MB, {tokens / seconds:.0f} tokens/s {where}"
    )


if __name__ == "__main__":
    entrypoint(main)
