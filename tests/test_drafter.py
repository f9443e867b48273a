"""The drafter's checkpoint format: what is read, what is refused, what is written."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decode import make_drafter

from dflash.drafter import (
    DrafterConfig,
    check_fits,
    load_drafter,
    save_drafter,
    target_record,
)
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
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
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


def test_what_a_config_leaves_out_is_filled_in_as_the_official_package_does(saved):
    folder, drafter = saved
    data = json.loads((folder / "config.json").read_text())
    for name in ("architectures", "layer_types", "rms_norm_eps", "max_position_embeddings"):
        del data[name]
    del data["block_size"], data["rope_theta"], data["rope_scaling"], data["eos_token_id"]
    data["mask_token_id"] = data["dflash_config"].pop("mask_token_id")  # at the top
    data["dflash_config"] = {"causal": None}  # two layers, so two taps by the formula
    data["num_target_layers"] = 12
    config = DrafterConfig.from_json(data, "x")
    assert config.block_size == 16 and config.target_layer_ids == (1, 9)
    assert config.mask_token_id == 3 and config.layer_types == ("full_attention",) * 2
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 32768)
    sliding = data | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    kinds = DrafterConfig.from_json(sliding, "x").layer_types
    assert kinds == ("full_attention", "sliding_attention")


def test_the_number_of_target_layers_is_needed_only_to_spread_taps(saved):
    folder, drafter = saved
    data = json.loads((folder / "config.json").read_text())
    del data["num_target_layers"]
    assert DrafterConfig.from_json(data, "x").num_target_layers is None
    del data["dflash_config"]["target_layer_ids"]
    with pytest.raises(UserError, match=r"x: found no dflash_config.target_layer_ids; give a comp"):
        DrafterConfig.from_json(data, "x")


def test_reads_shards(saved):
    folder, drafter = saved
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({n: state[n] for n in names if places[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    again = load_drafter(folder)
    assert all(torch.equal(again.state_dict()[n], v) for n, v in drafter.state_dict().items())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-1.safetensors: cannot be read .*fetch or export"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "is a DFlash 2 drafter, which is not supported"),
        ({"dflash_config": {"selector_rank": 256}}, "is a DFlash 2 drafter, which is not support"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, r"this is an EAGLE drafter \(LlamaForCau"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"this is no drafter \(Qwen3ForCausalLM\); give"),
        ({"speculators_model_type": "eagle3"}, r"layout of the speculators library \(eagle3\)"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "scaled rotary positions"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dflash_config": {"input_embedding_scale": 24}}, "input_embedding_scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"draft_vocab_size": 32}, "draft_vocab_size: not supported"),
        ({"attention_bias": True}, "attention_bias: not supported"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias: not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: not supported"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types chunked_attention are not supp"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_size": "64"}, 'hidden_size: found "64", expected a number'),
        ({"rope_theta": None, "rope_parameters": None}, "found no rope_theta; give a complete"),
        ({"dflash_config": {"target_layer_ids": 5}}, "target_layer_ids: found 5, expected layer"),
        ({"hidden_size": 48}, r"fc.weight has shape \[64, 128\], config.json implies \[48, 96\]"),
    ],
)
def test_refuses_what_it_would_get_wrong(saved, changes, words):
    change(saved[0], **changes)
    with pytest.raises(UserError, match=words):
        load_drafter(saved[0])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda s: s.pop("fc.weight"), "its weights lack fc.weight; give a complete"),
        (
            lambda s: s.update(extra=torch.ones(1)),
            "hold what a DFlash drafter has not: extra; give",
        ),
        (lambda s: s.update(d2t=torch.ones(1)), "holds d2t: drafters over a reduced vocabulary"),
        (
            lambda s: s.update({"norm.weight": s["norm.weight"].to(torch.float8_e4m3fn)}),
            "norm.weight is stored as torch.float8_e4m3fn; quantised",
        ),
        (
            lambda s: s.update({f"model.{n}": s.pop(n) for n in ["fc.weight"]}),
            "its weights lack fc.weight",
        ),
    ],
)
def test_tensors_that_do_not_belong_are_named(saved, edit, words):
    folder, _ = saved
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=words):
        load_drafter(folder)


def test_a_folder_without_readable_weights_is_refused(saved):
    folder, _ = saved
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model.safetensors: cannot be read .*fetch or export"):
        load_drafter(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"holds no model.safetensors; give the folder of"):
        load_drafter(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"only pickled weights \(pytorch_model.bin\), which can run"
    ):
        load_drafter(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match=r"index.json: names no shards"):
        load_drafter(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config.json: found list, expected the settings"):
        load_drafter(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json: no such file; give the folder of a DFlash"):
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
    # the official package then keeps the layer causal and drops its window
    change(folder, use_sliding_window=False, is_causal=None, dflash_config={"causal": None})
    see = load_drafter(folder).config.visibility(0)
    assert (see.window, see.causal) == (None, True)


def test_published_fields(saved):
    data = json.loads((saved[0] / "config.json").read_text())
    assert isinstance(data["dflash_config"]["target_layer_ids"], list)
    assert "trained_for" not in data
    assert DrafterConfig.from_json(data, "x").to_json("float32") == data


def test_a_drafter_knows_its_target(saved, tiny_qwen3, tiny_llama, identity_of):
    folder, drafter = saved
    own, other = identity_of(tiny_qwen3), identity_of(tiny_llama)
    check_fits(drafter, other, folder)  # no record: the shapes decide, and they are equal
    drafter.config = replace(drafter.config, trained_for=target_record(own))
    save_drafter(folder, drafter, "bfloat16")
    again = load_drafter(folder)
    assert again.config.trained_for == {
        "model": "tiny_qwen3", "revision": "local", "weights_sha256": own.weights_sha256
    }  # fmt: skip
    check_fits(again, own, folder)
    with pytest.raises(UserError, match=r"was trained for tiny_qwen3, revision local, weights "):
        check_fits(again, other, folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(vocab_size=321), "vocab_size 321 against 320"),
        (dict(num_target_layers=5), "num_target_layers 5 against 4"),
        (dict(num_target_layers=None, target_layer_ids=(1, 4)), "tap 4 of 4 layers"),
        (dict(mask_token_id=320), "mask token 320 of 320 tokens"),
    ],
)
def test_a_drafter_for_another_shape_is_refused(saved, tiny_qwen3, identity_of, changes, words):
    folder, drafter = saved
    drafter.config = replace(drafter.config, **changes)
    with pytest.raises(UserError, match=rf"does not fit the target .*{words}"):
        check_fits(drafter, identity_of(tiny_qwen3), folder)


def test_groups_are_sized_for_the_layer_that_sees_most():
    full = replace(make_drafter().config, num_hidden_layers=2, layer_types=("full_attention",) * 2)
    slides = replace(full, layer_types=("sliding_attention",) * 2, sliding_window=64)
    mixed = replace(slides, layer_types=("sliding_attention", "full_attention"))
    rows = [c.group_rows(16 << 20, 100_000, 16, 4) for c in (full, slides, mixed)]
    assert rows[0] == rows[2] < rows[1]
