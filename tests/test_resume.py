"""A training killed at any moment ends as if it had not been; what it cannot go on from is refused."""

# ruff: noqa: F811 (fixtures of test_train)

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_start import published
from test_train import SETTINGS, drafter_settings, features, run, with_last  # noqa: F401

from dflash import checkpoint, config, gradient, monitor, ranks, train, validate
from dflash.errors import UserError, entrypoint
from dflash.files import read_json, sha256
from dflash.regenerate import SCHEMA

# New processes are forked from one that has imported everything: a start takes 0.3 s, not five.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dflash.train"])

TIMINGS = {"seconds_per_step", "seconds", "tokens_per_second", "peak_memory_mb"}


def argv(features, out: Path, machine=None, changed="refuse", settings=None, **training):
    """The command of a training in `out`, after `python -m dflash.train`."""
    settings = settings or drafter_settings(**training)
    out.mkdir(exist_ok=True)
    (out / "identity.json").write_text(json.dumps(asdict(features[0])))
    return [
        *("--settings", json.dumps(settings.model_dump(mode="json", exclude={"extends"}))),
        *("--machine", json.dumps({"gpu": 0, "save_minutes": 1e-9, **(machine or {})})),
        *("--identity", str(out / "identity.json")),
        *("--features", *features[1]),
        *("--name", "x", "--threads", "1", "--changed", changed),
        *("--runs", str(out / "runs"), "--out", str(out / "drafter")),
    ]


# --- kill -9 --------------------------------------------------------------------------------------

# Where a process may be told to die, and in what a call of it is inside.
PLACES: dict[str, Callable] = {
    "run": train.Trainer.run,
    "step": train.Trainer._step,
    "save": checkpoint.save,
    "validate": train.Trainer._validate,
    "start": train.Trainer._resume,
    "finish": train.save_drafter,
}


def stage(argv: list[str], counted: str | None, moment: tuple[str, int] | None) -> None:
    """The stage, in a process that kills itself at a function's n-th call after entering a place, or
    counts the calls inside the first entry of each place and writes them down.

    Without garbage collection: while a profile function is set, CPython 3.11 crashes in it now and
    then (6 of 30 trainings with an empty function, none of 30 without collection, none of 60 without
    a profile function).
    """
    torch.set_num_threads(1)
    gc.disable()
    codes = {function.__code__: place for place, function in PLACES.items()}
    calls, begun, inside = 0, {}, {}

    def count(frame, event, _):
        nonlocal calls
        place = codes.get(frame.f_code) if event in ("call", "return") else None
        if event == "return":
            if place and place not in inside:
                inside[place] = calls - begun[place]
            return
        calls += event in ("call", "c_call")
        if place and place not in begun:
            begun[place] = calls
        if moment and moment[0] in begun and calls >= begun[moment[0]] + moment[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    try:
        entrypoint(lambda _: train.main(argv))
    finally:
        sys.setprofile(None)
        if counted:
            Path(counted).write_text(json.dumps(inside))


def status(argv: list[str], counted: Path | None = None, moment=None) -> int:
    """How the stage ends in a process of its own."""
    process = PROCESSES.Process(target=stage, args=(argv, counted and str(counted), moment))
    process.start()
    process.join(300)
    return process.exitcode


def results(folder: Path) -> tuple:
    """What a training in `folder` says and leaves, but for its timings."""
    (metrics,) = (folder / "runs").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    facts = read_json(folder / "drafter/training.json")
    facts["history"] = [{k: v for k, v in x.items() if k not in TIMINGS} for x in facts["history"]]
    return (
        sha256(folder / "drafter/model.safetensors"),
        [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines],
        {k: v for k, v in facts.items() if k != "shares"},
    )


CASES = {
    # AdamW, a checkpoint after every step
    "accumulation, average": (
        {"epochs": 4.0, "ema": 0.9, "validation": {"share": 0.2, "times": 4}},
        {"micro_batch": 2, "keep_last": 1},
    ),
    # a checkpoint only where validation finds a better one, so that a kill takes many steps along
    "muon, soft labels, two sizes of blocks": (
        {
            "optimizer": "muon",
            "block_sizes": [4, 3],
            "loss": {"labels": "soft", "weights": "dpace"},
            "validation": {"share": 0.2, "times": 6},
        },
        {"save_minutes": 60.0, "keep_last": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_five_times_it_ends_in_the_same_bytes(with_last, tmp_path, case):
    training, machine = CASES[case]
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    command = argv(with_last, tmp_path / "a", machine, **training)
    assert status(command, tmp_path / "counts.json") == 0
    straight = results(tmp_path / "a")
    counts = read_json(tmp_path / "counts.json")
    assert straight[2]["steps"] > 2 * straight[2]["documents"] / 5  # epochs begin and end

    command = argv(with_last, tmp_path / "b", machine, **training)
    moments = [("run", rng.randrange(counts["run"] // 3)), ("start", rng.randrange(9))]
    moments += [(place, rng.randrange(counts[place])) for place in ("save", "validate", "step")]
    rng.shuffle(moments)
    for moment in [*moments, ("finish", rng.randrange(counts["finish"]))]:
        print(f"seed {seed}: kill -9 {moment[1]} calls into {moment[0]}")
        assert status(command, moment=moment) == -signal.SIGKILL, (seed, moment)
        assert not (tmp_path / "b/drafter").exists()
    assert status(command) == 0, seed
    assert results(tmp_path / "b") == straight, (seed, moments)

    (folder,) = (tmp_path / "b/runs").iterdir()
    best = straight[2]["best"]["step"]
    kept = {checkpoint.folder_of(folder, s).name for s in (best, straight[2]["steps"])}
    assert {p.name for p in folder.iterdir() if p.is_dir()} == kept
    assert not list(tmp_path.glob("b/**/*.partial"))


def test_killed_from_outside_the_same_command_goes_on(features, tmp_path):
    """As it is started in a shell."""
    straight, command = (argv(features, tmp_path / x, epochs=9.0) for x in "ab")
    assert status(straight) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash.train", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(tmp_path.glob("b/runs/*/step-0000000[3-9]")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert status(command) == 0
    assert results(tmp_path / "b") == results(tmp_path / "a")


# --- leaving when asked -----------------------------------------------------------------------------


def test_a_time_limit_and_sigterm_save_and_go_on(features, tmp_path, monkeypatch, capsys):
    """A validation is due after every step: no time for one on leaving, so it is made up for."""
    often = {"max_steps": 8, "validation": {"share": 0.2, "times": 8}}
    train.main(argv(features, tmp_path / "a", {"save_minutes": 60.0}, **often))
    command = argv(features, tmp_path / "b", {"save_minutes": 60.0}, **often)
    limited = argv(features, tmp_path / "b", {"save_minutes": 60.0, "stop_minutes": 1e-9}, **often)
    for step in (1, 2):
        with pytest.raises(SystemExit) as end:
            train.main(limited)
        assert end.value.code == train.STATUS_INTERRUPTED
        assert [p.name for p in tmp_path.glob(f"b/runs/*/step-{step:08d}")]
        (log,) = tmp_path.glob("b/runs/*/metrics.jsonl")
        assert log.read_text().count("tau_mean") == step - 1
    with monkeypatch.context() as m:  # killed once more, with that validation logged but not saved

        def killed(*args):
            raise KeyboardInterrupt

        m.setattr(checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            train.main(command)
    assert log.read_text().count("tau_mean") > 1
    assert "run the same command again to go on" in capsys.readouterr().out
    original = train.Trainer._step

    def terminated(trainer, plan, *args):
        if plan.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(trainer, plan, *args)

    monkeypatch.setattr(train.Trainer, "_step", terminated)
    with pytest.raises(SystemExit) as end:
        train.main(command)
    assert end.value.code == 75 and len(list(tmp_path.glob("b/runs/*/step-00000005"))) == 1
    assert not (tmp_path / "b/drafter").exists()
    monkeypatch.undo()
    train.main(command)
    assert "going on from step 5" in capsys.readouterr().out
    assert results(tmp_path / "b") == results(tmp_path / "a")


def test_a_second_trainer_is_kept_out(features, tmp_path, refusal):
    command = argv(features, tmp_path / "a", max_steps=2)
    train.main(command)
    (folder,) = (tmp_path / "a/runs").iterdir()
    held = checkpoint.lock(folder)
    assert f"{folder}: another trainer is running here" in refusal(train.main, *command)
    held.close()
    train.main(command)


# --- what decides the result ------------------------------------------------------------------------


def everything(folder: Path) -> dict[Path, str]:
    return {p: sha256(p) for p in folder.rglob("*") if p.is_file()}


def test_what_differs_is_refused_by_name_or_starts_beside(features, tmp_path, refusal, monkeypatch):
    start = published(tmp_path / "start")
    change = {"start": str(start), "num_hidden_layers": 2}
    settings = drafter_settings(max_steps=2).model_copy(update=change)
    train.main(argv(features, tmp_path, settings=settings))
    (first,) = (tmp_path / "runs").iterdir()
    before = everything(first)

    training = settings.training.model_copy(update={"lr": 1e-3, "seed": 5})
    other = settings.model_copy(update={"training": training})
    said = refusal(train.main, *argv(features, tmp_path, settings=other))
    assert "settings.training.lr: 0.003 there, 0.001 here" in said
    assert "settings.training.seed: 0 there, 5 here" in said and "--changed fresh" in said
    assert str(first) in said

    fewer = (features[0], features[1][:1], *features[2:])
    said = refusal(train.main, *argv(fewer, tmp_path, settings=settings))
    assert "features: 1 of its 2 shards are not among these, 0 are new" in said

    with monkeypatch.context() as m:
        m.setitem(config.STAGE_VERSION, "train", config.STAGE_VERSION["train"] + 1)
        said = refusal(train.main, *argv(features, tmp_path, settings=settings))
    assert (
        f"code: {config.STAGE_VERSION['train']} there, {config.STAGE_VERSION['train'] + 1}" in said
    )

    weights = load_file(start / "model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, start / "model.safetensors")
    command = argv(features, tmp_path, settings=settings)
    old = read_json(first / "fingerprint.json")["start"]
    assert f'start: "{old[:50]}' in refusal(train.main, *command)
    assert everything(first) == before and [first] == list((tmp_path / "runs").iterdir())

    train.main(argv(features, tmp_path, settings=settings, changed="fresh"))
    assert everything(first) == before and len(list((tmp_path / "runs").iterdir())) == 2


def test_a_default_that_is_spelled_out_is_no_difference(features, tmp_path):
    command = argv(features, tmp_path, settings=drafter_settings(max_steps=1))
    place = command.index("--settings") + 1
    full = json.loads(command[place])
    short = {k: v for k, v in full.items() if k in SETTINGS}
    short["training"] = {k: full["training"][k] for k in (*SETTINGS["training"], "max_steps")}
    train.main(command)
    train.main([*command[:place], json.dumps(short), *command[place + 1 :]])
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_differences_are_named_field_by_field():
    old = {"target": "a", "settings": {"loss": {"gamma": 2.0}, "lr": 1}, "code": 2}
    new = {"target": "b", "settings": {"loss": {"gamma": 4.0}, "lr": 1}, "code": 2, "start": "s"}
    assert checkpoint.differences(old, new) == [
        "settings.loss.gamma: 2.0 there, 4.0 here",
        'start: null there, "s" here',
        'target: "a" there, "b" here',
    ]


def test_the_workflow_starts_beside(finished):
    """A changed setting retrains (`test_workflow`); its run directory is a new one."""
    rule = (Path(__file__).parent.parent / "rules/train.smk").read_text()
    assert '" --changed fresh ' in rule


# --- what is kept -----------------------------------------------------------------------------------


def told(taus: list[float]) -> Callable:
    """A validation that finds these, one after the other."""
    found = iter(taus)
    return lambda responses, size: {"tau_mean": next(found), "per_slot": []}


def test_the_best_checkpoint_stays_and_is_handed_over(features, tmp_path, monkeypatch):
    validation = {"share": 0.2, "times": 4}
    settings = drafter_settings(max_steps=12, validation=validation)
    monkeypatch.setattr(validate, "summary", told([1.2, 1.9, 1.4, 1.5]))
    sizes, save = [], checkpoint.save

    def counted(run, *args):
        save(run, *args)
        sizes.append(len([p for p in run.iterdir() if p.is_dir()]))

    monkeypatch.setattr(checkpoint, "save", counted)
    machine = config.TrainMachine(gpu=0, save_minutes=1e-9, keep_last=1)
    drafter, facts = run(features, tmp_path / "r", settings, machine)
    assert facts["best"] == {"step": 6, "tau_mean": 1.9}
    names = [p.name for p in checkpoint.checkpoints(tmp_path / "r")]
    assert names == ["step-00000006", "step-00000012"] and max(sizes) <= 2
    best, last = (load_file(tmp_path / "r" / n / "drafter.safetensors") for n in names)
    for name, p in drafter.named_parameters():
        assert torch.equal(p, best[name]) and (p.dim() < 2 or not torch.equal(p, last[name])), name


def test_of_equally_good_ones_the_latest_is_handed_over(features, tmp_path, monkeypatch):
    """At first nothing is accepted, and the first weights to be measured have learned least."""
    settings = drafter_settings(max_steps=6, validation={"share": 0.2, "times": 3})
    monkeypatch.setattr(validate, "summary", told([1.0, 1.0, 1.0]))
    _, facts = run(features, tmp_path / "r", settings)
    assert facts["best"] == {"step": 6, "tau_mean": 1.0}


def test_a_damaged_best_one_says_how_to_go_on(features, tmp_path, monkeypatch):
    """Deleting it alone would leave nothing to hand over."""
    settings = drafter_settings(max_steps=6, validation={"share": 0.2, "times": 3})
    monkeypatch.setattr(validate, "summary", told([1.4, 1.9, 1.5, 1.4, 1.9, 1.5]))
    first, _ = run(features, tmp_path / "r", settings)
    best, last = checkpoint.checkpoints(tmp_path / "r")
    path = best / "drafter.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):  # damaged, then gone
        with pytest.raises(UserError, match="; delete it and all later ones to train on from"):
            run(features, tmp_path / "r", settings)
        shutil.rmtree(best, ignore_errors=True)
    shutil.rmtree(last)
    again, _ = run(features, tmp_path / "r", settings)
    weights = dict(again.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in first.named_parameters())


def test_each_kept_checkpoint_can_be_gone_on_from(features, tmp_path, monkeypatch):
    """Also the last but one, whose best is not the last one's."""
    settings = drafter_settings(max_steps=6, validation={"share": 0.2, "times": 3})
    monkeypatch.setattr(validate, "summary", told([1.9, 1.4, 2.0]))
    machine = config.TrainMachine(gpu=0, save_minutes=1e-9, keep_last=2)
    run(features, tmp_path / "r", settings, machine)
    kept = checkpoint.checkpoints(tmp_path / "r")
    assert [p.name[-1] for p in kept] == ["2", "5", "6"]  # 2 is the best that 5 knows
    shutil.rmtree(kept[-1])
    monkeypatch.setattr(validate, "summary", told([1.5]))
    drafter, facts = run(features, tmp_path / "r", settings, machine)
    assert facts["best"]["step"] == 2
    best = load_file(kept[0] / "drafter.safetensors")
    assert all(torch.equal(p, best[name]) for name, p in drafter.named_parameters())


def test_what_killed_saves_leave_goes_with_the_next(features, tmp_path):
    for name in (".step-00000001.99999999.partial", ".step-00000002.partial"):
        (tmp_path / "r" / name).mkdir(parents=True)
        (tmp_path / "r" / name / "drafter.safetensors").write_bytes(b"half")
    run(features, tmp_path / "r", drafter_settings(max_steps=2))
    assert [p.name for p in (tmp_path / "r").iterdir() if p.is_dir()] == ["step-00000002"]


# --- bad checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(features, tmp_path_factory):
    """A run directory with checkpoints of steps 1 and 2 of 3, and the settings."""
    folder = tmp_path_factory.mktemp("saved") / "r"
    settings = drafter_settings(max_steps=3, ema=0.5)
    machine = config.TrainMachine(gpu=0, save_minutes=1e-9, keep_last=3)
    run(features, folder, settings, machine)
    shutil.rmtree(checkpoint.folder_of(folder, 3))
    return folder, settings


def unchecked(folder: Path) -> None:
    """Let the hashes of a checkpoint be those of its files, whatever they hold."""
    files = [p for p in sorted(folder.iterdir()) if p.name != "sha256.json"]
    (folder / "sha256.json").write_text(json.dumps({p.name: sha256(p) for p in files}))


FILES = (
    "drafter.safetensors",
    "optimizer.safetensors",
    "average.safetensors",
    "state.json",
    "sha256.json",
)


def refused(features, run_folder: Path, settings) -> str:
    """The sentence about the newest checkpoint; none is touched."""
    before = everything(run_folder)
    with pytest.raises(UserError) as e:
        run(features, run_folder, settings)
    said, newest = str(e.value), checkpoint.checkpoints(run_folder)[-1]
    assert said.startswith(f"{newest}: ") and said.count("\n") == 0
    assert said.endswith("; delete it to go on from the one before")
    assert everything(run_folder) == before
    return said


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["byte", "truncated", "missing", "empty"])
def test_a_damaged_file_is_named_and_the_one_before_is_good(
    features,
    saved,
    tmp_path,
    name,
    harm,
):
    folder = Path(shutil.copytree(saved[0], tmp_path / "r"))
    path = folder / "step-00000002" / name
    data = path.read_bytes()
    places = random.Random(name).sample(range(len(data)), 5) if harm == "byte" else [0]
    for place in places:
        changed = {
            "byte": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
            "truncated": data[: len(data) * 2 // 3],
            "empty": b"",
            "missing": None,
        }[harm]
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        said = refused(features, folder, saved[1])
        assert "damaged checkpoint (" in said
        if name != "sha256.json":
            assert name in said
    shutil.rmtree(path.parent)
    _, facts = run(features, folder, saved[1])
    assert facts["history"][-1]["step"] == 3


def test_every_byte_of_the_state_counts(features, saved, tmp_path):
    """Also one that leaves it readable, such as another step."""
    folder = Path(shutil.copytree(saved[0], tmp_path / "r"))
    path = folder / "step-00000002/state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    assert "state.json is not as it was written" in refused(features, folder, saved[1])


def test_a_checkpoint_of_another_training_is_refused(features, saved, tmp_path):
    def altered(name: str, change: Callable) -> str:
        folder = tmp_path / hashlib.sha256(os.urandom(8)).hexdigest()[:8]
        shutil.copytree(saved[0], folder)
        path = folder / "step-00000002" / name
        if name == "state.json":
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
        else:
            save_file(change(load_file(path)), path)
        unchecked(path.parent)
        return refused(features, folder, saved[1])

    drafter, optimizer = "drafter.safetensors", "optimizer.safetensors"
    another = "checkpoint of another training ("
    assert f"{another}extra is only there)" in altered(
        drafter, lambda t: t | {"extra": torch.zeros(2)}
    )
    without = lambda t: {k: v for k, v in t.items() if k != "fc.weight"}  # noqa: E731
    assert f"{another}fc.weight is only here)" in altered(drafter, without)
    # One row would be copied to all rows if shapes were not compared.
    row = lambda t: t | {"fc.weight": t["fc.weight"][:1].clone()}  # noqa: E731
    assert f"{another}fc.weight is [1, 192] there, [64, 192] here)" in altered(drafter, row)
    assert f"{another}fc.weight is [1, 192] there" in altered("average.safetensors", row)
    wide = lambda t: t | {"exp_avg/fc.weight": torch.zeros(2, 2)}  # noqa: E731
    assert f"{another}exp_avg/fc.weight is [2, 2] there" in altered(optimizer, wide)
    unknown = lambda t: t | {"exp_avg/other": torch.zeros(2)}  # noqa: E731
    assert f"{another}'other')" in altered(optimizer, unknown)
    said = altered("state.json", lambda s: s | {"momentum": 1})
    assert "damaged checkpoint" in said and "unexpected keyword argument 'momentum'" in said


# --- bad input --------------------------------------------------------------------------------------


def test_features_that_teach_nothing_are_refused(features, tmp_path, refusal, monkeypatch):
    shard = type(features[2][0])
    original = shard.tokens

    def silent(self):
        ids, mask = original(self)
        return ids, mask & False

    command = argv(features, tmp_path, max_steps=2)
    monkeypatch.setattr(shard, "tokens", silent)
    said = refusal(train.main, *command)
    assert "the features hold no supervised block" in said and "raise regenerate.max_new" in said
    monkeypatch.undo()
    long = drafter_settings().model_copy(update={"block_size": 64})
    said = refusal(train.main, *argv(features, tmp_path / "long", settings=long))
    assert "less than a block of 64" in said and "lower block_size" in said
    assert not list(tmp_path.glob("**/step-*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"head_dim": 15}, "`head_dim`: found 15; input should be a multiple of 2"),
        (
            {"training": {"lr": float("nan")}},
            "`training.lr`: found NaN; input should be a finite number",
        ),
        (
            {"training": {"clip": float("nan")}},
            "`training.clip`: found NaN; input should be a finite number",
        ),
        (
            {"training": {"ema": float("nan")}},
            "`training.ema`: found NaN; input should be a finite number",
        ),
        (
            {"training": {"weight_decay": float("nan")}},
            "`training.weight_decay`: found NaN; input should be a finite number",
        ),
        (
            {"training": {"lr": float("inf")}},
            "`training.lr`: found Infinity; input should be a finite number",
        ),
        ({"training": {"lrr": 1.0}}, "did you mean `lr`"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(features, tmp_path, refusal, change, said):
    own = json.loads(drafter_settings().model_dump_json(exclude={"extends"}))
    training = own["training"] | change.get("training", {})
    path = tmp_path / "settings.yaml"
    text = json.dumps(own | change | {"training": training})
    path.write_text(text.replace("NaN", ".nan").replace("Infinity", ".inf"))
    command = argv(features, tmp_path)
    command[1] = str(path)
    assert said in refusal(train.main, *command)
    assert not (tmp_path / "runs").exists()


def test_what_is_no_folder_of_runs_is_refused(features, tmp_path, refusal):
    command = argv(features, tmp_path, max_steps=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/thesis.tex").write_text("precious")
    said = refusal(train.main, *command)
    assert "runs: not a folder of training runs, it holds thesis.tex" in said
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["thesis.tex"]
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("precious")
    assert "runs: a file, not a folder of training runs" in refusal(train.main, *command)
    assert (tmp_path / "runs").read_text() == "precious"
    command[command.index("--runs") + 1] = str(tmp_path / "runs/deeper")
    assert "a file is in the way of a folder" in refusal(train.main, *command)


def test_a_run_directory_that_cannot_be_written_is_told(
    features,
    tmp_path,
    refusal,
    monkeypatch,
):
    def closed(path, mode):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(checkpoint, "open", closed, raising=False)
    said = refusal(train.main, *argv(features, tmp_path, max_steps=1))
    assert "the file system is read-only: set `results:`" in said and "/lock)" in said


@pytest.mark.parametrize("harm", ["missing", "damaged", "other"])
def test_unreadable_token_files_are_refused(features, finished, tmp_path, refusal, harm):
    tokens = sorted((finished[0] / "results/tokens/toy").glob("*.parquet"))
    kinds = train.kinds_of(tokens)
    assert set(kinds.values()) == {"odd", "even"} and len(kinds) > 10
    path = tmp_path / "tokens.parquet"
    if harm == "damaged":
        path.write_bytes(tokens[0].read_bytes()[:-9])
    elif harm == "other":
        import pyarrow.parquet as pq

        pq.write_table(pq.read_table(tokens[0]).drop_columns(["kind"]), path)
    assert "kind" in SCHEMA.names
    said = refusal(train.main, *argv(features, tmp_path), "--tokens", path)
    expected = {
        "missing": "no such file; run the regenerate",
        "damaged": "damaged (",
        "other": "columns",
    }
    assert said.startswith(f"{path}: {expected[harm]}")


# --- full disks -------------------------------------------------------------------------------------


def stopped(features, folder: Path) -> list[str]:
    """Save step 1 of a training in `folder` and leave; returns the command to go on."""
    with pytest.raises(SystemExit):
        train.main(argv(features, folder, {"stop_minutes": 1e-9}, max_steps=4))
    return argv(features, folder, {"keep_last": 9}, max_steps=4)


@pytest.mark.parametrize("how", ["weights", "fsync", "metrics.jsonl", "events.out"])
def test_a_full_disk_leaves_the_last_checkpoint_good(
    features,
    tmp_path,
    refusal,
    monkeypatch,
    how,
):
    train.main(argv(features, tmp_path / "a", max_steps=4))
    command = stopped(features, tmp_path / "b")
    (good,) = tmp_path.glob("b/runs/*/step-00000001")
    before = everything(good)
    limit, fsync = resource.getrlimit(resource.RLIMIT_FSIZE), os.fsync

    def full(fd):
        if "step-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, mode, buffering=-1):
        if not path.name.startswith(how):
            return open(path, mode, buffering)
        file = io.BufferedWriter(Full(path, "ab"))
        return file if "b" in mode else io.TextIOWrapper(file, line_buffering=True)

    with monkeypatch.context() as m:
        if how == "fsync":
            m.setattr(os, "fsync", full)
        elif how == "weights":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        else:
            m.setattr(monitor, "open", opened, raising=False)
        try:
            said = refusal(train.main, *command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "free space or set `results:` to another disk" in said
    assert everything(good) == before
    assert not list(tmp_path.glob("b/runs/*/.*")) and not (tmp_path / "b/drafter").exists()
    train.main(command)
    assert results(tmp_path / "b") == results(tmp_path / "a")


# --- no numbers -------------------------------------------------------------------------------------


def broken(monkeypatch, steps: set[int]) -> None:
    """Let the loss of some steps be no number."""
    original, loss = train.Trainer._step, gradient.pack_loss
    now = []

    def step(trainer, plan, *args):
        now[:] = [plan.step]
        return original(trainer, plan, *args)

    def pack_loss(*args):
        total, correct = loss(*args)
        return total * (torch.nan if now[0] in steps else 1.0), correct

    monkeypatch.setattr(train.Trainer, "_step", step)
    monkeypatch.setattr(gradient, "pack_loss", pack_loss)


def test_steps_without_a_number_are_left_out_and_counted(features, tmp_path, monkeypatch, capsys):
    bad = {1, 3, 4, 5, 8}
    broken(monkeypatch, bad)
    settings = drafter_settings(max_steps=12, nonfinite="skip")
    drafter, facts = run(features, tmp_path / "r", settings)
    assert facts["skipped_steps"] == len(bad) and facts["steps"] == 12
    assert [row["skipped_steps"] for row in facts["history"]] == [5, 5]
    assert all(p.isfinite().all() for p in drafter.parameters())
    said = capsys.readouterr().out
    assert "step 3 is left out" in said and "5 of 12 steps were left out" in said
    folders = sorted((tmp_path / "r").glob("nonfinite-*"))
    assert [int(p.name[-8:]) for p in folders] == sorted(bad)
    report = read_json(folders[0] / "report.json")
    stream = train.Trainer(
        settings, config.TrainMachine(), *features[:1], *features[2:], tmp_path / "s",
        ranks.one(torch.device("cpu")),
    ).stream  # fmt: skip
    assert report["sample_ids"] == [stream.place(5 + i).sample_id for i in range(5)]
    assert report["step"] == 1 and "loss nan" in report["found"]
    assert "fc.weight" in report["gradients_not_finite"]
    kept = [len(list(p.glob("drafter.safetensors"))) for p in folders]
    assert kept == [1, 1, 1, 0, 0]  # however many there are, the disk does not fill with weights


def test_a_training_without_any_number_hands_nothing_over(features, tmp_path, monkeypatch):
    broken(monkeypatch, {0, 1, 2})
    with pytest.raises(
        UserError, match="no number in all 3 steps: nothing is learned; see .*report"
    ):
        run(features, tmp_path / "r", drafter_settings(max_steps=3, nonfinite="skip"))


def test_only_gradients_that_are_no_numbers_are_named(features, tmp_path, monkeypatch):
    accumulate = train.accumulate

    def one_is_broken(drafter, *args):
        sums = accumulate(drafter, *args)
        drafter.fc.weight.grad[0, 0] = torch.nan
        return sums

    monkeypatch.setattr(train, "accumulate", one_is_broken)
    with pytest.raises(UserError, match="gradient norm nan"):
        run(features, tmp_path / "r", drafter_settings(max_steps=1))
    report = read_json(tmp_path / "r/nonfinite-00000000/report.json")
    assert report["gradients_not_finite"] == ["fc.weight"]


def test_a_step_without_a_number_stops_and_the_checkpoint_before_is_good(
    features,
    tmp_path,
    monkeypatch,
):
    settings = drafter_settings(max_steps=4)
    machine = config.TrainMachine(gpu=0, save_minutes=1e-9)
    straight, _ = run(features, tmp_path / "a", settings, machine)
    with monkeypatch.context() as m:
        broken(m, {2})
        for _ in range(2):  # the same again: it goes on from step 2
            with pytest.raises(UserError, match="step 2: .*training.nonfinite to skip"):
                run(features, tmp_path / "b", settings, machine)
    weights = load_file(tmp_path / "b/nonfinite-00000002/drafter.safetensors")
    good = load_file(tmp_path / "b/step-00000002/drafter.safetensors")
    assert all(torch.equal(weights[k], v) for k, v in good.items())
    resumed, _ = run(features, tmp_path / "b", settings, machine)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
