"""The exported folder: its card, its layouts, and that other programs read them as we do."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_decode import make_drafter
from tiny import ROOT

from dflash import card, export, results
from dflash.attention import Layout
from dflash.drafter import block_input, load_drafter, save_drafter
from dflash.errors import UserError
from dflash.files import read_json
from dflash.serving import launch_lines
from dflash.target import load_embedding_and_head, read_identity

PEERS_PYTHON = os.environ.get("DFLASH_PEERS_PYTHON")


def facts(drafter, identity, **changes) -> card.Facts:
    """Facts of a drafter that was never trained or measured."""
    base = dict(name="d", config=drafter.config, identity=identity, training=None, evaluations=[],
                corpus=[], tokens=[], licence=None, formats=["dflash"])  # fmt: skip
    return card.Facts(**base | changes)


def head_of(text: str) -> dict:
    """The YAML front matter of a card."""
    start, head, _ = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(head)


# --- the card -----------------------------------------------------------------------------------


def test_the_workflows_card_states_what_was_measured(finished):
    folder = finished[0] / "results"
    text = (folder / "export/small/README.md").read_text()
    e = results.read(results.Evaluation, folder / "evaluate/small/heldout.json")
    o, (low, high) = e.overall, e.overall.tau_mean_interval
    row = next(line for line in text.splitlines() if line.startswith("| all |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == [str(o.responses), f"{o.tau_mean:.2f} ({low:.2f} to {high:.2f})"]
    assert cells[3].split(" ")[0] == f"{o.tau_pooled:.2f}" and cells[4] == f"{o.speed_up:.2f}"
    assert cells[5] == f"{o.lossless.identical} of {o.lossless.checked}"
    assert "| accepted | " + " | ".join(f"{x:.3f}" for x in o.per_slot) + " |" in text
    assert all(f"| {kind} |" in text for kind in e.per_kind)
    counts = read_json(folder / "corpus/toy.json")
    tokens = [read_json(p) for p in sorted((folder / "tokens/toy").glob("*.json"))]
    held = sum(counts["kinds"]["heldout"].values())
    documents, answers = (sum(t[k] for t in tokens) for k in ("documents", "response_tokens"))
    assert f"| toy | {counts['kept']} | {held} | {documents} |" in text and f"{answers:,} |" in text
    assert "Every answer was generated anew by the target itself" in text
    assert str(finished[0]) not in text and "/tmp" not in text
    assert read_identity(folder / "target/identity.json").weights_sha256 in text


def test_each_precision_says_what_it_can(tiny_qwen3, identity_of):
    figures = {
        "responses": 3, "cycles": 9, "tau_mean": 1.5, "tau_mean_interval": [1.25, 1.75],
        "tau_pooled": 1.4, "tau_pooled_interval": [1.3, 1.5], "per_slot": [0.4], "speed_up": None,
        "lossless": {"checked": 3, "identical": 2, "divergences": 1, "near_ties": 1},
    }  # fmt: skip
    task = {"drafter": "d", "task": "t", "block_size": 2, "max_new_tokens": 8, "timed": [],
            "responses": [], "overall": figures, "per_kind": {}}  # fmt: skip
    for more, words in (
        ({"dtype": "float32"}, "greedy, blocks of 2, float32, at most 8 new tokens."),
        ({"dtype": "bfloat16", "temperature": 1.0}, "sampled at temperature 1, blocks of 2, bfl"),
    ):
        e = results.Evaluation.model_validate(task | more)
        text = card.model_card(facts(make_drafter(), identity_of(tiny_qwen3), evaluations=[e]))
        last = "2 of 3" if e.dtype == "float32" else "1 tokens differ, 1 of them near-ties"
        row = f"| all | 3 | 1.50 (1.25 to 1.75) | 1.40 (1.30 to 1.50) |  | {last} |"
        assert row in text and words in text


def test_front_matter_is_what_the_hub_reads(tiny_qwen3, identity_of):
    from huggingface_hub import ModelCard

    identity = replace(identity_of(tiny_qwen3), model="org/chat@1a2b", revision="1a2b3c")
    text = card.model_card(facts(make_drafter(), identity, licence="apache-2.0"))
    head = ModelCard(text).data.to_dict()
    assert head == head_of(text) | {"tags": ["dflash", "speculative-decoding"]}
    assert head["base_model"] == "org/chat" and head["license"] == "apache-2.0"
    assert "vllm serve org/chat --revision 1a2b3c" in text and "download org/chat first" in text
    assert "Not measured." in text and "was not trained by the workflow" in text


def test_a_target_in_a_folder_goes_by_its_name(tiny_qwen3, identity_of):
    text = card.model_card(facts(make_drafter(), identity_of(tiny_qwen3)))
    assert "base_model" not in head_of(text) and str(tiny_qwen3.parent) not in text
    assert "a DFlash drafter for tiny_qwen3" in text and "`TARGET` is tiny_qwen3." in text


def test_a_licence_is_chosen_by_a_person(tiny_qwen3, identity_of, copy_of):
    target = copy_of(tiny_qwen3)
    text = card.model_card(facts(make_drafter(), identity_of(target)))
    assert "license" not in head_of(text)
    assert "Not chosen yet" in text and "The target's folder states no licence." in text
    (target / "README.md").write_text("---\nlicense: mit\ntags: [x]\n---\n# A model\n")
    text = card.model_card(facts(make_drafter(), identity_of(target), licence="cc-by-4.0"))
    assert head_of(text)["license"] == "cc-by-4.0" and text.endswith(
        "cc-by-4.0. The target states mit.\n"
    )
    for odd in ("---\nlicense: [\n---\n", "no front matter", "---\n- a\n---\n"):
        (target / "README.md").write_text(odd)
        assert card.target_licence(identity_of(target)) is None


def test_launch_lines_count_slots_as_each_engine_does():
    lines = launch_lines("/models/my chat", "org/d", 16)
    assert '"num_speculative_tokens":15' in lines["vLLM"] and '"method":"dflash"' in lines["vLLM"]
    assert "--speculative-num-draft-tokens 16" in lines["SGLang"]
    assert "--spec-draft-n-max 15" in lines["llama.cpp"]
    assert all("'/models/my chat'" in line for line in lines.values())


# --- the entrypoint -------------------------------------------------------------------------------


def run(identity_path: Path, drafter: Path, out: Path, **settings) -> None:
    export.main(["--settings", json.dumps(settings), "--identity", str(identity_path),
                 "--drafter", str(drafter), "--out", str(out)])  # fmt: skip


def test_an_export_records_its_target_and_is_for_no_other(
    tiny_qwen3, tiny_llama, identity_file, identity_of, tmp_path, refusal
):
    (tmp_path / "d").mkdir()
    save_drafter(tmp_path / "d", make_drafter().float(), "float32")
    run(identity_file(tiny_qwen3), tmp_path / "d", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    config = load_drafter(tmp_path / "out").config
    assert config.trained_for["weights_sha256"] == identity_of(tiny_qwen3).weights_sha256
    assert str(tmp_path) not in (tmp_path / "out/config.json").read_text()
    said = refusal(
        export.main, "--identity", identity_file(tiny_llama), "--drafter", tmp_path / "out",
        "--out", tmp_path / "other",
    )  # fmt: skip
    assert "was trained for tiny_qwen3" in said and not (tmp_path / "other").exists()


def test_unknown_formats_are_refused(tiny_qwen3, identity_file, tmp_path, refusal):
    for formats, words in (
        (["speculators"], "expected dflash, alone or with speculators"),
        (["gguf"], "export: `formats"),
    ):
        said = refusal(
            export.main, "--settings", json.dumps({"formats": formats}), "--drafter", tmp_path,
            "--identity", identity_file(tiny_qwen3), "--out", tmp_path / "out",
        )  # fmt: skip
        assert words in said


# --- the speculators layout -----------------------------------------------------------------------


def test_speculators_layout(tiny_qwen3, identity_of):
    identity = identity_of(tiny_qwen3)
    c = make_drafter().config
    data = export.speculators_json(c, identity)
    assert data["speculators_model_type"] == "dflash" and data["block_size"] == 6
    assert data["aux_hidden_state_layer_ids"] == [1, 3] and c.target_layer_ids == (0, 2)
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    # vLLM reads this flag for full layers too, and a missing or false one as causal
    assert data["sliding_window_non_causal"] is True
    assert data["speculators_config"]["verifier"] == {
        "name_or_path": None, "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    assert "rope_theta" not in data["transformer_layer_config"]
    hub = export.speculators_json(c, replace(identity, model="org/chat@1a2b"))
    assert hub["speculators_config"]["verifier"]["name_or_path"] == "org/chat"
    sliding = make_drafter(sliding=9).config
    assert export.speculators_json(sliding, identity)["sliding_window_non_causal"] is False
    free = make_drafter(sliding=9, is_causal=False).config
    assert export.speculators_json(free, identity)["sliding_window_non_causal"] is True


def test_speculators_layout_refuses_what_it_cannot_say(tiny_qwen3, identity_of):
    c = make_drafter(sliding=9).config
    mixed = replace(c, layer_types=("sliding_attention", "full_attention"))
    for config in (mixed, make_drafter(is_causal=True).config):
        with pytest.raises(UserError, match="cannot say which layers of this drafter are causal"):
            export.speculators_json(config, identity_of(tiny_qwen3))


@pytest.mark.skipif(not PEERS_PYTHON, reason="DFLASH_PEERS_PYTHON names no interpreter")
@pytest.mark.parametrize(
    "shape",
    [dict(block=8), dict(block=16, layers=3), dict(block=6, sliding=40),
     dict(block=6, sliding=40, is_causal=False)],
)  # fmt: skip
def test_speculators_computes_the_same_hidden_states(tiny, identity_of, tmp_path, shape):
    identity = identity_of(tiny)
    drafter = make_drafter(**shape).float()
    wrote = facts(drafter, identity, formats=["dflash", "speculators"])
    (tmp_path / "out").mkdir()
    export.write_export(tmp_path / "out", drafter, wrote)
    drafter = load_drafter(tmp_path / "out")
    c, g = drafter.config, torch.Generator().manual_seed(3)
    ids = torch.randint(4, 320, (30,), generator=g)
    taps = torch.randn(30, 128, generator=g)
    # not beyond: speculators counts a window from the anchor, the engines from each slot
    anchors = torch.tensor([1, 5, 6, 13])
    save_file({"taps": taps, "ids": ids, "anchors": anchors}, tmp_path / "x.st")
    done = subprocess.run(
        [PEERS_PYTHON, str(ROOT / "tests/peers/speculators_hidden.py"), "--target", str(tiny),
         "--drafter", str(tmp_path / "out/speculators"), "--input", str(tmp_path / "x.st"),
         "--out", str(tmp_path / "y.st")],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "y.st")
    embed, head = load_embedding_and_head(identity)
    assert torch.equal(theirs["embed"], embed.float()) and torch.equal(theirs["head"], head.float())
    layout = Layout(torch.tensor([0, 30]), anchors, c.block_size)
    with torch.no_grad():
        ours = drafter(taps, block_input(embed, ids[anchors], c.block_size, 3), layout)
    torch.testing.assert_close(theirs["hidden"], ours, rtol=1e-4, atol=1e-5)
