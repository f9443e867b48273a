"""Fixtures that many tests share: tiny real models in folders, with real tokenizers.

Both targets have random weights from fixed seeds, four layers of width 64 and a byte-level BPE
tokenizer of 320 tokens with a ChatML template. `tiny_llama` ties its head to the embeddings,
`tiny_qwen3` does not. Their end token is likely enough that greedy answers end now and then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub: no test reaches a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from support.targets import SHAPE, save_tiny
from tiny import settings, snakemake
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash.errors import entrypoint
from dflash.target import Identity, identify

torch.set_num_threads(1)  # the models are tiny and the cores shared


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with tied embeddings. Do not change it: copy it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    return save_tiny(model, tmp_path_factory.mktemp("models") / "tiny_llama", end_factor=1.4)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with a head of its own. Do not change it: copy it."""
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    return save_tiny(model, tmp_path_factory.mktemp("models") / "tiny_qwen3", end_factor=2)


@pytest.fixture(scope="session")
def tiny_qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3-Next without its special layers, whose norms multiply by 1 + weight (as
    Gemma's do), with weights that differ. Do not change it: copy it."""
    torch.manual_seed(2)
    config = Qwen3NextConfig(
        **SHAPE,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * SHAPE["num_hidden_layers"],
        mlp_only_layers=list(range(SHAPE["num_hidden_layers"])),
    )
    model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.normal_(0, 0.3)
    return save_tiny(model, tmp_path_factory.mktemp("models") / "tiny_qwen3_next", end_factor=2)


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each of the two folders in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A function: folder of a model -> path of a copy that a test may change."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy" / folder.name))


@pytest.fixture(scope="session")
def identity_of() -> Callable[[Path], Identity]:
    """A function: folder of a model -> its Identity."""
    return lambda folder: identify(str(folder), folder, "local")


@pytest.fixture
def identity_file(
    tmp_path: Path, identity_of: Callable[[Path], Identity]
) -> Callable[[Path], Path]:
    """A function: folder of a model -> path of an identity.json for it, as `--identity` wants."""

    def write(folder: Path) -> Path:
        path = tmp_path / f"{folder.name}-identity.json"
        path.write_text(json.dumps(asdict(identity_of(folder))), encoding="utf-8")
        return path

    return write


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """A function: a stage's main and its arguments -> the one sentence with which it refuses them.

    The stage must end as its entrypoint does: exit status 2 and, but for progress bars, one line.
    """

    def run(main: Callable[[list[str]], None], *argv: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            entrypoint(lambda _: main([str(a) for a in argv]))
        assert end.value.code == 2
        lines = [x for x in capsys.readouterr().err.splitlines() if "%|" not in x]
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        return lines[0].removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path
) -> tuple[Path, dict[str, Any], subprocess.CompletedProcess[str]]:
    """A folder with a finished run of the whole tiny workflow, its settings, and how it ended."""
    folder = tmp_path_factory.mktemp("workflow")
    config = settings(folder, tiny_llama)
    done = snakemake(folder, config)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, config, done
