"""Measure a drafter by really decoding with it, and check that the output stays the target's.

    python -m dflash.evaluate --settings S --machine M --identity results/target/identity.json \\
        --drafter results/drafters/demo --task heldout --prompts results/corpus/*.parquet \\
        --out results/evaluate/demo/heldout.json

Three passes over the task's prompts: speculative decoding in batches (acceptance), a forward of the
target over what came out (where greedy, whether that is the target's own output), and a few prompts
of each kind one at a time in the same loop: plain, with the drafter, and with the cheap rival, drafts
looked up in the text so far (speed-up). A job has one temperature and one block size. The drafter's
weights are rounded to bfloat16 first: what is measured is what is exported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from dflash import acceptance, config, target, tasks
from dflash.corpus import Prompt, load_jsonl_prompts, read_prompts, select_per_kind
from dflash.decode import PromptLookup, Response, Sampling, Timing, generate
from dflash.drafter import DTYPES, Drafter, check_fits, load_drafter
from dflash.errors import UserError, entrypoint
from dflash.files import read_json, read_settings, text_sha256, write_json
from dflash.progress import progress
from dflash.taps import head_logits, run_decoder

# In bfloat16, logits of the size that models have (16 to 32) are 1/8 apart. Two tokens at most two
# steps apart may change places by rounding alone.
NEAR_TIE = 0.25
ROWS = ("plain", "drafted", "lookup")  # how a timed prompt is decoded


class PromptSettings(config.Settings):
    """What `corpus` decides of prompts that are read here."""

    max_prompt_tokens: int = Field(config.Corpus().max_prompt_tokens, ge=1)
    enable_thinking: bool = config.Corpus().enable_thinking


class DecodingSettings(config.Settings):
    """The prompts of a task and how they are decoded: what `evaluate` and `served` share."""

    version: int = 1
    task: config.Task = config.Task()
    corpus: PromptSettings = PromptSettings()
    trust_remote_code: bool = False
    max_new_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    top_k: int | None = None
    top_p: float | None = None
    rule: Literal["rejection", "sample_match"] = "rejection"
    seed: int = 0


class StageSettings(DecodingSettings):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["evaluate"] = "evaluate"
    dtype: config.DType = "float32"
    timed_prompts_per_kind: int = Field(2, ge=1)
    block_size: int | None = Field(None, ge=2)


@dataclass(frozen=True)
class Decoder:
    """The target and how it decodes: all that `generate` needs but prompts and drafts."""

    model: torch.nn.Module
    settings: StageSettings
    eos: list[int]

    def __call__(
        self,
        prompts: list[Prompt],
        limit: int | None = None,
        drafter: Drafter | None = None,
        propose: PromptLookup | None = None,
        block_size: int | None = None,
        on_cycle: Callable[[list[Response]], None] | None = None,
    ) -> tuple[list[Response], Timing]:
        s = self.settings
        return generate(
            self.model,
            [p.prompt_ids for p in prompts],
            limit or s.max_new_tokens,
            self.eos,
            sampling=Sampling(s.temperature, s.top_k, s.top_p, s.rule),
            seed=s.seed,
            streams=[_stream(p) for p in prompts],
            drafter=drafter,
            propose=propose,
            block_size=block_size,
            on_cycle=on_cycle,
        )


def _stream(prompt: Prompt) -> int:
    """The number of a prompt's own random stream, which no other prompt decides."""
    return int(text_sha256(f"stream/{prompt.sample_id}/{prompt.turn}")[:8], 16)


# --- acceptance ---------------------------------------------------------------------------------


def decode_all(
    decode: Decoder, drafter: Drafter, prompts: list[Prompt], batch_size: int
) -> list[Response]:
    """Speculative responses to all prompts, in batches of similar length, in the prompts' order."""
    limit = decode.settings.max_new_tokens
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].prompt_ids))
    found: dict[int, Response] = {}
    with progress(desc="decode", total=len(prompts), unit="prompts") as bar:

        def show(current: list[Response]) -> None:
            ended = [len(r.tokens) == limit or r.tokens[-1] in decode.eos for r in current]
            cycles = [c for r in [*found.values(), *current] for c in r.cycles]
            longest = max(len(r.tokens) for r in current)
            tau = sum(cycles) / max(1, len(cycles))
            bar.set_postfix_str(f"tau {tau:.2f} pooled, token {longest}", refresh=False)
            bar.update(len(found) + sum(ended) - bar.n)

        while order:
            batch = order[:batch_size]
            try:
                responses, _ = decode(
                    [prompts[j] for j in batch],
                    drafter=drafter,
                    block_size=decode.settings.block_size,
                    on_cycle=show,
                )
            except RuntimeError as e:
                if not target.is_out_of_memory(e) or len(batch) == 1:
                    raise
                batch_size = len(batch) // 2
                print(
                    f"evaluate: out of memory with {len(batch)} prompts, going on with {batch_size}"
                )
                continue
            found.update(zip(batch, responses, strict=True))
            del order[: len(batch)]
    return [found[i] for i in range(len(prompts))]


# --- losslessness -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """How a response compares with the target's own greedy choices."""

    stopped: bool  # at its first end token or at the limit, and not elsewhere
    # Where a token is not the target's choice: its number in the response, and how far the two best
    # logits are apart there.
    divergences: list[tuple[int, float]]

    @property
    def identical(self) -> bool:
        return self.stopped and not self.divergences


@torch.inference_mode()
def check_greedy(
    model: torch.nn.Module,
    prompts: list[Prompt],
    responses: list[Response],
    limit: int,
    eos: list[int],
    batch_tokens: int = 4096,
) -> list[Check]:
    """Compare each response with the target's own greedy output.

    By induction: it is that, if each of its tokens is the argmax of the target's logits after the
    tokens before it, and it stops at its first end token or at the limit and not elsewhere. One
    forward of the Hugging Face model, without any cache and none of our decoding loop, tells all of
    that. In bfloat16 this forward rounds otherwise than decoding did; the margins say whether that
    explains a divergence.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].prompt_ids))
    checks: dict[int, Check] = {}
    with progress(desc="check", total=len(prompts), unit="prompts") as bar:
        while order:
            width = max(len(prompts[i].prompt_ids) + len(responses[i].tokens) for i in order)
            batch = order[: max(1, batch_tokens // width)]
            del order[: len(batch)]
            rows = [prompts[i].prompt_ids + responses[i].tokens for i in batch]
            # padding on the right, where the causal mask hides it from every real token
            ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
            hidden = run_decoder(model, input_ids=ids.to(model.device), use_cache=False)
            for i, row, states in zip(batch, rows, hidden.last_hidden_state, strict=True):
                tokens, first = responses[i].tokens, len(prompts[i].prompt_ids) - 1
                logits = head_logits(model, states[first : len(row) - 1])
                own = logits.argmax(-1).tolist()
                stops = [t in eos for t in tokens]
                checks[i] = Check(
                    stopped=not any(stops[:-1]) and (stops[-1] or len(tokens) == limit),
                    divergences=[
                        (place, _margin(logits[place]))
                        for place, (token, choice) in enumerate(zip(tokens, own, strict=True))
                        if token != choice
                    ],
                )
            bar.update(len(batch))
    return [checks[i] for i in range(len(prompts))]


def _margin(logits_V: torch.Tensor) -> float:
    """How far the two best logits are apart."""
    best, second = logits_V.float().topk(2).values.tolist()
    return best - second


def lossless(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the check found over some responses."""
    margins = [margin for r in rows for _, margin in r["divergences"]]
    return {
        "checked": sum(r["identical"] is not None for r in rows),
        "identical": sum(r["identical"] is True for r in rows),
        "divergences": len(margins),
        "near_ties": sum(margin <= NEAR_TIE for margin in margins),
        "near_tie_margin": NEAR_TIE,
        "largest_margin": max(margins, default=None),
    }


# --- speed --------------------------------------------------------------------------------------


def time_some(decode: Decoder, drafter: Drafter, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Decode prompts one at a time: plain, with the drafter, with drafts looked up; seconds of each.

    Seconds are without the prefill, which is the same for all and stands apart.
    """
    drafts: dict[str, dict[str, Any]] = {
        "plain": {},
        "drafted": {"drafter": drafter, "block_size": decode.settings.block_size},
        "lookup": {
            "propose": PromptLookup(max_ngram=3),
            "block_size": decode.settings.block_size or drafter.config.block_size,
        },
    }
    for kind in ROWS:  # warm up: lazily loaded kernels, allocator
        decode(prompts[:1], limit=16, **drafts[kind])
    rows = []
    for turn, prompt in enumerate(progress(prompts, desc="time", unit="prompts")):
        row: dict[str, Any] = {
            "sample_id": prompt.sample_id,
            "kind": prompt.kind,
            "language": tasks.language_of(prompt),
        }
        for kind in ROWS if turn % 2 == 0 else ROWS[::-1]:
            begun = time.perf_counter()
            (response,), timing = decode([prompt], **drafts[kind])
            row[f"{kind}_seconds"] = time.perf_counter() - begun - timing.prefill
            row[f"{kind}_tokens"] = len(response.tokens)
            row[f"{kind}_cycles"] = len(response.cycles)
            if kind == "drafted":
                row["prefill_seconds"] = timing.prefill
                row |= {"draft_seconds": timing.draft, "verify_seconds": timing.verify}
        rows.append(row)
    return rows


def speed(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Seconds per token (prefill left out) of each way to decode, and how they compare.

    `tau_lookup` is pooled over these prompts, as `tau_timed` is for the drafter.
    """

    def ratio(above: str, below: str, minus: int = 0) -> float | None:
        count = sum(r[below] - minus for r in rows)
        return sum(r[above] for r in rows) / count if count > 0 else None

    plain, drafted, lookup = (ratio(f"{k}_seconds", f"{k}_tokens", minus=1) for k in ROWS)

    def tau(kind: str) -> float | None:
        cycles = sum(r[f"{kind}_cycles"] for r in rows)
        return sum(r[f"{kind}_tokens"] - 1 for r in rows) / cycles if cycles else None

    return {
        "prompts": len(rows),
        "seconds_per_token_plain": plain,
        "seconds_per_token_drafted": drafted,
        "seconds_per_token_lookup": lookup,
        "speed_up": plain / drafted if plain and drafted else None,
        "speed_up_lookup": plain / lookup if plain and lookup else None,
        "tau_timed": tau("drafted"),
        "tau_lookup": tau("lookup"),
        "draft_share": ratio("draft_seconds", "drafted_seconds") if drafted else None,
    }


# --- all of it ----------------------------------------------------------------------------------


def measure(
    decode: Decoder,
    drafter: Drafter,
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase | None,
    batch_size: int,
) -> dict[str, Any]:
    """Everything the evaluation of one drafter on one task reports.

    `tokenizer` is needed where prompts have later turns (`later_tokenizer`).
    """
    s = decode.settings
    block = s.block_size or drafter.config.block_size
    timed = select_per_kind(prompts, s.timed_prompts_per_kind)  # first turns
    prompts, responses = tasks.converse(
        prompts,
        lambda asked: decode_all(decode, drafter, asked, batch_size),
        tokenizer,
        s.corpus.enable_thinking,
    )
    greedy, exact = s.temperature == 0, s.dtype == "float32"
    checks: list[Check | None] = [None] * len(prompts)
    if greedy:
        checks = list(check_greedy(decode.model, prompts, responses, s.max_new_tokens, decode.eos))
    rows = [
        {
            "sample_id": prompt.sample_id,
            "turn": prompt.turn,
            "id": prompt.id,
            "kind": prompt.kind,
            "language": tasks.language_of(prompt),
            "prompt_tokens": len(prompt.prompt_ids),
            "tokens": len(response.tokens),
            "tokens_sha256": text_sha256(config.canonical(response.tokens)),
            "cycles": response.cycles,
            "accepted_per_slot": [sum(c > k for c in response.cycles) for k in range(1, block)],
            # in bfloat16 near-ties differ, so identity says nothing
            "identical": check.identical if check and exact else None,
            "divergences": check.divergences if check else [],
        }
        for prompt, response, check in zip(prompts, responses, checks, strict=True)
    ]
    times = time_some(decode, drafter, timed)

    def summary(field: str = "", value: str = "") -> dict[str, Any]:
        own = [r for r in rows if not field or r[field] == value]
        return {
            **acceptance.figures([r["cycles"] for r in own], block),
            **speed([r for r in times if not field or r[field] == value]),
            "lossless": lossless(own),
        }

    return {
        "block_size": block,
        "temperature": s.temperature,
        "rule": s.rule if s.temperature else None,
        "dtype": s.dtype,
        "max_new_tokens": s.max_new_tokens,
        "measured_on": measured_on(next(decode.model.parameters()).device),
        "overall": summary(),
        "per_kind": {k: summary("kind", k) for k in sorted({p.kind for p in prompts})},
        "per_language": {k: summary("language", k) for k in sorted({r["language"] for r in rows})},
        "timed": times,
        "responses": rows,
    }


def measured_on(device: torch.device) -> str:
    """What the speed was measured on. It belongs to this, and nothing reruns when it changes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return (
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}"
    )


def task_prompts(
    name: str,
    settings: DecodingSettings,
    parquets: list[str],
    identity: target.Identity,
) -> list[Prompt]:
    """The prompts of a task: a published one's, a file of its own, or the held-out ones of all
    sources. Raises UserError when there are none."""
    task = settings.task
    if task.dataset is not None:
        prompts = [p for path in parquets for p in tasks.read_prompts(path)]
        if not prompts:
            raise UserError(f"task {name}: --prompts names no prompts; run the task stage for it")
        return prompts
    if task.path is not None:
        tokenizer = target.load_tokenizer(identity, settings.trust_remote_code)
        prompts, counts = load_jsonl_prompts(
            task.path, tokenizer, source=name, **settings.corpus.model_dump()
        )
        print(
            f"task {name}: {counts.kept} prompts of {task.path}; {counts.too_long} too long and "
            f"{counts.duplicates} repeated ones left out"
        )
    else:
        every = [p for path in sorted(parquets) for p in read_prompts(path)]
        prompts = list({p.sample_id: p for p in every if p.split == "heldout"}.values())
        if not prompts:
            raise UserError(
                "the corpus has no held-out prompts to evaluate on; raise corpus.heldout_share, add "
                "prompts, or give the task a file of its own (evaluate.tasks.NAME.path)"
            )
    return select_per_kind(prompts, task.prompts_per_kind)


def later_tokenizer(
    settings: DecodingSettings, prompts: list[Prompt], identity: target.Identity
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that later turns need, if there are any."""
    if not any(p.later for p in prompts):
        return None
    return target.load_tokenizer(identity, settings.trust_remote_code)


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash.evaluate", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--machine", default="{}", help="JSON, or a file: how to run, not what")
    parser.add_argument("--identity", required=True, help="the target's identity.json")
    parser.add_argument("--drafter", required=True, type=Path, help="folder of the drafter")
    parser.add_argument("--task", required=True, help="the task's name")
    parser.add_argument("--prompts", nargs="*", default=[], help="corpus or task Parquet files")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = config.check(StageSettings, read_settings(args.settings), "evaluate")
    machine = config.check(config.EvaluateMachine, read_settings(args.machine), "machine.evaluate")
    identity = target.read_identity(args.identity)
    prompts = task_prompts(args.task, settings, args.prompts, identity)
    target.check_positions(
        identity,
        max(len(p.prompt_ids) for p in prompts) + settings.max_new_tokens,
        f"task {args.task}: the longest prompt and its answer",
        "lower `corpus.max_prompt_tokens` or `evaluate.max_new_tokens`",
    )

    device, dtype = target.default_device(), DTYPES[settings.dtype]
    drafter = load_drafter(args.drafter, device)
    check_fits(drafter, identity, args.drafter)
    drafter = drafter.to(torch.bfloat16).to(dtype)
    model = target.load_model(identity, settings.dtype, settings.trust_remote_code, device)
    result = measure(
        Decoder(model, settings, identity.eos_token_ids),
        drafter,
        prompts,
        later_tokenizer(settings, prompts, identity),
        machine.batch_size,
    )
    training = args.drafter / "training.json"
    name = read_json(training)["name"] if training.exists() else args.drafter.name
    write_json(args.out, {"drafter": name, "task": args.task, **result})
    o = result["overall"]
    if o["tau_mean"] is None:
        print(f"{name} on {args.task}: every response ended with its first token")
        return
    speed_up = f"speed-up {o['speed_up']:.2f}" if o["speed_up"] else "speed-up not measurable"
    print(
        f"{name} on {args.task} at temperature {settings.temperature:g}: tau {o['tau_mean']:.3f} mean "
        f"over {o['responses']} responses, {o['tau_pooled']:.3f} pooled; {speed_up}; "
        f"{_lossless_words(settings, o['lossless'])}"
    )


def _lossless_words(settings: StageSettings, found: dict[str, Any]) -> str:
    if settings.temperature:
        return "sampled, so that no output can be compared"
    if settings.dtype == "float32":
        return f"{found['identical']} of {found['checked']} outputs identical to the target's own"
    return (
        f"{found['divergences']} tokens not the target's choice, {found['near_ties']} of them with "
        f"its two best logits at most {NEAR_TIE} apart"
    )


if __name__ == "__main__":
    entrypoint(main)
