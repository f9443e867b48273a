"""dflash.plan: the predicted peak against live tensors, and what it says and refuses."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dflash import config, plan
from dflash.drafter import CHECKPOINTING
from dflash.errors import UserError

ROOT = Path(__file__).parent.parent
QWEN = ROOT / "config" / "qwen3-8b.yaml"
GIB = 2**30


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/plan_check.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plan_check")


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the prompts' path is relative


@pytest.fixture
def workflow(tmp_path: Path) -> config.Workflow:
    """The recipe for Qwen3-8B, with results that are not there."""
    settings = yaml.safe_load(QWEN.read_text()) | {"results": str(tmp_path / "results")}
    return config.load(settings)


@pytest.mark.parametrize(
    ("backend", "checkpointing", "changes"),
    [
        ("split", "layer", {}),
        ("chunked", "none", {"dtype": "bfloat16", "labels": "soft", "documents": 2, "packs": 2}),
        ("gather", "group", {}),
        ("dense", "none", {"anchors": 32}),
    ],
)
def test_peak_of_live_tensors(
    check: ModuleType, backend: str, checkpointing: str, changes: dict[str, Any]
) -> None:
    """Counted by the profiler, so that no allocator and no other process has a say."""
    shape = replace(
        check.BASE,
        **{"tokens": 512, "anchors": 64, "hidden": 128, "vocab": 2048, "intermediate": 256}
        | {"backend": backend, "checkpointing": checkpointing, "loss_rows": 256}
        | changes,
    )
    measured = check.live_tensor_bytes(shape)
    assert measured > 20e6
    assert plan.estimate(shape).peak == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("backend", plan.PLANNED)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_that_comes_goes(backend: str, checkpointing: str, dtype: str, device: str) -> None:
    """After a step only weights, moments, gradients and the target's tensors are left."""
    shape = replace(
        plan.START,
        backend=backend,
        checkpointing=checkpointing,
        dtype=dtype,
        device=device,
        packs=2,
    )
    live = plan.estimate(shape).live
    assert live["weights"] == 4 * shape.weights
    assert live["optimiser"] == 12 * shape.weights
    passing = ("activations", "attention", "loss")
    assert {k: live[k] for k in passing} == dict.fromkeys(passing, 0)


def test_counts_the_weights_of_the_published_drafter() -> None:
    """Qwen3-8B's: the shapes of reference/dflash.md, 3, added up by hand."""
    fc, norms = 5 * 4096 * 4096, 4096
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 2 * 128
    layer = attention + 3 * 4096 * 12288 + 2 * norms
    assert plan.START.weights == fc + 2 * norms + 5 * layer


def test_the_starting_point() -> None:
    found = plan.starting_point()
    assert found["chunks"] == 23
    assert found["chunk_bytes"] == 45 * 8016 * 4096 * 2
    assert found["chunk_bytes"] / GIB == pytest.approx(2.75, abs=0.01)
    assert found["layer_bytes"] / GIB == pytest.approx(128, rel=0.03)
    assert found["peaks"]["gather"]["none"] > 96e9
    assert found["peaks"]["split"]["layer"] < 32e9
    for row in found["peaks"].values():
        assert min(row, key=row.get) != "none"


def test_largest_anchors_fit_and_one_step_more_does_not() -> None:
    for card in list(plan.CARDS)[1:]:
        most = plan.largest_anchors(plan.START, card, 32768)
        peak = plan.estimate(replace(plan.START, tokens=32768, anchors=most)).peak
        more = plan.estimate(replace(plan.START, tokens=32768, anchors=most + plan.STEP)).peak
        assert peak <= plan.usable(card) < more
    assert plan.largest_anchors(plan.START, 141, 512) == 512  # one a token
    assert plan.largest_anchors(plan.START, 12, 512) == 0


def test_disk_from_prompts_and_from_counted_tokens(workflow: config.Workflow) -> None:
    drafter = workflow.drafters["qwen3-8b-b16"]
    found = plan.disk(workflow, drafter)
    assert found["bytes_a_token"] == 5 * 4096 * 2 + 5
    assert found["tokens"] == found["documents"] * 3072
    assert found["tokens_known"].startswith("at most")

    source = workflow.corpus.sources[0]
    for i, shard in enumerate(config.shard_names(source.shards)):
        path = Path(workflow.results) / "tokens" / source.name / f"{shard}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [[1] * 100, [1] * 5000] if i == 0 else [[1] * 200]
        pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), path)
    found = plan.disk(workflow, drafter)
    assert (found["documents"], found["tokens"]) == (17, 100 + 3072 + 15 * 200)
    assert found["extraction_bytes"] == found["tokens"] * 40965 + 17 * 24
    # chunks of 32 tokens are read whole: 31 more a document
    assert found["epoch_bytes"] == (found["tokens"] + 17 * 31) * 40960
    assert found["training_bytes"] == 6 * found["epoch_bytes"]
    for codec, row in (("compact", 28672), ("int8", 21094)):
        settings = workflow.model_dump(mode="json")
        settings["extract"]["codec"] = codec
        found = plan.disk(config.load(settings), drafter)
        assert found["bytes_a_token"] == row + 5
        assert found["epoch_bytes"] == (found["tokens"] + 17 * 63) * row


def test_labels_of_the_target_cost_another_state(workflow: config.Workflow) -> None:
    settings = workflow.model_dump(mode="json")
    settings["drafters"]["soft"] = {
        "extends": "qwen3-8b-b16",
        "taps": [1, 9],
        "training": {"loss": {"labels": "soft"}},
    }
    both = config.load(settings)
    found = plan.disk(both, both.drafters["soft"])
    assert found["bytes_a_token"] == 6 * 4096 * 2 + 5
    plain = plan.disk(both, both.drafters["qwen3-8b-b16"])
    assert found["epoch_bytes"] == plain["epoch_bytes"] * 6 // 5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_counts_what_optimisers_keep(optimizer: str) -> None:
    from test_decode import make_drafter

    from dflash import recipe

    drafter = make_drafter()
    c, training = drafter.config, config.Training(optimizer=optimizer)
    optimizers = recipe.make_optimizers(drafter, training)
    for p in drafter.parameters():
        p.grad = p.detach().clone()
    for one in optimizers:
        one.step()
    states = [v for one in optimizers for moments in one.state.values() for v in moments.values()]
    sizes = {"hidden": c.hidden_size, "heads": c.num_attention_heads, "head_dim": c.head_dim}
    sizes |= {"kv_heads": c.num_key_value_heads, "intermediate": c.intermediate_size}
    sizes |= {"layers": c.num_hidden_layers, "taps": len(c.target_layer_ids)}
    shape = replace(plan.START, **sizes, optimizer=optimizer)
    assert shape.weights == sum(p.numel() for p in drafter.parameters())
    assert shape.states == sum(v.numel() for v in states if v.dim() > 0)
    assert replace(shape, averaged=True).states == shape.states + shape.weights


def test_several_gpus_share_documents_and_if_asked_weights(workflow: config.Workflow) -> None:
    settings = workflow.model_dump(mode="json")
    name = next(iter(workflow.drafters))
    settings["machine"]["train"] |= {"gpu": 1}
    one = plan.shape_of(config.load(settings), name)
    settings["machine"]["train"] |= {"gpu": 4}
    four = plan.shape_of(config.load(settings), name)
    assert four == replace(one, ranks=4, packs=one.packs // 4)
    assert plan.fixed_bytes(four) == plan.fixed_bytes(one)
    settings["machine"]["train"] |= {"sharding": "fsdp"}
    split = plan.shape_of(config.load(settings), name)
    kept = plan.fixed_bytes(one) - 16 * one.weights
    assert plan.fixed_bytes(split) == kept + 4 * one.weights
    assert plan.estimate(split).peak < plan.estimate(one).peak
    live = plan.estimate(split).live
    assert live["optimiser"] == pytest.approx(12 * split.weights / 4, rel=1e-6)


def test_prints_text_and_json(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CARDS", {48: 46_068})
    plan.main(["--config", str(QWEN), "--tokens", "8000", "--anchors", "1024"])
    out = capsys.readouterr().out
    assert "a pack of 8,000 tokens in 1 document(s), 1,024 anchors" in out
    assert "45 x 8,016 x 32 x 128 x 2 bytes = 2.75 GiB" in out
    argv = [
        "--config",
        str(QWEN),
        "--tokens",
        "8000",
        "--anchors",
        "1024",
        "--card",
        "80",
        "--json",
    ]
    plan.main(argv)
    found = json.loads(capsys.readouterr().out)
    assert list(found["largest_anchors"]) == ["80"]
    assert sum(found["terms"].values()) == found["peak_bytes"]


def test_the_demo_needs_no_results() -> None:
    settings = config.load(ROOT / "config" / "config.yaml")
    shape = plan.shape_of(settings, "demo")
    assert (shape.hidden, shape.intermediate, shape.head_dim) == (576, 1536, 64)
    longest = settings.corpus.max_prompt_tokens + settings.regenerate.max_new_tokens
    assert shape.tokens == shape.documents * longest
    assert shape.documents == 4  # a step's, though micro_batch would take 8


def test_refuses_an_unknown_drafter(refusal: Callable[..., str]) -> None:
    said = refusal(plan.main, "--config", QWEN, "--drafter", "other")
    assert said == "--drafter: no drafter 'other' in the settings; there are qwen3-8b-b16"


def test_refuses_a_card_that_is_too_small(refusal: Callable[..., str]) -> None:
    said = refusal(plan.main, "--config", QWEN, "--card", 24)
    assert "a card of 24 GB leaves 20.8" in said and "lower machine.train.micro_batch" in said
    said = refusal(plan.main, "--config", QWEN, "--card", 12)
    assert said.endswith(
        "weights and optimiser alone do not fit: choose a larger card or fewer layers"
    )
    said = refusal(plan.main, "--config", QWEN, "--card", 48, "--tokens", 9000, "--anchors", 9000)
    assert "at most 4032 anchors fit" in said


def test_refuses_what_cannot_be_planned(workflow: config.Workflow, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="flex cannot be planned.*chunked, split, dense, gather"):
        plan.estimate(replace(plan.START, backend="flex"))
    with pytest.raises(UserError, match="9 anchors in 1 documents of 8 tokens"):
        plan.estimate(replace(plan.START, tokens=8, anchors=9))
    settings = workflow.model_dump(mode="json")
    settings["drafters"]["qwen3-8b-b16"]["intermediate_size"] = None
    with pytest.raises(UserError, match="intermediate_size: not stated"):
        plan.shape_of(config.load(settings), "qwen3-8b-b16")
    settings["corpus"]["sources"][0]["path"] = str(tmp_path / "none.jsonl")
    missing = config.load(settings)
    with pytest.raises(UserError, match="prompts: no file .*none.jsonl"):
        plan.disk(missing, missing.drafters["qwen3-8b-b16"])
