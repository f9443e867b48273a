"""Greedy decoding with vLLM's offline engine on the CPU, with or without a drafter, and its counters.

    VLLM_PYTHON tests/peers/vllm_decode.py --target T --prompts P.json --max-new-tokens N --stop 2 \
        [--drafter D --block-size B] [--dtype float32] --out R.json

VLLM_PYTHON is the interpreter of an environment of its own (docs/export.md).
P.json  a list of lists of token ids.
R.json  `tokens`: the ids generated for each prompt, the stop token included; `drafts`: drafted blocks;
        `accepted`: accepted tokens of each of the B - 1 slots, over all prompts; `seconds`; `version`.
"""

import argparse
import json
import os
import pathlib
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

import vllm  # noqa: E402


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--target", required=True)
    p.add_argument("--drafter")
    p.add_argument("--block-size", type=int)
    p.add_argument("--prompts", required=True)
    p.add_argument("--max-new-tokens", type=int, required=True)
    p.add_argument("--stop", type=int, nargs="*", default=[])
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--sequences", type=int, default=1, help="decoded together")
    p.add_argument("--out", required=True)
    a = p.parse_args()
    prompts = json.loads(pathlib.Path(a.prompts).read_text())
    drafting = {}
    if a.drafter:
        drafting = {"speculative_config": {
            "method": "dflash", "model": a.drafter, "num_speculative_tokens": a.block_size - 1,
        }}  # fmt: skip
    llm = vllm.LLM(
        a.target,
        dtype=a.dtype,
        max_model_len=max(map(len, prompts)) + a.max_new_tokens + 128,  # no draft is cut short
        max_num_seqs=a.sequences,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        **drafting,
    )
    # only the stop tokens named here end an answer, and they are part of it
    how = vllm.SamplingParams(
        temperature=0.0, max_tokens=a.max_new_tokens, stop_token_ids=a.stop, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    begun = time.perf_counter()
    outputs = []
    for i in range(0, len(prompts), a.sequences):
        part = [{"prompt_token_ids": ids} for ids in prompts[i : i + a.sequences]]
        outputs += llm.generate(part, how, use_tqdm=False)
    seconds = time.perf_counter() - begun
    counters = {m.name: m for m in llm.get_metrics()}
    found = {"drafts": 0, "accepted": []}
    if a.drafter:
        kept = "vllm:spec_decode_num_accepted_tokens_per_pos"
        found = {
            "drafts": counters["vllm:spec_decode_num_drafts"].value,
            "accepted": list(counters[kept].values),
        }
    found |= {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    found |= {"seconds": seconds, "version": vllm.__version__}
    pathlib.Path(a.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
