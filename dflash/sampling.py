"""How a token is chosen from logits, and how much of a drafted block is kept: greedy or sampled.

Shapes: n prompts · B slots a block, the anchor included · V vocabulary · N new tokens at most.

Three rules, each of which leaves the output what the target alone would give:

- greedy: a drafted token is kept if it is the target's likeliest;
- sample-match: the draft is greedy too, and a token is kept if it equals the target's own sample (the
  rule behind the paper's rows at temperature 1);
- rejection (Leviathan et al. 2023, Chen et al. 2023): the draft is sampled from the drafter's
  distribution q; token x is kept with probability min(1, p(x) / q(x)), and the first one rejected is
  drawn again from what p has in excess of q.

After the last kept token comes one more of the target's, the bonus.

Random numbers belong to places of a response, as keys do: three for each, one to draft the token, one
to keep or reject it, one to draw the target's. A slot that was drafted in vain is drafted again with
the same numbers, and nothing that decided before it looked at them. So a response depends on the seed,
its own stream and nothing else: neither its batch, nor the device's generator. And sample-match gives
the very tokens that sampling without a drafter gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dflash.errors import UserError
from dflash.files import text_sha256


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy.

    Only the `top_k` likeliest tokens count, and of those the fewest whose probability, renormalised,
    reaches `top_p`: for the target and for the drafter alike. Raises UserError for values out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    rule: Literal["rejection", "sample_match"] = "rejection"

    def __post_init__(self):
        wrong = [
            f"{name} {found}; expected {expected}"
            for name, found, expected, ok in (
                ("temperature", self.temperature, "0 (greedy) or more", self.temperature >= 0),
                ("top_k", self.top_k, "1 or more", self.top_k is None or self.top_k >= 1),
                (
                    "top_p",
                    self.top_p,
                    "above 0, at most 1",
                    self.top_p is None or 0 < self.top_p <= 1,
                ),
                ("rule", self.rule, "rejection or sample_match", self.rule in RULES),
            )
            if not ok
        ]
        if wrong:
            raise UserError(f"sampling: found {wrong[0]}; correct it")

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of the next token, logits [..., V] -> float32 [..., V]."""
        scaled = logits.float() / self.temperature
        if self.top_k is None and self.top_p in (None, 1.0):
            return scaled.softmax(-1)
        size = logits.shape[-1]
        top = scaled.topk(min(self.top_k or size, size))  # likeliest first
        p = top.values.softmax(-1)
        if self.top_p is not None:
            before = p.cumsum(-1) - p
            p = p.where(before < self.top_p, 0.0)  # nothing is before the likeliest: it stays
            p = p / p.sum(-1, keepdim=True)
        return torch.zeros_like(scaled).scatter_(-1, top.indices, p)


RULES = ("rejection", "sample_match")
GREEDY = Sampling()


def draw(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative weight passes `uniform`: p [..., V], uniform [...] -> [...].

    The weights need not sum to one. A token of weight 0 is never drawn.
    """
    cumulative = p.double().cumsum(-1)
    total = cumulative[..., -1:]
    wanted = (uniform.double()[..., None] * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True)[..., 0]


class Sampler:
    """Chooses the tokens of n responses, of which `made` are there already."""

    def __init__(
        self, sampling: Sampling, seed: int, streams: list[int], limit: int, device: torch.device
    ):
        self.sampling = sampling
        self.greedy = sampling.temperature == 0
        self.rejects = not self.greedy and sampling.rule == "rejection"
        if not self.greedy:
            rows = [_uniform(seed, stream, limit) for stream in streams]
            # [n, N]: to draft a token, to keep it, and to draw the target's
            self.to_draft, self.to_keep, self.to_draw = torch.stack(rows).to(device).unbind(1)

    def first(self, logits_nV: torch.Tensor) -> torch.Tensor:
        """The tokens [n] after the prompts."""
        if self.greedy:
            return logits_nV.argmax(-1)
        return draw(self.sampling.probabilities(logits_nV), self.to_draw[:, 0])

    def draft(
        self, logits_nbV: torch.Tensor, made_n: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafted tokens [n, B-1], and the distributions they were drawn from [n, B-1, V].

        None stands for a draft that was not drawn: all of the probability is on its token.
        """
        if not self.rejects:
            return logits_nbV.argmax(-1), None
        q_nbV = self.sampling.probabilities(logits_nbV)
        return draw(q_nbV, _at(self.to_draft, made_n, q_nbV.shape[1])), q_nbV

    def verify(
        self,
        draft_nb: torch.Tensor,
        q_nbV: torch.Tensor | None,
        logits_nBV: torch.Tensor,
        made_n: torch.Tensor,
        drafted_n: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n, B] of which the first `right + 1` are to be kept, and `right` [n].

        `logits_nBV` are the target's after the anchor and after each drafted token. Of prompt i only
        the first `drafted_n[i]` of its B-1 drafted tokens count.
        """
        n, block = logits_nBV.shape[:2]
        counts_nb = torch.arange(block - 1, device=logits_nBV.device) < drafted_n[:, None]
        if self.rejects:
            return self._reject(draft_nb, q_nbV, logits_nBV, made_n, counts_nb)
        if self.greedy:
            own_nB = logits_nBV.argmax(-1)
        else:
            p_nBV = self.sampling.probabilities(logits_nBV)
            own_nB = draw(p_nBV, _at(self.to_draw, made_n, block))
        return own_nB, _leading((draft_nb == own_nB[:, :-1]) & counts_nb)

    def _reject(self, draft_nb, q_nbV, logits_nBV, made_n, counts_nb):
        """Rejection sampling. Beyond what was drafted q is 0, so that the bonus, drawn where nothing
        was drafted, is the excess of p over q as well."""
        p_nBV = self.sampling.probabilities(logits_nBV)
        if q_nbV is None:
            q_nbV = torch.zeros_like(p_nBV[:, :-1]).scatter_(-1, draft_nb[..., None], 1.0)
        p_nb, q_nb = (x.gather(-1, draft_nb[..., None])[..., 0] for x in (p_nBV[:, :-1], q_nbV))
        keep_nb = _at(self.to_keep, made_n, q_nb.shape[1]) * q_nb < p_nb
        right_n = _leading(keep_nb & counts_nb)

        row_n = torch.arange(len(right_n), device=right_n.device)
        q_nBV = torch.cat([q_nbV * counts_nb[..., None], torch.zeros_like(p_nBV[:, :1])], dim=1)
        p_nV, q_nV = p_nBV[row_n, right_n], q_nBV[row_n, right_n]
        excess_nV = (p_nV - q_nV).clamp_min(0)
        # rounding alone can leave nothing of it, where p and q are the same
        excess_nV = torch.where(excess_nV.sum(-1, keepdim=True) > 0, excess_nV, p_nV)
        bonus_n = draw(excess_nV, _at(self.to_draw, made_n + right_n, 1)[:, 0])
        tokens_nB = torch.cat([draft_nb, bonus_n[:, None]], dim=1)
        tokens_nB[row_n, right_n] = bonus_n
        return tokens_nB, right_n


def _uniform(seed: int, stream: int, limit: int) -> torch.Tensor:
    """The random numbers of one response, float64 [3, N] in [0, 1)."""
    generator = torch.Generator().manual_seed(int(text_sha256(f"{seed}/{stream}")[:15], 16))
    return torch.rand(3, limit, generator=generator, dtype=torch.float64)


def _at(uniform_nN: torch.Tensor, first_n: torch.Tensor, width: int) -> torch.Tensor:
    """The numbers of `width` places from `first_n` on, [n, width]; past the limit anything."""
    place = first_n[:, None] + torch.arange(width, device=first_n.device)
    return uniform_nN.gather(1, place.clamp_max(uniform_nN.shape[1] - 1))


def _leading(right_nb: torch.Tensor) -> torch.Tensor:
    """How many are right before the first that is not, [n]."""
    return right_nb.long().cumprod(-1).sum(-1)
