"""The probe names the kernel that really runs, and the warning comes with a remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash import attention, kernels
from dflash.errors import UserError

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent


def test_names_the_kernel_that_the_profiler_sees():
    found = kernels.of_backend("split", CPU, torch.float32, 4, 2, 16)
    assert [(k.call, k.kernel, k.fault) for k in found] == [
        ("masked", "cpu flash", None),
        ("no mask", "cpu flash", None),
    ]
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 20, 16)
    with torch.profiler.profile() as profile:
        attention.kernel_forward(q, k, k, None)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names


def test_bare_sdpa_is_asked_too():
    """As the profiler sees it for the same call."""
    q, k = (torch.randn(1, n, 64, 16, requires_grad=True) for n in (4, 2))
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    with torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    names = " ".join(event.key for event in profile.key_averages())
    found = kernels.sdpa_kernel(CPU, torch.float32, 4, 2, 16, True)
    assert found == ("flash" if "flash_attention_for_cpu" in names else "math")


def test_math_is_warned_of_with_a_remedy(monkeypatch):
    monkeypatch.setattr(attention, "kernel_fault", lambda *a: "RuntimeError: not built")
    found = kernels.of_backend("chunked", CPU, torch.bfloat16, 4, 2, 16)
    assert found[0].kernel == "math"
    text = kernels.warning(found, "chunked")
    assert "cpu flash: RuntimeError: not built" in text and "group_rows" in text
    assert kernels.warning(found, "dense") is None  # asked for


def test_table_and_command_line(capsys):
    kernels.main(["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu"])
    text = capsys.readouterr().out
    for backend in attention.BACKENDS:
        assert backend in text
    assert "grouped heads" in text
    for argv, text in [
        (["--heads", "3", "--kv-heads", "2"], "does not divide"),
        (["--head-dim", "0"], "found 0; allowed: 1 or more"),
    ]:
        with pytest.raises(UserError, match=text):
            kernels.main(argv)


def test_a_refused_kernel_gives_way_to_the_next(monkeypatch):
    monkeypatch.setattr(
        attention, "kernel_fault", lambda kind, *a: "no" if kind == "flash" else None
    )
    q = torch.empty(1, 1, 1, 64, device="meta", dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "candidates", lambda *a: ["flash", "efficient"])
    assert attention.fused_kernel(q, None) == "efficient"


def test_candidates_by_device():
    bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    assert attention.candidates("cuda", bf16, 128, False) == ["flash", "efficient"]
    assert attention.candidates("cuda", bf16, 128, True) == ["efficient"]
    assert attention.candidates("cuda", f32, 128, False) == ["efficient"]
    assert attention.candidates("cuda", f64, 128, False) == []
    assert attention.candidates("cuda", bf16, 20, False) == []
    assert attention.candidates("cpu", f64, 20, True) == ["cpu flash"]


BLOCK = """
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["gpu_check.py", "--toy", "--in-process", "--device", "cpu", "--only"]
sys.argv += ["gradients", "selective", "loop", "loss", "own-slots"]
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/gpu_check.py", run_name="__main__")
"""


def test_gpu_check_starts_where_only_torch_numpy_and_safetensors_are():
    """The lent machine has no pydantic, zarr or snakemake; nothing else is asked for either."""
    blocked = ["pydantic", "pydantic_core", "yaml", "zarr", "snakemake", "pyarrow", "transformers"]
    blocked += ["tensorboard", "numcodecs", "google_crc32c", "huggingface_hub", "jinja2"]
    code = BLOCK.replace("BLOCKED", repr(blocked))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradients" in done.stdout and "ms for two packs" in done.stdout
