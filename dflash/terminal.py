"""What `python -m dflash.decode` does: answer one prompt in the terminal, token by token.

    python -m dflash.decode --prompt "What is a prime number?" --drafter results/export/demo
    python -m dflash.decode --prompt "What is a prime number?" --plain

The answer goes to stdout, its figures to stderr. On a terminal each token that was drafted and kept
has the colour of its slot; the target's own tokens have none (NO_COLOR turns colours off).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from dflash import config, target
from dflash.chat import as_prompt, check_messages, check_text, prompt_ids
from dflash.checkpoint import checkpoints
from dflash.decode import Response, Timing, generate
from dflash.drafter import DTYPES, Drafter, load_drafter
from dflash.drawing import plural
from dflash.errors import UserError
from dflash.evaluate import check_fits
from dflash.files import read_json
from dflash.initial import drafter_config
from dflash.sampling import RULES, Sampling

SLOT_COLOURS = (34, 36, 32, 33, 35, 31)  # blue, cyan, green, yellow, magenta, red; then again


class Pieces:
    """Text of tokens as they come: never half a character, and in the end all of it.

    A character may take several tokens; then its text comes with the last of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.known = self.given = (
            0  # the text of ids[:given] was given; what follows joins ids[known:]
        )

    def add(self, token: int) -> str:
        """What can be shown now that this token is known, perhaps nothing."""
        self.ids.append(token)
        text = self._new()
        if not text or text.endswith("\ufffd"):  # the decoder's sign for an unfinished character
            return ""
        self.known, self.given = self.given, len(self.ids)
        return text

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        return self._new()

    def _new(self) -> str:
        # Some tokenizers drop the space before a text's first word, so the new tokens are decoded
        # after some that are known.
        before, now = (self._text(self.ids[self.known : end]) for end in (self.given, None))
        return now[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class Stream:
    """Writes a growing response to stdout (`generate`'s `on_cycle`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, coloured: bool):
        self.pieces, self.coloured = Pieces(tokenizer), coloured
        self.shown = self.cycles = 0

    def __call__(self, responses: list[Response]) -> None:
        """Write what has come since the last call. A cycle's last token is the target's own."""
        (response,) = responses
        slots = [0] if self.shown == 0 else []
        for count in response.cycles[self.cycles :]:
            slots += [*range(1, count), 0]
        self.cycles = len(response.cycles)
        for token, slot in zip(response.tokens[self.shown :], slots, strict=True):
            self._write(paint(self.pieces.add(token), slot, self.coloured))
        self.shown = len(response.tokens)

    def close(self) -> None:
        """Write what was held back, and end the line."""
        self._write(self.pieces.rest() + "\n")

    def _write(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)


def paint(text: str, slot: int, coloured: bool) -> str:
    """The text in its slot's colour; slot 0, the target's own, has none."""
    if not (coloured and slot and text):
        return text
    return f"\x1b[{SLOT_COLOURS[(slot - 1) % len(SLOT_COLOURS)]}m{text}\x1b[0m"


def figures(response: Response, timing: Timing, block: int, coloured: bool) -> str:
    """Speed and acceptance in one line, or two where tokens were drafted."""
    cycles, seconds = response.cycles, timing.draft + timing.verify
    line = f"{plural(len(response.tokens), 'token')}, prefill {timing.prefill:.2f} s"
    if not cycles:
        return line
    line += f", then {sum(cycles) / seconds:.1f} tokens/s"
    if block == 1:
        return line
    line += (
        f"; tau {sum(cycles) / len(cycles):.2f} over {len(cycles)} cycles, "
        f"{timing.draft / seconds:.0%} of the time drafting\nkept of slot"
    )
    for slot in range(1, block):
        share = sum(count > slot for count in cycles) / len(cycles)
        line += "  " + paint(f"{slot}: {share:.0%}", slot, coloured)
    return line


def open_drafter(folder: Path, identity: target.Identity) -> Drafter:
    """The drafter of a run directory (its newest checkpoint), a trained folder, or an export.

    Raises UserError when the folder is none of these or was made for another target.
    """
    found = sorted(folder.glob("*/step-*")) + checkpoints(folder)
    if found:
        newest = max(found, key=lambda path: path.stat().st_mtime_ns)
        made_by = read_json(newest.parent / "fingerprint.json")
        if made_by["target"] != identity.weights_sha256:
            raise UserError(
                f"{newest}: trained for a target with other weights than {identity.model}; give the "
                "identity of that target (--identity)"
            )
        aside = ("stage", "version", "trust_remote_code")
        raw = {k: v for k, v in made_by["settings"].items() if k not in aside}
        drafter = Drafter(drafter_config(config.check(config.Drafter, raw, str(folder)), identity))
        try:
            drafter.load_state_dict(load_file(newest / "drafter.safetensors"))
        except (OSError, SafetensorError, RuntimeError) as e:
            raise UserError(
                f"{newest}: damaged checkpoint ({e}); delete it to use the one before"
            ) from None
        print(f"drafter: {newest}", file=sys.stderr)
        return drafter.eval().requires_grad_(False)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no drafter here; expected a run directory (results/runs/NAME), or a folder with "
            "config.json and model.safetensors (results/drafters/NAME, results/export/NAME, a published "
            "checkpoint)"
        )
    drafter = load_drafter(folder)
    check_fits(drafter, identity, folder)
    return drafter


def conversation(prompt: str | None, path: Path | None) -> list[dict[str, str]]:
    """The messages to answer: those of a JSON file, then the prompt."""
    messages = read_json(path) if path else []
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if prompt is not None and isinstance(messages, list):
        messages = [
            *messages,
            {"role": "user", "content": check_text(prompt, "--prompt", "--prompt")},
        ]
    if prompt is None and path is None:
        raise UserError("nothing to answer: give --prompt TEXT, or --messages FILE")
    return as_prompt(check_messages(messages, str(path or "--prompt")))[0]


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.decode",
        description="Answer a prompt in the terminal with speculative decoding.",
    )
    add = parser.add_argument
    add("--prompt", help="the user's message")
    add(
        "--messages",
        type=Path,
        help="JSON file of a conversation; --prompt, if given, goes on with it",
    )
    add(
        "--drafter",
        type=Path,
        help="run directory, trained drafter, export or published checkpoint",
    )
    add("--plain", action="store_true", help="decode without a drafter, to compare")
    add("--identity", default="results/target/identity.json", help="the target's (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top-k", type=int, help="sample among the k likeliest tokens")
    add("--top-p", type=float, help="sample among the likeliest tokens of this total probability")
    add("--rule", choices=RULES, default=RULES[0], help="what keeps drafted tokens (%(default)s)")
    add("--seed", type=int, default=0, help="of the random numbers (%(default)s)")
    add("--block-size", type=int, help="slots of a block (default: as trained)")
    add("--max-new-tokens", type=int, default=512, help="length of the answer (%(default)s)")
    add("--dtype", choices=sorted(DTYPES), help="bfloat16 on a GPU, else float32")
    add("--threads", type=int, help="CPU threads")
    add("--trust-remote-code", action="store_true", help="let the model's folder bring code")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if bool(args.drafter) == args.plain:
        raise UserError("give either --drafter FOLDER or --plain (decoding without one)")
    if args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: found {args.max_new_tokens}; expected 1 or more")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.rule)
    messages = conversation(args.prompt, args.messages)
    identity = target.read_identity(args.identity)
    drafter = open_drafter(args.drafter, identity) if args.drafter else None
    device = target.default_device()
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if drafter:  # in bfloat16 as it is exported
        drafter = drafter.to(device, torch.bfloat16).to(DTYPES[dtype])
    tokenizer = target.load_tokenizer(identity, args.trust_remote_code)
    ids = prompt_ids(tokenizer, messages, enable_thinking=False)
    model = target.load_model(identity, dtype, args.trust_remote_code, device)

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    stream = Stream(tokenizer, coloured)
    try:
        (response,), timing = generate(
            *(model, [ids], args.max_new_tokens, identity.eos_token_ids, drafter, args.block_size),
            sampling=sampling,
            seed=args.seed,
            on_cycle=stream,
        )
    except KeyboardInterrupt:
        stream.close()
        raise SystemExit(130) from None
    stream([response])  # an answer of one token has no cycle
    stream.close()
    block = args.block_size or drafter.config.block_size if drafter else 1
    coloured = coloured and sys.stderr.isatty()
    print(figures(response, timing, block, coloured), file=sys.stderr)
