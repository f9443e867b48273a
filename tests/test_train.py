"""Training: the same update however it is split, the same weights however often it was stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash import checkpoint, config, extract, gradient, loader, monitor, ranks, recipe, train
from dflash.data import pack
from dflash.errors import UserError
from dflash.initial import new_drafter
from dflash.loader import Stream, frequent_tokens, load
from dflash.loss import slot_weights
from dflash.target import (
    load_embedding_and_head,
    load_final_norm,
    load_tensors,
    read_identity,
)

SETTINGS = {
    "block_size": 4,
    "num_hidden_layers": 1,
    "taps": [0, 1, 2],
    "mask_token_id": 3,
    "training": {
        "epochs": 6.0,
        "documents_per_step": 5,
        "anchors_per_document": 8,
        "lr": 3e-3,
        "dtype": "float32",
        "validation": {"share": 0.0},
    },
}
MACHINE = config.TrainMachine(gpu=0)


@pytest.fixture(scope="module")
def features(finished):
    """Identity, manifests, opened shards and tap positions of the tiny workflow."""
    folder = finished[0] / "results"
    identity = read_identity(folder / "target/identity.json")
    manifests = sorted(map(str, (folder / "features").glob("*/*.json")))
    return identity, manifests, *train.open_features(manifests, identity, [0, 1, 2])


def drafter_settings(**training) -> config.Drafter:
    data = SETTINGS | {"training": SETTINGS["training"] | training}
    return config.Drafter.model_validate(data)


def run(features, tmp_path, settings=None, machine=MACHINE):
    identity, _, shards, positions = features
    tmp_path.mkdir(exist_ok=True)
    settings = settings or drafter_settings()
    one = ranks.one(torch.device("cpu"))
    return train.Trainer(settings, machine, identity, shards, positions, tmp_path, one).run()


def state(drafter) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in drafter.state_dict().items()}


def one_gradient(
    features, micro_batch: int, checkpointing: str, tokens=None, machine=None, **training
):
    """Gradients of the first step."""
    identity, _, shards, positions = features
    settings = drafter_settings(clip=1e9, **training)
    asks_target = config.needs_last_hidden(settings)
    drafter = new_drafter(settings, identity).train()
    stream = Stream(shards, positions, 0, 8, 4, asks_target, kept=tokens)
    norm = load_final_norm(identity) if asks_target else None
    head = gradient.Head(*load_embedding_and_head(identity), torch.float32, norm)
    if tokens is not None:
        head.reduce(tokens)
    machine = config.TrainMachine(
        micro_batch=micro_batch, checkpointing=checkpointing, loss_rows=7, **machine or {}
    )
    weights = gradient.weights_of_slots(settings)
    dtype = gradient.DTYPES[settings.training.dtype]

    def make(documents, places):
        anchors_of = [p.anchors_N for p in places]
        return gradient.make_pack(documents, anchors_of, weights, drafter, machine, dtype, head)

    plan = stream.plan(0, 5, weights)
    clock = monitor.Clock(torch.device("cpu"))
    with closing(load(stream, [plan], machine, make)) as loaded:
        _, packs = next(loaded)
        sums = gradient.accumulate(
            drafter, packs, plan.mass, head, settings.training, machine, clock
        )
    row = dataclasses.asdict(sums) | {"mass": plan.mass}
    assert row.pop("sample_ids") == []  # none without a loss
    return row, {n: p.grad for n, p in drafter.named_parameters()}


def test_any_split_of_a_step_gives_the_same_gradient(features):
    row, whole = one_gradient(features, 8, "none")
    assert row["loss"] > 0 and row["blocks"] > 5
    for micro_batch, checkpointing in [(1, "none"), (2, "layer"), (8, "layer")]:
        other, split = one_gradient(features, micro_batch, checkpointing)
        assert math.isclose(other["loss"], row["loss"], rel_tol=1e-5)
        for name, grad in whole.items():
            torch.testing.assert_close(split[name], grad, rtol=1e-4, atol=1e-6)


def test_updates_are_those_of_packs_that_are_all_made_first(with_last, tmp_path):
    """Bit for bit: reading pack by pack, in threads, moves no rounding."""
    identity, _, shards, positions = with_last
    loss = {"labels": "soft", "positions": "all", "head_tokens": 60}
    settings = drafter_settings(max_steps=4, loss=loss)
    machine = config.TrainMachine(micro_batch=2, loader_threads=3)
    found, facts = run(with_last, tmp_path / "r", settings, machine)

    drafter = new_drafter(settings, identity).train()
    (optimizer,) = recipe.make_optimizers(drafter, settings.training)
    weights = gradient.weights_of_slots(settings)
    kept = frequent_tokens(shards, 60, identity.vocab_size, True)
    head = gradient.Head(
        *load_embedding_and_head(identity), torch.float32, load_final_norm(identity)
    )
    head.reduce(kept)
    stream = Stream(shards, positions, 0, 8, 4, True, True)
    lost = 0
    for step in range(4):
        places = [stream.place(step * 5 + i) for i in range(5)]
        packs = []
        for i in (0, 2, 4):
            documents = [stream.read(p) for p in places[i : i + 2]]
            rows = gradient.group_rows(drafter, documents, machine, torch.float32)
            anchors_of = [p.anchors_N for p in places[i : i + 2]]
            packs.append(pack(documents, anchors_of, weights, rows))
        lost += sum(map(head.relabel, packs))
        mass = sum(p.mass for p in packs)
        optimizer.zero_grad(set_to_none=True)
        for packed in packs:
            total, _ = gradient.pack_loss(drafter, packed, head, settings.training, machine)
            (total / mass).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        recipe.set_rates([optimizer], recipe.rate(step, 4, settings.training))
        optimizer.step()
    assert lost == facts["history"][-1]["labels_outside_head"] > 0
    for name, value in state(drafter).items():
        assert torch.equal(value, found.state_dict()[name]), name


def test_one_pack_of_a_step_is_in_memory(features, tmp_path, monkeypatch):
    original, hidden, live = gradient.pack_loss, [], []

    def counting(drafter, packed, *args):
        hidden.append(weakref.ref(packed.taps_SD))
        live.append(sum(ref() is not None for ref in hidden))
        return original(drafter, packed, *args)

    monkeypatch.setattr(gradient, "pack_loss", counting)
    machine = config.TrainMachine(micro_batch=1, loader_threads=0)
    run(features, tmp_path / "r", drafter_settings(max_steps=2), machine)
    assert live == [1] * 10


def test_waiting_for_data_is_told(features, tmp_path):
    machine = config.TrainMachine(loader_threads=0)
    _, facts = run(features, tmp_path / "r", drafter_settings(max_steps=3), machine)
    (row,) = map(json.loads, (tmp_path / "r/metrics.jsonl").read_text().splitlines())
    assert 0 < row["seconds"]["data"] < 3 * row["seconds_per_step"]
    assert 0 < facts["shares"]["data"] < 1


def test_padding_to_constant_shapes_changes_no_gradient(features):
    row, plain = one_gradient(features, 8, "none")
    for attention in ("chunked", "split"):
        fixed = {"pad_context": 999, "pad_blocks": 77, "attention": attention}
        other, padded = one_gradient(features, 8, "none", machine=fixed)
        assert {k: v for k, v in other.items() if k != "loss"} == pytest.approx(
            {k: v for k, v in row.items() if k != "loss"}, rel=1e-5
        )
        assert math.isclose(other["loss"], row["loss"], rel_tol=1e-6)
        for name, grad in plain.items():
            assert not padded[name].isnan().any()
            torch.testing.assert_close(padded[name], grad, rtol=1e-4, atol=1e-6)


def test_a_pack_larger_than_its_constant_shape_is_refused(features):
    for fixed in ({"pad_context": 30, "pad_blocks": 77}, {"pad_context": 999, "pad_blocks": 3}):
        with pytest.raises(UserError, match="raise them or lower micro_batch"):
            one_gradient(features, 8, "none", machine=fixed)


def test_shards_made_in_different_ways_are_told(features, monkeypatch, capsys):
    def opened(path, expect, manifest):
        shard = SimpleNamespace(attributes={"compute_dtype": "float32", "codec": manifest.stem})
        shard.tap_positions, shard.close = (lambda ids: [0]), (lambda: None)
        return shard

    monkeypatch.setattr(train, "open_shard", opened)
    train.open_features(["a/raw.json", "b/raw.json"], features[0], [0])
    assert capsys.readouterr().out == ""
    train.open_features(["a/raw.json", "b/int8.json"], features[0], [0])
    assert "different ways (float32, int8; float32, raw)" in capsys.readouterr().out


def test_constant_shapes_are_checked_before_the_first_step(features, tmp_path):
    """However late the pack comes that does not fit."""
    settings = drafter_settings(max_steps=40, documents_per_step=3)
    stream = loader.Stream(*features[2:], settings.training.seed, 8, settings.block_size)
    most = stream.largest_pack(0, 40, 3, 2)
    plans = [stream.plan(s, 3, torch.ones(4)) for s in range(40)]
    packs = [p.places[i : i + 2] for p in plans for i in (0, 2)]
    rows = [sum(p.length for p in pack) for pack in packs]
    blocks = [sum(len(p.anchors_N) for p in pack) for pack in packs]
    assert most == (max(rows), max(blocks)) and rows[0] < most[0]
    machine = config.TrainMachine(micro_batch=2, pad_context=most[0], pad_blocks=most[1])
    with pytest.raises(UserError, match=f"up to {most[0]} tokens and {most[1]} blocks, more than"):
        run(features, tmp_path / "r", settings, machine)
    assert (tmp_path / "r/metrics.jsonl").read_text() == ""


@pytest.fixture(scope="module")
def with_last(finished, tmp_path_factory):
    """As `features`, with the target's last hidden state."""
    results, folder = finished[0] / "results", tmp_path_factory.mktemp("last")
    settings = {"stage": "extract", "version": 1, "taps": [0, 1, 2], "dtype": "float32"}
    settings |= {"max_tokens": 3072, "last_hidden": True}
    for tokens in sorted((results / "tokens/toy").glob("*.parquet")):
        argv = ["--settings", json.dumps(settings), "--tokens", str(tokens), "--threads", "1"]
        argv += ["--identity", str(results / "target/identity.json")]
        extract.main([*argv, "--out", str(folder / f"{tokens.stem}.zarr")])
    identity = read_identity(results / "target/identity.json")
    manifests = sorted(map(str, folder.glob("*.json")))
    return identity, manifests, *train.open_features(manifests, identity, [0, 1, 2], True)


KINDS = list(itertools.product(("data", "argmax", "soft"), ("decay", "dpace"), (False, True)))


@pytest.mark.parametrize(("labels", "weights", "reduced"), KINDS)
def test_any_split_gives_the_same_gradient_for_every_loss(with_last, labels, weights, reduced):
    loss = {"labels": labels, "weights": weights}
    tokens = frequent_tokens(with_last[2], 40, 320) if reduced else None
    row, whole = one_gradient(with_last, 8, "none", tokens, loss=loss)
    assert row["loss"] > 0 and (row["outside_head"] > 0) is reduced
    if weights == "dpace":
        assert row["mass"] == round(row["mass"]) > row["blocks"]  # the count of supervised slots
    for micro_batch in (1, 2):
        other, split = one_gradient(with_last, micro_batch, "layer", tokens, loss=loss)
        assert other["mass"] == pytest.approx(row["mass"], rel=1e-12)
        assert math.isclose(other["loss"], row["loss"], rel_tol=1e-5)
        for name, grad in whole.items():
            torch.testing.assert_close(split[name], grad, rtol=1e-4, atol=1e-6)


def test_the_targets_own_argmax_is_what_it_answered(with_last):
    """Its answers are greedy, so a shift by one position, or another norm, would show at once."""
    identity, _, shards, positions = with_last
    head = gradient.Head(
        *load_embedding_and_head(identity), torch.float32, load_final_norm(identity)
    )
    stream = Stream(shards, positions, 0, 8, 4, True)
    same = {-1: [], 0: [], 1: []}
    for i in range(len(stream)):
        place = stream.place(i)
        packed = pack([stream.read(place)], [place.anchors_N], slot_weights(4, 2.0))
        on = packed.labels_NB >= 0
        for shift, found in same.items():
            rows = (packed.target_rows_NB[on] + shift).clamp_max(len(packed.last_SH) - 1)
            logits = head.norm(packed.last_SH[rows].float()) @ head.head_VH.T
            found.append(logits.argmax(-1) == packed.labels_NB[on])
    share = {shift: float(torch.cat(found).float().mean()) for shift, found in same.items()}
    assert share[0] > 0.97 and max(share[-1], share[1]) < 0.5, share


def test_labels_of_the_target_equal_greedy_data(with_last):
    """On greedy answers both labels are the same tokens, but for near ties turned by rounding."""
    row, grads = one_gradient(with_last, 8, "none")
    other, own = one_gradient(with_last, 8, "none", loss={"labels": "argmax"})
    assert row["mass"] == other["mass"]
    assert math.isclose(other["loss"], row["loss"], rel_tol=0.05)
    for name, grad in grads.items():
        assert (own[name] - grad).norm() < 0.3 * grad.norm() + 1e-6, name


@pytest.mark.parametrize("loss", [{"labels": "soft"}, {"labels": "soft", "weights": "dpace"}])
def test_training_on_the_targets_distribution_learns(with_last, tmp_path, loss):
    _, facts = run(with_last, tmp_path / "r", drafter_settings(epochs=30.0, loss=loss))
    first, last = facts["history"][0], facts["history"][-1]
    assert last["accepted_by_position"] > first["accepted_by_position"] + 0.3
    if loss == {"labels": "soft"}:  # D-PACE's factors grow as the drafter improves
        assert last["loss"] < 0.5 * first["loss"]


def test_training_on_the_targets_distribution_in_bfloat16(with_last, tmp_path):
    losses = []
    for dtype in ("float32", "bfloat16"):
        settings = drafter_settings(max_steps=3, dtype=dtype, loss={"labels": "soft"})
        losses.append(run(with_last, tmp_path / dtype, settings)[1]["history"][-1]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_soft_labels_through_the_stage(features, with_last, finished, tmp_path, refusal):
    """As Snakemake runs it; and features without the last hidden state are refused in a sentence."""
    drafter = drafter_settings(max_steps=3, loss={"labels": "soft", "weights": "dpace"})
    workflow = config.demo_workflow().model_copy(update={"drafters": {"x": drafter}})
    out = tmp_path / "out"
    argv = ["--settings", config.stage_settings(workflow, "train", "x"), "--machine", '{"gpu": 0}']
    argv += ["--identity", str(finished[0] / "results/target/identity.json"), "--name", "x"]
    argv += ["--runs", str(tmp_path / "runs"), "--out", str(out), "--threads", "1", "--features"]
    said = refusal(train.main, *argv, *features[1])
    assert "holds no last hidden state, but `training.loss.labels`" in said
    assert "run extract again with this drafter in the settings" in said and not out.exists()
    train.main([*argv, *with_last[1]])
    facts = json.loads((out / "training.json").read_text())
    assert facts["settings"]["training"]["loss"]["labels"] == "soft" and facts["steps"] == 3


def test_bfloat16_stays_close_to_float32(features):
    row, whole = one_gradient(features, 8, "layer")
    other, half = one_gradient(features, 8, "layer", dtype="bfloat16")
    assert math.isclose(other["loss"], row["loss"], rel_tol=2e-2)
    for name, grad in whole.items():
        assert (half[name] - grad).norm() < 0.1 * grad.norm() + 1e-6, name
        assert half[name].dtype == torch.float32


def test_training_learns(features, tmp_path):
    _, facts = run(features, tmp_path / "r", drafter_settings(epochs=30.0))
    first, last = facts["history"][0], facts["history"][-1]
    assert last["loss"] < 0.5 * first["loss"]
    assert last["accepted_by_position"] > first["accepted_by_position"] + 0.3
    assert (tmp_path / "r" / "metrics.jsonl").read_text().count("\n") == len(facts["history"])


RECIPES = {
    "data": ({}, {}),
    "soft, in prompts too, constant shapes": (
        {"labels": "soft", "positions": "all", "weights": "dpace"},
        {"pad_context": 999, "pad_blocks": 99},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_stopped_and_resumed_equals_undisturbed(with_last, tmp_path, monkeypatch, recipe):
    loss, shape = RECIPES[recipe]
    features, settings = with_last, drafter_settings(loss=loss)
    straight, facts = run(features, tmp_path / "a", settings)
    # saves after every step
    machine = config.TrainMachine(save_minutes=1e-9, keep_last=2, **shape)
    steps, original = facts["steps"], train.Trainer._step

    for stop in (3, 4, steps - 2):

        def dying(trainer, plan, *args, stop=stop):
            if plan.step == stop:
                raise KeyboardInterrupt
            return original(trainer, plan, *args)

        monkeypatch.setattr(train.Trainer, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            run(features, tmp_path / "b", settings, machine)
        assert not [t for t in threading.enumerate() if t.name.startswith("loader")]
        kept = [p.name for p in checkpoint.checkpoints(tmp_path / "b")]
        assert kept == [f"step-{stop - 1:08d}", f"step-{stop:08d}"]
    monkeypatch.setattr(train.Trainer, "_step", original)
    if shape:  # other groups round otherwise; the same padding undisturbed
        straight, facts = run(features, tmp_path / "c", settings, machine)
    resumed, again = run(features, tmp_path / "b", settings, machine)
    for name, value in state(straight).items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    timing = {"seconds_per_step", "seconds", "tokens_per_second", "peak_memory_mb"}
    for a, b in zip(again["history"], facts["history"], strict=True):  # also across the stops
        assert {k: v for k, v in a.items() if k not in timing} == {
            k: v for k, v in b.items() if k not in timing
        }


def test_sigterm_saves_and_asks_to_be_run_again(features, finished, tmp_path):
    _, manifests, _, _ = features
    settings = json.loads(drafter_settings(epochs=400.0).model_dump_json(exclude={"extends"}))
    command = [
        *(sys.executable, "-m", "dflash.train", "--settings", json.dumps(settings)),
        *("--machine", '{"save_minutes": 60.0}', "--name", "x"),
        *("--identity", str(finished[0] / "results/target/identity.json")),
        *("--features", *manifests),
        *("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--threads", "1"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = list((tmp_path / "runs").glob("*/metrics.jsonl"))
        if lines and lines[0].read_text().count("\n") > 1:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == train.STATUS_INTERRUPTED, err
    assert "run the same command again" in out
    assert len(list((tmp_path / "runs").glob("*/step-*"))) == 1 and not (tmp_path / "out").exists()


def test_slots_weigh_alike_before_dpace():
    assert gradient.weights_of_slots(drafter_settings()).tolist() == slot_weights(4, 2.0).tolist()
    even = drafter_settings(loss={"weights": "dpace", "gamma": 2.0})
    assert gradient.weights_of_slots(even).tolist() == [0, 1, 1, 1]


def test_two_trainers_in_one_run_directory_are_refused(tmp_path):
    held = checkpoint.lock(tmp_path)
    with pytest.raises(UserError, match="another trainer"):
        checkpoint.lock(tmp_path)
    held.close()
    checkpoint.lock(tmp_path).close()


def test_a_finished_training_says_so(features, tmp_path, capsys):
    run(features, tmp_path / "r")
    capsys.readouterr()
    run(features, tmp_path / "r")
    assert "finished already; delete" in capsys.readouterr().out


def test_damaged_checkpoint_is_named(features, tmp_path):
    run(features, tmp_path / "r")
    newest = checkpoint.checkpoints(tmp_path / "r")[-1]
    path = newest / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=f"{newest.name}: damaged checkpoint"):
        run(features, tmp_path / "r")


def test_half_a_line_of_metrics_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"step": 30}\n{"st')
    assert checkpoint.cut_metrics(tmp_path, 20, 0) == [{"step": 10}, {"step": 20}]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 10}\n{"step": 20}\n'


def test_fingerprint_tells_settings_features_and_target_apart(features):
    identity, _, shards, _ = features
    base = checkpoint.fingerprint({"lr": 1}, identity, shards)
    assert base == checkpoint.fingerprint({"lr": 1}, identity, shards[::-1])
    assert base != checkpoint.fingerprint({"lr": 2}, identity, shards)
    assert base != checkpoint.fingerprint({"lr": 1}, identity, shards[:1])


def test_start_from_the_target(features):
    identity = features[0]
    drafter = new_drafter(drafter_settings(), identity)
    names = ["model.norm.weight", "model.layers.3.mlp.up_proj.weight"]
    own = load_tensors(identity, names)
    assert torch.equal(drafter.norm.weight, own[names[0]].float())
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, own[names[1]].float())
    taps = torch.randn(5, 3 * 64)
    torch.testing.assert_close(drafter.fc(taps), taps[:, -64:])
    scratch = drafter_settings().model_copy(update={"start": "random"})
    assert not torch.equal(
        new_drafter(scratch, identity).layers[0].mlp.up_proj.weight, own[names[1]].float()
    )


def test_reduced_head_gives_the_same_loss_as_the_same_columns(features):
    identity = features[0]
    embed, head_weight = load_embedding_and_head(identity)
    tokens = np.array([4, 9, 17, 30])
    head = gradient.Head(embed, head_weight, torch.float32)
    head.reduce(tokens)
    assert torch.equal(head.head_VH, head_weight[torch.from_numpy(tokens)].float())
    stream = Stream(*features[2:], 0, 8, 4)
    place = stream.place(0)
    packed = pack([stream.read(place)], [place.anchors_N], slot_weights(4, 2.0))
    before = packed.labels_NB.clone()
    lost = head.relabel(packed)
    inside = torch.isin(before, torch.from_numpy(tokens))
    assert lost == int((before >= 0).sum() - inside.sum())
    assert (packed.labels_NB[~inside] == -1).all() and (packed.weights_NB[~inside] == 0).all()
    assert torch.equal(torch.from_numpy(tokens)[packed.labels_NB[inside]], before[inside])


def test_a_loss_that_is_not_finite_stops_and_names_the_samples(features, tmp_path, monkeypatch):
    original = gradient.pack_loss

    def broken(*args):
        total, correct = original(*args)
        return total * math.nan, correct

    monkeypatch.setattr(gradient, "pack_loss", broken)
    with pytest.raises(UserError, match="not finite .*samples [0-9a-f]{16}"):
        run(features, tmp_path / "r")
    assert checkpoint.checkpoints(tmp_path / "r") == []


def test_taps_that_are_not_stored_are_refused(features):
    identity, manifests, _, _ = features
    with pytest.raises(UserError, match=r"\[0, 1, 2\].*extract"):
        train.open_features(manifests, identity, [0, 3])


def test_features_of_another_target_are_refused(features):
    import dataclasses

    identity, manifests, _, _ = features
    other = dataclasses.replace(identity, weights_sha256="0" * 64)
    with pytest.raises(UserError, match="weights_sha256"):
        train.open_features(manifests, other, [0, 1, 2])


def test_accepted_counts_the_leading_run():
    right = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    assert gradient.accepted_by_position(right).tolist() == [3, 1, 5]


def test_weights_do_not_depend_on_the_hash_seed(features, tmp_path):
    """Nothing on the way iterates a set or dict of names in hash order."""
    drafter, _ = run(features, tmp_path / "r", drafter_settings(max_steps=3))
    data = b"".join(v.numpy().tobytes() for v in state(drafter).values())
    code = (
        "import sys, hashlib, torch; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "torch.set_num_threads(1)\n"
        "import test_train as t\n"
        "from dflash import train; from dflash.target import read_identity\n"
        "i = read_identity(sys.argv[2]); m = sys.argv[4:]\n"
        "f = (i, m, *train.open_features(m, i, [0, 1, 2]))\n"
        "d, _ = t.run(f, Path(sys.argv[3]), t.drafter_settings(max_steps=3))\n"
        "print(hashlib.sha256(b''.join(v.numpy().tobytes() for v in d.state_dict().values()))"
        ".hexdigest())\n"
    )
    identity_path = features[1][0].split("/features/")[0] + "/target/identity.json"
    command = [sys.executable, "-c", code, os.path.dirname(__file__), identity_path]
    done = subprocess.run(
        [*command, str(tmp_path / "other"), *features[1]],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == hashlib.sha256(data).hexdigest()


def test_gains_of_targets_that_multiply_by_one_plus_weight(features, monkeypatch):
    """A drafter's norm multiplies by its weight alone, so such targets' gains are raised by one."""
    settings, identity = drafter_settings(), features[0]
    assert train.target.norm_offset(identity) == 0
    plain = new_drafter(settings, identity)

    class OnePlus(torch.nn.RMSNorm):
        def forward(self, x):
            return torch.nn.functional.rms_norm(x, self.normalized_shape) * (1 + self.weight)

    monkeypatch.setattr(train.target, "load_final_norm", lambda *a: OnePlus(identity.hidden_size))
    raised = new_drafter(settings, identity)
    torch.testing.assert_close(raised.norm.weight, plain.norm.weight + 1)
    for name, p in plain.layers.named_parameters():
        other = raised.layers.get_parameter(name)
        copied = "layernorm" in name
        torch.testing.assert_close(other, p + 1 if copied else p)


def test_help_keeps_commands_on_their_lines(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert (
        "\n    torchrun --standalone --nproc-per-node 2 -m dflash.train ...\n"
        in capsys.readouterr().out
    )
