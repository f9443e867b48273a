"""Stage `regenerate`: the target answers one shard of a source's training prompts.

    python -m dflash.regenerate --settings JSON --machine JSON --identity IDENTITY \\
        --prompts results/corpus/NAME.parquet --shard 00000-of-00002 --threads 2 \\
        --out results/tokens/NAME/00000-of-00002.parquet --stats STATS.json

A row holds the prompt's ids followed by the very ids that the target produced, up to and including
its end token; the loss mask covers the produced ones. No tokenizer is involved.

Shapes: B prompts of a batch · P longest prompt · N produced tokens · V vocabulary.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from dflash import decode
from dflash.config import DType, Regenerate, RegenerateMachine, check
from dflash.corpus import Prompt, read_prompts, read_table
from dflash.errors import UserError
from dflash.files import read_settings, text_sha256, whole, write_json
from dflash.progress import progress
from dflash.target import (
    Identity,
    check_positions,
    is_out_of_memory,
    load_model,
    read_identity,
)

AGAIN = "delete the file and run the regenerate stage again"
SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


@dataclass(frozen=True)
class TokenRow:
    """A document: prompt and response as token ids, all equally long."""

    sample_id: str
    source: str
    kind: str
    split: str
    input_ids: np.ndarray  # int32 [S]
    loss_mask: np.ndarray  # bool [S], true on the response with its end token


class StageSettings(Regenerate):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["regenerate"]
    version: int
    source: str
    dtype: DType
    trust_remote_code: bool = False


# --- the target answers -------------------------------------------------------------------------


def answers(
    model: PreTrainedModel,
    identity: Identity,
    prompts: list[Prompt],
    settings: Regenerate,
    batch_size: int,
    bar: tqdm | None = None,
) -> dict[str, list[int]]:
    """Sample id -> ids of the target's response, its end token included where it came.

    Batches hold prompts of about equal length, the longest first, so that memory that does not
    suffice shows at once: then the batch is halved, for the rest of the run too. What a prompt is
    answered does not depend on its batch (but for rounding). Raises UserError when not even one
    prompt fits in memory.
    """
    waiting = sorted(prompts, key=lambda p: (-len(p.prompt_ids), p.sample_id))
    responses: dict[str, list[int]] = {}
    while waiting:
        batch = waiting[:batch_size]
        try:
            produced = generate(model, identity, batch, settings, _Watch(bar, responses))
        except RuntimeError as e:
            if not is_out_of_memory(e):
                raise
            produced = None  # outside this block the failed tensors are free
        if produced is None:
            batch_size = _halved(len(batch), batch[0])
            continue
        responses |= {p.sample_id: ids for p, ids in zip(batch, produced, strict=True)}
        del waiting[: len(batch)]
        if bar is not None:
            _show_rate(bar, sum(map(len, responses.values())))
            bar.update(len(responses) - bar.n)
    return responses


def generate(
    model: PreTrainedModel,
    identity: Identity,
    prompts: list[Prompt],
    settings: Regenerate,
    watch: Callable[[list[decode.Response]], None] | None = None,
) -> list[list[int]]:
    """The responses to one batch of prompts, by our own loop (`decode.generate`).

    Nothing of the model's generation_config (sampling, penalties, forced tokens) enters it. Against
    Hugging Face's `generate` it gives the same tokens, without copying the whole cache at every one
    (benchmarks/regenerate.py compares the two).
    """
    responses, _ = decode.generate(
        model,
        [p.prompt_ids for p in prompts],
        settings.max_new_tokens,
        identity.eos_token_ids,
        choose=Sampler(prompts, settings) if settings.temperature > 0 else None,
        on_cycle=watch,
    )
    return [r.tokens for r in responses]


class Sampler:
    """Chooses each prompt's next token with temperature, top-k and top-p.

    Each prompt has random numbers of its own, from the seed and its sample id, one a token. So its
    response depends neither on the batch it was in nor on the shard nor on the device's generator,
    and a smaller batch after a lack of memory changes nothing.
    """

    def __init__(self, prompts: list[Prompt], settings: Regenerate):
        self.settings = settings
        self.step = 0
        self.uniform_BN = torch.from_numpy(np.stack([self._numbers(p) for p in prompts]))

    def _numbers(self, prompt: Prompt) -> np.ndarray:
        seed = int(text_sha256(f"answer/{self.settings.seed}/{prompt.sample_id}"), 16)
        return np.random.default_rng(seed).random(self.settings.max_new_tokens)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """The tokens [B] after the next step."""
        self.uniform_BN = self.uniform_BN.to(logits_BV.device)  # once
        uniform_B = self.uniform_BN[:, self.step]
        self.step += 1
        s = self.settings
        return draw(logits_BV, uniform_B, s.temperature, s.top_k, s.top_p)


def draw(
    logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_k: int | None, top_p: float
) -> Tensor:
    """The token [B] at which the cumulative probability, likeliest first, passes `uniform_B`.

    Only the `top_k` likeliest tokens count, and of those the fewest whose probability,
    renormalised, reaches `top_p`, in transformers' order of the two.
    """
    top = logits_BV.float().topk(min(top_k or logits_BV.shape[1], logits_BV.shape[1]))
    p_BK = (top.values.double() / temperature).softmax(-1)
    before_BK = p_BK.cumsum(-1) - p_BK
    kept_BK = before_BK < top_p  # the likeliest has nothing before it and stays
    p_BK = p_BK.where(kept_BK, 0.0)
    cumulative_BK = p_BK.cumsum(-1)
    wanted_B1 = uniform_B.double()[:, None] * cumulative_BK[:, -1:]
    place_B1 = (cumulative_BK <= wanted_B1).sum(-1, keepdim=True)
    last_B1 = kept_BK.sum(-1, keepdim=True) - 1  # rounding may carry `wanted` to the very end
    return top.indices.gather(1, place_B1.minimum(last_B1))[:, 0]


class _Watch:
    """Moves the bar while a long batch is being answered."""

    def __init__(self, bar: tqdm | None, finished: dict[str, list[int]]):
        self.bar = bar
        self.produced = sum(map(len, finished.values()))
        self.shown = time.monotonic()

    def __call__(self, responses: list[decode.Response]) -> None:
        now = time.monotonic()
        if self.bar is not None and now - self.shown >= self.bar.mininterval:
            self.shown = now
            lengths = [len(r.tokens) for r in responses]
            _show_rate(self.bar, self.produced + sum(lengths), f", token {max(lengths)}")
            self.bar.refresh()


def _show_rate(bar: tqdm, tokens: int, more: str = "") -> None:
    rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
    bar.set_postfix_str(f"{rate:.0f} tokens/s{more}", refresh=False)


def _halved(size: int, longest: Prompt) -> int:
    """The next batch size to try, told on stderr."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if size == 1:
        raise UserError(
            f"{longest.source}, prompt {longest.id}: not even this one prompt "
            f"({len(longest.prompt_ids)} tokens) fits in memory; lower `regenerate.max_new_tokens` "
            "or `corpus.max_prompt_tokens`, or use a device with more memory"
        )
    print(
        f"regenerate: out of memory with {size} prompts at once, going on with {size // 2}; set "
        "`machine.regenerate.batch_size` to that",
        file=sys.stderr,
        flush=True,
    )
    return size // 2


# --- files --------------------------------------------------------------------------------------


def shard_of(prompts: list[Prompt], shard: str) -> list[Prompt]:
    """The training prompts of shard `00000-of-00002`: by sample id, every n-th from the i-th on.

    Raises UserError when the name is not a shard's.
    """
    match = re.fullmatch(r"(\d{5})-of-(\d{5})", shard)
    i, n = map(int, match.groups()) if match else (0, 0)
    if i >= n:
        raise UserError(f"--shard: found {shard!r}; expected 00000-of-00002 and the like")
    train = sorted((p for p in prompts if p.split == "train"), key=lambda p: p.sample_id)
    return train[i::n]


def rows_of(prompts: list[Prompt], responses: dict[str, list[int]]) -> Iterator[TokenRow]:
    """The documents, in the order of their sample ids."""
    for p in sorted(prompts, key=lambda p: p.sample_id):
        response = responses[p.sample_id]
        mask = [False] * len(p.prompt_ids) + [True] * len(response)
        yield TokenRow(
            p.sample_id,
            p.source,
            p.kind,
            p.split,
            np.array(p.prompt_ids + response, dtype=np.int32),
            np.array(mask, dtype=np.bool_),
        )


def write_tokens(path: Path, rows: list[TokenRow]) -> None:
    """Write documents as Parquet, whole or not at all; equal documents give equal bytes."""
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    with whole(path) as temporary:
        pq.write_table(pa.table(columns, schema=SCHEMA), temporary, compression="zstd")


def read_tokens(path: str | Path) -> list[TokenRow]:
    """Documents as this stage wrote them. Raises UserError when missing or damaged."""
    table = read_table(path, SCHEMA, "regenerate")
    types = {"input_ids": np.int32, "loss_mask": np.bool_}
    columns = []
    for name in SCHEMA.names:
        values = table[name].to_pylist()
        dtype = types.get(name)
        for i, value in enumerate(values):
            if value is None or (dtype and None in value):
                raise UserError(
                    f"{path}: row {i}: `{name}` has no value (null) where one is expected; {AGAIN}"
                )
        columns.append([np.array(v, dtype=dtype) for v in values] if dtype else values)
    rows = [TokenRow(*values) for values in zip(*columns, strict=True)]
    for i, row in enumerate(rows):
        if len(row.input_ids) != len(row.loss_mask):
            raise UserError(
                f"{path}: row {i}: `loss_mask` has {len(row.loss_mask)} values for {len(row.input_ids)} "
                f"`input_ids`; {AGAIN}"
            )
    return rows


# --- the stage ----------------------------------------------------------------------------------


def statistics(rows: list[TokenRow], ends: list[int]) -> dict[str, Any]:
    """Counts of what was produced; a response of one token can hold no block to learn from."""
    lengths = [int(row.loss_mask.sum()) for row in rows]
    ended = sum(int(row.input_ids[-1]) in ends for row in rows)
    return {
        "documents": len(rows),
        "tokens": sum(len(row.input_ids) for row in rows),
        "response_tokens": sum(lengths),
        "ended_share": ended / len(rows),
        "responses_below_2_tokens": sum(n < 2 for n in lengths),
    }


def _checked_prompts(path: str, shard: str, identity: Identity) -> list[Prompt]:
    prompts = shard_of(read_prompts(path), shard)
    if not prompts:
        raise UserError(
            f"{path}: holds no training prompts for shard {shard}; lower `shards` of this source, "
            "`corpus.heldout_share`, or add prompts"
        )
    for p in prompts:
        if max(p.prompt_ids) >= identity.vocab_size:
            raise UserError(
                f"{path}: prompt {p.id} holds token {max(p.prompt_ids)}, the target has only "
                f"{identity.vocab_size}; its tokenizer belongs to another model: correct its folder"
            )
    return prompts


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.regenerate",
        description="Let the target answer one shard of the training prompts.",
    )
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--machine", default="{}", help="how to run: JSON, or a file")
    parser.add_argument("--identity", required=True, help="identity.json of the target stage")
    parser.add_argument("--prompts", required=True, help="Parquet file of the corpus stage")
    parser.add_argument("--shard", default="00000-of-00001", help="which part, such as %(default)s")
    parser.add_argument("--threads", type=int, help="CPU threads (default: the machine's)")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    parser.add_argument("--stats", required=True, type=Path, help="JSON file of counts to write")
    args = parser.parse_args(argv)
    settings = check(StageSettings, read_settings(args.settings), "--settings")
    machine = check(RegenerateMachine, read_settings(args.machine), "--machine")
    identity = read_identity(args.identity)
    prompts = _checked_prompts(args.prompts, args.shard, identity)
    check_positions(
        identity,
        max(len(p.prompt_ids) for p in prompts) + settings.max_new_tokens,
        f"{args.prompts}: the longest prompt and its answer",
        "lower `corpus.max_prompt_tokens` or `regenerate.max_new_tokens`",
    )

    torch.set_num_threads(args.threads or machine.threads)
    model = load_model(identity, settings.dtype, settings.trust_remote_code)
    started = time.monotonic()
    with progress(
        desc=f"regenerate {settings.source} {args.shard}", total=len(prompts), unit="documents"
    ) as bar:
        responses = answers(model, identity, prompts, settings, machine.batch_size, bar)
    rows = list(rows_of(prompts, responses))
    stats = statistics(rows, identity.eos_token_ids)
    write_tokens(args.out, rows)
    write_json(args.stats, stats)
    print(
        f"regenerate {settings.source} {args.shard}: {stats['documents']} documents, "
        f"{stats['response_tokens']} response tokens, {stats['ended_share']:.0%} ended by an end "
        f"token, {stats['responses_below_2_tokens']} responses below 2 tokens, "
        f"{stats['response_tokens'] / (time.monotonic() - started):.0f} tokens/s on {model.device}"
    )


if __name__ == "__main__":
    from dflash.errors import entrypoint

    entrypoint(main)
