"""The drafter's checkpoint format: what is read, what is refused, what is written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decode import make_drafter

from dflash.drafter import DrafterConfig, load_drafter, save_drafter
from dflash.errors import UserError


@pytest.fixture
def saved(tmp_path):
    """A folder with a random drafter in the published format, and the drafter."""
    drafter = make_drafter().float()
    save_drafter(tmp_path, drafter, "float32")
    return tmp_path, drafter


def change(folder, **changes):
    data = json.loads((folder / "config.json").read_text())
    inner = changes.pop("dflash_config", {})
    data |= changes
    data["dflash_config"] |= inner
    (folder / "config.json").write_text(json.dumps(data))


def test_round_trip(saved):
    folder, drafter = saved
    again = load_drafter(folder)
    assert again.config == drafter.config
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_reads_other_spellings(saved):
    folder, drafter = saved
    state = load_file(folder / "model.safetensors")
    save_file({f"model.{k}": v for k, v in state.items()}, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    del data["dflash_config"]["block_size"], data["rope_parameters"]
    data["rope_scaling"] = {"rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(data))
    assert load_drafter(folder).config == drafter.config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "scaled rotary positions"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dflash_config": {"input_embedding_scale": 24}}, "input_embedding_scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_size": 48}, "tensors do not fit config.json"),
    ],
)
def test_refuses_what_it_would_get_wrong(saved, changes, words):
    change(saved[0], **changes)
    with pytest.raises(UserError, match=words):
        load_drafter(saved[0])


def test_missing_and_unknown_tensors_are_named(saved):
    folder, _ = saved
    state = load_file(folder / "model.safetensors")
    state["extra.weight"] = state.pop("fc.weight")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="extra.weight, fc.weight"):
        load_drafter(folder)


def test_sliding_layers_are_read_as_the_engines_read_them(saved):
    folder, _ = saved
    kinds = ["sliding_attention", "full_attention"]
    change(folder, layer_types=kinds, sliding_window=7, use_sliding_window=True)
    config = load_drafter(folder).config
    assert (config.visibility(0).window, config.visibility(0).causal) == (7, True)
    assert (config.visibility(1).window, config.visibility(1).causal) == (None, False)
    change(folder, is_causal=None, dflash_config={"causal": False})
    assert load_drafter(folder).config.visibility(0).causal is False
    change(folder, is_causal=True)
    assert load_drafter(folder).config.visibility(1).causal is True
    change(folder, use_sliding_window=False)
    assert load_drafter(folder).config.visibility(0).window is None


def test_published_fields(saved):
    data = json.loads((saved[0] / "config.json").read_text())
    assert isinstance(data["dflash_config"]["target_layer_ids"], list)
    assert DrafterConfig.from_json(data, "x").to_json("float32") == data
