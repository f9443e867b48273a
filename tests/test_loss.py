"""The chunked losses against plain float64 code through full logits and autograd."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash import loss
from dflash.loss import Teacher, block_loss, dpace_factors, slot_losses, slot_weights

N, B, S, H, V = 7, 5, 23, 12, 50
KINDS = list(itertools.product(("data", "argmax", "soft"), ("decay", "dpace")))


class Norm(nn.Module):
    """A final norm unlike RMSNorm, in any precision: what is used must be the module given."""

    def forward(self, x):
        return x.tanh() * 1.5 + 0.1


class Problem:
    """Random blocks with gaps in their supervision; hidden states want a gradient."""

    def __init__(self, dtype=torch.float64, weights="decay", cap=None):
        g = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        self.hidden = normal(N, B, H).requires_grad_()
        self.head, self.last = normal(V, H), normal(S, H)
        self.rows = torch.randint(S, (N, B), generator=g)
        self.labels = torch.randint(V, (N, B), generator=g)
        on = torch.rand(N, B, generator=g) < 0.8
        on[2] = False  # a block without any
        gamma = 2.5 if weights == "decay" else math.inf
        self.weights = torch.where(on, slot_weights(B, gamma), 0.0).to(dtype)
        self.cap = cap

    def arguments(self, labels, weights, rows=slice(None)):
        """Of `block_loss`, for some blocks."""
        teacher = Teacher(self.last, self.rows[rows], Norm(), self.cap)
        return dict(
            hidden_NBH=self.hidden[rows],
            head_VH=self.head,
            labels_NB=self.labels[rows],
            weights_NB=self.weights[rows],
            teacher=None if labels == "data" else teacher,
            soft=labels == "soft",
            dpace_alpha=0.3 if weights == "dpace" else None,
        )

    def slow(self, labels, weights):
        """The definition, slot by slot, with all logits at once."""
        log_q = (self.hidden @ self.head.T).log_softmax(-1)
        target = Norm()(self.last) @ self.head.T
        if self.cap:
            target = self.cap * torch.tanh(target / self.cap)
        log_p = target.log_softmax(-1)
        total, correct = 0.0, torch.zeros(N, B, dtype=torch.bool)
        for n in range(N):
            slots = [k for k in range(B) if self.weights[n, k] > 0]
            losses, confidences = [], []
            for k in slots:
                p = log_p[self.rows[n, k]]
                label = int(self.labels[n, k]) if labels == "data" else int(p.argmax())
                kl = (p.exp() * (p - log_q[n, k])).sum()
                losses.append(kl if labels == "soft" else -log_q[n, k, label])
                confidences.append(float(log_q[n, k, label].detach().exp()))
                correct[n, k] = int(log_q[n, k].argmax()) == label
            for j, k in enumerate(slots):
                weight = self.weights[n, k]
                if weights == "dpace":
                    smooth = [0.7 * q + 0.3 for q in confidences]
                    weight = sum(math.prod(smooth[: m + 1]) for m in range(j, len(slots)))
                total = total + weight * losses[j]
        return total, correct


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("labels", "weights"), KINDS)
def test_value_and_gradient_equal_the_definition(labels, weights, cap):
    problem = Problem(weights=weights, cap=cap)
    want, right = problem.slow(labels, weights)
    (want_grad,) = torch.autograd.grad(want, problem.hidden)
    assert 0 < int(right.sum()) or labels == "data"
    for chunk in (1, 4, 1000):
        total, correct = block_loss(**problem.arguments(labels, weights), chunk=chunk)
        (grad,) = torch.autograd.grad(total / 3, problem.hidden)
        torch.testing.assert_close(total.detach(), want.detach(), rtol=1e-11, atol=0)
        torch.testing.assert_close(grad * 3, want_grad, rtol=1e-9, atol=1e-11)
        assert torch.equal(correct, right)


@pytest.mark.parametrize(("labels", "weights"), KINDS)
def test_half_precision_stays_close(labels, weights):
    exact, half = Problem(weights=weights), Problem(torch.bfloat16, weights)
    half.weights = exact.weights.float()
    results = []
    for problem in (exact, half):
        total, _ = block_loss(**problem.arguments(labels, weights), chunk=6)
        results.append((total.detach(), *torch.autograd.grad(total, problem.hidden)))
    (a, grad_a), (b, grad_b) = results
    assert b.dtype == torch.float32 and grad_b.dtype == torch.bfloat16
    # an argmax among near ties may turn with rounding; these numbers are fixed by the seed
    assert abs(float(b / a) - 1) < 0.05 and (grad_b.double() - grad_a).norm() < 0.2 * grad_a.norm()


@pytest.mark.parametrize(("labels", "weights"), KINDS)
def test_parts_of_a_step_add_up(labels, weights):
    """Sums over any split, divided by the mass of all, are the loss of all."""
    problem = Problem(weights=weights)
    whole, _ = block_loss(**problem.arguments(labels, weights))
    (whole_grad,) = torch.autograd.grad(whole, problem.hidden)
    mass = sum(float(problem.weights[rows].sum()) for rows in ([0, 1, 2], [3], [4, 5, 6]))
    assert math.isclose(mass, float(problem.weights.sum()), rel_tol=1e-12)
    parts, grad = 0.0, torch.zeros_like(problem.hidden)
    for rows in ([0, 1, 2], [3], [4, 5, 6]):
        part, _ = block_loss(**problem.arguments(labels, weights, rows))
        grad += torch.autograd.grad(part / mass, problem.hidden)[0]
        parts += float(part.detach()) / mass
    assert math.isclose(parts, float(whole.detach()) / mass, rel_tol=1e-12)
    torch.testing.assert_close(grad, whole_grad / mass, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("labels", "weights"), KINDS)
def test_a_reduced_head_is_the_definition_over_its_tokens(labels, weights):
    problem = Problem(weights=weights)
    kept = torch.arange(3, V, 2)
    problem.head = problem.head[kept]  # the definition then also sees no other token
    inside = problem.labels < len(kept)
    problem.weights = torch.where(inside, problem.weights, 0.0)
    problem.labels = torch.where(inside, problem.labels, -1)
    want, right = problem.slow(labels, weights)
    total, correct = block_loss(**problem.arguments(labels, weights), chunk=3)
    torch.testing.assert_close(total.detach(), want.detach(), rtol=1e-11, atol=0)
    assert torch.equal(correct, right)


def test_soft_labels_are_learnt_when_both_distributions_agree():
    problem = Problem()
    problem.hidden = Norm()(problem.last)[problem.rows].requires_grad_()
    total, correct = block_loss(**problem.arguments("soft", "decay"))
    (grad,) = torch.autograd.grad(total, problem.hidden)
    assert abs(float(total.detach())) < 1e-12 and grad.abs().max() < 1e-12
    assert torch.equal(correct, problem.weights > 0)


def test_nothing_is_supervised():
    problem = Problem()
    problem.weights.zero_()
    for labels, weights in KINDS:
        total, correct = block_loss(**problem.arguments(labels, weights))
        (grad,) = torch.autograd.grad(total, problem.hidden)
        assert total == 0 and not grad.any() and not correct.any()


class Largest(TorchDispatchMode):
    """The most elements that any operation's result holds."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize(("labels", "weights"), KINDS)
def test_no_more_logits_than_asked_for(labels, weights):
    problem = Problem(weights=weights)
    with Largest() as largest:
        total, _ = block_loss(**problem.arguments(labels, weights), chunk=2)
        torch.autograd.grad(total, problem.hidden)
    assert largest.elements <= max(N * B * H, V * H, 2 * V)
    assert int((problem.weights > 0).sum()) * V > largest.elements  # the whole would be seen


def test_dpace_by_hand():
    """Two supervised slots, then one after a gap; alpha smooths towards 1."""
    on = torch.tensor([[False, True, True, False, True]])
    q = torch.tensor([[9.0, 0.5, 0.25, 9.0, 1.0]])
    got = dpace_factors(q, on, 0.2)[0]
    a, b, c = 0.8 * 0.5 + 0.2, 0.8 * 0.25 + 0.2, 1.0
    want = [0, a + a * b + a * b * c, a * b + a * b * c, 0, a * b * c]
    torch.testing.assert_close(got, torch.tensor(want))
    assert dpace_factors(q, on, 1.0)[0].tolist() == [0, 3, 2, 0, 1]


def test_weighted_sum_of_given_labels():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 12, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 12, generator=g, dtype=torch.float64)
    labels = torch.randint(50, (37,), generator=g)
    weights = torch.rand(37, generator=g, dtype=torch.float64)
    want_ce = F.cross_entropy(hidden @ head.T, labels, reduction="none")
    (want_grad,) = torch.autograd.grad((weights * want_ce).sum(), hidden)
    ce, _, right = slot_losses(hidden, head, labels, 5)
    (grad,) = torch.autograd.grad((weights * ce).sum(), hidden)
    torch.testing.assert_close(ce.detach(), want_ce.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-11, atol=1e-12)
    assert torch.equal(right, (hidden @ head.T).argmax(-1) == labels)


def test_autocast_does_not_reach_the_loss():
    problem = Problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        one, _ = block_loss(**problem.arguments("soft", "decay"))
    other, _ = block_loss(**problem.arguments("soft", "decay"))
    assert torch.equal(one, other)
    assert loss.slot_losses(problem.hidden[0], problem.head, problem.labels[0]).loss_R.dtype == (
        torch.float32
    )


def test_slot_weights_follow_the_paper():
    w = slot_weights(16, 7.0)
    assert w[0] == 0 and w[1] == 1
    torch.testing.assert_close(w[8], torch.tensor(-1.0).exp())
    assert slot_weights(4, math.inf).tolist() == [0, 1, 1, 1]
