"""The workflow on SLURM: the real plugin and profile, on the stand-in commands of tests/slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, settings, snakemake

from dflash.files import read_json

FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "CUDA_", "DFLASH_", "KUBERNETES_", "PBS_", "LSB_")
# A submission without the names of job, log and folder and without the command.
CPU = "-A mylab -p cpu -t 60 --mem 4000 --nodes=1 --requeue --ntasks=1 --cpus-per-task=1"
GPU = "-A mylab -p gpu -t 60 --mem 4000 --nodes=1 --requeue --cpus-per-task=1 --gpus=1"


def run(
    folder: Path, target: Path, *args: str, **env: str
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, str, Path]]]:
    """Run the workflow with profiles/slurm on a cluster of its own.

    Returns the process and, for each submission, its comment, the rest of its line, its folder.
    """
    config: dict[str, Any] = settings(folder, target)
    config["corpus"]["sources"][0]["shards"] = 1
    config["machine"]["evaluate"] = {"gpu": 1, "threads": 2, "mem_mb": 3000, "runtime": 45}
    path = os.pathsep.join(
        [str(ROOT / "tests/slurm"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    env |= {"PATH": path, "STANDIN_SLURM": str(folder / "cluster")}
    # The plugin's first look at its jobs is after 40 s; this squeue answers when there is news.
    quick = ("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "5")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(FOREIGN):
                patch.delenv(name)
        done = snakemake(folder, config, *quick, *args, profile="slurm", env=env)
    submissions = []
    for job in sorted((folder / "cluster").glob("[0-9]*"), key=lambda path: int(path.name)):
        argv = read_json(job / "argv.json")
        assert argv[:2] == ["--parsable", "--job-name"] and argv[3] == "--output"
        assert argv[5:7] == ["--export=ALL", "--comment"]
        at = argv.index("-D")
        assert argv[at + 1] == str(folder) and argv[-1].startswith("--wrap=")
        submissions.append((argv[7], shlex.join(argv[8:at] + argv[at + 2 : -1]), job))
    return done, submissions


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_llama):
    """A finished run in which training met its time limit once: folder, process, submissions."""
    folder = tmp_path_factory.mktemp("slurm")
    on_cpus = [f"{rule}:slurm_partition=cpu" for rule in ("target", "corpus", "export", "report")]
    done, submissions = run(
        folder,
        tiny_llama,
        *("--set-resources", *on_cpus),
        SBATCH_ACCOUNT="mylab",
        SBATCH_PARTITION="gpu",
        STANDIN_TIMEOUT=json.dumps({"rule_train": "results/runs/small/*/step-*"}),
        DFLASH_GPUS="4",
        DFLASH_LOCK_DIR=str(folder / "leases"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done, submissions


def test_submissions(finished):
    folder, _, submissions = finished
    lines = [(comment, line) for comment, line, _ in submissions]
    before, after = lines[:6], sorted(lines[6:-1])
    assert before == [
        ("rule_target", CPU),
        ("rule_corpus_wildcards_toy", CPU),
        ("rule_regenerate_wildcards_toy_00000-of-00001", GPU),
        ("rule_extract_wildcards_toy_00000-of-00001", GPU),
        ("rule_train_wildcards_small", GPU),
        ("rule_train_wildcards_small", GPU.replace("-t 60", "-t 120")),
    ]
    assert after == [
        (
            "rule_evaluate_wildcards_small_heldout_",  # the default run has no name
            "-A mylab -p gpu -t 45 --mem 3000 --nodes=1 --requeue --cpus-per-task=2 --gpus=1",
        ),
        ("rule_export_wildcards_small", CPU),
    ]
    assert lines[-1] == ("rule_report", CPU)
    assert (folder / "results/report.html").exists()


def test_steps_run_on_one_node_with_the_gpus_of_their_job(finished):
    for _, line, job in finished[2]:
        step = read_json(job / "srun.json")
        assert "--nodes=1" in step and "-n1" in step
        assert ("--gpus=1" in step) == ("--gpus=1" in line)


def test_training_that_meets_its_time_limit_saves_and_goes_on(finished):
    folder, done, submissions = finished
    states = [(job / "state").read_text() for _, _, job in submissions]
    assert states == ["COMPLETED"] * 4 + ["TIMEOUT"] + ["COMPLETED"] * 4
    # Snakemake removes the log of the failed attempt; what SLURM caught of it stays.
    caught = list((folder / ".snakemake/slurm_logs/rule_train").rglob("5.log"))[0].read_text()
    assert "interrupted; saved in" in caught
    assert "going on from step" in (folder / "results/logs/train/small.log").read_text()


def test_the_device_of_the_allocation_is_used_without_a_lease(finished):
    folder = finished[0]
    log = (folder / "results/logs/extract/toy.00000-of-00001.log").read_text()
    assert "no GPU on this machine" not in log  # so the launcher saw the four stand-in devices
    assert not (folder / "leases").exists()


def test_without_account_and_partition_a_refusal_is_shown(tmp_path, tiny_llama):
    refusal = "Batch job submission failed: Invalid account"
    done, submissions = run(tmp_path, tiny_llama, "--retries", "0", STANDIN_REFUSE=refusal)
    assert done.returncode != 0 and refusal in done.stdout + done.stderr
    line = CPU.replace("-A mylab -p cpu", "-p batch")
    assert [(comment, rest) for comment, rest, _ in submissions] == [("rule_target", line)]
