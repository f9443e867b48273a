"""dflash.chat: which conversations are proper, what is the prompt, and its ids."""

import pytest
from support.targets import END, START

from dflash import chat
from dflash.errors import UserError
from dflash.target import load_tokenizer

USER = {"role": "user", "content": "Why?"}
REPLY = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama, identity_of):
    return load_tokenizer(identity_of(tiny_llama))


def test_a_proper_conversation_keeps_role_and_content():
    given = [SYSTEM, {**USER, "name": "me", "tokens": 3}, REPLY, USER]
    assert chat.check_messages(given, "f, row 1") == [SYSTEM, USER, REPLY, USER]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [{**USER, "role": "human"}],
            "message 1: role 'human' is unknown; allowed: system, user, as",
        ),
        ([{"content": "x"}], "message 1: role missing is unknown"),
        ([USER, {**USER, "role": ["user"]}], "message 2: role ['user'] is unknown"),
        ([USER, SYSTEM], "message 2: role system; allowed only in message 1"),
        ([{"role": "user"}], "message 1: has no `content`"),
        ([USER, {**REPLY, "content": ""}], "message 2: `content` is ''; expected a string that is"),
        ([{**USER, "content": " \n"}], "`content` is ' \\n'; expected a string that is not empty"),
        ([{**USER, "content": None}], "`content` is missing; expected a string"),
        ([{**USER, "content": ["a"]}], "`content` is ['a']; expected a string"),
        ([{**USER, "content": "\ud800"}], "`content` holds half a surrogate pair"),
        ([SYSTEM, REPLY], "no message of role user; add the prompt"),
        ([], "`messages` is []; expected a list of one or more"),
        ("hello", "`messages` is 'hello'; expected a list"),
        (["hello"], "message 1: found 'hello'; expected {"),
    ],
)
def test_each_fault_is_named_with_file_and_row(messages, says):
    with pytest.raises(UserError) as e:
        chat.check_messages(messages, "data.jsonl, row 7")
    assert str(e.value).startswith("data.jsonl, row 7") and says in str(e.value)


def test_a_long_found_value_is_shortened():
    with pytest.raises(UserError) as e:
        chat.check_messages([{"role": "x" * 5000, "content": "a"}], "f, row 1")
    assert len(str(e.value)) < 250


def test_given_final_replies_are_not_part_of_the_prompt():
    assert chat.as_prompt([USER, REPLY]) == ([USER], True)
    assert chat.as_prompt([USER, REPLY, REPLY]) == ([USER], True)
    assert chat.as_prompt([USER, REPLY, USER]) == ([USER, REPLY, USER], False)


def test_ids_are_the_template_with_generation_prompt(tokenizer):
    ids = chat.prompt_ids(tokenizer, [SYSTEM, USER], enable_thinking=True)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    assert tokenizer.decode(ids) == text + "<|im_start|>assistant\n"
    assert type(ids) is list and all(type(i) is int for i in ids)
    assert ids.count(START) == 3 and ids.count(END) == 2


def test_enable_thinking_reaches_the_template(tokenizer):
    on = chat.prompt_ids(tokenizer, [USER], enable_thinking=True)
    off = chat.prompt_ids(tokenizer, [USER], enable_thinking=False)
    assert tokenizer.decode(off) == tokenizer.decode(on) + "<think></think>"


def test_what_the_template_refuses_is_told_with_file_and_row(tokenizer):
    with pytest.raises(UserError, match="^f, row 3: .*refuses this conversation .roles must alter"):
        chat.prompt_ids(tokenizer, [USER, USER], False, "f, row 3")
