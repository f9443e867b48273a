"""Greedy decoding with the official PyPI package `dflash` 0.1.0, on the CPU, for comparison with our own loop.

    pip install --no-deps --target OFFICIAL dflash==0.1.0
    PYTHONPATH=OFFICIAL python official.py --target T --drafter D --prompts P.json \
        --max-new-tokens N --block-size B [--dtype float32] --out R.json

Our own package is also called `dflash`: run this file from a folder that has no `dflash/` beside it (Python puts the
script's folder before PYTHONPATH). The script stops if it got hold of another `dflash`.
Only torch, transformers >= 5.15 and safetensors have to be importable; nothing of the package is copied here.

P.json  a list of lists of token ids.
R.json  a list, one entry a prompt, in order:
  tokens             generated ids; token 0 comes from the prefill; ends with the stop token if one was produced
  accepted_plus_one  tokens advanced by each draft-verify cycle (accepted drafts + the target's own token), cut at the
                     stop token and at the limit as the package does: 1 + sum(accepted_plus_one) == len(tokens)
  drafted            block length of each cycle, anchor included: min(B, N - tokens so far + 1)
  stopped            whether the last token is a stop token
  stop_token_ids, prefill_seconds, seconds_per_token, settings, versions

--dump-block F.st   what the drafter saw and gave in each prompt's first cycle: `i.features [1,S,T*H]`, `i.block_ids [1,B]`,
                    `i.hidden [1,B,H]` (after the final norm; slot 0 included).
--block-input X.st  with --dump-block: also run the drafter on `features [1,S,T*H]`, `block_ids [1,B]` of this file
                    (context positions 0..S-1, block positions S..S+B-1, no cache) and add `hidden [1,B,H]`.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

VERSION = "0.1.0"


def parse_args():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--target", required=True)
    p.add_argument("--drafter", required=True)
    p.add_argument("--prompts", help="JSON: list of lists of token ids")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument(
        "--block-size", type=int, help="default: the drafter's; 1 = plain decoding, no drafts"
    )
    p.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    p.add_argument(
        "--attn",
        choices=["sdpa", "eager"],
        default="sdpa",
        help="target only; the package's drafter is always sdpa",
    )
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--dump-block")
    p.add_argument("--block-input")
    p.add_argument("--save", help="folder: also write the drafter as the package saves it")
    p.add_argument("--out")
    a = p.parse_args()
    if bool(a.prompts) != bool(a.out):
        p.error("--prompts and --out go together")
    if not a.prompts and not a.block_input:
        p.error("nothing to do: give --prompts and --out, or --block-input and --dump-block")
    if a.block_input and not a.dump_block:
        p.error("--block-input needs --dump-block")
    if a.max_new_tokens < 1:
        p.error("--max-new-tokens must be at least 1")
    return a


def official():
    """The package's model module, after making sure that it is the official one."""
    want = f"the official dflash {VERSION} (pip install --no-deps --target FOLDER dflash=={VERSION}; PYTHONPATH=FOLDER)"
    try:
        import dflash
    except ModuleNotFoundError:
        raise SystemExit(f"found no module dflash; expected {want}") from None
    try:
        dist = importlib.metadata.distribution("dflash")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"found {dflash.__file__}, an uninstalled package; expected {want}"
        ) from None
    mine = pathlib.Path(dist.locate_file("dflash/__init__.py")).resolve()
    if dist.version != VERSION or mine != pathlib.Path(dflash.__file__).resolve():
        raise SystemExit(f"found dflash {dist.version}, module {dflash.__file__}; expected {want}")
    import dflash.model

    return dflash.model


def load_target(folder, dtype, attn):
    target, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attn, output_loading_info=True
    )
    refuse_partial(folder, info)
    return target.eval()


def load_drafter(pkg, folder, dtype):
    two = "DFlash2DraftModel" in (AutoConfig.from_pretrained(folder).architectures or [])
    cls = pkg.DFlash2DraftModel if two else pkg.DFlashDraftModel
    drafter, info = cls.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    refuse_partial(folder, info)
    return drafter.eval()


def refuse_partial(folder, info):
    """transformers only warns about absent tensors and leaves them random; a comparison must not."""
    bad = {
        k: sorted(map(str, info.get(k) or ()))
        for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    }
    bad = {k: v for k, v in bad.items() if v}
    if bad:
        raise SystemExit(f"{folder}: the checkpoint does not fit the model: {bad}")


def stop_ids(target):
    """End tokens of generation_config, else of config; None when neither names one (id 0 is a legal end token)."""
    for cfg in (target.generation_config, target.config):
        eos = getattr(cfg, "eos_token_id", None)
        if eos is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    return None


class FirstCycle:
    """Records the drafter's calls: the block length of each, and all of the first."""

    def __init__(self, drafter):
        self.sizes, self.first = [], None
        drafter.register_forward_hook(self.see, with_kwargs=True)

    def reset(self):
        self.sizes, self.first = [], None

    def see(self, module, args, kwargs, out):
        if self.first is None:
            self.first = kwargs["target_hidden"].detach().clone(), out.detach().clone()
        self.sizes.append(kwargs["noise_embedding"].shape[1])


@torch.inference_mode()
def run_block(target, drafter, x):
    scale = float(drafter.config.dflash_config.get("input_embedding_scale", 1.0))
    S, B = x["features"].shape[1], x["block_ids"].shape[1]
    emb = (
        torch.nn.functional.embedding(x["block_ids"], target.get_input_embeddings().weight) * scale
    )
    return drafter(
        target_hidden=x["features"].to(emb.dtype),
        noise_embedding=emb,
        position_ids=torch.arange(S + B)[None],
    )


def main():
    a = parse_args()
    torch.set_num_threads(a.threads)
    transformers.utils.logging.disable_progress_bar()
    pkg = official()
    # The package times with torch.cuda.synchronize() when asked for its statistics; the accepted lengths come with them.
    torch.cuda.synchronize = lambda device=None: None
    dtype = getattr(torch, a.dtype)
    target, drafter = load_target(a.target, dtype, a.attn), load_drafter(pkg, a.drafter, dtype)
    if a.save:
        drafter.save_pretrained(a.save)
    block = drafter.block_size if a.block_size is None else a.block_size
    stops = stop_ids(target)
    versions = {
        "dflash": VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    settings = {
        "dtype": a.dtype,
        "target_attn": a.attn,
        "drafter_attn": "sdpa",
        "block_size": block,
        "max_new_tokens": a.max_new_tokens,
        "target_layer_ids": list(drafter.target_layer_ids),
        "mask_token_id": drafter.mask_token_id,
        "drafter_class": type(drafter).__name__,
        "threads": a.threads,
    }
    seen, dump, results = FirstCycle(drafter), {}, []

    if a.block_input:
        dump["hidden"] = run_block(target, drafter, load_file(a.block_input))
    for i, prompt in enumerate(json.load(open(a.prompts)) if a.prompts else []):
        seen.reset()
        r = pkg.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            a.max_new_tokens,
            stops,
            temperature=0.0,
            block_size=block,
            return_stats=True,
        )
        tokens = r.output_ids[0, r.num_input_tokens :].tolist()
        cycles = [int(n) for n in r.acceptance_lengths]
        assert r.output_ids[0, : len(prompt)].tolist() == prompt and r.num_input_tokens == len(
            prompt
        )
        assert 1 + sum(cycles) == len(tokens) <= a.max_new_tokens, (i, cycles, len(tokens))
        results.append(
            {
                "tokens": tokens,
                "accepted_plus_one": cycles,
                "drafted": seen.sizes if block > 1 else [1] * len(cycles),
                "stopped": tokens[-1] in (stops or []),
                "stop_token_ids": stops,
                "prefill_seconds": r.time_to_first_token,
                "seconds_per_token": r.time_per_output_token,
                "settings": settings,
                "versions": versions,
            }
        )
        if a.dump_block and seen.first is not None:
            n = seen.sizes[0]
            dump[f"{i}.features"], dump[f"{i}.hidden"] = seen.first
            dump[f"{i}.block_ids"] = torch.tensor([[tokens[0]] + [drafter.mask_token_id] * (n - 1)])
    if a.out:
        pathlib.Path(a.out).write_text(json.dumps(results, indent=1) + "\n")
    if a.dump_block:
        save_file({k: v.contiguous() for k, v in dump.items()}, a.dump_block)


if __name__ == "__main__":
    main()
