"""Measuring a server: three small ones that speak the dialects of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash import config, served
from dflash.corpus import Prompt
from dflash.errors import UserError

END = 1
BLOCK = 4
# What the drafter gets right in each cycle of an answer, by the prompt's first token. Every answer
# is the prefill's token and what its cycles gave, and then cut at the limit.
RUNS = {7: [3, 0, 1], 9: [0, 2], 8: []}


class Fake(BaseHTTPRequestHandler):
    """Answers as the real server does; one class for each dialect says how."""

    model, owner, drafts, others = "target", "vllm", True, 0

    def log_message(self, *_: object) -> None:
        pass

    def send(self, content: Any, code: int = 200) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send({"data": [{"id": self.model, "owned_by": self.owner}]})
        else:
            self.send(self.metrics())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        self.send(self.answer(body))

    def decode(self, prompt: list[int], limit: int) -> tuple[list[int], list[int]]:
        """Tokens of an answer and the runs of its cycles."""
        runs, tokens = [], [100]
        for run in RUNS[prompt[0]]:
            if len(tokens) < limit:
                runs.append(run)
                tokens += [100 + run] * (run + 1)
        tokens = tokens[:limit]
        return (tokens, runs) if len(tokens) == limit else ([*tokens[:-1], END], runs)


class FakeVllm(Fake):
    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, runs = self.decode(body["prompt"], body["max_tokens"])
        count = self.server.counts
        count["generation_tokens_total"] += len(tokens) + self.others
        count["request_decode_time_seconds_sum"] += 0.5
        count["request_decode_time_seconds_count"] += 1
        count["num_drafts_total"] += len(runs)
        count["num_accepted_tokens_total"] += sum(runs)
        for k in range(BLOCK - 1):
            count[k] += sum(run > k for run in runs)
        return {"choices": [{"text": "?", "token_ids": tokens, "finish_reason": "stop"}]}

    def metrics(self) -> str:
        tags = 'engine="0",model_name="target"'
        lines = ["# HELP vllm:num_requests_running Number.", "# TYPE x gauge"]
        for name, value in self.server.counts.items():
            if isinstance(name, int):
                label = f'{tags},position="{name}"'
                name = "spec_decode_num_accepted_tokens_per_pos_total"
            else:
                label = tags
                name = name.replace("num_", "spec_decode_num_") if "num_" in name else name
            if self.drafts or "spec_decode" not in name:
                lines.append(f"vllm:{name}{{{label}}} {float(value)}")
        lines.append('vllm:generation_tokens_total{engine="0",model_name="other"} 7.0')
        lines.append('vllm:request_decode_time_seconds_bucket{le="+Inf"} 1.0')
        return "\n".join(lines) + "\n"


class FakeSglang(Fake):
    owner, old = "sglang", False

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, runs = self.decode(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        meta = {
            "finish_reason": {"type": "length", "length": len(tokens)},
            "completion_tokens": len(tokens),
            "e2e_latency": 0.5,
        }
        if tokens[-1] == END:
            meta["finish_reason"] = {"type": "stop", "matched": END}
            tokens = tokens[:-1]
        if self.drafts:
            meta["spec_verify_ct"] = len(runs)
            meta["spec_accept_length"] = 1 + sum(runs) / max(1, len(runs))
            if not self.old:
                meta["spec_num_correct_drafts"] = sum(runs)
                meta["spec_correct_drafts_histogram"] = [runs.count(n) for n in range(BLOCK)]
        return {"text": "?", "output_ids": tokens, "meta_info": meta}


class FakeLlama(Fake):
    owner = "llamacpp"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, runs = self.decode(body["prompt"], body["n_predict"])
        timings = {"prompt_ms": 9.0, "predicted_n": 1 + sum(runs) + len(runs), "predicted_ms": 500}
        if self.drafts and runs:  # llama.cpp leaves them out where nothing was drafted
            timings |= {"draft_n": len(runs) * (BLOCK - 1), "draft_n_accepted": sum(runs)}
        ended = tokens[-1] == END
        return {
            "tokens": tokens[:-1] if ended else tokens,
            "stop_type": "eos" if ended else "limit",
            "timings": timings,
        }


@pytest.fixture
def serve():
    """A function: handler and changes of its class -> the URL of a server, until the test ends."""
    started = []

    def start(handler: type[Fake], **changes: Any) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), changes))
        names = ("generation_tokens_total", "request_decode_time_seconds_sum")
        names += ("request_decode_time_seconds_count", "num_drafts_total")
        server.counts = dict.fromkeys([*names, "num_accepted_tokens_total", 0, 1, 2], 3)
        server.bodies = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        start.bodies = server.bodies
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


class Identity:
    eos_token_ids = [END]


def measure(url: str, limit: int = 50, firsts: tuple[int, ...] = (7, 9, 8), **given: Any):
    server = {key: given.pop(key) for key in ("kind", "model") if key in given}
    settings = served.StageSettings(
        server=config.Server(url=url, **server), max_new_tokens=limit, **given
    )
    prompts = [
        Prompt(f"{first:016x}", "s", str(first), "even" if first == 8 else "odd", "heldout",
               [{"role": "user", "content": "hello"}], [first, 5])
        for first in firsts
    ]  # fmt: skip
    return served.measure(settings, prompts, Identity())


@pytest.mark.parametrize(
    ("handler", "engine", "per_slot"),
    [
        (FakeVllm, "vLLM", [3 / 5, 2 / 5, 1 / 5]),
        (FakeSglang, "SGLang", [3 / 5, 2 / 5, 1 / 5]),
        (FakeLlama, "llama.cpp", []),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_acceptance_from_each_engines_own_counts(serve, handler, engine, per_slot, told):
    kind = {"vLLM": "vllm", "SGLang": "sglang"}.get(engine, engine)
    found = measure(serve(handler), **({"kind": kind} if told else {}))
    assert found["engine"] == engine and found["model"] == "target"
    o = found["overall"]
    assert (o["responses"], o["cycles"]) == (2, 5)
    assert o["tau_pooled"] == pytest.approx(1 + 6 / 5)
    assert o["tau_mean"] == pytest.approx((1 + 4 / 3 + 1 + 2 / 2) / 2)
    assert o["per_slot"] == pytest.approx(per_slot)
    assert o["tokens"] == 8 + 5 + 1 and o["seconds"] == pytest.approx(1.5)
    assert o["tokens_per_second"] == pytest.approx(11 / 1.5)
    assert found["per_kind"]["odd"]["cycles"] == 5 and found["per_kind"]["even"]["cycles"] == 0
    rows = {r["id"]: r for r in found["responses"]}
    assert (rows["7"]["cycles"], rows["7"]["accepted"], rows["7"]["tokens"]) == (3, 4, 8)
    assert rows["8"]["tokens"] == 1


def test_engines_give_the_same_tokens(serve):
    """Also where an engine leaves the end token out."""
    hashes = [
        [r["tokens_sha256"] for r in measure(serve(handler))["responses"]]
        for handler in (FakeVllm, FakeSglang, FakeLlama)
    ]
    assert hashes[0] == hashes[1] == hashes[2]


def test_older_sglang_tells_only_the_mean(serve):
    o = measure(serve(FakeSglang, old=True))["overall"]
    assert o["tau_pooled"] == pytest.approx(1 + 6 / 5) and o["per_slot"] == []


def test_what_is_sent(serve):
    measure(serve(FakeVllm), 6, temperature=0.5, top_k=3, top_p=0.9, seed=4)
    path, body = serve.bodies[-1]
    assert path == "/v1/completions" and body["prompt"] == [8, 5] and body["max_tokens"] == 6
    assert (body["temperature"], body["top_k"], body["top_p"], body["seed"]) == (0.5, 3, 0.9, 4)
    assert body["stop_token_ids"] == [END] and body["model"] == "target"
    measure(serve(FakeSglang), 6)
    path, body = serve.bodies[-1]
    assert path == "/generate" and body["input_ids"] == [8, 5]
    assert body["sampling_params"]["temperature"] == 0 and body["sampling_params"]["top_k"] == -1
    measure(serve(FakeLlama), 6)
    path, body = serve.bodies[-1]
    assert path == "/completion" and body["prompt"] == [8, 5] and body["n_predict"] == 6
    assert body["top_k"] == 1 and not body["cache_prompt"] and body["return_tokens"]


@pytest.mark.parametrize(
    ("handler", "changes", "given", "words"),
    [
        (FakeVllm, {"drafts": False}, {}, "counts no speculative decoding; start it with"),
        (FakeSglang, {"drafts": False}, {}, "SGLang tells nothing of drafting; start it with the"),
        (FakeLlama, {"drafts": False}, {}, "llama.cpp tells nothing of drafting"),
        (FakeVllm, {}, {"model": "gone"}, "serves target; expected gone; correct"),
        (FakeVllm, {"owner": "me"}, {}, "calls itself 'me'; set evaluate.server.kind to one of"),
        (FakeVllm, {"others": 2}, {}, r"answered others meanwhile \(4 tokens counted, 2 received"),
    ],
)
def test_servers_that_cannot_be_measured_are_refused(serve, handler, changes, given, words):
    with pytest.raises(UserError, match=words) as e:
        measure(serve(handler, **changes), **given)
    assert "\n" not in str(e.value)


def test_a_server_that_is_not_there():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
        with pytest.raises(UserError, match="no server answers .*start it as the report says"):
            measure(url)


def test_a_refusal_is_passed_on(serve):
    def refuse(self) -> None:
        self.send({"error": {"message": "prompt too long"}}, 400)

    with pytest.raises(UserError, match=r"the server refused \(400\): .*prompt too long"):
        measure(serve(FakeVllm, do_POST=refuse))


def test_something_that_is_no_model_server(serve):
    with pytest.raises(UserError, match="expected a JSON object, the server sent '<html>"):
        measure(serve(Fake, do_GET=lambda self: self.send("<html>hello</html>")))


def test_the_stage(serve, tmp_path, finished, capsys):
    """From the workflow's own files to the JSON that the report reads."""
    folder = finished[0] / "results"
    url = serve(FakeVllm, decode=lambda self, prompt, limit: ([5] * limit, [1]))
    settings = {"server": {"url": url}, "max_new_tokens": 3}
    args = ["--settings", json.dumps(settings), "--identity", folder / "target/identity.json"]
    args += ["--drafter", "small", "--task", "heldout", "--prompts", folder / "corpus/toy.parquet"]
    served.main([str(a) for a in [*args, "--out", tmp_path / "served.json"]])
    found = json.loads((tmp_path / "served.json").read_text())
    assert found["drafter"] == "small" and found["overall"]["tau_pooled"] == 2.0
    offline = json.loads((folder / "evaluate/small/heldout.json").read_text())
    key = "sample_id"
    assert [r[key] for r in found["responses"]] == [r[key] for r in offline["responses"]]
    assert (
        "small on heldout, served by vLLM: tau 2.000 mean, 2.000 pooled" in capsys.readouterr().out
    )
