"""Speculative decoding with a DFlash drafter: draft a block, verify it in one pass, keep a prefix.

Shapes: n prompts decoded together · B slots a block · T taps · H hidden width · V vocabulary ·
K key/value heads · d head width · P cache places.

The caches are indexed by position: the key of position p of a prompt lies at place p of its row.
Rejected tokens need no cropping then: the next block begins at the first rejected position and
overwrites their places before anything can look at them, since a query at position q sees the places
up to q and no further. Prompts of any length, advancing at different speeds, share a batch, each
seeing exactly what it would see alone.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, DynamicLayer

from dflash.attention import Visibility, folded
from dflash.drafter import Drafter, block_input
from dflash.errors import UserError
from dflash.taps import Taps, head_logits, rope_edge

# The prompts are read in pieces of about so many tokens (rows times columns): enough for a full
# matrix product, and small enough that temporaries stay below the size at which the C library returns
# memory to the system after every use (on a CPU that halved the speed at 25,000).
PREFILL_TOKENS = 4096


class Places:
    """Keys and values [n, K, P, d] of one layer, written and read by position."""

    def __init__(self, n: int, places: int):
        self.n, self.places = n, places
        self.keys = self.values = None

    def write(self, k_nKLd: torch.Tensor, v_nKLd: torch.Tensor, at_nL: torch.Tensor) -> None:
        """Store L new keys and values of every prompt at its own positions."""
        if self.keys is None:
            shape = (self.n, k_nKLd.shape[1], self.places, k_nKLd.shape[3])
            # zeros, since a hidden place is multiplied by a weight of 0 and must not be NaN
            self.keys, self.values = k_nKLd.new_zeros(shape), v_nKLd.new_zeros(shape)
        index = at_nL[:, None, :, None].expand_as(k_nKLd)
        self.keys.scatter_(2, index, k_nKLd)
        self.values.scatter_(2, index, v_nKLd)

    def read(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` places, as views."""
        return self.keys[:, :, :length], self.values[:, :, :length]


class _TargetLayer(DynamicLayer):
    """`Places` behind the interface that Hugging Face models call."""

    is_croppable = True

    def __init__(self, owner: TargetCache):
        super().__init__()
        self.owner = owner
        self.data = Places(owner.n, owner.places)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        self.data.write(key_states, value_states, self.owner.at_nL)
        return self.data.read(self.owner.length)

    def get_seq_length(self) -> int:
        return 0


class TargetCache(Cache):
    """The target's cache, indexed by position. Set `at_nL` and `length` before each forward."""

    def __init__(self, n: int, places: int, layers: int):
        self.n, self.places = n, places
        self.at_nL: torch.Tensor | None = None
        self.length = 0
        super().__init__(layers=[_TargetLayer(self) for _ in range(layers)])


class TargetRunner:
    """Forwards of the target over new tokens of every prompt, with taps and the wanted logits.

    Raises UserError for targets whose layers are not all softmax attention over positions (linear
    attention keeps a state that cannot be overwritten by position), and for texts that may become
    so long that all their positions would be turned otherwise, cached ones too.
    """

    KINDS = ("full_attention", "sliding_attention")

    def __init__(self, model: torch.nn.Module, tap_ids: list[int], n: int, places: int):
        text = model.config.get_text_config()
        self.window = getattr(text, "sliding_window", None)
        uniform = "sliding_attention" if self.window else "full_attention"  # Mistral, for one
        kinds = set(getattr(text, "layer_types", None) or [uniform])
        other = sorted(kinds - set(self.KINDS))
        if other:
            raise UserError(
                f"the target has layers of kind {', '.join(other)}, whose cache cannot be rewound; "
                "decoding supports full and sliding attention"
            )
        edge = rope_edge(text)
        if edge is not None and places > edge:
            raise UserError(
                f"prompt, response and block may reach {places} tokens, and beyond {edge} this target turns "
                "all positions otherwise (longrope), cached ones too, which decoding cannot do yet; "
                "lower `max_new_tokens` or `corpus.max_prompt_tokens`"
            )
        self.model, self.kinds = model, kinds
        self.additive = text._attn_implementation == "eager"  # which adds its mask to the scores
        self.device = next(model.parameters()).device
        self.cache = TargetCache(n, places, text.num_hidden_layers)
        self.tap_ids = tap_ids
        decoder = model.get_decoder()
        known = inspect.signature(inspect.unwrap(decoder.forward)).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # renamed in 5.2x

    def __call__(
        self, ids_nL: torch.Tensor, at_nL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Final hidden states [n, L, H] and taps [n, L, T·H] of new tokens at given positions."""
        length = int(at_nL.max()) + 1
        self.cache.at_nL, self.cache.length = at_nL, length
        place = torch.arange(length, device=self.device)
        back = at_nL[:, None, :, None] - place  # [n, 1, L, length]
        far = {"full_attention": length, "sliding_attention": self.window}
        masks = {kind: (back >= 0) & (back < far[kind]) for kind in sorted(self.kinds)}
        if self.additive:
            never = torch.finfo(self.model.dtype).min
            zero = torch.zeros((), dtype=self.model.dtype, device=self.device)
            masks = {kind: zero.where(mask, never) for kind, mask in masks.items()}
        with Taps(self.model, self.tap_ids) as taps:
            out = self.model.get_decoder()(
                input_ids=ids_nL,
                position_ids=at_nL,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        return out.last_hidden_state, taps.stack().flatten(2) if self.tap_ids else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's head over hidden states [..., H] -> [..., V]."""
        return head_logits(self.model, hidden)


class DrafterRunner:
    """The drafter with its cache of context keys; the block's own keys are never kept."""

    def __init__(self, drafter: Drafter, embed_VH: torch.Tensor, n: int, places: int):
        self.drafter, self.embed_VH = drafter, embed_VH
        self.cache = [Places(n, places) for _ in drafter.layers]
        self.length = 0  # places that hold context in at least one prompt

    def read_context(self, taps_nLD: torch.Tensor, at_nL: torch.Tensor) -> None:
        """Add the target's hidden states at new positions to the context of every layer."""
        context = self.drafter.context(taps_nLD)
        angles = self.drafter.rope(at_nL)
        for layer, cache in zip(self.drafter.layers, self.cache, strict=True):
            k, v = layer.self_attn.keys_values(context, angles)
            cache.write(k.transpose(1, 2), v.transpose(1, 2), at_nL)
        self.length = max(self.length, int(at_nL.max()) + 1)

    def draft(
        self, tokens_n: torch.Tensor, anchor_n: torch.Tensor, length_n: torch.Tensor, block: int
    ) -> torch.Tensor:
        """Hidden states [n, B-1, H] of the slots after the anchors `tokens_n` at `anchor_n`.

        Near the limit of new tokens a prompt's block has only `length_n` slots, the anchor included;
        what the others hold is meaningless.
        """
        c = self.drafter.config
        x = block_input(self.embed_VH, tokens_n, block, c.mask_token_id)
        at_nB = anchor_n[:, None] + torch.arange(block, device=anchor_n.device)
        angles = self.drafter.rope(at_nB)
        for i, (layer, cache) in enumerate(zip(self.drafter.layers, self.cache, strict=True)):
            mask = self._mask(anchor_n, length_n, at_nB, c.visibility(i))
            x = layer(x, angles, lambda q, k, v, m=mask, past=cache: self._attend(q, k, v, past, m))
        return self.drafter.norm(x[:, 1:])

    def _mask(
        self, anchor_n: torch.Tensor, length_n: torch.Tensor, at_nB: torch.Tensor, see: Visibility
    ) -> torch.Tensor:
        """Which of [context places ; own block] each slot sees; bool [n, 1, B, P + B]."""
        place = torch.arange(self.length, device=anchor_n.device)
        context = (place < anchor_n[:, None])[:, None].expand(-1, at_nB.shape[1], -1)
        back = at_nB[:, :, None] - at_nB[:, None, :]
        own = (at_nB < (anchor_n + length_n)[:, None])[:, None].expand_as(back)
        if see.causal:
            own = own & (back >= 0)
        if see.window is not None:
            context = context & (at_nB[:, :, None] - place < see.window)
            own = own & (back.abs() < see.window)
        return torch.cat([context, own], dim=-1)[:, None]

    def _attend(self, q, k, v, cache: Places, mask: torch.Tensor) -> torch.Tensor:
        """Queries [n, B, Q, d] over cached context and own block keys [n, B, K, d]."""
        past_k, past_v = cache.read(self.length)
        k = torch.cat([past_k, k.transpose(1, 2)], dim=2)
        v = torch.cat([past_v, v.transpose(1, 2)], dim=2)
        return folded(q, k, v, mask)


@dataclass
class Response:
    """What was decoded for one prompt."""

    tokens: list[int] = field(default_factory=list)  # the end token included
    cycles: list[int] = field(default_factory=list)  # tokens kept of each draft-verify cycle


@dataclass
class Timing:
    """Wall seconds of one call of `generate`."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0


@torch.inference_mode()
def generate(
    model: torch.nn.Module,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_token_ids: list[int],
    drafter: Drafter | None = None,
    block_size: int | None = None,
    embed_VH: torch.Tensor | None = None,
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    on_cycle: Callable[[list[Response]], None] | None = None,
) -> tuple[list[Response], Timing]:
    """Greedy decoding of some prompts (token ids) together; speculative if a drafter is given.

    Each cycle drafts B-1 tokens after the last one, has the target read all B, accepts the longest
    prefix that equals the target's own choices and adds the target's next choice (the bonus). A
    response ends with its first end token or at `max_new_tokens`, and so does its last cycle: blocks
    shrink to what may still be produced, and a cycle counts the tokens kept, as in the official loop
    (so 1 + sum(cycles) == len(tokens); the first token comes from the prefill). The mean over cycles
    is the acceptance length. Without a drafter a cycle is one token.

    `choose` takes the place of the argmax, logits [n, V] -> tokens [n], where no drafter is given.
    `on_cycle` sees the responses after each cycle (progress, streaming).
    """
    if choose and drafter:
        raise ValueError("speculative decoding is greedy: `choose` goes without a drafter")
    pick = choose or (lambda logits: logits.argmax(-1))
    device = next(model.parameters()).device
    n = len(prompts)
    block = (block_size or drafter.config.block_size) if drafter else 1
    places = max(map(len, prompts)) + max_new_tokens + block
    tap_ids = list(drafter.config.target_layer_ids) if drafter else []
    target = TargetRunner(model, tap_ids, n, places)
    if drafter:
        embed_VH = model.get_input_embeddings().weight if embed_VH is None else embed_VH
        draft = DrafterRunner(drafter, embed_VH, n, places)
    responses, timing = [Response() for _ in prompts], Timing()
    clock = _Clock(device)

    # Prefill. Rows are padded on the right; what padding writes lies at positions that the first
    # block overwrites, or beyond everything that is ever seen.
    longest = max(map(len, prompts))
    ids_nL = torch.tensor([p + [p[-1]] * (longest - len(p)) for p in prompts], device=device)
    at_nL = torch.arange(longest, device=device).expand(n, -1)
    lengths_n = torch.tensor([len(p) for p in prompts], device=device)
    rows_n = torch.arange(n, device=device)
    ends_nH = []
    for columns in (torch.arange(longest, device=device)).split(max(1, PREFILL_TOKENS // n)):
        hidden, taps = target(ids_nL[:, columns], at_nL[:, columns])
        if drafter:
            draft.read_context(taps, at_nL[:, columns])
        ends_nH.append(hidden[rows_n, (lengths_n - 1 - columns[0]).clamp(0, len(columns) - 1)])
    piece_n = (lengths_n - 1) // max(1, PREFILL_TOKENS // n)
    last_n = pick(target.logits(torch.stack(ends_nH)[piece_n, rows_n]))
    timing.prefill = clock.lap()

    anchor_n = lengths_n  # position of the last token, which the caches do not hold yet
    going = [True] * n
    _take(responses, going, last_n[:, None].tolist(), [1] * n, max_new_tokens, eos_token_ids)
    while any(going):
        left = [max_new_tokens - len(r.tokens) for r in responses]
        lengths = [min(block, tokens + 1) for tokens in left]
        width = max(length for length, on in zip(lengths, going, strict=True) if on)
        length_n = torch.tensor(lengths, device=device)
        slots = torch.arange(width, device=device)
        ids_nB = last_n[:, None]
        if width > 1:
            hidden = draft.draft(last_n, anchor_n, length_n, width)
            ids_nB = torch.cat([ids_nB, target.logits(hidden).argmax(-1)], dim=1)
            timing.draft += clock.lap()
        at_nB = anchor_n[:, None] + slots
        hidden, taps = target(ids_nB, at_nB)
        logits = target.logits(hidden)
        choice_nB = pick(logits[:, 0])[:, None] if choose else logits.argmax(-1)
        same = (ids_nB[:, 1:] == choice_nB[:, :-1]) & (slots[1:] < length_n[:, None])
        right = same.long().cumprod(-1).sum(-1)  # accepted slots, [n]
        timing.verify += clock.lap()
        if drafter:
            # Context of rejected slots is written too and overwritten by the next cycle's.
            draft.read_context(taps, at_nB)
            timing.draft += clock.lap()
        running = torch.tensor(going, device=device)
        kept = _take(
            responses,
            going,
            choice_nB.tolist(),
            (right + 1).tolist(),
            max_new_tokens,
            eos_token_ids,
        )
        for response, count in zip(responses, kept, strict=True):
            if count:
                response.cycles.append(count)
        # A finished row stays where it is, so that its positions never leave the cache.
        last_n = torch.where(running, choice_nB[rows_n, right], last_n)
        anchor_n = torch.where(running, anchor_n + right + 1, anchor_n)
        if on_cycle:
            on_cycle(responses)
    return responses, timing


def _take(
    responses: list[Response],
    going: list[bool],
    tokens: list[list[int]],
    counts: list[int],
    max_new_tokens: int,
    eos_token_ids: list[int],
) -> list[int]:
    """Append each prompt's first `counts` tokens, up to an end token or the limit.

    Returns how many were kept of each; 0 where the response had already ended.
    """
    kept = [0] * len(responses)
    for i, response in enumerate(responses):
        for token in tokens[i][: counts[i]] if going[i] else []:
            response.tokens.append(token)
            kept[i] += 1
            if token in eos_token_ids or len(response.tokens) == max_new_tokens:
                going[i] = False
                break
    return kept


class _Clock:
    """Seconds between laps, waiting for the device first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last = time.perf_counter()

    def lap(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        spent, self.last = now - self.last, now
        return spent
