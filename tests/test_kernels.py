"""The probe names the kernel that really runs, and the warning comes with a remedy."""

import pytest
import torch

from dflash import attention, kernels
from dflash.errors import UserError

CPU = torch.device("cpu")


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
    assert kernels.sdpa_kernel(CPU, torch.float32, 4, 4, 16, True) in ("flash", "math")


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
    with pytest.raises(UserError, match="does not divide"):
        kernels.main(["--heads", "3", "--kv-heads", "2"])
