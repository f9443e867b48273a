"""dflash.regenerate: the rows hold exactly what the target itself would answer, each alone."""

import errno
import json
import os
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.targets import END, PAD
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash import decode, regenerate
from dflash.chat import prompt_ids
from dflash.config import Regenerate
from dflash.corpus import Prompt, sample_id, write_prompts
from dflash.errors import UserError
from dflash.target import load_model, load_tokenizer

GREEDY = Regenerate(max_new_tokens=24)
SAMPLED = Regenerate(max_new_tokens=24, temperature=0.9, top_k=40, top_p=0.95, seed=5)


def make_prompts(tokenizer, n):
    """Prompts of clearly different lengths."""
    prompts = []
    for i in range(n):
        messages = [{"role": "user", "content": f"question {i * i}" + " and more" * (i % 7)}]
        ids = prompt_ids(tokenizer, messages, enable_thinking=False)
        kind = "ab"[i % 2]
        prompts.append(Prompt(sample_id(messages), "src", str(i), kind, "train", messages, ids))
    return prompts


def alone(model, prompt, tokens=24):
    """The model's own greedy answer to one prompt without padding."""
    out = model.generate(
        torch.tensor([prompt.prompt_ids]),
        attention_mask=torch.ones(1, len(prompt.prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=tokens,
    )
    return out[0, len(prompt.prompt_ids) :].tolist()


@pytest.fixture
def target(tiny, identity_of):
    """Identity, model in float32 and fifteen prompts."""
    identity = identity_of(tiny)
    prompts = make_prompts(load_tokenizer(identity), 15)
    return identity, load_model(identity, "float32"), prompts


# --- greedy answers -----------------------------------------------------------------------------


def test_a_padded_batch_answers_as_each_prompt_alone(target):
    identity, model, prompts = target
    expected = {p.sample_id: alone(model, p) for p in prompts}
    assert len({len(p.prompt_ids) for p in prompts}) > 5
    assert {r[-1] == END for r in expected.values()} == {True, False}  # both ways to end occur
    for batch_size in (1, 4, 15):
        assert regenerate.answers(model, identity, prompts, GREEDY, batch_size) == expected


def test_rows_are_prompt_and_response_with_the_mask_on_the_response(target):
    identity, model, prompts = target
    responses = regenerate.answers(model, identity, prompts, GREEDY, 8)
    rows = list(regenerate.rows_of(prompts, responses))
    assert [r.sample_id for r in rows] == sorted(p.sample_id for p in prompts)
    by_id = {p.sample_id: p for p in prompts}
    for row in rows:
        p, response = by_id[row.sample_id], responses[row.sample_id]
        assert row.input_ids.tolist() == p.prompt_ids + response
        assert row.input_ids[row.loss_mask].tolist() == response
        assert row.loss_mask.tolist() == [False] * len(p.prompt_ids) + [True] * len(response)
        assert END not in response[:-1] and PAD not in response
        assert response[-1] == END or len(response) == 24
        assert (row.source, row.kind, row.split) == (p.source, p.kind, p.split)


def test_the_models_own_sampling_defaults_do_not_leak_in(tiny_qwen3, copy_of, identity_of):
    plain = identity_of(tiny_qwen3)
    prompts = make_prompts(load_tokenizer(plain), 6)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    expected = {p.sample_id: alone(model, p) for p in prompts}
    folder = copy_of(tiny_qwen3)
    GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_k=7,
        repetition_penalty=1.8,
        no_repeat_ngram_size=2,
        min_new_tokens=20,
        suppress_tokens=[r[0] for r in expected.values()],
        num_beams=2,
        max_length=30,
        eos_token_id=END,
    ).save_pretrained(folder)
    spoilt = load_model(identity_of(folder), "float32")
    assert spoilt.generation_config.repetition_penalty == 1.8
    assert regenerate.answers(spoilt, plain, prompts, GREEDY, 3) == expected
    assert regenerate.answers(spoilt, plain, prompts, SAMPLED, 3) == regenerate.answers(
        model, plain, prompts, SAMPLED, 3
    )


def test_any_end_token_ends_a_response(target):
    identity, model, prompts = target
    before = regenerate.answers(model, identity, prompts, GREEDY, 8)
    other = next(r[3] for r in before.values() if len(r) > 5)
    more = replace(identity, eos_token_ids=sorted([END, other]), pad_token_id=None)
    after = regenerate.answers(model, more, prompts, GREEDY, 8)
    for k, r in before.items():
        stop = next((i for i, t in enumerate(r) if t in (END, other)), len(r) - 1)
        assert after[k] == r[: stop + 1]
    assert any(r[-1] == other for r in after.values())


def test_a_response_of_only_the_end_token_is_a_row(target):
    identity, model, prompts = target
    first = regenerate.answers(model, identity, prompts, GREEDY, 8)[prompts[0].sample_id][0]
    ends = replace(identity, eos_token_ids=sorted({END, first}))
    responses = regenerate.answers(model, ends, prompts[:1], GREEDY, 8)
    (row,) = regenerate.rows_of(prompts[:1], responses)
    assert row.input_ids[row.loss_mask].tolist() == [first]
    stats = regenerate.statistics([row], ends.eos_token_ids)
    assert stats["responses_below_2_tokens"] == 1 and stats["ended_share"] == 1.0


# --- sampled answers ----------------------------------------------------------------------------


def test_sampling_depends_on_the_seed_and_not_on_the_batch(target):
    identity, model, prompts = target
    sampled = regenerate.answers(model, identity, prompts, SAMPLED, 15)
    for batch_size in (1, 4):
        assert regenerate.answers(model, identity, prompts, SAMPLED, batch_size) == sampled
    assert regenerate.answers(model, identity, prompts[::2], SAMPLED, 3) == {
        p.sample_id: sampled[p.sample_id] for p in prompts[::2]
    }
    other = regenerate.answers(model, identity, prompts, replace_seed(SAMPLED, 6), 15)
    assert sum(other[k] != sampled[k] for k in sampled) > 10
    greedy = regenerate.answers(model, identity, prompts, GREEDY, 15)
    assert sum(greedy[k] != sampled[k] for k in sampled) > 10


def test_each_prompt_has_random_numbers_of_its_own(target):
    _, _, prompts = target
    numbers = regenerate.Sampler(prompts, SAMPLED).uniform_BN
    assert numbers.shape == (15, 24) and len(np.unique(numbers)) == 15 * 24
    assert 0.4 < numbers.mean() < 0.6


def replace_seed(settings, seed):
    return settings.model_copy(update={"seed": seed})


def test_top_k_1_is_greedy(target):
    identity, model, prompts = target
    one = Regenerate(max_new_tokens=24, temperature=2.0, top_k=1)
    assert regenerate.answers(model, identity, prompts, one, 8) == regenerate.answers(
        model, identity, prompts, GREEDY, 8
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 1.0), (0.6, None, 1.0), (1.3, 5, 1.0), (1.0, None, 0.7), (0.8, 8, 0.9)],
)
def test_drawn_frequencies_are_those_of_transformers(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 20, generator=generator)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    expected = scores.softmax(-1)[0]
    n = 20000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # evenly spread, not random
    drawn = regenerate.draw(logits.expand(n, -1), uniform, temperature, top_k, top_p)
    found = drawn.bincount(minlength=20) / n
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 2 / n


def test_draws_stay_inside_what_is_kept_at_both_ends():
    logits = torch.tensor([[0.1, 5.0, 4.9, -3.0, 0.3]]).repeat(3, 1)
    uniform = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert regenerate.draw(logits, uniform, 1.0, None, 0.9).tolist() == [1, 2, 2]
    assert regenerate.draw(logits, uniform, 1.0, 2, 1.0).tolist() == [1, 2, 2]


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ],
)
def test_out_of_memory_halves_the_batch(error, target, monkeypatch, capsys):
    identity, model, prompts = target
    expected = regenerate.answers(model, identity, prompts, SAMPLED, 15)
    sizes, original = [], decode.generate

    def generate(model, prompts, *args, **options):
        sizes.append(len(prompts))
        if len(prompts) > 4:
            raise error
        return original(model, prompts, *args, **options)

    monkeypatch.setattr(decode, "generate", generate)
    assert regenerate.answers(model, identity, prompts, SAMPLED, 15) == expected
    assert sizes == [15, 7, 3, 3, 3, 3, 3]
    said = capsys.readouterr().err
    assert "out of memory with 15 prompts at once, going on with 7" in said
    assert "machine.regenerate.batch_size" in said


def test_no_memory_even_for_one_prompt(target, monkeypatch):
    identity, model, prompts = target

    def generate(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(decode, "generate", generate)
    with pytest.raises(UserError, match="not even this one prompt .* lower `regenerate.max_new_to"):
        regenerate.answers(model, identity, prompts, GREEDY, 4)


def test_other_errors_are_not_taken_for_lack_of_memory(target, monkeypatch):
    identity, model, prompts = target

    def generate(*args, **options):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(decode, "generate", generate)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        regenerate.answers(model, identity, prompts, GREEDY, 4)


# --- shards and files ---------------------------------------------------------------------------


def test_shards_part_the_training_prompts():
    prompts = [
        Prompt(
            f"{i * 7919 % 101:016x}", "s", str(i), "k", ["train", "heldout"][i % 5 == 0], [], [1]
        )
        for i in range(40)
    ]
    train = sorted(p.sample_id for p in prompts if p.split == "train")
    shards = [regenerate.shard_of(prompts, f"0000{i}-of-00003") for i in range(3)]
    assert [[p.sample_id for p in s] for s in shards] == [train[i::3] for i in range(3)]
    for bad in ("00003-of-00003", "0-of-3", "00000-of-00000", "00000", "x"):
        with pytest.raises(UserError, match="--shard: found .*expected 00000-of-00002"):
            regenerate.shard_of(prompts, bad)


@pytest.fixture
def arguments(tmp_path, tiny_llama, identity_of, identity_file):
    """A function: options of the stage -> its arguments, for fifteen prompts in a file."""
    prompts = make_prompts(load_tokenizer(identity_of(tiny_llama)), 15)
    prompts[4] = replace(prompts[4], split="heldout")

    def make(shard="00000-of-00002", out="out", prompts=prompts, machine=None, **settings):
        write_prompts(tmp_path / "prompts.parquet", prompts)
        stage = {"stage": "regenerate", "version": 1, "source": "src", "dtype": "float32"}
        stage = {**stage, "max_new_tokens": 24, **settings}
        return [
            *("--settings", json.dumps(stage)),
            *("--machine", json.dumps(machine or {"batch_size": 4, "gpu": 1})),
            *("--identity", str(identity_file(tiny_llama)), "--threads", "1"),
            *("--prompts", str(tmp_path / "prompts.parquet"), "--shard", shard),
            *("--out", str(tmp_path / out / f"{shard}.parquet")),
            *("--stats", str(tmp_path / out / f"{shard}.json")),
        ]

    make.prompts = prompts
    return make


def test_the_stage_end_to_end_without_a_tokenizer(
    arguments, tmp_path, tiny_llama, monkeypatch, capsys
):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    runs = [arguments(f"0000{i}-of-00002") for i in range(2)]

    def no_tokenizer(*_, **__):
        raise AssertionError("something is tokenised a second time")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", no_tokenizer)
    rows = []
    for i, argv in enumerate(runs):
        regenerate.main(argv)
        shard = regenerate.read_tokens(tmp_path / "out" / f"0000{i}-of-00002.parquet")
        stats = json.loads((tmp_path / "out" / f"0000{i}-of-00002.json").read_text())
        assert stats == {
            "documents": 7,
            "tokens": sum(len(r.input_ids) for r in shard),
            "response_tokens": sum(r.loss_mask.sum() for r in shard),
            "ended_share": sum(r.input_ids[-1] == END for r in shard) / 7,
            "responses_below_2_tokens": sum(r.loss_mask.sum() < 2 for r in shard),
        }
        assert [r.sample_id for r in shard] == sorted(r.sample_id for r in shard)
        rows += shard
    assert "7 documents" in capsys.readouterr().out

    train = {p.sample_id: p for p in arguments.prompts if p.split == "train"}
    assert {r.sample_id for r in rows} == set(train) and len(rows) == 14
    for r in rows:
        assert r.input_ids.dtype == np.int32 and r.loss_mask.dtype == np.bool_
        p = train[r.sample_id]
        assert r.input_ids.tolist() == p.prompt_ids + alone(model, p)
        assert r.loss_mask.sum() == len(r.input_ids) - len(p.prompt_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_settings_give_equal_bytes(temperature, arguments, tmp_path):
    written = []
    for out, batch_size in (("a", 4), ("b", 4), ("c", 3)):
        argv = arguments(out=out, temperature=temperature, machine={"batch_size": batch_size})
        regenerate.main(argv)
        written.append((tmp_path / out / "00000-of-00002.parquet").read_bytes())
    assert written[0] == written[1] == written[2]


def test_faults_end_in_one_sentence_and_no_file(arguments, refusal, tmp_path):
    def refused(*argv):
        said = refusal(regenerate.main, *argv)
        assert not (tmp_path / "out").exists()
        return said

    held = [replace(p, split="heldout") for p in arguments.prompts]
    few = [*held[1:], arguments.prompts[0]]
    foreign = [replace(p, prompt_ids=[5, 320]) for p in arguments.prompts]
    assert "holds no training prompts for shard 00001-of-00002; lower `shards`" in refused(
        *arguments("00001-of-00002", prompts=few)
    )
    assert "holds token 320, the target has only 320" in refused(*arguments(prompts=foreign))
    assert "--settings: unknown key `max_tokens`" in refused(*arguments(max_tokens=3))
    assert "--machine: `batch_size`: found 0" in refused(*arguments(machine={"batch_size": 0}))
    argv = arguments()
    (tmp_path / "prompts.parquet").unlink()
    assert "prompts.parquet: no such file; run the corpus stage" in refused(*argv)


def test_a_full_results_folder(arguments, refusal, tmp_path, monkeypatch):
    argv = arguments()

    def full(table, where, **options):
        where.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", full)
    assert "the disk is full: free space" in refusal(regenerate.main, *argv)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_bar_moves_inside_a_long_batch(target, monkeypatch, capsys):
    identity, model, prompts = target
    monkeypatch.setattr("dflash.progress.LINE_SECONDS", 0.0)
    with regenerate.progress(desc="x", total=15, unit="documents") as bar:
        regenerate.answers(model, identity, prompts, GREEDY, 15, bar)
    said = capsys.readouterr().err
    assert "tokens/s, token 2" in said and "0/15" in said and "15/15" in said
