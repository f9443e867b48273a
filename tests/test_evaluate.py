"""What the evaluation reports, from numbers worked out by hand; and its check of the outputs."""

import dataclasses
import json

import pytest
import torch
from test_tasks import write

from dflash import config, evaluate, tasks
from dflash.corpus import Prompt
from dflash.decode import Response, generate
from dflash.drafter import load_drafter
from dflash.errors import UserError
from dflash.target import load_model


def test_speed_leaves_the_prefills_token_out():
    rows = [
        dict(plain_seconds=1.0, plain_tokens=11, plain_cycles=10, draft_seconds=0.1,
             drafted_seconds=0.5, drafted_tokens=11, drafted_cycles=4,
             lookup_seconds=0.8, lookup_tokens=11, lookup_cycles=8),
        dict(plain_seconds=3.0, plain_tokens=11, plain_cycles=10, draft_seconds=0.3,
             drafted_seconds=1.5, drafted_tokens=11, drafted_cycles=6,
             lookup_seconds=2.4, lookup_tokens=11, lookup_cycles=8),
    ]  # fmt: skip
    s = evaluate.speed(rows)
    assert s["seconds_per_token_plain"] == pytest.approx(0.2)
    assert s["speed_up"] == pytest.approx(2.0) and s["draft_share"] == pytest.approx(0.2)
    assert s["speed_up_lookup"] == pytest.approx(1.25)
    assert s["tau_timed"] == pytest.approx(2.0) and s["tau_lookup"] == pytest.approx(20 / 16)
    one_token = {key: 1 if key.endswith("tokens") else 0 for key in rows[0]}
    assert set(evaluate.speed([one_token]).values()) == {1, None}


@pytest.fixture
def greedy(tiny, identity_of):
    """A tiny target, some prompts, its own answers, and the check of changed ones."""
    identity = identity_of(tiny)
    model = load_model(identity, "float32", device=torch.device("cpu"))
    ids = [[5, 9, 200, 31], [7], [100, 101, 102, 103, 104, 105], [50, 60, 70], [31, 31]]
    prompts = [Prompt(f"{i:016x}", "s", str(i), "k", "heldout", [], p) for i, p in enumerate(ids)]
    eos, limit = identity.eos_token_ids, 20
    responses, _ = generate(model, ids, limit, eos)

    def check(changed):
        return evaluate.check_greedy(model, prompts, changed, limit, eos, batch_tokens=40)

    return model, prompts, responses, check


def test_greedy_check_accepts_the_targets_own_output_and_nothing_else(greedy):
    _, _, responses, check = greedy

    def identical(changed):
        return [c.identical for c in check(changed)]

    assert identical(responses) == [True] * 5
    for i, response in enumerate(responses):
        for place in range(len(response.tokens)):
            wrong = list(response.tokens)
            wrong[place] = (wrong[place] + 1) % 320
            changed = [Response(wrong) if j == i else r for j, r in enumerate(responses)]
            assert identical(changed) == [j != i for j in range(5)], (i, place)
        if len(response.tokens) > 1:  # stopped too early
            short = [Response(r.tokens[:-1]) if j == i else r for j, r in enumerate(responses)]
            assert identical(short) == [j != i for j in range(5)]


def test_a_divergence_has_its_place_and_margin(greedy):
    model, prompts, responses, check = greedy
    i = max(range(5), key=lambda i: len(responses[i].tokens))
    tokens = list(responses[i].tokens)
    tokens[4] = (tokens[4] + 1) % 320
    changed = [Response(tokens) if j == i else r for j, r in enumerate(responses)]
    first = check(changed)[i].divergences[0]
    logits = model(torch.tensor([prompts[i].prompt_ids + tokens[:4]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert first == (4, pytest.approx(best - second, abs=1e-4)) and best > second


def test_near_ties_are_told_from_other_divergences():
    near = evaluate.NEAR_TIE
    rows = [
        {"identical": None, "divergences": [(3, 0.0), (9, near)]},
        {"identical": None, "divergences": [(0, 2 * near)]},
        {"identical": None, "divergences": []},
    ]
    found = evaluate.lossless(rows)
    assert (found["divergences"], found["near_ties"]) == (3, 2)
    assert found["largest_margin"] == 2 * near and found["checked"] == 0
    exact = evaluate.lossless([{"identical": i, "divergences": []} for i in (True, False, True)])
    assert (exact["checked"], exact["identical"], exact["largest_margin"]) == (3, 2, None)


def test_a_drafter_of_another_target_is_refused(finished, identity_of, tiny_qwen3, tiny_llama):
    folder = finished[0] / "results/export/small"
    drafter = load_drafter(folder)
    identity = identity_of(tiny_llama)
    evaluate.check_fits(drafter, identity, folder)
    other = dataclasses.replace(identity, hidden_size=128, vocab_size=99)
    with pytest.raises(UserError, match="hidden_size 64 against 128; vocab_size 320 against 99"):
        evaluate.check_fits(drafter, other, folder)
    # of the same shape, which its record tells apart
    with pytest.raises(
        UserError, match=r"was trained for tiny_llama, revision local, weights \w+;"
    ):
        evaluate.check_fits(drafter, identity_of(tiny_qwen3), folder)


@pytest.fixture
def stage(finished, tmp_path, tiny_llama, identity_file):
    """A function: a task's name, its prompts and changed settings -> what the stage writes."""
    results = finished[0] / "results"

    def run(name, *prompts, **settings):
        out = tmp_path / "out.json"
        args = ["--settings", json.dumps({"max_new_tokens": 12} | settings)]
        args += ["--identity", results / "target/identity.json", "--task", name]
        args += ["--drafter", results / "drafters/small", "--prompts", *prompts, "--out", out]
        evaluate.main([str(a) for a in args])
        return json.loads(out.read_text())

    return run


def test_later_turns_are_responses_of_their_own(stage, tmp_path, finished):
    folder = write(tmp_path, "mt-bench")
    prompts = tmp_path / "chat.parquet"
    settings = json.dumps({"dataset": "mt-bench", "path": str(folder), "max_new_tokens": 12})
    identity = str(finished[0] / "results/target/identity.json")
    tasks.main(["--settings", settings, "--identity", identity, "--out", str(prompts)])
    found = stage("chat", prompts, task={"dataset": "mt-bench"}, block_size=3)
    assert [(r["id"], r["turn"]) for r in found["responses"]] == [
        ("1", 1), ("2", 1), ("1", 2), ("2", 2),
    ]  # fmt: skip
    first, _, second, _ = found["responses"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"]
    assert found["overall"]["lossless"]["identical"] == 4 and found["block_size"] == 3
    assert found["per_language"].keys() == {"Latin script"}
    for r in found["responses"]:
        assert r["accepted_per_slot"] == [sum(c > k for c in r["cycles"]) for k in (1, 2)]
    assert len(found["timed"]) == 2 and found["timed"][0]["prefill_seconds"] > 0
    assert found["overall"]["tau_lookup"] >= 1 and found["overall"]["speed_up_lookup"] > 0


def test_in_bfloat16_divergences_are_counted(stage, finished):
    corpus = finished[0] / "results/corpus/toy.parquet"
    found = stage("heldout", corpus, dtype="bfloat16")
    lossless = found["overall"]["lossless"]
    assert lossless["checked"] == lossless["identical"] == 0
    assert lossless["divergences"] == sum(len(r["divergences"]) for r in found["responses"])
    assert all(r["identical"] is None for r in found["responses"])


def test_samples_are_the_same_again_and_not_compared(stage, finished):
    corpus = finished[0] / "results/corpus/toy.parquet"
    hot = {"temperature": 1.5, "rule": "sample_match"}
    first, again, other = (stage("heldout", corpus, **hot, seed=seed) for seed in (1, 1, 2))

    def hashes(found):
        return [r["tokens_sha256"] for r in found["responses"]]

    assert hashes(first) == hashes(again) != hashes(other)
    assert first["temperature"] == 1.5 and first["rule"] == "sample_match"
    assert first["overall"]["lossless"]["checked"] == 0
    assert all(r["divergences"] == [] for r in first["responses"])


def test_a_published_task_without_its_prompts_is_refused(identity_of, tiny_llama):
    settings = evaluate.StageSettings(task=config.Task(dataset="gsm8k"))
    with pytest.raises(UserError, match="run the task stage for it"):
        evaluate.task_prompts("gsm8k", settings, [], identity_of(tiny_llama))
