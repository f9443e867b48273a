"""Measure a drafter where it serves: acceptance and speed of a running vLLM, SGLang or llama.cpp.

    python -m dflash.served --settings '{"server": {"url": "http://127.0.0.1:8000"}}' \\
        --identity results/target/identity.json --drafter demo --task heldout \\
        --prompts results/corpus/*.parquet --out results/served/demo/heldout.json

The prompts' token ids are sent one at a time, as offline decoding times them, and what a server says
of its own drafting is taken down after each answer. The engines count alike but for the end of an
answer: they count drafts beyond its limit or end token, which our own figures leave out.

    engine      asked at          acceptance from                            per slot
    vLLM        /v1/completions   Prometheus counters, before and after      yes
    SGLang      /generate         meta_info of the answer                    from its histogram
    llama.cpp   /completion       timings of the answer                      no
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash import acceptance, config, target, tasks
from dflash.corpus import Prompt
from dflash.errors import UserError, entrypoint
from dflash.evaluate import DecodingSettings, later_tokenizer, task_prompts
from dflash.files import read_settings, text_sha256, write_json
from dflash.progress import progress

WAIT_SECONDS = 600.0  # for one answer
COUNTERS_SECONDS = 10.0  # until the counters hold an answer that was already given


class StageSettings(DecodingSettings):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["served"] = "served"
    server: config.Server


@dataclass
class Answer:
    """What a server said to one prompt, and what it says of its drafting."""

    tokens: list[int]  # the end token included
    seconds: float  # of decoding; with reading the prompt where the engine does not tell them apart
    cycles: int | None = None  # drafts verified; None if the server does not draft
    accepted: int = 0  # drafted tokens accepted in them
    per_slot: list[int] | None = None  # accepted in slot 1, 2, ...; None if not told


# --- HTTP ---------------------------------------------------------------------------------------


def request(url: str, body: dict[str, Any] | None = None, seconds: float = WAIT_SECONDS) -> str:
    """The answer to a GET, or to a POST of JSON. Raises UserError when there is none."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=seconds) as answer:
            return answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        said = " ".join(e.read().decode("utf-8", "replace").split())[:200]
        raise UserError(f"{url}: the server refused ({e.code}): {said or e.reason}") from None
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", e)
        raise UserError(
            f"{url}: no server answers ({reason}); start it as the report says, or correct "
            "evaluate.server.url"
        ) from None


def request_json(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """As `request`, for an answer that is a JSON object."""
    text = request(url, body)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"{url}: expected a JSON object, the server sent {text[:60]!r}; is it what "
            "evaluate.server says?"
        )
    return found


# --- the three engines --------------------------------------------------------------------------


@dataclass
class Asking:
    """How all prompts are asked."""

    url: str
    model: str
    eos: list[int]
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


COUNTER = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Vllm:
    """vLLM counts for all requests together, so each answer is the difference of two readings."""

    name = "vLLM"

    def __init__(self, asking: Asking):
        self.asking = asking
        self.before = self.counters()
        if "vllm:spec_decode_num_drafts_total" not in self.before:
            raise UserError(
                f"{asking.url}: this vLLM counts no speculative decoding; start it with "
                "--speculative-config and without --disable-log-stats"
            )

    def counters(self) -> dict[str, float]:
        """All counters of the model, summed over engines; slots' by name and position."""
        sums: dict[str, float] = {}
        for name, labels, value in COUNTER.findall(request(f"{self.asking.url}/metrics")):
            tags = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
            if tags.get("model_name", self.asking.model) == self.asking.model:
                key = f"{name}/{tags['position']}" if "position" in tags else name
                sums[key] = sums.get(key, 0.0) + float(value)
        return sums

    def answer(self, prompt: Prompt, limit: int) -> Answer:
        a = self.asking
        body = {
            "model": a.model,
            "prompt": prompt.prompt_ids,
            "max_tokens": limit,
            "temperature": a.temperature,
            "top_k": a.top_k or 0,
            "top_p": a.top_p or 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": a.seed,
            "stop_token_ids": a.eos,
            "return_token_ids": True,
        }
        found = request_json(f"{a.url}/v1/completions", body)
        tokens = found["choices"][0]["token_ids"]
        gained = self.counted(len(tokens))
        slots = sorted(
            (int(key.split("/")[1]), count)
            for key, count in gained.items()
            if key.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total/")
        )
        return Answer(
            tokens,
            gained.get("vllm:request_decode_time_seconds_sum", 0.0),
            int(gained["vllm:spec_decode_num_drafts_total"]),
            int(gained["vllm:spec_decode_num_accepted_tokens_total"]),
            [int(count) for _, count in slots],
        )

    def counted(self, tokens: int) -> dict[str, float]:
        """What the counters gained by an answer of so many tokens, which they hold a moment after
        it was given. Raises UserError when they gained more: someone else was served too."""
        until = time.monotonic() + COUNTERS_SECONDS
        while True:
            now = self.counters()
            gained = {key: value - self.before.get(key, 0.0) for key, value in now.items()}
            generated = gained.get("vllm:generation_tokens_total", 0)
            ended = gained.get("vllm:request_decode_time_seconds_count", 1)
            if generated > tokens or ended > 1:
                raise UserError(
                    f"{self.asking.url}: the server answered others meanwhile ({generated:.0f} tokens "
                    f"counted, {tokens} received); measure while nobody else uses it"
                )
            if (generated == tokens and ended == 1) or time.monotonic() > until:
                self.before = now
                return gained
            time.sleep(0.005)


class Sglang:
    """SGLang tells with each answer what its drafting gave."""

    name = "SGLang"
    ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")

    def __init__(self, asking: Asking):
        self.asking = asking

    def answer(self, prompt: Prompt, limit: int) -> Answer:
        a = self.asking
        sampling = {
            "max_new_tokens": limit,
            "temperature": a.temperature,
            "top_k": a.top_k or -1,
            "top_p": a.top_p or 1.0,
            "min_p": 0.0,
            "stop_token_ids": a.eos,
        }
        body = {"input_ids": prompt.prompt_ids, "sampling_params": sampling}
        found = request_json(f"{a.url}/generate", body)
        meta = found["meta_info"]
        answer = Answer(list(found["output_ids"]), float(meta["e2e_latency"]))
        end = (meta.get("finish_reason") or {}).get("matched")
        if isinstance(end, int) and answer.tokens[-1:] != [end]:
            answer.tokens.append(end)  # some versions leave it out
        if meta.get("spec_verify_ct") is None:
            return answer
        answer.cycles = int(meta["spec_verify_ct"])
        told = next((meta[key] for key in self.ACCEPTED if meta.get(key) is not None), None)
        if told is None:  # an older version: only the mean, bonus token included
            told = round((float(meta.get("spec_accept_length") or 1.0) - 1.0) * answer.cycles)
        answer.accepted = int(told)
        runs = next((meta[key] for key in self.HISTOGRAM if meta.get(key)), None)
        # index: how many drafted tokens a cycle accepted; older versions count otherwise
        if runs and sum(n * count for n, count in enumerate(runs)) == answer.accepted:
            answer.per_slot = [sum(runs[k:]) for k in range(1, len(runs))]
        return answer


class LlamaCpp:
    """llama.cpp tells how many tokens it drafted and accepted; a cycle gives one token more than it
    accepts, and the first token comes from the prompt."""

    name = "llama.cpp"

    def __init__(self, asking: Asking):
        self.asking = asking

    def answer(self, prompt: Prompt, limit: int) -> Answer:
        a = self.asking
        body = {
            "prompt": prompt.prompt_ids,
            "n_predict": limit,
            "temperature": a.temperature,
            "top_k": a.top_k or (0 if a.temperature else 1),
            "top_p": a.top_p or 1.0,
            "min_p": 0.0,
            "seed": a.seed,
            "return_tokens": True,
            "cache_prompt": False,
        }
        found = request_json(f"{a.url}/completion", body)
        times = found["timings"]
        answer = Answer(list(found["tokens"]), float(times["predicted_ms"]) / 1000)
        if found.get("stop_type") == "eos" and answer.tokens[-1:] != a.eos[-1:] and len(a.eos) == 1:
            answer.tokens += a.eos  # it stops at the end token without returning it
        if "draft_n" in times:
            answer.accepted = int(times["draft_n_accepted"])
            answer.cycles = int(times["predicted_n"]) - 1 - answer.accepted
        return answer


ENGINES = {"vllm": Vllm, "sglang": Sglang, "llama.cpp": LlamaCpp}
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}  # as /v1/models names them


def connect(server: config.Server, asking: Asking) -> Vllm | Sglang | LlamaCpp:
    """The engine behind a URL, asked what it is and which model it serves.

    Raises UserError when it serves no such model, or does not say what it is.
    """
    listed = request_json(f"{server.url.rstrip('/')}/v1/models").get("data") or []
    models = [str(m.get("id")) for m in listed]
    if server.model is not None and server.model not in models:
        raise UserError(
            f"{server.url}: serves {', '.join(models) or 'no model'}; expected {server.model}; correct "
            "evaluate.server.model, or serve that one"
        )
    if server.model is None and len(models) != 1:
        raise UserError(
            f"{server.url}: serves {', '.join(models) or 'no model'}; name the target among them in "
            "evaluate.server.model"
        )
    asking.model = server.model or models[0]
    kind = server.kind
    if kind == "auto":
        owner = str(listed[models.index(asking.model)].get("owned_by"))
        if owner not in OWNERS:
            raise UserError(
                f"{server.url}: calls itself {owner!r}; set evaluate.server.kind to one of "
                f"{', '.join(ENGINES)}"
            )
        kind = OWNERS[owner]
    return ENGINES[kind](asking)


# --- figures ------------------------------------------------------------------------------------


def figures(answers: list[Answer]) -> dict[str, Any]:
    """Acceptance and speed of some answers, named as the offline figures are.

    `tokens_per_second` leaves each answer's first token out, as the offline speed does.
    """
    drafted = [a for a in answers if a.cycles]
    found = acceptance.averages([(a.cycles + a.accepted, a.cycles) for a in drafted])
    told = [a.per_slot for a in drafted if a.per_slot is not None]
    slots = max(map(len, told)) if told and len(told) == len(drafted) else 0
    accepted = [sum(p[k] for p in told if k < len(p)) for k in range(slots)]
    seconds = sum(a.seconds for a in answers)
    return {
        **found,
        "per_slot": [count / found["cycles"] for count in accepted],
        "tokens": sum(len(a.tokens) for a in answers),
        "seconds": seconds,
        "tokens_per_second": sum(len(a.tokens) - 1 for a in answers) / seconds if seconds else None,
    }


def measure(
    settings: StageSettings,
    prompts: list[Prompt],
    identity: target.Identity,
) -> dict[str, Any]:
    """Everything that a server says of its drafting on a task."""
    s = settings
    url = s.server.url.rstrip("/")
    asking = Asking(url, "", identity.eos_token_ids, s.temperature, s.top_k, s.top_p, s.seed)
    engine = connect(s.server, asking)
    engine.answer(prompts[0], 2)  # what the first request loads is not timed

    def answer_all(asked: list[Prompt]) -> list[Answer]:
        answers: list[Answer] = []
        with progress(desc=f"ask {engine.name}", total=len(asked), unit="prompts") as bar:
            for prompt in asked:
                answers.append(engine.answer(prompt, s.max_new_tokens))
                if answers[-1].cycles is None and len(answers[-1].tokens) > 2:
                    raise UserError(
                        f"{s.server.url}: {engine.name} tells nothing of drafting; start it with the "
                        "drafter, as the report says"
                    )
                cycles = sum(a.cycles or 0 for a in answers)
                tau = 1 + sum(a.accepted for a in answers) / cycles if cycles else 0.0
                bar.set_postfix_str(f"tau {tau:.2f} pooled", refresh=False)
                bar.update(1)
        return answers

    tokenizer = later_tokenizer(s, prompts, identity)
    asked, answers = tasks.converse(prompts, answer_all, tokenizer, s.corpus.enable_thinking)
    kinds = sorted({p.kind for p in asked})
    pairs = list(zip(asked, answers, strict=True))
    return {
        "engine": engine.name,
        "model": asking.model,
        "temperature": s.temperature,
        "max_new_tokens": s.max_new_tokens,
        "overall": figures(answers),
        "per_kind": {kind: figures([a for p, a in pairs if p.kind == kind]) for kind in kinds},
        "responses": [
            {
                "sample_id": prompt.sample_id,
                "turn": prompt.turn,
                "id": prompt.id,
                "kind": prompt.kind,
                "language": tasks.language_of(prompt),
                "tokens": len(answer.tokens),
                "tokens_sha256": text_sha256(config.canonical(answer.tokens)),
                "seconds": answer.seconds,
                "cycles": answer.cycles,
                "accepted": answer.accepted,
                "accepted_per_slot": answer.per_slot,
            }
            for prompt, answer in pairs
        ],
    }


@contextmanager
def alone(url: str) -> Iterator[None]:
    """Waits until no other job of this machine measures the same server."""
    name = f"dflash-served-{os.getuid()}-{text_sha256(url)[:16]}.lock"
    with open(Path(tempfile.gettempdir()) / name, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash.served", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--identity", required=True, help="the target's identity.json")
    parser.add_argument("--drafter", required=True, help="name of the drafter that is served")
    parser.add_argument("--task", required=True, help="the task's name")
    parser.add_argument("--prompts", nargs="*", default=[], help="corpus or task Parquet files")
    parser.add_argument("--out", required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    settings = config.check(StageSettings, read_settings(args.settings), "served")
    identity = target.read_identity(args.identity)
    prompts = task_prompts(args.task, settings, args.prompts, identity)
    with alone(settings.server.url):
        result = measure(settings, prompts, identity)
    write_json(args.out, {"drafter": args.drafter, "task": args.task, **result})
    o = result["overall"]
    tau = (
        f"tau {o['tau_mean']:.3f} mean, {o['tau_pooled']:.3f} pooled" if o["cycles"] else "no cycle"
    )
    speed = f"{o['tokens_per_second']:.1f} tokens/s" if o["tokens_per_second"] else "no time told"
    print(
        f"{args.drafter} on {args.task}, served by {result['engine']}: {tau} over {o['responses']} "
        f"responses; {speed}"
    )


if __name__ == "__main__":
    entrypoint(main)
