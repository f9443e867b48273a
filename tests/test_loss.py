"""The chunked head loss against plain cross-entropy and autograd."""

import torch
import torch.nn.functional as F

from dflash.loss import head_cross_entropy, slot_weights


def test_loss_and_gradient_equal_plain_cross_entropy():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 12, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 12, generator=g, dtype=torch.float64)
    labels = torch.randint(50, (37,), generator=g)
    weights = torch.rand(37, generator=g, dtype=torch.float64)
    want_ce = F.cross_entropy(hidden @ head.T, labels, reduction="none")
    want = (weights * want_ce).sum() / weights.sum()
    (want_grad,) = torch.autograd.grad(want, hidden)
    for chunk in (1, 5, 37, 100):
        total, ce, right = head_cross_entropy(hidden, head, labels, weights, chunk)
        (grad,) = torch.autograd.grad(total / weights.sum(), hidden)
        torch.testing.assert_close(total.double() / weights.sum(), want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ce, want_ce.detach(), rtol=1e-5, atol=1e-5)
        # softmax runs in float32 whatever comes in
        torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(right, (hidden @ head.T).argmax(-1) == labels)


def test_slot_weights_follow_the_paper():
    w = slot_weights(16, 7.0)
    assert w[0] == 0 and w[1] == 1
    torch.testing.assert_close(w[8], torch.tensor(-1.0).exp())
