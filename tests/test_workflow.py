"""The workflow as a whole, on a tiny target: it runs, reruns what it must, and survives kills."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from tiny import ROOT, planned, snakemake

from dflash.drafter import load_drafter
from dflash.files import read_json


def changed(config, path, value):
    """A copy of the settings with one value changed, by its dotted path."""
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    node = config
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return config


def test_ends_in_a_summary_a_report_and_a_drafter(finished):
    folder, config, done = finished
    summary = read_json(folder / "results/summary.json")
    small = summary["drafters"]["small"]
    for name in ("tau_mean", "tau_pooled", "speed_up", "lossless", "per_kind"):
        assert name in small
    assert set(small["per_kind"]) == {"even", "odd"}
    assert small["lossless"]["checked"] == small["lossless"]["identical"] > 0
    assert 1 < small["tau_pooled"] <= 4
    assert set(summary["stages"]) >= {
        "target", "corpus", "regenerate", "extract", "train", "evaluate", "export",
    }  # fmt: skip
    assert all(seconds > 0 for seconds in summary["stages"].values())
    assert load_drafter(folder / "results/export/small").config.block_size == 4
    assert (folder / "results/report.html").stat().st_size > 5000
    assert "no GPU on this machine" in done.stdout + done.stderr


def test_second_run_has_nothing_to_do(finished):
    folder, config, _ = finished
    assert planned(folder, config) == []


@pytest.mark.parametrize(
    ("path", "value", "jobs"),
    [
        ("drafters.small.training.lr", 1e-3, ["evaluate", "export", "report", "train"]),
        ("evaluate.max_new_tokens", 20, ["evaluate", "export", "report"]),
        (
            "evaluate.temperatures",
            [0.0, 1.0],
            ["evaluate", "export", "report"],
        ),  # the new one alone
        ("evaluate.block_sizes", [4, 3, 2], ["evaluate", "evaluate", "export", "report"]),
        ("evaluate.top_k", 3, []),
        ("evaluate.tasks.math", {"dataset": "math500"}, ["evaluate", "export", "report", "task"]),
        ("export.licence", "mit", ["export", "report"]),
        ("machine.train.micro_batch", 2, []),
        ("machine.extract.gpu", 0, []),
        (
            "extract.max_tokens",
            30,
            ["evaluate", "export", "extract", "extract", "report", "train"],
        ),
    ],
)
def test_only_what_a_setting_decides_runs_again(finished, path, value, jobs):
    folder, config, _ = finished
    assert planned(folder, changed(config, path, value)) == jobs


def test_a_second_drafter_trains_on_the_same_features(finished):
    folder, config, _ = finished
    more = changed(config, "drafters.other", {"extends": "small", "block_size": 3})
    assert planned(folder, more) == ["evaluate", "export", "report", "train"]
    assert planned(folder, more, "--until", "train") == ["train"]


def test_a_model_replaced_in_its_folder_is_noticed(finished, tmp_path):
    folder, config, _ = finished
    weights = Path(config["target"]["model"]) / "model.safetensors"
    before, data = weights.stat(), weights.read_bytes()
    try:
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the same size, as any fine-tune
        assert "target" in planned(folder, config)
    finally:
        weights.write_bytes(data)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert planned(folder, config) == []


def test_a_new_source_recomputes_no_old_shard(finished, tmp_path):
    folder, config, _ = finished
    (tmp_path / "more.jsonl").write_text('{"prompt": "how does it work"}\n{"prompt": "is it"}\n')
    more = copy.deepcopy(config)
    more["corpus"]["sources"].append({"name": "more", "path": str(tmp_path / "more.jsonl")})
    jobs = planned(folder, more)
    assert [j for j in jobs if j in ("corpus", "regenerate", "extract")] == [
        "corpus", "extract", "regenerate",
    ]  # fmt: skip


def test_settings_are_refused_before_any_job(finished):
    folder, config, _ = finished
    done = snakemake(folder, changed(config, "drafters.small.training.lrr", 1.0), "--dry-run")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "drafters.small.training.lrr" in said and "did you mean `lr`" in said
    assert "Traceback" not in said


def test_a_second_run_at_the_same_time_is_refused(finished):
    folder, config, _ = finished
    with open(folder / "results/.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = snakemake(folder, changed(config, "evaluate.max_new_tokens", 20))
    assert done.returncode != 0
    assert "another snakemake run is working on results" in done.stdout + done.stderr
    assert planned(folder, config) == []


@pytest.mark.parametrize("results", ["prompts.jsonl", "prompts.jsonl/results"])
def test_an_unusable_results_folder_is_refused(finished, results):
    folder, config, _ = finished
    done = snakemake(folder, changed(config, "results", results), "--dry-run")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "Traceback" not in said
    assert "prompts.jsonl is a file, not a folder; set `results:`" in said


def test_the_published_recipe_plans():
    assert "train" in planned(ROOT, ROOT / "config/qwen3-8b.yaml")


def test_a_missing_prompts_file_is_refused_though_results_exist(finished):
    folder, config, _ = finished
    more = copy.deepcopy(config)
    more["corpus"]["sources"].append({"name": "more", "path": "nowhere.jsonl"})
    done = snakemake(folder, more)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "corpus.sources: more: there is no file nowhere.jsonl" in said
    task = changed(config, "evaluate.tasks", {"own": {"path": "gone.jsonl"}})
    done = snakemake(folder, task)
    said = done.stdout + done.stderr
    assert "evaluate.tasks: own: there is no file gone.jsonl" in said
    task = changed(config, "evaluate.tasks", {"own": {"dataset": "gsm8k", "path": "gone"}})
    done = snakemake(folder, task)
    assert "evaluate.tasks: own: there is no folder gone" in done.stdout + done.stderr


def test_a_running_server_adds_its_own_jobs(finished):
    folder, config, _ = finished
    asked = changed(config, "evaluate.backend", "openai")
    asked = changed(asked, "evaluate.server", {"url": "http://127.0.0.1:1"})
    assert planned(folder, asked) == ["report", "served"]


def stage_process(name: str, folder: Path) -> int | None:
    """Process id of a running stage of the workflow in `folder`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[1:3] == [b"-m", f"dflash.{name}".encode()]:
                    if os.readlink(entry / "cwd") == str(folder):
                        return int(entry.name)
            except OSError:
                continue
    return None


def weights(folder: Path) -> str:
    return hashlib.sha256(
        (folder / "results/drafters/small/model.safetensors").read_bytes()
    ).hexdigest()


def kill_when(run, folder: Path, name: str, ready, whole_group: bool) -> None:
    """kill -9 a stage (or snakemake and all its children) once it runs and `ready` holds."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        pid = stage_process(name, folder)
        if pid and ready():
            if whole_group:
                os.killpg(run.pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
            run.wait(60)
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} was never caught (snakemake ended with {run.poll()})")


def test_killed_in_every_stage_it_still_ends_in_the_same_weights(finished, tmp_path):
    undisturbed, config, _ = finished
    config = copy.deepcopy(config)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    checkpoints = lambda: any((tmp_path / "results/runs/small").glob("*/step-*"))  # noqa: E731
    always = lambda: True  # noqa: E731
    for stage in (
        "target",
        "corpus",
        "regenerate",
        "extract",
        "train",
        "evaluate",
        "export",
        "report",
    ):
        run = snakemake(tmp_path, path, wait=False)
        ready = checkpoints if stage == "train" else always
        kill_when(
            run, tmp_path, stage, ready, whole_group=stage in ("extract", "train", "evaluate")
        )
        assert run.returncode != 0
    log = tmp_path / "results/logs/train/small.log"
    done = snakemake(tmp_path, path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from step" in log.read_text()
    assert weights(tmp_path) == weights(undisturbed)
    left = [p for p in (tmp_path / "results").rglob("*.partial")]
    assert left == []
