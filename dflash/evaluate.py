"""Measure a drafter by really decoding with it, and check that the output stays the target's.

    python -m dflash.evaluate --settings S --machine M --identity results/target/identity.json \\
        --drafter results/drafters/demo --task heldout --prompts results/corpus/*.parquet \\
        --out results/evaluate/demo/heldout.json

Three passes over the task's prompts: speculative decoding in batches (acceptance), a forward of the
target over what came out (the check that it is the target's own greedy output, in float32), and a
few prompts of each kind one at a time with and without the drafter in the same loop (speed-up).
The drafter's weights are rounded to bfloat16 first: what is measured is what is exported.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash import config, target
from dflash.corpus import Prompt, load_jsonl_prompts, read_prompts, select_per_kind
from dflash.decode import Response, generate
from dflash.drafter import DTYPES, Drafter, check_fits, load_drafter
from dflash.errors import UserError, entrypoint
from dflash.files import read_json, read_settings, text_sha256, write_json
from dflash.progress import progress
from dflash.taps import run_decoder


def acceptance(cycles_of: Iterable[list[int]], block_size: int) -> dict[str, Any]:
    """Acceptance figures of some responses, each given by the tokens gained in its cycles.

    `tau_mean` is the mean over responses of each response's mean (the published figure),
    `tau_pooled` the tokens of all cycles over their number; both count the bonus token, not the
    prefill's. `per_slot[k-1]` is the share of cycles in which slot k was accepted. Responses that
    ended with the prefill's token have no cycle and are left out of both.
    """
    lists = [c for c in cycles_of if c]
    cycles = [x for c in lists for x in c]
    if not cycles:
        return {"responses": 0, "cycles": 0, "tau_mean": None, "tau_pooled": None, "per_slot": []}
    return {
        "responses": len(lists),
        "cycles": len(cycles),
        "tau_mean": sum(sum(c) / len(c) for c in lists) / len(lists),
        "tau_pooled": sum(cycles) / len(cycles),
        "per_slot": [sum(x > k for x in cycles) / len(cycles) for k in range(1, block_size)],
    }


def bootstrap_interval(
    cycles_of: list[list[int]], draws: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """95 % interval of `tau_mean`, responses drawn with replacement."""
    means = [sum(c) / len(c) for c in cycles_of if c]
    if not means:
        return None
    rng = random.Random(seed)
    taus = sorted(sum(rng.choices(means, k=len(means))) / len(means) for _ in range(draws))
    return taus[int(0.025 * draws)], taus[int(0.975 * draws) - 1]


def speed(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Seconds per token (prefill left out) with and without the drafter, and their ratio."""

    def per_token(kind: str) -> float | None:
        tokens = sum(r[f"{kind}_tokens"] - 1 for r in rows)
        return sum(r[f"{kind}_seconds"] for r in rows) / tokens if tokens > 0 else None

    plain, drafted = per_token("plain"), per_token("drafted")
    draft = sum(r["draft_seconds"] for r in rows)
    total = sum(r["drafted_seconds"] for r in rows)
    return {
        "prompts": len(rows),
        "seconds_per_token_plain": plain,
        "seconds_per_token_drafted": drafted,
        "speed_up": plain / drafted if plain and drafted else None,
        "draft_share": draft / total if total else None,
    }


def decode_all(
    model: torch.nn.Module,
    drafter: Drafter,
    prompts: list[Prompt],
    settings: config.Evaluate,
    eos: list[int],
    batch_size: int,
) -> list[Response]:
    """Speculative responses to all prompts, in batches of similar length, in the prompts' order."""
    limit = settings.max_new_tokens
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].prompt_ids))
    found: dict[int, Response] = {}
    with progress(desc="decode", total=len(prompts), unit="prompts") as bar:

        def show(current: list[Response]) -> None:
            ended = [len(r.tokens) == limit or r.tokens[-1] in eos for r in current]
            cycles = [r.cycles for r in [*found.values(), *current]]
            tau = acceptance(cycles, 2)["tau_pooled"]
            longest = max(len(r.tokens) for r in current)
            bar.set_postfix_str(f"tau {tau:.2f} pooled, token {longest}", refresh=False)
            bar.update(len(found) + sum(ended) - bar.n)

        while order:
            batch = order[:batch_size]
            ids = [prompts[j].prompt_ids for j in batch]
            try:
                responses, _ = generate(model, ids, limit, eos, drafter, on_cycle=show)
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


@torch.inference_mode()
def own_greedy_outputs(
    model: torch.nn.Module,
    prompts: list[Prompt],
    responses: list[Response],
    limit: int,
    eos: list[int],
    batch_tokens: int = 4096,
) -> list[bool]:
    """Whether each response is the target's own greedy output.

    By induction: it is, if each of its tokens is the argmax of the target's logits after the tokens
    before it, and it stops at its first end token or at the limit and not elsewhere. One forward of
    the Hugging Face model, without any cache and none of our decoding loop, tells all of that.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].prompt_ids))
    same = [False] * len(prompts)
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
                logits = model.get_output_embeddings()(states[first : len(row) - 1])
                stops = [t in eos for t in tokens]
                ended = stops[-1] or len(tokens) == limit
                own = logits.argmax(-1).tolist() == tokens
                same[i] = own and ended and not any(stops[:-1])
            bar.update(len(batch))
    return same


def time_some(
    model: torch.nn.Module,
    drafter: Drafter,
    prompts: list[Prompt],
    settings: config.Evaluate,
    eos: list[int],
) -> list[dict[str, Any]]:
    """Decode prompts one at a time, with and without the drafter in turn; seconds of each."""
    rows = []
    kinds = [("plain", None), ("drafted", drafter)]
    for _, with_drafter in kinds:  # warm up: lazily loaded kernels, allocator
        generate(model, [prompts[0].prompt_ids], 16, eos, with_drafter)
    for turn, prompt in enumerate(progress(prompts, desc="time", unit="prompts")):
        row: dict[str, Any] = {"sample_id": prompt.sample_id, "kind": prompt.kind}
        for kind, with_drafter in kinds if turn % 2 == 0 else kinds[::-1]:
            begun = time.perf_counter()
            responses, timing = generate(
                model, [prompt.prompt_ids], settings.max_new_tokens, eos, with_drafter
            )
            row[f"{kind}_seconds"] = time.perf_counter() - begun - timing.prefill
            row[f"{kind}_tokens"] = len(responses[0].tokens)
            if with_drafter:
                row["drafted_cycles"] = len(responses[0].cycles)
                row |= {"draft_seconds": timing.draft, "verify_seconds": timing.verify}
        rows.append(row)
    return rows


def measure(
    model: torch.nn.Module,
    drafter: Drafter,
    prompts: list[Prompt],
    settings: config.Evaluate,
    machine: config.EvaluateMachine,
    identity: target.Identity,
) -> dict[str, Any]:
    """Everything the evaluation of one drafter on one task reports."""
    eos, block = identity.eos_token_ids, drafter.config.block_size
    responses = decode_all(model, drafter, prompts, settings, eos, machine.batch_size)
    checked = settings.dtype == "float32"  # in bf16 near-ties differ, so identity says nothing
    if checked:
        same = own_greedy_outputs(model, prompts, responses, settings.max_new_tokens, eos)
    rows = [
        {
            "sample_id": prompt.sample_id,
            "id": prompt.id,
            "kind": prompt.kind,
            "prompt_tokens": len(prompt.prompt_ids),
            "tokens": len(response.tokens),
            "tokens_sha256": text_sha256(config.canonical(response.tokens)),
            "cycles": response.cycles,
            "identical": same[i] if checked else None,
        }
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    timed = time_some(
        model, drafter, select_per_kind(prompts, settings.timed_prompts_per_kind), settings, eos
    )

    def summary(kind: str | None) -> dict[str, Any]:
        own_rows = [r for r in rows if kind in (None, r["kind"])]
        return {
            **acceptance([r["cycles"] for r in own_rows], block),
            "tau_mean_interval": bootstrap_interval([r["cycles"] for r in own_rows]),
            **speed([r for r in timed if kind in (None, r["kind"])]),
            "lossless": {
                "checked": sum(r["identical"] is not None for r in own_rows),
                "identical": sum(r["identical"] is True for r in own_rows),
            },
        }

    kinds = sorted({p.kind for p in prompts})
    return {
        "block_size": block,
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "measured_on": measured_on(next(model.parameters()).device),
        "overall": summary(None),
        "per_kind": {kind: summary(kind) for kind in kinds},
        "timed": timed,
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
    task: config.Task,
    parquets: list[str],
    corpus: dict[str, Any],
    identity: target.Identity,
    trust_remote_code: bool,
) -> list[Prompt]:
    """The prompts of a task: a file of its own, or the held-out prompts of all sources."""
    if task.path is not None:
        tokenizer = target.load_tokenizer(identity, trust_remote_code)
        prompts, counts = load_jsonl_prompts(task.path, tokenizer, source=name, **corpus)
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


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash.evaluate", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--machine", default="{}", help="JSON, or a file: how to run, not what")
    parser.add_argument("--identity", required=True, help="the target's identity.json")
    parser.add_argument("--drafter", required=True, type=Path, help="folder of the drafter")
    parser.add_argument("--task", required=True, help="the task's name")
    parser.add_argument("--prompts", nargs="*", default=[], help="corpus Parquet files")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    raw = read_settings(args.settings)
    task = config.check(config.Task, raw.get("task", {}), f"evaluate.tasks.{args.task}")
    own = {k: v for k, v in raw.items() if k in config.Evaluate.model_fields and k != "tasks"}
    settings = config.check(config.Evaluate, own, "evaluate")
    machine = config.check(config.EvaluateMachine, read_settings(args.machine), "machine.evaluate")
    identity = target.read_identity(args.identity)
    trust = raw.get("trust_remote_code", False)
    corpus = config.Corpus().model_dump(include={"max_prompt_tokens", "enable_thinking"})
    prompts = task_prompts(
        args.task, task, args.prompts, corpus | raw.get("corpus", {}), identity, trust
    )

    device, dtype = target.default_device(), DTYPES[settings.dtype]
    drafter = load_drafter(args.drafter, device)
    check_fits(drafter, identity, args.drafter)
    drafter = drafter.to(torch.bfloat16).to(dtype)
    model = target.load_model(identity, settings.dtype, trust, device)
    result = measure(model, drafter, prompts, settings, machine, identity)
    training = args.drafter / "training.json"
    name = read_json(training)["name"] if training.exists() else args.drafter.name
    write_json(args.out, {"drafter": name, "task": args.task, **result})
    o = result["overall"]
    lossless = o["lossless"]
    if o["tau_mean"] is None:
        print(f"{name} on {args.task}: every response ended with its first token")
        return
    speed_up = f"speed-up {o['speed_up']:.2f}" if o["speed_up"] else "speed-up not measurable"
    print(
        f"{name} on {args.task}: tau {o['tau_mean']:.3f} mean over {o['responses']} responses, "
        f"{o['tau_pooled']:.3f} pooled; {speed_up}; {lossless['identical']} of "
        f"{lossless['checked']} outputs identical to the target's own"
    )


if __name__ == "__main__":
    entrypoint(main)
