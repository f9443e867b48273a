"""Optimisers, rates and averages against slow float64 code written out here."""

import itertools
import math

import pytest
import torch
from torch import nn

from dflash import config, recipe

STEPS = 8
BETAS, EPS = (0.8, 0.9), 1e-8  # the latter: AdamW's in torch
QUINTIC = (3.4445, -4.7750, 2.0315)  # of Muon's iterations, as torch documents them


class Toy(nn.Module):
    """Matrices of several proportions, and a norm's gains between them."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.wide = nn.Parameter(torch.randn(6, 40, generator=g))
        self.norm = nn.Parameter(torch.rand(6, generator=g) + 0.5)
        self.tall = nn.Parameter(torch.randn(40, 6, generator=g))
        self.flat = nn.Parameter(torch.randn(16, 24, generator=g))


def training(**settings) -> config.Training:
    return config.Training.model_validate(settings)


MUON = training(
    optimizer="muon",
    lr=0.1,
    betas=BETAS,
    weight_decay=0.5,
    muon={"lr": 0.3, "momentum": 0.7, "weight_decay": 0.4},
)


def gradient(name: str, step: int) -> torch.Tensor:
    """Random, with a part that stays the same from step to step."""
    shape = Toy().get_parameter(name).shape
    same, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + step)
    return torch.randn(shape, generator=same) + torch.randn(shape, generator=own)


def advance(toy: Toy, optimizers: list, settings: config.Training, first=0, last=STEPS) -> None:
    for step in range(first, last):
        for name, p in toy.named_parameters():
            p.grad = gradient(name, step).to(p.device)
        recipe.set_rates(optimizers, recipe.rate(step, STEPS, settings))
        for optimizer in optimizers:
            optimizer.step()


def trained(settings: config.Training) -> Toy:
    toy = Toy()
    advance(toy, recipe.make_optimizers(toy, settings), settings)
    return toy


def slow_adamw(name: str, settings: config.Training, decay: float) -> torch.Tensor:
    w = Toy().get_parameter(name).detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(STEPS):
        lr = settings.lr * recipe.rate(step, STEPS, settings)
        g = gradient(name, step).double()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        mean, square = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
        w = w - lr * decay * w
        w = w - lr * mean / (square.sqrt() + EPS)
    return w


def orthogonal(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Newton-Schulz through the singular values: each iteration is an odd quintic in them."""
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
    return left @ torch.diag(s) @ right


def slow_muon(name: str, settings: config.Training) -> torch.Tensor:
    muon = settings.muon
    w = Toy().get_parameter(name).detach().double()
    momentum = torch.zeros_like(w)
    for step in range(STEPS):
        lr = muon.lr * recipe.rate(step, STEPS, settings)
        g = gradient(name, step).double()
        momentum = muon.momentum * momentum + g
        ahead = g + muon.momentum * momentum  # Nesterov's
        w = w - lr * muon.weight_decay * w
        w = w - lr * 0.2 * math.sqrt(max(w.shape)) * orthogonal(ahead, muon.steps)
    return w


def test_adamw_is_the_slow_one():
    settings = training(lr=0.1, betas=BETAS, weight_decay=0.5, warmup_share=0.4)
    for name, p in trained(settings).named_parameters():
        want = slow_adamw(name, settings, 0.0 if name == "norm" else 0.5)
        torch.testing.assert_close(p.detach().double(), want, rtol=1e-5, atol=1e-6)


def distance(toy: Toy, name: str, settings: config.Training) -> float:
    want = slow_muon(name, settings)
    return float((toy.get_parameter(name).detach() - want).norm() / want.norm())


@pytest.mark.parametrize("steps", [1, 5])
def test_muon_is_the_slow_one(steps):
    settings = MUON.model_copy(update={"muon": MUON.muon.model_copy(update={"steps": steps})})
    toy = trained(settings)
    for name in ("wide", "tall", "flat"):
        assert distance(toy, name, settings) < 0.005  # torch iterates in bfloat16
    want = slow_adamw("norm", settings, 0.0)
    torch.testing.assert_close(toy.norm.detach().double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other", [{"momentum": 0.6}, {"weight_decay": 0.38}, {"lr": 0.29}, {"steps": 4}]
)
def test_bfloat16_hides_no_setting_of_muon(other):
    """The tolerance of the test above tells settings apart that differ by a little."""
    toy = trained(MUON)
    settings = MUON.model_copy(update={"muon": MUON.muon.model_copy(update=other)})
    assert all(distance(toy, name, settings) > 0.005 for name in ("wide", "tall", "flat"))


def names(toy: Toy, group: dict) -> list[str]:
    by_param = {p: name for name, p in toy.named_parameters()}
    return [by_param[p] for p in group["params"]]


def test_groups_of_adamw():
    toy = Toy()
    (optimizer,) = recipe.make_optimizers(toy, training(lr=0.002))
    matrices, vectors = optimizer.param_groups
    assert names(toy, matrices) == ["wide", "tall", "flat"] and matrices["weight_decay"] == 0.01
    assert names(toy, vectors) == ["norm"] and vectors["weight_decay"] == 0.0
    assert all(g["peak"] == g["lr"] == 0.002 and g["fused"] for g in optimizer.param_groups)
    assert all(g["betas"] == (0.9, 0.95) for g in optimizer.param_groups)


@pytest.mark.parametrize("own, peak", [(None, 0.02), (0.005, 0.005)])
def test_groups_of_muon(own, peak):
    toy = Toy()
    settings = training(optimizer="muon", lr=0.002, muon={"lr": own})
    optimizers = recipe.make_optimizers(toy, settings)
    (matrices,), (vectors,) = (o.param_groups for o in optimizers)
    assert [type(o) for o in optimizers] == [torch.optim.Muon, torch.optim.AdamW]
    assert names(toy, matrices) == ["wide", "tall", "flat"] and matrices["weight_decay"] == 0.01
    assert names(toy, vectors) == ["norm"] and vectors["weight_decay"] == 0.0
    recipe.set_rates(optimizers, 0.25)
    assert matrices["lr"] == pytest.approx(0.25 * peak) and matrices["peak"] == peak
    assert vectors["lr"] == 0.25 * 0.002 and vectors["peak"] == 0.002


def test_a_device_without_fused_adamw_gets_the_plain_one():
    toy = Toy().to("meta")
    settings = training()
    optimizers = recipe.make_optimizers(toy, settings)
    advance(toy, optimizers, settings)
    assert not any(g["fused"] for g in optimizers[0].param_groups)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_is_tensors_only_and_all_that_is_needed_to_go_on(optimizer):
    settings = MUON.model_copy(update={"optimizer": optimizer})
    toy = Toy()
    optimizers = recipe.make_optimizers(toy, settings)
    advance(toy, optimizers, settings, last=3)
    saved = [
        {name: o.state[p] for name, p in toy.named_parameters() if p in o.state} for o in optimizers
    ]
    for o, states in zip(optimizers, saved, strict=True):
        kinds = {"step", "exp_avg", "exp_avg_sq"}
        if isinstance(o, torch.optim.Muon):
            kinds = {"momentum_buffer"}
        assert states and all(set(state) == kinds for state in states.values())
        assert all(isinstance(v, torch.Tensor) for s in states.values() for v in s.values())
    resumed = Toy()
    resumed.load_state_dict(toy.state_dict())
    others = recipe.make_optimizers(resumed, settings)
    for o, states in zip(others, saved, strict=True):
        for name, state in states.items():
            o.state[resumed.get_parameter(name)] = {k: v.clone() for k, v in state.items()}
    advance(resumed, others, settings, first=3)
    whole = trained(settings)
    assert all(torch.equal(p, whole.get_parameter(n)) for n, p in resumed.named_parameters())


def rates(steps: int, **settings) -> list[float]:
    return [recipe.rate(step, steps, training(**settings)) for step in range(steps)]


COSINE = [0.5 + 0.5 * math.cos(math.pi * i / 8) for i in range(8)]


@pytest.mark.parametrize(
    "schedule, after",
    [
        ("cosine", COSINE),
        ("linear", [8 / 8, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("constant", [1.0] * 8),
        ("wsd", [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_schedules(schedule, after):
    found = rates(10, schedule=schedule, warmup_steps=2, decay_share=0.4)
    assert found == pytest.approx([0.5, 1.0, *after])
    found = rates(8, schedule=schedule, warmup_steps=0, decay_share=0.5)
    assert found == pytest.approx(after)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_corners_of_schedules(schedule):
    assert rates(1, schedule=schedule) == [1.0]
    assert rates(1, schedule=schedule, warmup_steps=0) == [1.0]
    assert rates(4, schedule=schedule, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(4, schedule=schedule, warmup_steps=8) == [0.125, 0.25, 0.375, 0.5]
    for steps, warm in itertools.product((1, 2, 3, 7, 1000), (0, 1, 2, 6)):
        found = rates(steps, schedule=schedule, warmup_steps=warm)
        assert all(0 < r <= 1 for r in found)
        assert found == sorted(found[:warm]) + sorted(found[warm:], reverse=True)


def test_wsd_falls_only_after_warm_up():
    found = rates(10, schedule="wsd", warmup_steps=8, decay_share=0.5)
    assert found[7:] == [1.0, 1.0, 0.5]
    assert rates(9, schedule="wsd", warmup_steps=3, decay_share=1.0) == rates(
        9, schedule="linear", warmup_steps=3
    )


def test_steps_of_warm_up_win_over_their_share():
    assert recipe.warmup_steps(100, training(warmup_share=0.04)) == 4
    assert recipe.warmup_steps(101, training(warmup_share=0.04)) == 5
    assert recipe.warmup_steps(100, training(warmup_share=0.04, warmup_steps=0)) == 0
    assert recipe.warmup_steps(100, training(warmup_share=0.04, warmup_steps=300)) == 300


def move(toy: Toy, step: int) -> None:
    with torch.no_grad():
        for name, p in toy.named_parameters():
            p.add_(gradient(name, step), alpha=0.1)


def test_average_is_the_slow_one_and_goes_on_from_its_tensors():
    toy, decay = Toy(), 0.6  # which is the smaller from step 13 on
    average = recipe.Average(toy, decay)
    slow = {name: p.detach().double() for name, p in toy.named_parameters()}
    for step in range(20):
        move(toy, step)
        if step == 5:
            kept = {name: a.clone() for name, a in average.tensors.items()}
            average = recipe.Average(toy, decay)
            for name, a in average.tensors.items():
                a.copy_(kept[name])
        average.update(step)
        d = min(decay, (1 + step) / (10 + step))
        for name, p in toy.named_parameters():
            slow[name] = d * slow[name] + (1 - d) * p.detach().double()
    for name, a in average.tensors.items():
        assert a.dtype == torch.float32 and not a.requires_grad
        torch.testing.assert_close(a.double(), slow[name], rtol=1e-5, atol=1e-6)


def test_an_early_average_is_not_the_initial_weights():
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    average = recipe.Average(model, 0.999)
    nn.init.zeros_(model.weight)
    for step in range(50):
        average.update(step)
    assert 0 < average.tensors["weight"].max() < 1e-10


def test_swapped_gives_the_own_weights_back():
    toy = Toy()
    average = recipe.Average(toy, 0.9)
    move(toy, 0)
    average.update(0)
    own = {name: p.detach().clone() for name, p in toy.named_parameters()}
    averages = {name: a.clone() for name, a in average.tensors.items()}
    with pytest.raises(KeyboardInterrupt):
        with average.swapped():
            for name, p in toy.named_parameters():
                assert torch.equal(p, averages[name]) and not torch.equal(p, own[name])
            move(toy, 1)
            raise KeyboardInterrupt
    for name, p in toy.named_parameters():
        assert torch.equal(p, own[name]) and p.requires_grad
        assert torch.equal(average.tensors[name], averages[name])
