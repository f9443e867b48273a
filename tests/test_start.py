"""Training a drafter further: what is taken from the checkpoint, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_decode import make_drafter
from test_train import SETTINGS
from test_workflow import changed
from tiny import planned, snakemake

from dflash import checkpoint, config, initial, train
from dflash.drafter import Drafter, load_drafter, save_drafter
from dflash.errors import UserError
from dflash.files import read_json
from dflash.target import read_identity

TAPS = [0, 1, 2]


def published(folder: Path, **changes) -> Path:
    """A published drafter that fits the tiny targets, with a shape that no setting's default gives."""
    shape = dict(num_attention_heads=8, num_key_value_heads=1, head_dim=8, intermediate_size=48,
                 rope_theta=5e5, target_layer_ids=tuple(TAPS), block_size=8,
                 layer_types=("sliding_attention", "full_attention"), sliding_window=9)  # fmt: skip
    drafter = Drafter(replace(make_drafter().config, **shape | changes))
    drafter.init_weights(5)
    folder.mkdir()
    save_drafter(folder, drafter, "bfloat16")
    return folder


def settings(start: Path | str, **changes) -> dict:
    return SETTINGS | {"start": str(start), "num_hidden_layers": 2, "taps": TAPS} | changes


def argv(folder: Path, out: Path, own: dict) -> list[str]:
    manifests = sorted(map(str, (folder / "features").glob("*/*.json")))
    return ["--settings", json.dumps(own), "--identity", str(folder / "target/identity.json"),
            "--features", *manifests, "--name", "more", "--runs", str(out / "run"),
            "--out", str(out / "drafter")]  # fmt: skip


def test_shape_and_weights_are_the_checkpoints(finished, tmp_path):
    identity = read_identity(finished[0] / "results/target/identity.json")
    start = published(tmp_path / "start")
    own = config.Drafter.model_validate(settings(start))
    drafter, given = initial.new_drafter(own, identity, start=start), load_drafter(start)
    assert all(torch.equal(drafter.state_dict()[k], v) for k, v in given.state_dict().items())
    assert all(p.requires_grad for p in drafter.parameters())
    c = drafter.config
    assert c.block_size == 4 and c.trained_for["weights_sha256"] == identity.weights_sha256
    assert c.eos_token_id == 1 and given.config.eos_token_id is None
    kept = dict(block_size=8, trained_for=None, eos_token_id=None, pad_token_id=None)
    assert replace(c, **kept) == given.config


def test_it_trains_from_there(finished, tmp_path):
    folder = finished[0] / "results"
    start = published(tmp_path / "start")
    own = settings(start)
    own["training"] = own["training"] | {"max_steps": 1, "lr": 1e-9}
    train.main(argv(folder, tmp_path, own))
    ended, given = load_drafter(tmp_path / "drafter"), load_drafter(start)
    for name, value in given.state_dict().items():
        torch.testing.assert_close(ended.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    run = read_json(next((tmp_path / "run").glob("*/fingerprint.json")))
    again = published(tmp_path / "other", rope_theta=1e4)
    prints = [
        checkpoint.fingerprint(own, read_identity(folder / "target/identity.json"), [], f)["start"]
        for f in (start, again)
    ]
    assert run["start"] == prints[0] != prints[1]


@pytest.mark.parametrize(
    ("changes", "own", "words"),
    [
        ({"vocab_size": 321}, {}, "its vocab_size is 321, the target's 320"),
        ({"num_target_layers": 6}, {}, "its num_target_layers is 6, the target's 4"),
        ({}, {"num_hidden_layers": 1}, "its num_hidden_layers is 2, the settings say 1"),
        ({}, {"mask_token_id": 4}, "its mask_token_id is 3, the settings say 4"),
        ({}, {"taps": [0, 2]}, "its target_layer_ids is [0, 1, 2], the settings say [0, 2]"),
        ({}, {"head_dim": 16}, "its head_dim is 8, the settings say 16"),
        ({}, {"sliding_window": 5}, "its sliding_window is 9, the settings say 5"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    finished, tmp_path, refusal, changes, own, words
):
    start = published(tmp_path / "start", **changes)
    said = refusal(train.main, *argv(finished[0] / "results", tmp_path, settings(start, **own)))
    assert words in said
    assert (
        said.startswith("drafters.more.start: ") and "start from a drafter of this target" in said
    )
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_does_not_say_its_targets_layers_fits_any(tmp_path):
    start = load_drafter(published(tmp_path / "start", num_target_layers=None)).config
    own = config.Drafter.model_validate(settings("random"))
    facts = config.TargetFacts(num_hidden_layers=4, hidden_size=64, vocab_size=320)
    config.check_start(own, facts, start, "drafters.more")


def test_where_a_start_may_lie():
    for start in ("target", "random", "./a", "/a", "org/name@1.0"):
        config.check(config.Drafter, {"mask_token_id": 3, "start": start}, "x")
    for start in ("org/name", "scratch", "results/drafters/a"):
        with pytest.raises(UserError, match=r"expected target, random, a folder"):
            config.check(config.Drafter, {"mask_token_id": 3, "start": start}, "x")


def test_a_start_that_cannot_be_fetched_is_refused():
    own = config.Drafter.model_validate(settings("org/no-such-drafter@1.0"))
    with pytest.raises(UserError, match=r"drafters.more.start: org/no-such-drafter@1.0 is not in"):
        initial.start_folder(own, "drafters.more")


def test_the_workflow_sees_the_checkpoint_before_any_job(finished, tmp_path):
    folder, whole, _ = finished
    start = published(tmp_path / "start")
    own = {"extends": "small", "num_hidden_layers": 2, "start": str(start)}
    assert planned(folder, changed(whole, "drafters.more", own), "--until", "train") == ["train"]
    done = snakemake(folder, changed(whole, "drafters.more", own | {"taps": [0, 2]}), "--dry-run")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "drafters.more.start" in said and "target_layer_ids" in said
