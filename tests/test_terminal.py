"""`python -m dflash.decode`: what it prints, which drafters it opens, what it refuses."""

import json
import shutil

import pytest
import torch
from support.targets import tiny_tokenizer
from test_decode import make_drafter
from transformers import PreTrainedTokenizerFast

from dflash.corpus import read_prompts
from dflash.decode import Response, Timing, generate
from dflash.drafter import load_drafter, save_drafter
from dflash.target import load_model, read_identity
from dflash.terminal import Pieces, Stream, figures, main, open_drafter


def by_byte() -> PreTrainedTokenizerFast:
    """Every byte beyond the few merges is a token of its own, so characters are split."""
    return tiny_tokenizer()


@pytest.mark.parametrize("text", ["how does it work", "é", "naïve 東京 🙂🙂 ok", "🙂"])
def test_no_character_is_split_and_none_lost(text):
    tokenizer = by_byte()
    pieces = Pieces(tokenizer)
    shown = [pieces.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(shown) + pieces.rest() == text
    assert not any("\ufffd" in piece for piece in shown)


def test_half_a_character_at_the_end_is_still_shown():
    tokenizer = by_byte()
    pieces = Pieces(tokenizer)
    ids = tokenizer("a🙂")["input_ids"]
    assert [pieces.add(token) for token in ids[:-1]] == ["a"] + [""] * (len(ids) - 2)
    assert pieces.rest() == "\ufffd"
    assert pieces.add(ids[-1]) == "🙂"


def test_slots_have_colours_and_the_targets_own_tokens_none(capsys):
    tokenizer = by_byte()
    ids = tokenizer("abcdef")["input_ids"]
    stream = Stream(tokenizer, coloured=True)
    stream([Response(ids[:2], [1])])  # the prefill's, and a cycle with nothing kept
    stream([Response(ids[:5], [1, 3])])  # two kept and the bonus
    stream.close()
    assert capsys.readouterr().out == "ab\x1b[34mc\x1b[0m\x1b[36md\x1b[0me\n"
    plain = Stream(tokenizer, coloured=False)
    plain([Response(ids[:5], [1, 3])])
    plain.close()
    assert capsys.readouterr().out == "abcde\n"


def test_figures():
    response = Response(list(range(8)), [3, 1, 3])
    text = figures(response, Timing(0.5, 1.0, 1.0), 4, coloured=False)
    assert text.splitlines() == [
        "8 tokens, prefill 0.50 s, then 3.5 tokens/s; tau 2.33 over 3 cycles, 50% of the time drafting",
        "kept of slot  1: 67%  2: 67%  3: 0%",
    ]
    assert figures(Response([1], []), Timing(0.5), 4, False) == "1 token, prefill 0.50 s"


def test_it_answers_from_all_kinds_of_drafters(finished, tmp_path, capsys):
    """Trained folder and export hold the same weights, the run directory the newest; all answer."""
    results = finished[0] / "results"
    identity = read_identity(results / "target/identity.json")
    weights = []
    for place in ("runs/small", "drafters/small", "export/small"):
        drafter = open_drafter(results / place, identity).to(torch.bfloat16)
        weights.append(torch.cat([p.flatten() for p in drafter.parameters()]))
    assert torch.equal(weights[1], weights[2]) and weights[0].shape == weights[1].shape

    prompt = "what is the answer to this question"
    common = ["--prompt", prompt, "--identity", str(results / "target/identity.json")]
    common += ["--max-new-tokens", "20"]
    outputs = []
    for more in (["--plain"], ["--drafter", str(results / "runs/small")]):
        main([*common, *more])
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out != "\n"
    assert "\x1b" not in outputs[1].out
    assert "tau" in outputs[1].err and "tau" not in outputs[0].err
    assert "step-" in outputs[1].err  # which checkpoint it took


def test_a_conversation_goes_on(finished, tmp_path, capsys):
    results = finished[0] / "results"
    path = tmp_path / "talk.json"
    talk = [
        {"role": "user", "content": "what is this"},
        {"role": "assistant", "content": "the answer"},
    ]
    path.write_text(json.dumps(talk))
    common = ["--identity", str(results / "target/identity.json"), "--plain", "--max-new-tokens"]
    main([*common, "8", "--messages", str(path), "--prompt", "how does it work"])
    first = capsys.readouterr().out
    whole = [*talk, {"role": "user", "content": "how does it work"}]
    path.write_text(json.dumps({"messages": whole}))
    main([*common, "8", "--messages", str(path)])
    assert capsys.readouterr().out == first
    main([*common, "8", "--prompt", "how does it work"])
    assert capsys.readouterr().out != first


def test_refusals(finished, tmp_path, refusal):
    results = finished[0] / "results"
    identity = ["--identity", results / "target/identity.json"]
    export = ["--drafter", results / "export/small"]
    ask = ["--prompt", "what is this"]
    both = "give either --drafter FOLDER or --plain"
    assert both in refusal(main, *ask, *identity)
    assert both in refusal(main, *ask, *identity, *export, "--plain")
    assert "nothing to answer" in refusal(main, *identity, *export)
    assert "`--prompt` is ' '" in refusal(main, "--prompt", " ", *identity, *export)
    assert "expected 1 or more" in refusal(main, *ask, *export, "--max-new-tokens", "0")
    assert "temperature -1.0" in refusal(main, *ask, *export, "--temperature", "-1")
    assert "no drafter here" in refusal(main, *ask, *identity, "--drafter", tmp_path)
    assert "blocks of 4" in refusal(main, *ask, *identity, *export, "--block-size", "5")
    assert "identity.json" in refusal(main, *ask, *export, "--identity", tmp_path / "identity.json")
    (tmp_path / "other").mkdir()
    save_drafter(tmp_path / "other", make_drafter(vocab_size=300), "float32")
    said = refusal(main, *ask, *identity, "--drafter", tmp_path / "other")
    assert "vocab_size 300 against 320" in said

    run = tmp_path / "run"
    shutil.copytree(results / "runs/small", run)
    (fingerprint,) = run.glob("*/fingerprint.json")
    made_by = json.loads(fingerprint.read_text())
    newest = max(fingerprint.parent.glob("step-*"))
    (newest / "drafter.safetensors").write_bytes(b"half")
    assert "damaged checkpoint" in refusal(main, *ask, *identity, "--drafter", run)
    fingerprint.write_text(json.dumps(made_by | {"target": "another"}))
    said = refusal(main, *ask, *identity, "--drafter", run)
    assert "trained for a target with other weights" in said


def test_the_answer_is_that_of_generate(finished, capsys):
    results = finished[0] / "results"
    identity = read_identity(results / "target/identity.json")
    prompt = read_prompts(results / "corpus/toy.parquet")[0]
    drafter = load_drafter(results / "export/small")
    (response,), _ = generate(
        load_model(identity, "float32"), [prompt.prompt_ids], 16, identity.eos_token_ids, drafter
    )
    text = json.loads((finished[0] / "prompts.jsonl").read_text().splitlines()[int(prompt.id[1:])])
    main(
        [
            *("--prompt", text["prompt"], "--drafter", str(results / "export/small")),
            *("--identity", str(results / "target/identity.json"), "--max-new-tokens", "16"),
        ]
    )
    expected = tiny_tokenizer().decode(response.tokens, skip_special_tokens=True)
    assert capsys.readouterr().out == expected + "\n"
