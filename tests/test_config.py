"""Settings: what is refused, with which words, and what decides a rerun."""

import copy
import json
from pathlib import Path

import pytest

from dflash import attention, config, drafter
from dflash.errors import UserError

ROOT = Path(__file__).parent.parent
FACTS = config.TargetFacts(
    num_hidden_layers=30, hidden_size=576, vocab_size=49152, pad_token_id=2, eos_token_ids=[2, 0]
)
GOOD = {"drafters": {"d": {"mask_token_id": 5}}}


def load(changes: dict) -> config.Workflow:
    return config.load({**copy.deepcopy(GOOD), **changes}, FACTS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter": {}}, ["unknown key `drafter`", "did you mean `drafters`"]),
        (
            {"drafters": {"d": {"mask_token_id": 5, "block_sze": 8}}},
            ["unknown key `drafters.d.block_sze`", "did you mean `block_size`"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"lr": "fast"}}}},
            ["`drafters.d.training.lr`", '"fast"', "number"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"lr": float("nan")}}}},
            ["`drafters.d.training.lr`", "NaN"],
        ),
        ({"drafters": {"d": {}}}, ["`drafters.d.mask_token_id` is missing"]),
        ({"drafters": {}}, ["`drafters`", "at least 1"]),
        (
            {"drafters": {"d": {"mask_token_id": 5, "block_size": 1}}},
            ["`drafters.d.block_size`", "found 1", "greater than or equal to 2"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "block_size": "8"}}},
            ["`drafters.d.block_size`", '"8"', "integer"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 2}}},
            ["drafters.d.mask_token_id", "found 2", "end token", "[0, 2]"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 49152}}},
            ["drafters.d.mask_token_id", "found 49152", "0..49151"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "taps": [1, 30]}}},
            ["drafters.d.taps", "[30]", "0..28"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "taps": [1, 29]}}},
            ["drafters.d.taps", "[29]", "last layer"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "taps": [5, 3]}}},
            ["`drafters.d.taps`", "ascending"],
        ),
        ({"drafters": {"d": {"mask_token_id": 5, "taps": 29}}}, ["drafters.d.taps", "29"]),
        (
            {"drafters": {"d": {"mask_token_id": 5}, "e": {"extends": "f"}}},
            ["`drafters.e.extends`", '"f"', "allowed: d"],
        ),
        (
            {"drafters": {"d": {"extends": "e"}, "e": {"extends": "d"}}},
            ["extends", "circle"],
        ),
        ({"target": {"model": "embedded:gpt"}}, ["`target.model`", "smollm2"]),
        ({"target": {"model": "Qwen/Qwen3-8B"}}, ["`target.model`", "pinned revision"]),
        (
            {"corpus": {"sources": [{"name": "../x", "path": "p"}]}},
            ["`corpus.sources.0.name`", "../x"],
        ),
        (
            {"corpus": {"sources": [{"name": "a", "path": "p"}, {"name": "a", "path": "q"}]}},
            ["`corpus.sources`", "differ"],
        ),
        (
            {
                "drafters": {
                    "d": {"mask_token_id": 5, "num_attention_heads": 5, "num_key_value_heads": 2}
                }
            },
            ["drafters.d", "5 query heads", "2 key/value heads"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"betas": [1.5, 0.9]}}}},
            ["`drafters.d.training.betas.0`", "1.5", "less than 1"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"lr": "6e-4"}}}},
            ["`drafters.d.training.lr`", "write 0.0006"],
        ),
        (
            {
                "drafters": {
                    "d": {"mask_token_id": 5, "training": {"loss": {"gamma": float("inf")}}}
                }
            },
            ["`drafters.d.training.loss.gamma`", "finite"],
        ),
        ({"drafters": {"d": {"extends": ["e"]}}}, ["`drafters.d.extends`", "no other drafter"]),
        ({"corpus": {"heldout_share": 0.0}}, ["`corpus.heldout_share`", "found 0", "path"]),
        (
            {
                "extract": {"backend": "vllm"},
                "machine": {"extract": {"gpu": 2, "parallel": "tensor"}},
            },
            ["`machine.extract.parallel`", "found tensor", "vllm.tensor_parallel"],
        ),
        ({"machine": {"evaluate": {"gpu": 8}}}, ["`machine.evaluate.gpu`", "found 8"]),
        (
            {
                "drafters": {
                    "d": {"mask_token_id": 5, "block_size": 4, "training": {"block_sizes": [2, 8]}}
                }
            },
            ["block_sizes [2, 8]", "block_size 4"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"block_sizes": [4, 4]}}}},
            ["found [4, 4]", "once"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"lr": float("nan")}}}},
            ["training.lr`", "NaN", "finite"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"epochs": 1e300}}}},
            ["training.epochs`", "found 1e+300", "1000000"],
        ),
        (
            {"drafters": {"d": {"mask_token_id": 5, "training": {"optimizer": "sgd"}}}},
            ["'adamw' or 'muon'"],
        ),
    ],
)
def test_refusals_name_key_found_and_allowed(changes, words):
    with pytest.raises(UserError) as e:
        load(changes)
    for word in words:
        assert word in str(e.value)
    assert "\n" not in str(e.value)


def test_several_faults_are_all_named():
    with pytest.raises(UserError) as e:
        load({"resuls": "x", "extract": {"max_tokens": 1}})
    assert "resuls" in str(e.value) and "extract.max_tokens" in str(e.value)


def test_extends_merges_deeply():
    w = load(
        {
            "drafters": {
                "a": {"mask_token_id": 5, "training": {"lr": 1e-3, "seed": 3}},
                "b": {"extends": "a", "training": {"seed": 4}},
                "c": {"extends": "b", "block_size": 4},
            }
        }
    )
    c = w.drafters["c"]
    assert (c.training.lr, c.training.seed, c.block_size, c.mask_token_id) == (1e-3, 4, 4, 5)
    assert w.drafters["a"].block_size == 16


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (28, 5, [1, 7, 13, 19, 25]),
        (48, 5, [1, 12, 23, 34, 45]),
        (64, 5, [1, 16, 31, 46, 61]),
        (30, 1, [15]),
    ],
)
def test_published_tap_ids(layers, taps, ids):
    assert config.tap_ids(config.Drafter(mask_token_id=5, taps=taps), layers) == ids


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (13, 6.0), (4, 2.0)])
def test_published_decay(block, gamma):
    assert config.gamma(config.Drafter(mask_token_id=5, block_size=block)) == gamma


def test_stage_settings_hold_exactly_what_decides():
    base = load({})

    def differing(changes):
        other = load(changes)
        out = []
        for stage in config.STAGE_VERSION:
            name = {"corpus": "quickstart", "regenerate": "quickstart", "train": "d"}.get(stage, "")
            name = "heldout" if stage in ("task", "evaluate", "served") else name
            if config.stage_settings(base, stage, name) != config.stage_settings(
                other, stage, name
            ):
                out.append(stage)
        return out

    lr = {"mask_token_id": 5, "training": {"lr": 1e-3}}
    assert differing({"drafters": {"d": lr}}) == ["train"]
    assert differing({"evaluate": {"max_new_tokens": 10}}) == ["task", "evaluate", "served"]
    assert differing({"evaluate": {"dtype": "bfloat16"}}) == ["evaluate"]
    # decides which runs there are, or what none of these does
    assert differing({"evaluate": {"temperatures": [0.0, 1.0], "block_sizes": [16, 8]}}) == []
    assert differing({"evaluate": {"top_k": 5, "rule": "sample_match", "seed": 3}}) == []
    server = {"backend": "openai", "server": {"url": "http://localhost:1"}}
    assert differing({"evaluate": server}) == ["served"]
    assert differing({"machine": {"train": {"micro_batch": 1}, "extract": {"gpu": 0}}}) == []
    assert differing({"results": "elsewhere"}) == []
    assert differing({"target": {"dtype": "float32"}}) == ["regenerate", "extract"]
    assert differing({"regenerate": {"temperature": 0.5}}) == ["regenerate"]
    taps = {"mask_token_id": 5, "taps": [1, 2]}
    assert differing({"drafters": {"d": taps}}) == ["extract", "train"]

    def loss(**changes):
        return differing({"drafters": {"d": {"mask_token_id": 5, "training": {"loss": changes}}}})

    assert loss(labels="soft") == loss(labels="argmax") == ["extract", "train"]
    assert loss(weights="dpace") == loss(gamma=3.0) == ["train"]
    assert loss(dpace_alpha=0.4) == loss(labels="data", weights="decay") == []


def test_runs_have_names_and_settings_of_their_own():
    drafters = {"d": {"mask_token_id": 5}, "e": {"mask_token_id": 5, "block_size": 8}}
    evaluate = {"temperatures": [0.0, 0.5], "block_sizes": [8, 4], "top_p": 0.9, "seed": 4}
    workflow = load({"drafters": drafters, "evaluate": evaluate})
    names = [[run.name for run in config.runs(workflow, d)] for d in drafters]
    assert names == [
        ["@t0-b8", "@t0-b4", "@t0.5-b8", "@t0.5-b4"],
        ["", "@t0-b4", "@t0.5", "@t0.5-b4"],
    ]
    assert [run.name for run in config.runs(load({}), "d")] == [""]

    def added(run):
        first = json.loads(config.stage_settings(load({}), "evaluate", "heldout"))
        own = json.loads(config.stage_settings(workflow, "evaluate", "heldout", run))
        return {key: value for key, value in own.items() if key not in first}

    assert added(config.Run()) == {}
    assert added(config.Run(0.0, 4)) == {"block_size": 4}
    assert added(config.Run(0.5)) == {"temperature": 0.5, "top_p": 0.9, "seed": 4}


def test_published_tasks_have_limits_of_their_own():
    tasks = {"a": {"dataset": "gsm8k"}, "b": {"dataset": "aime25", "max_new_tokens": 9}, "c": {}}
    workflow = load({"evaluate": {"tasks": tasks, "max_new_tokens": 7}})
    assert [config.response_limit(workflow, t) for t in tasks] == [2048, 9, 7]
    found = json.loads(config.stage_settings(workflow, "evaluate", "a"))
    assert found["task"] == {"dataset": "gsm8k"} and found["max_new_tokens"] == 2048
    assert config.check(config.Task, found["task"], "task").dataset == "gsm8k"  # reads it back


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        ({"block_sizes": [16, 20]}, r"evaluate.block_sizes`: found \[20\], and drafter d .* of 16"),
        ({"temperatures": [1.0, 1.0]}, "expected each value once"),
        ({"temperatures": []}, "at least 1 item"),
        ({"backend": "openai"}, "`openai` and `server` go together"),
        ({"server": {"url": "http://h:1"}}, "`openai` and `server` go together"),
        ({"backend": "openai", "server": {"url": "h:1"}}, "server.url"),
        (
            {"backend": "openai", "server": {"url": "http://h:1", "drafter": "x"}},
            "server.drafter`: found x; allowed: the drafter that the server drafts with, one of d",
        ),
        ({"tasks": {"t": {"dataset": "gsm9k"}}}, "tasks.t.dataset"),
        ({"tasks": {"t": {"rows": 3}}}, "revision and rows go with `dataset` only"),
        (
            {"tasks": {"t": {"dataset": "gsm8k", "prompts_per_kind": 3}}},
            "prompts_per_kind does not go with `dataset`",
        ),
        (
            {"tasks": {"t": {"dataset": "gsm8k", "path": "x", "revision": "y"}}},
            "revision belongs to the hub",
        ),
    ],
)
def test_evaluations_that_cannot_be_are_refused(evaluate, words):
    with pytest.raises(UserError, match=words):
        load({"evaluate": evaluate})


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (
            {"profile_steps": [5, 3]},
            r"profile_steps`: found \[5, 3\]; expected the first step, then",
        ),
        ({"sharding": "fsdp", "gpu": 1}, "found fsdp with gpu 1, .* allowed: gpu 2 or more"),
        ({"sharding": "fsdp", "gpu": 0}, "sharding`: found fsdp with gpu 0"),
    ],
)
def test_ways_to_train_that_cannot_be_are_refused(machine, words):
    with pytest.raises(UserError, match=words):
        load({"machine": {"train": machine}})


def test_settings_that_do_not_go_together_are_said_without_a_key():
    with pytest.raises(UserError, match=r"^drafters.d: training.block_sizes \[2\] with block_size"):
        drafter = {"mask_token_id": 5, "training": {"block_sizes": [2]}}
        config.check(config.Drafter, drafter, "drafters.d")


def test_what_came_later_leaves_older_results_alone():
    """Settings that ask for nothing new give the very JSON they gave before (dflash 0.1)."""
    assert config.stage_settings(load({}), "evaluate", "heldout") == (
        '{"corpus":{"enable_thinking":false,"max_prompt_tokens":512},"dtype":"float32",'
        '"max_new_tokens":64,"stage":"evaluate","task":{"path":null,"prompts_per_kind":20},'
        '"timed_prompts_per_kind":2,"trust_remote_code":false,"version":1}'
    )
    train = json.loads(config.stage_settings(load({}), "train", "d"))
    extract = json.loads(config.stage_settings(load({}), "extract"))
    assert "last_hidden" not in extract and extract["version"] == 1
    assert "codec" not in extract  # extractions made before there were codecs stay valid
    packed = json.loads(config.stage_settings(load({"extract": {"codec": "int8"}}), "extract"))
    assert packed == extract | {"codec": "int8"}

    soft = {"mask_token_id": 5, "training": {"loss": {"labels": "soft", "weights": "dpace"}}}
    both = load({"drafters": {"d": {"mask_token_id": 5}, "e": soft}})
    assert config.stage_settings(both, "train", "d") == config.canonical(train)
    assert json.loads(config.stage_settings(both, "extract"))["last_hidden"] is True
    own = json.loads(config.stage_settings(both, "train", "e"))
    assert "trust_remote_code" not in own
    trusting = load({"target": {"trust_remote_code": True}, "drafters": {"d": soft}})
    assert json.loads(config.stage_settings(trusting, "train", "d"))["trust_remote_code"] is True


def test_settings_that_decide_nothing_retrain_nothing():
    def share(**training):
        settings = load({"drafters": {"d": {"mask_token_id": 5, "training": training}}})
        return config.stage_settings(settings, "train", "d")

    assert share() == share(muon={"lr": 0.1}) != share(optimizer="muon", muon={"lr": 0.1})
    muon = {"optimizer": "muon"}
    assert share(**muon) == share(**muon, weight_decay=0.5) and share() != share(weight_decay=0.5)
    assert share() == share(decay_share=0.5)
    assert share(schedule="wsd") != share(schedule="wsd", decay_share=0.5)
    assert share(warmup_steps=3) == share(warmup_steps=3, warmup_share=0.5) != share()
    assert share() == share(loss={"dpace_alpha": 0.9})
    dpace = {"weights": "dpace", "gamma": 2.0}
    assert (
        share(loss=dpace)
        == share(loss={"weights": "dpace"})
        != share(loss=dpace | {"dpace_alpha": 0.9})
    )
    off = {"share": 0.0}
    assert share(validation=off) == share(validation=off | {"times": 3}) != share()
    assert share(validation={"times": 3}) != share()


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_smoothing_outside_its_range(alpha):
    loss = {"weights": "dpace", "dpace_alpha": alpha}
    with pytest.raises(UserError, match=rf"loss.dpace_alpha`: found {alpha}"):
        load({"drafters": {"d": {"mask_token_id": 5, "training": {"loss": loss}}}})


def test_canonical_json_ignores_key_order():
    assert config.canonical({"b": 1, "a": [1, 2]}) == config.canonical({"a": [1, 2], "b": 1})


def test_generated_files_are_in_step():
    for name, text in config.generated_files().items():
        assert (ROOT / "config" / name).read_text() == text, (
            f"config/{name} is stale: run python -m dflash.config --write config"
        )


def test_generated_yaml_reads_back_as_the_demo():
    assert config.load(ROOT / "config/config.yaml") == config.demo_workflow()


def test_conda_environment_is_made_from_the_lock():
    import runpy

    made = runpy.run_path(str(ROOT / "envs/conda.py"))["conda_yaml"]()
    assert (ROOT / "envs/dflash.yaml").read_text() == made


def test_lock_pins_everything_that_is_required():
    import re

    pins = dict(
        line.split("==")
        for line in (ROOT / "envs/lock.txt").read_text().splitlines()
        if "==" in line
    )
    pinned = {re.sub(r"[-_.]+", "-", k).lower() for k in pins}
    for line in (ROOT / "envs/requirements.in").read_text().splitlines():
        name = re.split(r"[=<>]", line)[0].strip()
        if name and not name.startswith("#"):
            assert re.sub(r"[-_.]+", "-", name).lower() in pinned
    documented = (ROOT / "docs/dependencies.md").read_text()
    for line in (ROOT / "envs/requirements.in").read_text().splitlines():
        name = re.split(r"[=<>]", line)[0].strip()
        if name and not name.startswith("#"):
            assert f"`{name}`" in documented, f"{name} has no reason in docs/dependencies.md"


def test_local_folder_facts(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 99, "eos_token_id": 1})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    facts = config.target_facts(config.Target(model=str(tmp_path)))
    assert facts.eos_token_ids == [1, 7] and facts.pad_token_id is None
    with pytest.raises(UserError, match="config.json"):
        config.target_facts(config.Target(model=str(tmp_path / "nowhere")))


def test_published_recipe_is_complete():
    w = config.load(ROOT / "config/qwen3-8b.yaml")
    d = w.drafters["qwen3-8b-b16"]
    assert config.tap_ids(d, 36) == [1, 9, 17, 25, 33]
    t = d.training
    assert (t.lr, t.epochs, t.anchors_per_document, t.warmup_share, t.clip) == (
        6e-4, 6.0, 512, 0.04, 1.0,
    )  # fmt: skip
    assert config.gamma(d) == 7.0 and d.start == "random" and w.extract.max_tokens == 3072


def test_blocks_in_prompts_need_labels_of_the_target():
    with pytest.raises(UserError, match="positions `all` with labels `data`.*argmax or soft"):
        config.check(config.Loss, {"positions": "all"}, "x")
    assert config.check(config.Loss, {"positions": "all", "labels": "soft"}, "x").positions == "all"


def test_changing_how_a_stage_runs_leaves_it_its_gpu():
    for stage in ("regenerate", "extract", "train", "evaluate"):
        machine = {stage: {"threads": 3}}
        assert getattr(load({"machine": machine}).machine, stage).gpu == 1


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ({"checkpointing": "selective", "reentrant": True}, "older checkpoint cannot keep"),
        ({"pad_context": 999}, "only together; allowed: both or neither"),
        ({"pad_blocks": 9}, "only together; allowed: both or neither"),
        ({"attention": "sparse"}, "`machine.train.attention`: found"),
        ({"attention": "flex", "gpu": 1}, "compiles anew for every shape"),
        ({"attention": "flex", "gpu": 0, "pad_context": 9, "pad_blocks": 9}, "trains on GPUs only"),
        ({"group_rows": 0}, "`machine.train.group_rows`: found 0"),
    ],
)
def test_train_machine_settings_that_cannot_work_together(machine, text):
    demo = copy.deepcopy(config.DEMO)
    demo["machine"]["train"] = machine
    with pytest.raises(UserError, match=text):
        config.load(demo)


def test_settings_name_the_backends_and_modes_that_exist():
    """Settings know no torch, so they repeat these names."""
    properties = config.TrainMachine.model_json_schema()["properties"]
    assert set(properties["attention"]["enum"]) == set(attention.BACKENDS)
    assert set(properties["checkpointing"]["enum"]) == set(drafter.CHECKPOINTING)
