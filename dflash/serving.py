"""How a drafter is served: the launch line of each engine, for a block of B slots.

A block drafts B - 1 tokens: vLLM and llama.cpp count these, SGLang counts the whole block.
"""

from __future__ import annotations

import json
import shlex


def launch_lines(target: str, drafter: str, block: int, revision: str = "") -> dict[str, str]:
    """Engine -> shell command. `target` and `drafter` are folders or hub ids; `revision` is the
    target's, where it comes from the hub (llama.cpp converts folders, so it has none)."""
    model, draft = shlex.quote(target), shlex.quote(drafter)
    pinned = f" --revision {shlex.quote(revision)}" if revision else ""
    vllm = {"method": "dflash", "model": drafter, "num_speculative_tokens": block - 1}
    return {
        "vLLM": f"vllm serve {model}{pinned} \\\n"
        f"  --speculative-config {shlex.quote(json.dumps(vllm, separators=(',', ':')))}",
        "SGLang": f"python -m sglang.launch_server --model-path {model}{pinned} \\\n"
        f"  --speculative-algorithm DFLASH \\\n"
        f"  --speculative-draft-model-path {draft} \\\n"
        f"  --speculative-num-draft-tokens {block}",
        "llama.cpp": f"python convert_hf_to_gguf.py {model} --outtype bf16 --outfile target.gguf\n"
        f"python convert_hf_to_gguf.py {draft} --target-model-dir {model} \\\n"
        f"  --outtype bf16 --outfile draft.gguf\n"
        f"llama-server -m target.gguf -md draft.gguf \\\n"
        f"  --spec-type draft-dflash --spec-draft-n-max {block - 1}",
    }
