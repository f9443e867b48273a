"""Plants faults of the kind that only a CUDA device shows, one at a time, in a copy of the tree, and
tells which of them the tests on the emulated device catch.

    python tests/support/cuda/planted.py [WORD ...]     only faults with one of these words

About a minute and a half each; not part of the tests. A fault whose text is no longer in the code is an
error: adapt the fault to the code.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

FAULTS: dict[str, tuple[str, str, str]] = {  # name: file, code, what stands there instead
    "efficient kernel gets out in another layout": (
        "attention.py",
        "out = out.transpose(1, 2).contiguous().transpose(1, 2)",
        "pass",
    ),
    "log-sum-exp padded with zeros": ("attention.py", 'value=float("inf"))', "value=0.0)"),
    "misaligned bias": (
        "attention.py",
        "wide = F.pad(bias_RL, (0, -length % 16))",
        "wide = bias_RL",
    ),
    "bias in float32 beside half-precision queries": (
        "attention.py",
        "return additive(self.mask(g.first, g.last, ranges, see, device), dtype)",
        "return additive(self.mask(g.first, g.last, ranges, see, device), torch.float32)",
    ),
    "a CPU index on a GPU tensor": (
        "data.py",
        "            at_R=at_R,\n",
        "            at_R=self.at_R,\n",
    ),
    "a missing .to: positions stay on the host": (
        "drafter.py",
        "numbers = layout.on_device(taps_SD.device)",
        "numbers = layout.numbers",
    ),
    "pinned memory reused before its copy ended": (
        "data.py",
        "self.integers = torch.empty(size, dtype=torch.int64, pin_memory=True)",
        "self.integers = globals().setdefault('_B', torch.empty(10**5, dtype=torch.int64, "
        "pin_memory=True))[:size]",
    ),
    "the stream of a pack's copy not joined": (
        "gradient.py",
        "        computed.wait_stream(copies)\n",
        "",
    ),
    "a pack's memory not recorded on the stream that computes": (
        "gradient.py",
        "            tensor.record_stream(computed)\n",
        "            pass\n",
    ),
    "a wait for every pack": (
        "gradient.py",
        "            names.append(packed.sample_ids)\n",
        "            names.append(packed.sample_ids)\n            float(total)\n",
    ),
    "supervised slots looked up on the device": ("gradient.py", "        at_R=pack.at_R,\n", ""),
    "gradients summed on the host": (
        "ranks.py",
        "            waiting.append(dist.all_reduce(p.grad, async_op=True))\n",
        "            host = p.grad.cpu()\n            dist.all_reduce(host)\n"
        "            p.grad.copy_(host)\n",
    ),
    "the sum of gradients not waited for": (
        "ranks.py",
        "        for work in waiting:\n            work.wait()\n",
        "",
    ),
    "moments stay on the host after a resume": (
        "checkpoint.py",
        "owner[p].state[p][kind] = ranks.like(value, p)",
        "owner[p].state[p][kind] = value",
    ),
    "times read before they are known": (
        "monitor.py",
        "            torch.cuda.synchronize()\n",
        "            pass\n",
    ),
    "states copied before the model has computed them": (
        "extract.py",
        "    stream.wait_stream(torch.cuda.current_stream(hidden.device))\n",
        "",
    ),
    "states read before they have come": (
        "extract.py",
        "        copied.synchronize()\n",
        "        pass\n",
    ),
    "a blocking copy in every cycle of decoding": (
        "decode.py",
        "    return numbers.pin_memory().to(device, non_blocking=True)",
        "    return numbers.to(device)",
    ),
    "the connector reports before its copy has ended": (
        "vllm_connector.py",
        "self.copies[0].ended.query()",
        "True",
    ),
    "cuDNN's attention first": (
        "__init__.py",
        'os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")',
        "pass",
    ),
    "out of memory is not recognised": (
        "target.py",
        "    if isinstance(e, torch.OutOfMemoryError):\n        return True",
        "    if isinstance(e, torch.OutOfMemoryError):\n        return False",
    ),
    "autocast of the host in validation": (
        "validate.py",
        "torch.autocast(device.type, torch.bfloat16",
        'torch.autocast("cpu", torch.bfloat16',
    ),
    "a tied table twice on the device": (
        "train.py",
        "head = on_device if head is embed else head.to(device)",
        "head = head.to(device)",
    ),
    "every rank on the first device": (
        "ranks.py",
        '    return torch.device("cuda", number)',
        '    return torch.device("cuda", 0)',
    ),
}


def plant(tree: Path, file: str, code: str, instead: str) -> None:
    path = tree / "dflash" / file
    text = path.read_text()
    if text.count(code) != 1:
        raise SystemExit(f"{file}: holds {code!r} {text.count(code)} times, expected once")
    path.write_text(text.replace(code, instead))


def caught(tree: Path) -> str:
    """The first test that fails on the emulated device, or nothing."""
    from support.cuda import device

    environment = device.environment(DFLASH_GPUS="2", OMP_NUM_THREADS="1")
    paths = [str(tree), str(tree / "tests/support/cuda/site")]
    environment["PYTHONPATH"] = ":".join(paths)
    # what needs the whole workflow last
    names = ["device", "kernels", "extract", "decode", "check", "training", "ranks"]
    files = [str(tree / f"tests/cuda/test_cuda_{name}.py") for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    found = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not found:
        return f"(pytest ended with status {done.returncode})"
    return found[1] if found else ""


def main(words: list[str]) -> int:
    missed, count = [], 0
    for name, (file, code, instead) in FAULTS.items():
        if words and not any(w in name for w in words):
            continue
        count += 1
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            ignore = shutil.ignore_patterns(".venv", ".git", "results", ".snakemake", "__pycache__")
            shutil.copytree(ROOT, tree, ignore=ignore)
            plant(tree, file, code, instead)
            test = caught(tree)
        if not test:
            missed.append(name)
        print(f"{name:<60} {'caught by ' + test if test else 'NOT CAUGHT'}", flush=True)
    print(f"{count - len(missed)} of {count} caught")
    return 0 if not missed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
