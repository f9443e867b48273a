"""Validation against real decoding and a slow loop, and what it reads and keeps from training."""

import json
import pickle
from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest
import torch
from test_data import Doc, document
from test_decode import END, PROMPTS, fit, make_drafter, own
from test_features import some_documents, write
from test_loader import Shard, make_stream, split

from dflash import acceptance, data, decode, validate
from dflash.attention import Layout
from dflash.drafter import block_input
from dflash.errors import UserError
from dflash.features import open_shard
from dflash.taps import Taps, run_decoder
from dflash.target import load_model

NAMES = [f"{i:02d}" for i in range(40)]


def extracted(model, taps, name: str, ids: list[int], mask: list[bool]) -> Doc:
    """A document as the store has it: hidden states rounded to bf16."""
    with Taps(model, taps) as found, torch.no_grad():
        run_decoder(model, input_ids=torch.tensor([ids]))
    hidden = found.stack()[0].bfloat16().view(torch.uint16).numpy()
    return Doc(name, np.array(ids, np.int32), np.array(mask), hidden)


def heads(model) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


SHAPES = [
    ("tiny_llama", dict()),  # its head is the embedding table
    ("tiny_llama", dict(sliding=5)),
    ("tiny_qwen3", dict()),
    ("tiny_qwen3", dict(sliding=4, is_causal=False)),
]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda p: f"{p[0]}-{'-'.join(p[1])}")
def fitted(request, identity_of):
    """A target in float64, and a drafter of blocks of 8 that knows its answers to PROMPTS in part."""
    target, shape = request.param
    identity = identity_of(request.getfixturevalue(target))
    model = load_model(identity, "float32", device=torch.device("cpu")).double()
    return model, fit(model, make_drafter(block=8, **shape), steps=26)


def ending(model) -> list[int]:
    """End tokens with which the answers to PROMPTS end within 40 tokens, the long ones late."""
    long = [tokens for p in PROMPTS if (tokens := own(model, p, 40))[-1] != END]
    return [END, *(max(tokens, key=tokens.index) for tokens in long)]


def answers(model, drafter, block: int | None = None) -> list[decode.Response]:
    """Decoded long before the limit, close to which blocks shrink."""
    ends = ending(model)
    responses, _ = decode.generate(model, PROMPTS, 60, ends, drafter, block_size=block)
    assert all(r.tokens[-1] in ends for r in responses)
    return responses


def of_answers(model, taps, responses) -> list[Doc]:
    return [
        extracted(model, taps, f"{i}", p + r.tokens, [False] * len(p) + [True] * len(r.tokens))
        for i, (p, r) in enumerate(zip(PROMPTS, responses, strict=True))
    ]


def conversation(model, drafter) -> Doc:
    """All prompts and answers as one document of several turns, the last answer cut in its middle."""
    ids, mask = [], []
    for prompt, response in zip(PROMPTS, answers(model, drafter), strict=True):
        ids += prompt + response.tokens
        mask += [False] * len(prompt) + [True] * len(response.tokens)
    cut = len(ids) - len(response.tokens) // 2
    return extracted(model, drafter.config.target_layer_ids, "talk", ids[:cut], mask[:cut])


@torch.no_grad()
def slow_runs(drafter, embed_VH, head_VH, d: Doc, block: int, start: int, end: int) -> list[int]:
    """One anchor at a time, with nothing of the document behind it, and all logits."""
    ids = torch.from_numpy(d.input_ids).long()
    taps = torch.from_numpy(d.hidden).view(torch.bfloat16).double().flatten(1)
    runs = []
    for a in range(start, end - 1):
        layout = Layout(torch.tensor([0, a + 1]), torch.tensor([a]), block)
        x = block_input(embed_VH, ids[a : a + 1], block, drafter.config.mask_token_id)
        guesses = (drafter(taps[: a + 1], x, layout, "dense")[0] @ head_VH.T).argmax(-1).tolist()
        run = 0
        while run + 1 < block and a + run + 1 < end and guesses[run + 1] == ids[a + run + 1]:
            run += 1
        runs.append(run)
    return runs


# --- runs ---------------------------------------------------------------------------------------


def test_runs_are_what_decoding_accepts(fitted, monkeypatch):
    """At the start of each cycle, position by position; and walking goes through just these cycles."""
    (model, drafter), read = fitted, decode.DrafterRunner.read_context

    def as_stored(self, taps_nLD, span):
        read(self, taps_nLD.bfloat16().to(taps_nLD.dtype), span)

    monkeypatch.setattr(decode.DrafterRunner, "read_context", as_stored)
    gained = []
    for block in (2, 4, 8):
        responses = answers(model, drafter, block)
        documents = of_answers(model, drafter.config.target_layer_ids, responses)
        found = validate.measure(drafter, documents, *heads(model), block, {}, torch.float64)
        found = {int(f.sample_id): f for f in found}
        for i, response in enumerate(responses):
            if len(response.tokens) == 1:
                assert i not in found
                continue
            assert found[i].start == len(PROMPTS[i])
            assert len(found[i].runs) == len(response.tokens) - 1
            at = 0
            for kept in response.cycles:
                run = found[i].runs[at]
                # The last cycle may end with a right guess, where there is no bonus.
                assert kept == run + 1 or (kept == run and at + kept == len(response.tokens) - 1)
                at += kept
            assert acceptance.walk(found[i].runs) == response.cycles
        cycles = [r.cycles for r in responses]
        whole = validate.summary(found.values(), block)
        assert whole["per_slot"] == [
            round(x, 5) for x in acceptance.figures(cycles, block)["per_slot"]
        ]
        gained += [x for c in cycles for x in c]
    assert max(gained) > 4 and min(gained) == 1 and len(gained) > 40  # the test sees all cases


def test_turns_are_apart_and_equal_the_slow_loop(fitted):
    model, drafter = fitted
    talk = conversation(model, drafter)
    spans = data.responses(talk.loss_mask).tolist()
    spans = [(a, b) for a, b in spans if b - a > 1]
    assert len(spans) > 2 and spans[-1][1] == len(talk.input_ids)
    for block in (2, 4, 8):
        found = validate.measure(
            drafter, [talk], *heads(model), block, {"talk": "x"}, torch.float64
        )
        assert [f.start for f in found] == [a for a, _ in spans]
        assert {f.kind for f in found} == {"x"}
        for f, (a, b) in zip(found, spans, strict=True):
            assert f.runs == slow_runs(drafter, *heads(model), talk, block, a, b)
            assert all(run <= b - 1 - at for at, run in enumerate(f.runs, a))
    assert max(run for f in found for run in f.runs) > 1


def test_no_guess_beyond_a_responses_end_is_right(fitted):
    """Of a response cut where the drafter guesses on, and of what comes after it."""
    model, drafter = fitted
    ids = PROMPTS[2] + answers(model, drafter)[2].tokens
    start = len(PROMPTS[2])

    def runs(mask: str) -> dict[int, list[int]]:
        mask = mask.ljust(len(ids), "1")
        d = extracted(model, drafter.config.target_layer_ids, "a", ids, [m == "1" for m in mask])
        found = validate.measure(drafter, [d], *heads(model), 8, {}, torch.float64)
        return {f.start: f.runs for f in found}

    whole = runs("0" * start)[start]
    at = max(range(len(whole)), key=lambda i: whole[i])
    assert whole[at] > 2
    cut = runs("0" * start + "1" * (at + 2) + "0")  # the token behind at + 1 is not the target's
    assert cut[start] == [min(run, at + 1 - i) for i, run in enumerate(whole[: at + 1])]
    assert cut[start][at] == 1
    assert cut[start + at + 3] == whole[at + 3 :]


def test_documents_of_any_size_take_bounded_memory(fitted, monkeypatch):
    model, drafter = fitted[0], deepcopy(fitted[1])
    talk, sizes = conversation(model, drafter), []
    drafter.register_forward_pre_hook(lambda _, args: sizes.append(args[1].shape[:2].numel()))

    def measured():
        sizes.clear()
        return validate.measure(drafter, [talk], *heads(model), 8, {}, torch.float64)

    whole = measured()
    assert len(sizes) == 1 and sizes[0] > 200
    monkeypatch.setattr(acceptance, "SLOTS", 100)
    assert measured() == whole
    assert len(sizes) > 2 and max(sizes) == 96


def test_precision_is_that_of_training(fitted):
    model, drafter = fitted
    talk, seen = conversation(model, drafter), []
    drafter = deepcopy(drafter).float().train().requires_grad_()
    embed_VH, head_VH = (x.float() for x in heads(model))
    drafter.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, _, out: seen.append((out.dtype, module.weight.dtype, module.training))
    )
    for dtype in (torch.bfloat16, torch.float32):
        found = validate.measure(drafter, [talk], embed_VH, head_VH.to(dtype), 8, {}, dtype)
        assert seen.pop() == (dtype, torch.float32, False) and drafter.training
        assert max(run for f in found for run in f.runs) > 1


def test_the_drafter_trains_on_after_an_error():
    drafter = make_drafter().train()

    def documents():
        raise UserError("damaged")
        yield

    with pytest.raises(UserError, match="damaged"):
        validate.measure(drafter, documents(), *[torch.zeros(9, 64)] * 2, 6, {}, torch.float32)
    assert drafter.training


# --- the summary --------------------------------------------------------------------------------


def test_summary_of_numbers_worked_out_by_hand():
    found = [
        validate.Response("b", "even", 9, [0, 0, 0]),  # cycles of 1, 1, 1
        validate.Response("a", "odd", 30, [1, 5, 0]),  # 2, 1
        validate.Response("a", "odd", 4, [2, 0, 0, 3, 2, 1, 0]),  # 3, 4
        validate.Response("c", "", 4, [0]),  # 1
    ]
    whole = validate.summary(found, 4)
    assert whole["responses"] == 4 and whole["cycles"] == 8
    assert whole["tau_mean"] == pytest.approx((1 + 1.5 + 3.5 + 1) / 4)
    assert whole["tau_pooled"] == pytest.approx(14 / 8)
    assert whole["by_position"] == pytest.approx(1 + 14 / 14)
    assert whole["per_slot"] == [3 / 8, 2 / 8, 1 / 8]
    assert whole["kinds"]["even"] == dict(responses=1, cycles=3, tau_mean=1.0, tau_pooled=1.0)
    assert whole["kinds"]["odd"] == dict(responses=2, cycles=4, tau_mean=2.5, tau_pooled=2.5)
    assert list(whole["kinds"]) == ["even", "odd"]


def test_summary_of_nothing():
    whole = validate.summary([], 4)
    assert whole["tau_mean"] is whole["tau_pooled"] is whole["by_position"] is None
    assert whole["per_slot"] == [] and whole["kinds"] == {} and whole["responses"] == 0


def test_summary_does_not_depend_on_order_nor_on_the_way_from_rank_to_rank(monkeypatch):
    taus, seen = acceptance.taus, []
    monkeypatch.setattr(acceptance, "taus", lambda counts: seen.append(counts) or taus(counts))
    rng = np.random.default_rng(0)
    found = [
        validate.Response(n, n[0], s, rng.integers(0, 7, rng.integers(1, 30)).tolist())
        for n in NAMES
        for s in (3, 90)
    ]
    text = json.dumps(validate.summary(found, 8))
    for part in (found[::-1], found[1::2] + found[::2], pickle.loads(pickle.dumps(found))):
        assert json.dumps(validate.summary(part, 8)) == text
        assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]  # nor do its sums, to the last bit
        del seen[len(seen) // 2 :]
    sent = json.loads(json.dumps([asdict(r) for r in found]))
    assert [validate.Response(**r) for r in sent] == found


# --- which documents ----------------------------------------------------------------------------


def some(names=NAMES) -> list[Doc]:
    return [document(n, "0011" + "01" * (i % 3), seed=i) for i, n in enumerate(names)]


def test_the_chosen_do_not_depend_on_shards():
    chosen = validate.choose(split(some(), 1), 0.25, 99)
    assert len(chosen) == 10 and chosen == sorted(chosen) and set(chosen) < set(NAMES)
    assert validate.choose(split(some()[::-1], 3), 0.25, 99) == chosen


def test_share_and_most_bound_the_chosen_which_stay_when_more_are_wanted():
    shards = split(some(), 2)
    counts = {(0.0, 9): 0, (0.001, 9): 1, (0.1, 9): 4, (0.29, 99): 11, (0.5, 7): 7, (0.999, 99): 39}
    before: list[str] = []
    for (share, most), count in counts.items():
        chosen = validate.choose(shards, share, most)
        assert len(chosen) == count
        assert set(chosen) >= set(before) or most == 7
        before = chosen


def test_one_document_is_always_left_to_train_with():
    assert validate.choose(split(some(["a", "b"]), 1), 0.9, 9) != []
    assert validate.choose(split(some(["a"]), 1), 0.9, 9) == []
    # those that hold no block would not be enough
    others = [document("b", "0001"), document("c", "0101"), document("d", "0000")]
    assert validate.choose(split([*some(["a"]), *others], 1), 0.9, 9) == []
    assert validate.choose(split(others, 1), 0.9, 9) == []


def test_only_documents_with_something_to_draft_are_chosen_and_count():
    documents = [*some(NAMES[:10]), *(document(n, "0101") for n in NAMES[10:])]
    assert len(validate.choose(split(documents, 3), 0.5, 99)) == 5
    assert set(validate.choose(split(documents, 3), 0.9, 99)) < set(NAMES[:10])


def test_a_sample_in_two_shards_counts_once_as_its_last_shard_has_it(store):
    first, last = Shard(some()), Shard(some(NAMES[:20])[::-1])
    assert len(validate.choose([first, last], 0.5, 99)) == 20
    name = validate.choose([first], 0.001, 1)[0]
    unusable = Shard([document(name, "0001")])
    assert name not in validate.choose([first, unusable], 0.9, 99)
    assert name in validate.choose([unusable, first], 0.9, 99)
    documents = validate.read([first, last], [0, 1], ["03", "25"])
    assert documents.places == [(0, 25), (1, 16)]
    with pytest.raises(KeyError, match="strange"):
        validate.read([first, last], [0, 1], ["strange"])


# --- reading ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    """Twelve documents in three shards on disk, opened, and the documents."""
    shards, documents = [], []
    for i in range(3):
        documents.append(some_documents([9, 17, 30, 41], seed=i))
        write(tmp_path / f"{i}.zarr", documents[-1])
        shards.append(open_shard(tmp_path / f"{i}.zarr"))
        shards[-1].close()
    return shards, documents


def test_documents_are_read_again_each_time(store):
    shards, written = store
    wanted = [written[2][3], written[0][1], written[2][0]]
    for taps in ([0, 1], [1], [1, 0]):
        documents = validate.read(shards, taps, [d.sample_id for d in wanted])
        assert len(documents) == 3
        for _ in range(2):
            for d, want in zip(documents, [wanted[1], wanted[2], wanted[0]], strict=True):
                assert d.sample_id == want.sample_id
                assert d.input_ids.tolist() == want.input_ids.tolist()
                assert d.loss_mask.tolist() == want.loss_mask.tolist()
                assert np.array_equal(d.hidden, want.hidden[:, taps])
    for shard in shards:  # nothing is kept
        assert not {"_arrays", "offsets", "_input_ids", "_loss_mask"} & set(vars(shard))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_share_the_documents(store, world):
    shards, written = store
    ids = [d.sample_id for some in written for d in some][1:9]
    documents = validate.read(shards, [0, 1], ids)
    parts = [documents[rank::world] for rank in range(world)]
    assert [len(list(p)) for p in parts] == [len(p) for p in parts]
    assert sorted(d.sample_id for p in parts for d in p) == sorted(ids)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_document_is_in_memory_and_one_shard_open():
    shards, seen = split(some(), 3), []
    for shard in shards:
        shard.on_read = lambda d: seen.append((d.sample_id, sum(len(s.copies) for s in shards)))
    documents = iter(validate.read(shards, [0, 1], NAMES))
    next(documents)
    assert len(seen) == 1
    assert len(list(documents)) == 39 and {count for _, count in seen} == {1}


def test_damage_is_said_in_the_stores_own_sentence(store):
    shards, written = store
    documents = validate.read(shards, [0, 1], [written[1][2].sample_id])
    for file in (shards[1].path / "hidden" / "c").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(UserError, match="hidden/c/.* is missing"):
        list(documents)


def test_training_and_validation_share_no_document():
    documents = some()
    shards = split(documents, 3)
    kept = validate.choose(shards, 0.2, 99)
    stream = make_stream(shards=split(documents, 3), without=kept)
    trained = {stream.place(i).sample_id for i in range(len(stream))}
    assert trained == set(NAMES) - set(kept) and len(kept) == 8
    assert {d.sample_id for d in validate.read(shards, [0, 1], kept)} == set(kept)
