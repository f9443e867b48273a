"""Decoding and evaluation on the device: the CPU's tokens, one wait a cycle, no plan of cuDNN's."""

from __future__ import annotations

import pytest
import torch
from support.cuda import device, kernels
from support.targets import END
from test_decode import PROMPTS, Recalled, fit, make_drafter
from test_decode_families import family

from dflash import decode, evaluate, regenerate, terminal
from dflash.corpus import Prompt
from dflash.decode import generate
from dflash.errors import UserError
from dflash.sampling import Sampling
from dflash.target import load_model

COUNT = 24
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.8, 40, 0.95),
    "sample match": Sampling(0.8, rule="sample_match"),
}


@pytest.fixture(scope="module")
def models(tiny_llama, identity_of):
    """The tiny target on the CPU and on the device, and a drafter that was taught its answers."""
    identity = identity_of(tiny_llama)
    on_cpu = load_model(identity, "float32", device="cpu")
    on_gpu = load_model(identity, "float32")
    assert on_gpu.device == torch.device("cuda", 0)
    drafter = fit(on_cpu, make_drafter(block=4).float(), steps=6)
    other = make_drafter(block=4).float()
    other.load_state_dict(drafter.state_dict())
    return identity, (on_cpu, drafter), (on_gpu, other.to("cuda").eval().requires_grad_(False))


def decoded(pair, prompts, how=WAYS["greedy"], **more):
    model, drafter = pair
    responses, timing = generate(model, prompts, COUNT, [END], drafter, sampling=how, **more)
    return responses, timing


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batched", "one"])
@pytest.mark.parametrize("how", WAYS)
def test_the_tokens_are_the_cpus_and_a_cycle_waits_once(models, how, prompts):
    _, cpu, gpu = models
    wanted, _ = decoded(cpu, prompts, WAYS[how])
    decoded(gpu, prompts, WAYS[how])  # lazily made things
    per_cycle, seen = [], [0]
    with device.waits() as waits:

        def watch(_):
            per_cycle.append(len(waits) - seen[0])
            seen[0] = len(waits)

        found, timing = decoded(gpu, prompts, WAYS[how], on_cycle=watch)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    assert [r.cycles for r in found] == [r.cycles for r in wanted]
    assert how == "sample match" or max(max(r.cycles) for r in found) > 1
    # the first count has the prompts' pass and its token in it
    assert per_cycle[1:] == [1] * (len(per_cycle) - 1), waits
    assert timing.prefill > 0 and timing.draft > 0 and timing.verify > 0


def test_plain_decoding_waits_once_a_token(models):
    _, (cpu, _), (gpu, _) = models
    wanted, _ = decoded((cpu, None), PROMPTS)
    generate(gpu, PROMPTS, 2, [END])
    with device.waits() as waits:
        found, _ = decoded((gpu, None), PROMPTS)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    tokens = max(len(r.tokens) for r in found)
    assert len(waits) <= tokens + 2, waits  # and the clock at the end


def test_answering_with_a_temperature_waits_once_a_token(models):
    identity, (cpu, _), (gpu, _) = models
    from dflash.config import Regenerate

    settings = Regenerate(max_new_tokens=COUNT, temperature=0.7, top_p=0.9)
    prompts = [
        Prompt(f"{i:016x}", "toy", str(i), "odd", "train", [], p) for i, p in enumerate(PROMPTS)
    ]
    wanted = regenerate.generate(cpu, identity, prompts, settings)
    with device.waits() as waits:
        found = regenerate.generate(gpu, identity, prompts, settings)
    assert found == wanted
    assert len(waits) <= max(map(len, found)) + 3, waits


@pytest.mark.parametrize("name", ["qwen3.5", "gemma3", "mistral"])
def test_families_with_states_and_windows(name):
    """Hybrids keep, restore and read again their state; windows hide what lies behind."""
    cpu, gpu = family(name), family(name).to("cuda")
    wanted, _ = generate(cpu, PROMPTS, COUNT, [END])
    recalled = Recalled(PROMPTS, [r.tokens for r in wanted], wrong_every=5)
    found, _ = generate(gpu, PROMPTS, COUNT, [END], propose=recalled, block_size=4)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    drafter = make_drafter().float().to("cuda")
    found, _ = generate(gpu, PROMPTS, COUNT, [END], drafter)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]


def test_half_precision_builds_no_plan_of_cudnns(models):
    _, _, (gpu, drafter) = models
    target = family("mistral").to("cuda", torch.bfloat16)
    generate(target, PROMPTS, 12, [END], make_drafter().to("cuda", torch.bfloat16))
    assert not kernels.plans and not kernels.calls["cudnn"]
    assert kernels.calls["efficient"] > 0


def test_one_prompt_without_a_mask_gets_flash(tiny_llama, identity_of):
    model = load_model(identity_of(tiny_llama), "bfloat16")
    generate(model, PROMPTS[:1], 6, [END])
    kernels.calls.clear()
    with device.waits():
        generate(model, PROMPTS[:1], 8, [END])
    assert kernels.calls["flash"] >= 4 * 6  # four layers, a call a token


def prompts_of(identity) -> list[Prompt]:
    return [
        Prompt(f"{i:016x}", "toy", str(i), "even" if i % 2 else "odd", "heldout", [], p)
        for i, p in enumerate(PROMPTS)
    ]


def test_evaluation(models):
    identity, cpu, gpu = models
    settings = evaluate.StageSettings(max_new_tokens=COUNT, timed_prompts_per_kind=1)
    results = []
    for model, drafter in (cpu, gpu):
        decoder = evaluate.Decoder(model, settings, [END])
        results.append(evaluate.measure(decoder, drafter, prompts_of(identity), None, 4))
    wanted, found = results
    for key in ("tau_mean", "tau_pooled", "per_slot"):
        assert found["overall"][key] == wanted["overall"][key]
    assert found["overall"]["lossless"]["identical"] == len(PROMPTS)
    assert device.NAME in found["measured_on"] and found["overall"]["speed_up"] > 0


class Scarce:
    """Lets calls of a function with more than so many prompts run out of memory, on the device."""

    def __init__(self, monkeypatch, most: int):
        real = decode.TargetRunner.read_prompts

        def read(runner, prompts, draft):
            if len(prompts) > most:
                with device.limit(64):
                    torch.empty(1 << 20, device="cuda")
            return real(runner, prompts, draft)

        monkeypatch.setattr(decode.TargetRunner, "read_prompts", read)


def test_memory_that_does_not_suffice_halves_the_batch_of_evaluation(models, monkeypatch, capsys):
    identity, cpu, gpu = models
    Scarce(monkeypatch, 1)
    decoder = evaluate.Decoder(gpu[0], evaluate.StageSettings(max_new_tokens=8), [END])
    found = evaluate.decode_all(decoder, gpu[1], prompts_of(identity), 4)
    assert "out of memory with 4 prompts, going on with 2" in capsys.readouterr().out
    monkeypatch.undo()
    wanted, _ = generate(cpu[0], PROMPTS, 8, [END], cpu[1])
    assert [r.tokens for r in found] == [r.tokens for r in wanted]


def test_memory_that_does_not_suffice_halves_the_batch_of_answering(models, monkeypatch, capsys):
    from dflash.config import Regenerate

    identity, cpu, gpu = models
    prompts, settings = prompts_of(identity), Regenerate(max_new_tokens=8)
    wanted = regenerate.answers(cpu[0], identity, prompts, settings, 4)
    Scarce(monkeypatch, 2)
    assert regenerate.answers(gpu[0], identity, prompts, settings, 4) == wanted
    assert "out of memory with 4 prompts at once, going on with 2" in capsys.readouterr().err
    Scarce(monkeypatch, 0)
    with pytest.raises(UserError, match="not even this one prompt"):
        regenerate.answers(gpu[0], identity, prompts, settings, 1)


def test_the_command(finished, capsys):
    """In bfloat16 unless told otherwise; in float32 the same answer with a drafter and without."""
    results = finished[0] / "results"
    common = ["--identity", str(results / "target/identity.json"), "--max-new-tokens", "20"]
    common += ["--prompt", "what is the answer to this question"]
    said = []
    drafter = ["--drafter", str(results / "drafters/soft")]
    for more in (["--plain", "--dtype", "float32"], [*drafter, "--dtype", "float32"], drafter):
        terminal.main([*common, *more])
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out != "\n"
    assert all("tau" in s.err for s in said[1:]) and said[2].out != "\n"
