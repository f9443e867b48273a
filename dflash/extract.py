"""Stage `extract`: the target reads one shard of documents; the outputs of its tapped layers stay.

    python -m dflash.extract --settings JSON --machine JSON --identity IDENTITY --threads 2 \\
        --tokens results/tokens/NAME/SHARD.parquet \\
        --out results/features/NAME/SHARD.zarr --manifest results/features/NAME/SHARD.json

One forward of the decoder without its head gives all features of a document. What is stored does
not depend, up to rounding, on which documents were read together. Where some drafter learns from the
target's own distribution, the last layer's output is stored too, before the final norm.

The target reads a batch while the one before is written. It may lie on several cards: with
`machine.extract.parallel` set to tensor this runs under torchrun, a process a card; every process
reads the same batches and the first one writes.

Legend: B documents · S tokens · T taps · H hidden width.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dflash import extract_vllm
from dflash.config import DType, Extract, ExtractMachine, canonical, check, check_backend
from dflash.decode import lay_out
from dflash.errors import UserError, entrypoint
from dflash.features import (
    SAMPLE_ID,
    Document,
    Shard,
    open_shard,
    shard_identity,
    verify,
    write_shard,
)
from dflash.files import read_settings, sha256, text_sha256, write_json
from dflash.progress import progress
from dflash.regenerate import AGAIN, TokenRow, read_tokens
from dflash.taps import Taps, decoder, final_norm, rope_edge, run_decoder
from dflash.target import (
    Identity,
    check_positions,
    is_out_of_memory,
    load_model,
    read_identity,
)

MAX_PADDING = 0.05  # of all tokens that the target reads


class StageSettings(Extract):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["extract"]
    version: int
    taps: list[int] = Field(min_length=1)
    dtype: DType
    trust_remote_code: bool = False
    last_hidden: bool = False  # store the last layer's output, before the final norm


def check_settings(settings: StageSettings, machine: ExtractMachine, target: Identity) -> None:
    """Raises UserError for what a workflow refuses before any job, when the stage is run alone."""
    taps, layers = settings.taps, target.num_hidden_layers
    if len(set(taps)) != len(taps) or not all(0 <= i < layers for i in taps):
        raise UserError(
            f"--settings: `taps`: found {taps}; expected layer ids from 0 to {layers - 1} without repeats, "
            f"as the target has {layers} layers; change the drafter's `taps`"
        )
    check_backend(settings, machine, "--settings")


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
    if not rows:
        raise UserError(f"{where}: holds no document; {AGAIN}")
    kept: list[TokenRow] = []
    seen: set[str] = set()
    for row in rows:
        if not SAMPLE_ID.fullmatch(row.sample_id):
            raise UserError(
                f"{where}: sample id {row.sample_id!r}, expected 16 of the digits 0 to 9 and a to f; {AGAIN}"
            )
        if row.sample_id in seen:
            raise UserError(
                f"{where}: sample {row.sample_id} occurs twice, expected distinct ones; {AGAIN}"
            )
        seen.add(row.sample_id)
        low, high = (row.input_ids.min(), row.input_ids.max()) if len(row.input_ids) else (0, 0)
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"{where}: sample {row.sample_id} holds tokens {low} to {high}, the target has 0 "
                f"to {vocab_size - 1}; {AGAIN}"
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


@dataclass
class Batches:
    """How many documents, longest first, are read together.

    A batch ends before its padded tokens would pass `limit`, and before the padding of all batches so
    far would pass `MAX_PADDING` of their tokens: what long and equal documents save, short and
    unequal ones may use. It also ends at `edge`, beyond which the target turns a whole batch's positions
    otherwise (`dflash.taps.rope_edge`).
    """

    limit: int
    edge: int | None = None
    tokens: int = 0  # of the batches read so far, padding included
    padding: int = 0  # of these

    def end(self, rows: Sequence[TokenRow], start: int) -> int:
        """Where the batch that starts at `start` ends: after at least one row."""
        width = len(rows[start].input_ids)
        padding, end = 0, start + 1
        while end < len(rows) and (end + 1 - start) * width <= self.limit:
            length = len(rows[end].input_ids)
            padding += width - length
            tokens = self.tokens + (end + 1 - start) * width
            if self.padding + padding > MAX_PADDING * tokens:
                break
            if self.edge is not None and length <= self.edge < width:
                break
            end += 1
        return end

    def count(self, batch: Sequence[TokenRow]) -> None:
        """Add a batch that was read."""
        tokens = len(batch) * len(batch[0].input_ids)
        self.tokens += tokens
        self.padding += tokens - sum(len(row.input_ids) for row in batch)

    def halve(self, batch: Sequence[TokenRow]) -> None:
        """Take half the tokens of a batch that did not fit from now on, and say so on stderr.

        Raises UserError for a single document, and where other processes read the same batches: those
        wait inside the forward that failed here.
        """
        width = len(batch[0].input_ids)
        if len(batch) == 1:
            raise UserError(
                f"sample {batch[0].sample_id}: not even this one document ({width} tokens) fits in "
                "memory; lower `extract.max_tokens`, or use a device with more memory"
            )
        tokens = len(batch) * width
        self.limit = tokens // 2
        if torch.distributed.is_initialized():
            raise UserError(
                f"extract: out of memory with {tokens} tokens at once; set "
                f"`machine.extract.batch_tokens` to {self.limit}"
            )
        print(
            f"extract: out of memory with {tokens} tokens at once, going on with {self.limit}; "
            "set `machine.extract.batch_tokens` to that",
            file=sys.stderr,
            flush=True,
        )


# --- the forward --------------------------------------------------------------------------------


@torch.inference_mode()
def forward(
    model: nn.Module, taps: Taps, rows: Sequence[TokenRow], pad_id: int = 0
) -> tuple[Tensor, torch.cuda.Event | None] | None:
    """Hidden states of documents read together: bfloat16 [B, S, T, H], padding included, on the host.

    From a GPU they are still being copied there until the event returned with them has happened.
    None where memory did not suffice. Padding is on the right, where the causal mask already hides it
    from every real token, so no padding mask is passed: that keeps the fast attention kernels, which
    take none.
    """
    width = max(len(row.input_ids) for row in rows)
    ids_BS = torch.full((len(rows), width), pad_id)
    for i, row in enumerate(rows):
        ids_BS[i, : len(row.input_ids)] = torch.from_numpy(row.input_ids)
    try:
        run_decoder(model, input_ids=ids_BS.to(model.device), use_cache=False)
        return _to_host(taps.stack())
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
    finally:
        taps.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _to_host(hidden: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start copying from a GPU in a stream of its own, beside what the model does next."""
    if hidden.device.type != "cuda":
        return hidden, None
    stream = torch.cuda.Stream(hidden.device)
    stream.wait_stream(torch.cuda.current_stream(hidden.device))
    with torch.cuda.stream(stream):
        host = hidden.to("cpu", non_blocking=True)
    hidden.record_stream(stream)  # its memory must not be given away before
    return host, stream.record_event()


def documents(
    model: nn.Module,
    taps: Taps,
    rows: Sequence[TokenRow],
    batches: Batches,
    last_hidden: bool = False,
) -> Iterator[Document]:
    """Every row with its hidden states, in order; with `last_hidden`, the last tap is that state.

    While the caller works on the documents of one batch, the model reads the next one in a thread, and
    no further. Running out of memory halves the batch, for what is left too, and says so. Raises
    UserError when a single document does not fit.
    """
    cuda = model.device.type == "cuda"
    prepare = torch.cuda.set_device if cuda else None  # a thread's own setting
    with ThreadPoolExecutor(1, initializer=prepare, initargs=(model.device,)) as thread:
        start, ready = 0, iter(())
        while start < len(rows):
            batch = rows[start : batches.end(rows, start)]
            coming = thread.submit(forward, model, taps, batch)
            yield from ready
            ready, hidden = iter(()), coming.result()
            if hidden is None:
                batches.halve(batch)
                continue
            batches.count(batch)
            start += len(batch)
            ready = _cut(batch, *hidden, last_hidden)
            del hidden, coming  # nothing but `ready` keeps a batch that is handed out
        yield from ready


def _cut(
    rows: Sequence[TokenRow],
    hidden: Tensor,
    copied: torch.cuda.Event | None,
    last_hidden: bool,
) -> Iterator[Document]:
    """The documents of a batch without its padding."""
    if copied:
        copied.synchronize()
    hidden_BSTH = hidden.view(torch.uint16).numpy()
    for row, hidden_STH in zip(rows, hidden_BSTH, strict=True):
        hidden, last = hidden_STH[: len(row.input_ids)], None
        if last_hidden:
            hidden, last = hidden[:, :-1], hidden[:, -1]
        yield Document(row.sample_id, row.input_ids, row.loss_mask, hidden, last)


@torch.inference_mode()
def check_final_norm(model: nn.Module) -> None:
    """Run two tokens: the final norm of the last layer's output must be what the head gets.

    Raises UserError for a model that does anything else there.
    """
    ids_BS = torch.tensor([[0, 1]], device=model.device)
    with Taps(model, [len(decoder(model).layers) - 1]) as taps:
        out = run_decoder(model, input_ids=ids_BS, use_cache=False)
    last_BSH = taps.stack()[:, :, 0]
    normed_BSH = final_norm(model)(last_BSH).to(out.last_hidden_state.device)
    if not torch.equal(normed_BSH, out.last_hidden_state):
        raise UserError(
            f"{type(model).__name__} does more than its final norm between the last layer and the head, "
            "so its distribution does not follow from the stored state; set `training.loss.labels: data`"
        )


@contextmanager
def reading(
    target: Identity,
    settings: StageSettings,
    machine: ExtractMachine,
    rows: Sequence[TokenRow],
    out: Path,
    threads: int,
    ranks: int,
) -> Iterator[tuple[Iterator[Document], Callable[[], str]]]:
    """Load the target; yields every row with its hidden states, in order, and a function that tells in a
    few words, afterwards, how they were read."""
    if settings.backend == "vllm":
        with extract_vllm.reading(target, settings, machine, rows, out, threads) as found:
            yield found, lambda: "with vLLM"
        return
    torch.set_num_threads(threads)
    model = load_model(
        target, settings.dtype, settings.trust_remote_code, parallel=machine.parallel
    )
    lay_out(model)
    caught = list(settings.taps)
    if settings.last_hidden:
        check_final_norm(model)
        caught.append(len(decoder(model).layers) - 1)
    batches = Batches(machine.batch_tokens, rope_edge(model.config))
    with (
        Taps(model, caught, torch.bfloat16) as taps,
        closing(documents(model, taps, rows, batches, settings.last_hidden)) as found,
    ):
        yield (
            found,
            lambda: (
                f"on {_devices(model, ranks)}, with {batches.padding / batches.tokens:.1%} of padding"
            ),
        )


# --- the stage ----------------------------------------------------------------------------------


def finished(
    out: Path, manifest: Path, identity: dict[str, Any], rows: Sequence[TokenRow]
) -> Shard | None:
    """The shard, if it is already there and exactly what would be made; else say why not.

    A shard without a manifest, as a kill between the two leaves it, is read whole and gets one.
    """
    lost = not manifest.exists()
    if lost and not os.path.lexists(out):
        return None
    try:
        shard = open_shard(out, identity, None if lost else manifest)
        if shard.sample_ids != [row.sample_id for row in rows]:
            raise UserError(
                f"{out}: its {len(shard)} documents are not the {len(rows)} that are asked for, in "
                "their order"
            )
        if lost:
            write_json(manifest, verify(out))
            print(f"extract: {out} is whole, its manifest was missing and is written again")
    except UserError as e:
        print(f"extract: making the shard anew, because {e}", flush=True)
        return None
    return shard


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
    check_settings(settings, machine, target)
    rows, dropped = select(
        read_tokens(args.tokens), settings.max_tokens, target.vocab_size, args.tokens
    )
    check_positions(
        target,
        len(rows[0].input_ids) + (settings.backend == "vllm"),  # which samples a token
        f"{args.tokens}: sample {rows[0].sample_id}",
        "lower `extract.max_tokens` to cut such documents",
    )
    identity = shard_identity(
        target,
        settings.taps,
        compute_dtype=settings.dtype,
        settings_sha256=text_sha256(canonical(raw)),
        tokens_sha256=sha256(args.tokens),
        last_hidden=settings.last_hidden,
    )
    wanted = identity | {"codec": settings.codec}
    rank, ranks = 0, 1
    if machine.parallel == "tensor":  # torchrun's numbers
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if finished(args.out, manifest, wanted, rows):
        print(
            f"extract {name}: {args.out} is already there, its checksums are checked when it is read; "
            "nothing to do"
        )
        return
    tokens = sum(len(row.input_ids) for row in rows)
    threads = max(1, (args.threads or machine.threads) // ranks)
    # Every rank reads everything, the first one alone writes.
    shard = write_shard(args.out, identity, len(rows), tokens, manifest, dropped, settings.codec)
    with (
        shard if rank == 0 else nullcontext() as writer,
        reading(target, settings, machine, rows, args.out, threads, ranks) as (found, told),
        progress(desc=f"extract {name}", total=tokens, unit="tokens", show=rank == 0) as bar,
    ):
        started = time.monotonic()
        for document in found:
            if writer is not None:
                writer.add(document)
            bar.update(len(document.input_ids))
        seconds = time.monotonic() - started
    if ranks > 1:
        torch.distributed.destroy_process_group()
    if rank:
        return
    size = open_shard(args.out, wanted, manifest).size
    print(
        f"extract {name}: {len(rows)} documents{_report(dropped, settings.max_tokens)}, {tokens} "
        f"tokens, {size / 1e6:.1f} MB, {tokens / seconds:.0f} tokens/s {told()}"
    )


def _devices(model: nn.Module, ranks: int) -> str:
    """Where the model lies, for people."""
    spread = sorted({str(d) for d in getattr(model, "hf_device_map", {}).values()})
    if ranks > 1:
        return f"{ranks} ranks of {model.device.type}"
    return ", ".join(spread) or str(model.device)


if __name__ == "__main__":
    entrypoint(main)
