"""The official package loads what we export and decodes it to the same tokens, cycle by cycle.

It lives in a folder and a process of its own, since its import name is ours too (`make test`
installs it into .venv/official).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_decode import END, make_drafter
from test_sampling import DEEP, FAR, PROMPT, distance, own_distribution, sampled
from test_sampling import pair as pair  # a fixture
from tiny import ROOT

from dflash.corpus import read_prompts
from dflash.decode import generate
from dflash.drafter import Drafter, load_drafter, save_drafter
from dflash.files import read_json
from dflash.sampling import Sampling
from dflash.target import load_model, read_identity

OFFICIAL = Path(os.environ.get("DFLASH_OFFICIAL", ROOT / ".venv/official"))


def official(
    tmp_path: Path, target: Path, drafter: Path, prompts: list[list[int]], limit: int, block: int
):
    """What the official package decodes, in its own process; float32, greedy, CPU."""
    needs_official()
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [
        *(sys.executable, str(ROOT / "tests/peers/official.py")),
        *("--target", str(target), "--drafter", str(drafter), "--dtype", "float32"),
        *("--prompts", str(tmp_path / "prompts.json"), "--out", str(tmp_path / "out.json")),
        *("--max-new-tokens", str(limit), "--block-size", str(block)),
    ]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(OFFICIAL)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "out.json").read_text())


def needs_official() -> None:
    assert (OFFICIAL / "dflash").is_dir(), (
        f"{OFFICIAL} holds no official package; `make test` installs it, or run pip install "
        "--no-deps --target .venv/official -r envs/official.txt"
    )


def assert_same(theirs, responses):
    assert [r["tokens"] for r in theirs] == [r.tokens for r in responses]
    assert [r["accepted_plus_one"] for r in theirs] == [r.cycles for r in responses]


def test_the_workflows_export_decodes_the_same(finished, tmp_path):
    folder = finished[0] / "results"
    identity = read_identity(folder / "target/identity.json")
    prompts = [p for p in read_prompts(folder / "corpus/toy.parquet") if p.split == "heldout"][:20]
    ids = [p.prompt_ids for p in prompts]
    drafter = load_drafter(folder / "export/small")
    responses, _ = generate(
        load_model(identity, "float32"), ids, 40, identity.eos_token_ids, drafter
    )
    theirs = official(tmp_path, Path(identity.folder), folder / "export/small", ids, 40, 4)
    assert_same(theirs, responses)
    gained = [x for r in responses for x in r.cycles]
    assert len(set(gained)) > 1, "a drafter that is never or always right shows nothing"


@pytest.mark.parametrize(
    ("shape", "block"),
    [(dict(block=8), 8), (dict(block=8), 5), (dict(block=6, layers=3, sliding=5), 6)],
)
def test_random_pairs(tiny_qwen3, identity_of, tmp_path, shape, block):
    identity = identity_of(tiny_qwen3)
    drafter = make_drafter(**shape).float()
    (tmp_path / "drafter").mkdir()
    save_drafter(tmp_path / "drafter", drafter, "bfloat16")
    drafter = load_drafter(tmp_path / "drafter")
    ids = [[5, 9, 200, 31], [7], list(range(100, 130)), [50, 60, 70]]
    model = load_model(identity, "float32")
    responses, _ = generate(model, ids, 20, [END], drafter, block_size=block)
    assert_same(official(tmp_path, tiny_qwen3, tmp_path / "drafter", ids, 20, block), responses)


def test_sampled_responses_have_the_same_distribution(pair, tmp_path):
    """Ours and theirs against each other, and both against the target's exact probabilities.

    Their loop draws one at a time. DFLASH_DRAWS=20000 gives the test its full strength.
    """
    needs_official()
    draws = int(os.environ.get("DFLASH_DRAWS", 1500))
    model, drafter = pair
    sampling = Sampling(1.2, top_k=4, top_p=0.95)
    model.save_pretrained(tmp_path / "target")
    (tmp_path / "drafter").mkdir()
    save_drafter(tmp_path / "drafter", drafter, "float32")
    shape = {"temperature": 1.2, "top_k": 4, "top_p": 0.95, "tokens": DEEP, "prompt": PROMPT}
    places = {"target": str(tmp_path / "target"), "drafter": str(tmp_path / "drafter")}
    (tmp_path / "settings.json").write_text(json.dumps(shape | places | {"draws": draws}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/peers/official_samples.py"), tmp_path / "settings.json"],
        env=os.environ | {"PYTHONPATH": str(OFFICIAL)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = Counter(map(tuple, json.loads(done.stdout)))
    ours, _ = sampled(model, sampling, drafter, draws)
    expected = own_distribution(model, sampling)
    assert distance(theirs, expected) < FAR and distance(ours, expected) < FAR
    assert two_sample_distance(ours, theirs) < FAR
    other, _ = sampled(model, Sampling(0.8, top_k=4, top_p=0.95), drafter, draws)
    assert two_sample_distance(other, theirs) > 2 * FAR  # the test sees a wrong temperature


def two_sample_distance(a: Counter, b: Counter) -> float:
    """Chi-square of two equally large samples, in standard deviations above its mean."""
    assert sum(a.values()) == sum(b.values())
    common = {o for o in a | b if a[o] + b[o] >= 20}
    rest = [sum(n for o, n in counts.items() if o not in common) for counts in (a, b)]
    cells = [(a[o], b[o]) for o in common] + ([tuple(rest)] if sum(rest) >= 20 else [])
    degrees = len(cells) - 1
    return (sum((x - y) ** 2 / (x + y) for x, y in cells) - degrees) / (2 * degrees) ** 0.5


def test_exported_folder_is_the_published_format(finished):
    folder = finished[0] / "results/export/small"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    config = read_json(folder / "config.json")
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["num_target_layers"] == 4 and config["block_size"] == 4
    assert config["dflash_config"] == {
        "mask_token_id": 3, "target_layer_ids": [0, 1, 2], "block_size": 4,
    }  # fmt: skip
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"] is None and config["use_sliding_window"] is False
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as f:
        names = set(f.keys())
        assert {f.get_tensor(n).dtype for n in names} == {torch.bfloat16}
    assert len(names) == 11 * config["num_hidden_layers"] + 3
    assert names == set(Drafter(load_drafter(folder).config).state_dict())
    assert not any("mask_hidden" in n or n.startswith("model.") for n in names)
