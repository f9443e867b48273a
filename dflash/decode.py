"""Speculative decoding with a DFlash drafter: draft a block, verify it in one pass, keep a prefix.

    python -m dflash.decode --prompt "What is a prime number?" --drafter results/export/demo

Shapes: n prompts decoded together · L new tokens · B slots a block · T taps · H hidden width ·
V vocabulary · d head width · P cache places.

Keys lie at their positions (`dflash.cache`), so that prompts of any length, advancing at different
speeds, share a batch. Which tokens are drafted and kept is the matter of `dflash.sampling`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dflash.attention import Visibility
from dflash.cache import Places, Span, TargetCache, grouped_attention
from dflash.drafter import Drafter, block_input
from dflash.errors import UserError
from dflash.sampling import GREEDY, Sampler, Sampling
from dflash.taps import Taps, head_logits, rope_edge

# The prompts are read in pieces of about so many tokens (rows times columns): enough for a full
# matrix product, and small enough that temporaries stay below the size at which the C library returns
# memory to the system after every use (on a CPU that halved the speed at 25,000).
PREFILL_TOKENS = 4096
PROPOSED_BLOCK = 8  # slots of a block, where something else than a drafter proposes
KINDS = ("full_attention", "sliding_attention", "linear_attention")

Choose = Callable[[torch.Tensor], torch.Tensor]  # logits [n, V] -> tokens [n]
# A prompt with its response so far, and how many tokens may be drafted -> the tokens, perhaps none.
Propose = Callable[[list[int], int], list[int]]


@dataclass
class Response:
    """What was decoded for one prompt."""

    tokens: list[int] = field(default_factory=list)  # the end token included
    cycles: list[int] = field(default_factory=list)  # tokens kept of each draft-verify cycle


@dataclass
class Timing:
    """Seconds of one call of `generate`."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_token_ids: list[int],
    drafter: Drafter | None = None,
    block_size: int | None = None,
    embed_VH: torch.Tensor | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    choose: Choose | None = None,
    on_cycle: Callable[[list[Response]], None] | None = None,
    propose: Propose | None = None,
    streams: list[int] | None = None,
) -> tuple[list[Response], Timing]:
    """Decode some prompts (token ids) together; speculatively, if a drafter is given.

    Each cycle drafts B-1 tokens after the last one, has the target read all B, keeps the longest
    prefix that the rule of `sampling` accepts and adds a token of the target's own (the bonus). A
    response ends with its first end token or at `max_new_tokens`, and so does its last cycle: blocks
    shrink to what may still be produced, and a cycle counts the tokens kept, as in the official loop
    (so 1 + sum(cycles) == len(tokens); the first token comes from the prefill). The mean over cycles
    is the acceptance length. Without a drafter a cycle is one token.

    Args:
        block_size: slots of a block, the anchor included; at most (and by default) the drafter's.
        embed_VH: the target's embedding table, if it is not to be the model's own.
        seed, streams: decide the random numbers of each prompt, alone; its stream is the prompt's
            number in the task (default: its place in `prompts`).
        choose: takes the place of `sampling` where nothing is drafted.
        on_cycle: sees the responses after each cycle (progress, streaming).
        propose: drafts in the drafter's place, prompt by prompt (see `PromptLookup`).

    Raises UserError for a block size that does not suit the drafter, and for a target with layers,
    logits or attention of a kind that is not supported.
    """
    if sum(x is not None for x in (drafter, choose, propose)) > 1:
        raise ValueError("`drafter`, `choose` and `propose` exclude each other")
    n, device = len(prompts), next(model.parameters()).device
    block = _block_size(block_size, drafter, propose)
    drafter = drafter if block > 1 else None
    streams = list(range(n)) if streams is None else streams
    if n > 1 and "linear_attention" in layer_kinds(model):  # its state leaves no room for padding
        if choose:
            raise UserError(
                "the target has layers of linear attention and answers one prompt at a time: set "
                "`machine.regenerate.batch_size` to 1"
            )
        done, total = [], Timing()
        for prompt, stream in zip(prompts, streams, strict=True):
            see = on_cycle and (lambda now: on_cycle([*done, *now]))  # noqa: B023 (called at once)
            one, timing = generate(
                *(model, [prompt], max_new_tokens, eos_token_ids, drafter, block_size, embed_VH),
                *(sampling, seed, None, see, propose, [stream]),
            )
            done += one
            for kind, seconds in vars(timing).items():
                setattr(total, kind, getattr(total, kind) + seconds)
        return done, total

    places = max(map(len, prompts)) + max_new_tokens + block
    target = TargetRunner(model, drafter.config.target_layer_ids if drafter else (), n, places)
    draft = None
    if drafter:
        embed_VH = model.get_input_embeddings().weight if embed_VH is None else embed_VH
        draft = DrafterRunner(drafter, embed_VH, n, places)
    sampler = Sampler(sampling, seed, streams, max_new_tokens, device)
    responses, going = [Response() for _ in prompts], [True] * n
    clock = _Clock(device)

    def take(tokens_nB: torch.Tensor, right_n: torch.Tensor) -> list[int]:
        """Append the tokens up to the bonus, an end token or the limit; how many of each prompt."""
        kept = [0] * n
        # The only time in a cycle that the host waits for the device.
        for i, (*row, right) in enumerate(torch.cat([tokens_nB, right_n[:, None]], 1).tolist()):
            for token in row[: right + 1] if going[i] else []:
                responses[i].tokens.append(token)
                kept[i] += 1
                if token in eos_token_ids or len(responses[i].tokens) == max_new_tokens:
                    going[i] = False
                    break
        return kept

    hidden_nH = target.read_prompts(prompts, draft)
    first_n = (choose or sampler.first)(target.logits(hidden_nH))
    take(first_n[:, None], torch.zeros_like(first_n))
    clock.lap("prefill")

    while any(going):
        # A response's last token anchors its block; the caches do not hold it yet. A finished one
        # stays where it is and drafts nothing.
        made = [len(r.tokens) for r in responses]
        anchors = [len(p) + m - 1 for p, m in zip(prompts, made, strict=True)]
        room = [min(block - 1, max_new_tokens - m) * on for m, on in zip(made, going, strict=True)]
        ids = [r.tokens[-1:] for r in responses]
        if propose:
            texts = [p + r.tokens for p, r in zip(prompts, responses, strict=True)]
            found = [propose(t, k) if k else [] for t, k in zip(texts, room, strict=True)]
            room = [len(tokens) for tokens in found]
            ids = [a + b + [0] * (max(room) - len(b)) for a, b in zip(ids, found, strict=True)]
        rows = zip(made, room, anchors, *zip(*ids, strict=True), strict=True)
        made_n, room_n, anchor_n, *columns = to_device(list(rows), device).unbind(1)
        width = max(room) + 1
        span, ids_nB, q_nbV = Span.of(anchor_n, anchors, width), torch.stack(columns, 1), None
        if draft and max(room):
            hidden = draft(ids_nB[:, 0], span, anchor_n + room_n + 1)
            draft_nb, q_nbV = sampler.draft(target.logits(hidden), made_n)
            ids_nB = torch.cat([ids_nB, draft_nb], dim=1)
        clock.lap("draft")

        states = target.cache.states() if width > 1 else []
        hidden, taps = target(ids_nB, span)
        logits_nBV = target.logits(hidden)
        if choose:
            tokens_nB, right_n = choose(logits_nBV[:, 0])[:, None], torch.zeros_like(made_n)
        else:
            tokens_nB, right_n = sampler.verify(ids_nB[:, 1:], q_nbV, logits_nBV, made_n, room_n)
        kept = take(tokens_nB, right_n)
        for response, count in zip(responses, kept, strict=True):
            response.cycles += [count] if count else []
        new = max(kept)  # tokens that the caches are to hold from now on, the anchor's the first
        if states and new < width and any(going):
            target.cache.restore(states)
            target(ids_nB[:, :new], span.head(new))
        clock.lap("verify")

        if draft and any(going):
            draft.read_context(taps[:, :new], span.head(new))
            clock.lap("draft")
        if on_cycle:
            on_cycle(responses)
    return responses, clock.timing()


def to_device(rows: list, device: torch.device) -> torch.Tensor:
    """Numbers that the host knows, int64; the host does not wait for their copy to a GPU."""
    numbers = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _block_size(asked: int | None, drafter: Drafter | None, propose: Propose | None) -> int:
    """Slots of a block. Raises UserError for one that the drafter was not trained for."""
    if drafter is None:
        return (asked or PROPOSED_BLOCK) if propose else 1
    trained = drafter.config.block_size
    if asked is not None and not 1 <= asked <= trained:
        raise UserError(
            f"block size {asked}: this drafter was trained with blocks of {trained}; choose one from 1 "
            f"(no drafting) to {trained}"
        )
    return asked or trained


class PromptLookup:
    """Drafts what followed the last time that the text's last few tokens occurred (`generate`'s
    `propose`): the rival that costs nothing.

    Looks for the last `max_ngram` tokens, then for fewer, down to one.
    """

    def __init__(self, max_ngram: int = 3):
        self.max_ngram = max_ngram

    def __call__(self, text: list[int], count: int) -> list[int]:
        """At most `count` tokens, none where the last token is new."""
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == text[-size:]:
                    return text[start + size : start + size + count]
        return []


# --- the two models -----------------------------------------------------------------------------


def layer_kinds(model: nn.Module) -> list[str]:
    """What each layer of the target is. Raises UserError for one that cannot be decoded with."""
    text = model.config.get_text_config()
    uniform = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [uniform] * text.num_hidden_layers
    other = sorted(set(kinds) - set(KINDS))
    if other:
        raise UserError(
            f"the target has layers of kind {', '.join(other)}, whose cache cannot be rewound; "
            f"decoding supports {', '.join(KINDS)}"
        )
    return list(kinds)


class TargetRunner:
    """Forwards of the target over new tokens of every prompt, with taps and the wanted logits."""

    def __init__(self, model: nn.Module, tap_ids: Sequence[int], n: int, places: int):
        self.model, self.decoder, self.tap_ids = model, model.get_decoder(), list(tap_ids)
        self.text = text = model.config.get_text_config()
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.window = getattr(text, "sliding_window", None)
        kinds = layer_kinds(model)
        self.kinds = sorted(set(kinds))
        self.cache = TargetCache(n, places, kinds)
        _check_logits(text)
        edge = rope_edge(text)
        if edge is not None and places > edge:
            raise UserError(
                f"prompt, response and block may reach {places} tokens, and beyond {edge} this target turns "
                "all positions otherwise (longrope), cached ones too, which decoding cannot do yet; "
                "lower `max_new_tokens` or `corpus.max_prompt_tokens`"
            )
        if text._attn_implementation not in ("eager", "sdpa", GROUPED):
            raise UserError(
                f"the target runs with {text._attn_implementation}, which takes no mask; load it with "
                'attn_implementation="sdpa"'
            )
        known = inspect.signature(inspect.unwrap(self.decoder.forward)).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # renamed in 5.2x
        lay_out(model)

    def __call__(
        self, ids_nL: torch.Tensor, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Final hidden states [n, L, H] and taps [n, L, T·H] of new tokens at given positions."""
        self.cache.span = span
        masks = {kind: self._mask(span, kind) for kind in self.kinds}
        with Taps(self.model, self.tap_ids) as taps, _grouped(self.text):
            out = self.decoder(
                input_ids=ids_nL,
                position_ids=span.at_nL,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        return out.last_hidden_state, taps.stack().flatten(2) if self.tap_ids else None

    def read_prompts(self, prompts: list[list[int]], draft: DrafterRunner | None) -> torch.Tensor:
        """Fill the caches; the final hidden states [n, H] of the prompts' last tokens.

        Rows are padded on the right. What padding writes lies at positions that the first block
        overwrites, or beyond everything that is ever seen.
        """
        n, longest = len(prompts), max(map(len, prompts))
        rows = [p + [p[-1]] * (longest - len(p)) for p in prompts]
        ids_nL = to_device(rows, self.device)
        last_n = to_device([len(p) - 1 for p in prompts], self.device)
        found_nH, start_n = None, torch.zeros_like(last_n)
        size = max(1, PREFILL_TOKENS // n)
        for start in range(0, longest, size):
            piece_nL = ids_nL[:, start : start + size]
            length = piece_nL.shape[1]
            span = Span.of(start_n + start, [start] * n, length)
            hidden, taps = self(piece_nL, span)
            if draft:
                draft.read_context(taps, span)
            place_n = last_n - start
            at_nH = hidden[torch.arange(n, device=self.device), place_n.clamp(0, length - 1)]
            here_n1 = ((place_n >= 0) & (place_n < length))[:, None]
            found_nH = at_nH if found_nH is None else torch.where(here_n1, at_nH, found_nH)
        return found_nH

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's head over hidden states [..., H] -> [..., V]."""
        return head_logits(self.model, hidden)

    def _mask(self, span: Span, kind: str) -> torch.Tensor | None:
        """What to add to the scores of each new token and place, [n, 1, L, P]: 0 where it is seen. None
        where all places are: kernels without a mask are faster."""
        if kind == "linear_attention":
            return None
        one = span.start is not None and span.at_nL.shape[1] == 1
        far = kind == "sliding_attention" and span.end > self.window
        if one and not far and self.text._attn_implementation != "eager":
            return None
        back = span.at_nL[:, None, :, None] - torch.arange(span.end, device=self.device)
        hidden = back < 0
        if kind == "sliding_attention":
            hidden |= back >= self.window
        # As numbers, which eager attention wants, and into which kernels turn booleans in every layer.
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(hidden, torch.finfo(self.dtype).min)


def _check_logits(text) -> None:
    """Raises UserError where a family scales its logits, which is done in a forward not called here."""
    for name in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise UserError(
                f"the target scales its logits ({name} {getattr(text, name)}), which decoding does not "
                "support; choose another target"
            )


class DrafterRunner:
    """The drafter with its cache of keys: those of context, and after them those of the block."""

    def __init__(self, drafter: Drafter, embed_VH: torch.Tensor, n: int, places: int):
        self.drafter, self.embed_VH = drafter, embed_VH
        self.cache = [Places(n, places) for _ in drafter.layers]
        self.see = [drafter.config.visibility(i) for i in range(len(drafter.layers))]
        lay_out(drafter)

    def read_context(self, taps_nLD: torch.Tensor, span: Span) -> None:
        """Add the target's hidden states at new positions to the context of every layer."""
        context = self.drafter.context(taps_nLD)
        angles = self.drafter.rope(span.at_nL)
        for layer, cache in zip(self.drafter.layers, self.cache, strict=True):
            k, v = layer.self_attn.keys_values(context, angles)
            cache.write(k.transpose(1, 2), v.transpose(1, 2), span)

    def __call__(self, tokens_n: torch.Tensor, span: Span, ends_n: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, B-1, H] of the slots after the anchors, whose blocks lie at the positions of
        `span`.

        A prompt's block ends before position `ends_n[i]`; what lies beyond is meaningless. The block's
        keys stay at their positions until context, or the next block, takes their places.
        """
        mask_id = self.drafter.config.mask_token_id
        x = block_input(self.embed_VH, tokens_n, span.at_nL.shape[1], mask_id)
        angles = self.drafter.rope(span.at_nL)
        masks = {see: self._mask(span, ends_n, see) for see in set(self.see)}
        for layer, cache, see in zip(self.drafter.layers, self.cache, self.see, strict=True):

            def attend(q, k, v, cache=cache, mask=masks[see]):
                cache.write(k.transpose(1, 2), v.transpose(1, 2), span)
                return grouped_attention(q.transpose(1, 2), *cache.read(span.end), mask).transpose(
                    1, 2
                )

            x = layer(x, angles, attend)
        return self.drafter.norm(x[:, 1:])

    def _mask(self, span: Span, ends_n: torch.Tensor, see: Visibility) -> torch.Tensor | None:
        """Which places each slot sees, bool [n, 1, B, P]; None stands for all of them."""
        if len(ends_n) == 1 and see == Visibility():
            return None
        place = torch.arange(span.end, device=ends_n.device)
        back = span.at_nL[:, :, None] - place  # [n, B, P]
        seen = (place < ends_n[:, None, None]).expand_as(back)
        if see.causal:
            seen = seen & (back >= 0)
        if see.window is not None:
            seen = seen & (back.abs() < see.window)
        return seen[:, None]


# --- how fast -----------------------------------------------------------------------------------

GROUPED = "dflash_grouped"
FEW_ROWS = 64  # new tokens up to which keys are worth sparing; a prompt's mask would grow too large


def _sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """transformers' `sdpa`, but without a copy of all keys for every query head."""
    if query.shape[2] > FEW_ROWS or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    out = grouped_attention(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(GROUPED, _sdpa)


@contextmanager
def _grouped(text) -> Iterator[None]:
    """Lets a target that runs with `sdpa` use the attention above."""
    before = text._attn_implementation
    if before == "sdpa":
        text._attn_implementation = GROUPED
    try:
        yield
    finally:
        text._attn_implementation = before


def lay_out(module: nn.Module) -> None:
    """Turn float32 matrices on a CPU round in memory; their values stay.

    MKL multiplies few rows (a block, a prompt) by a matrix 1.2 to 1.7 times as fast when the outputs
    of one input lie together, not the inputs of one output as torch has them.
    """
    with torch.inference_mode(False):  # or these could never be trained again
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and layer.weight.device.type == "cpu":
                weight = layer.weight.data
                if weight.dtype == torch.float32 and not weight.t().is_contiguous():
                    layer.weight.data = weight.t().contiguous().t()


class _Clock:
    """Seconds between laps, on the device's own clock, so that nothing waits for it."""

    def __init__(self, device: torch.device):
        self.cuda = device if device.type == "cuda" else None
        self.laps: list[tuple[str, float | torch.cuda.Event]] = []
        self.lap("start")

    def lap(self, kind: str) -> None:
        """Everything since the last lap belongs to `kind`."""
        if self.cuda is None:
            now = time.perf_counter()
        else:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.cuda))
        self.laps.append((kind, now))

    def timing(self) -> Timing:
        """The seconds of all laps of each kind."""
        if self.cuda is not None:
            torch.cuda.synchronize(self.cuda)
        spent = dict.fromkeys(vars(Timing()), 0.0)
        for (_, before), (kind, now) in zip(self.laps, self.laps[1:], strict=False):
            spent[kind] += now - before if self.cuda is None else before.elapsed_time(now) / 1000
        return Timing(**spent)


if __name__ == "__main__":
    from dflash.errors import entrypoint
    from dflash.terminal import main

    entrypoint(main)
