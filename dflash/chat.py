"""Conversations: what is a proper one, which part is the prompt, and the prompt's token ids.

A conversation is a list of messages {"role", "content"}. Pure functions; no files.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dflash.errors import UserError

ROLES = ("system", "user", "assistant")
Message = dict[str, str]


def check_messages(messages: Any, where: str) -> list[Message]:
    """The conversation with only what matters, role and content of each message.

    `where` (file and row) opens every error. Raises UserError for an unknown role, a system message
    that is not the first, missing or empty content, and a conversation without a user's turn.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where}: `messages` is {_show(messages)}; expected a list of one or more "
            '{"role": ..., "content": ...}'
        )
    checked = [_check_message(m, i, f"{where}, message {i + 1}") for i, m in enumerate(messages)]
    if all(m["role"] != "user" for m in checked):
        raise UserError(f"{where}: no message of role user; add the prompt or remove the row")
    return checked


def _check_message(message: Any, index: int, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(
            f'{where}: found {_show(message)}; expected {{"role": ..., "content": ...}}'
        )
    role = message.get("role")
    if role not in ROLES:
        raise UserError(
            f"{where}: role {_show(role)} is unknown; allowed: {', '.join(ROLES)}; correct or "
            "remove the row"
        )
    if role == "system" and index > 0:
        raise UserError(
            f"{where}: role system; allowed only in message 1; correct or remove the row"
        )
    if "content" not in message:
        raise UserError(f"{where}: has no `content`; add it or remove the row")
    return {"role": role, "content": check_text(message["content"], "content", where)}


def check_text(text: Any, field: str, where: str) -> str:
    """A non-empty string that UTF-8 can hold, or a UserError naming the field."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{where}: `{field}` is {_show(text)}; expected a string that is not empty; correct or "
            "remove the row"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: `{field}` holds half a surrogate pair (\\ud800 to \\udfff alone); write the "
            "whole character or remove the row"
        ) from None
    return text


def _show(value: Any) -> str:
    """A found value, short enough for a sentence."""
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_prompt(messages: list[Message]) -> tuple[list[Message], bool]:
    """The conversation up to the last turn that is not the assistant's, and whether any was cut.

    The target writes that reply itself, so a given one is not used.
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], end < len(messages)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    enable_thinking: bool,
    where: str = "conversation",
) -> list[int]:
    """Token ids of the conversation up to where the assistant begins to answer.

    `enable_thinking` reaches the template only as its variable of that name. Raises UserError,
    opened by `where`, when the template refuses the conversation (roles that do not alternate, a
    system message it does not know).
    """
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            enable_thinking=enable_thinking,
        )
    except TemplateError as e:
        raise UserError(
            f"{where}: the target's chat template refuses this conversation ({e}); correct or "
            "remove the row"
        ) from None
    return list(encoded["input_ids"])
