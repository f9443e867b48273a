"""Tiny targets: shapes, special tokens, a real tokenizer, and how a model is saved with it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, END, START, MASK = 0, 1, 2, 3  # ids of SPECIAL
SPECIAL = ["<|pad|>", "<|im_end|>", "<|im_start|>", "<|mask|>"]
VOCAB = 320
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.15,  # large enough for logits that differ clearly
    bos_token_id=None,
    eos_token_id=END,
    pad_token_id=PAD,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few merges, four special tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "user assistant system what is the answer to this question and how does it work there"
    tokenizer.train_from_iterator([text] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        additional_special_tokens=[SPECIAL[START], SPECIAL[MASK]],
        chat_template=TEMPLATE,
    )


def save_tiny(model: PreTrainedModel, folder: Path, end_factor: float) -> Path:
    """Save model and tokenizer; the end token's row in the head is made longer, so that it wins
    now and then and greedy answers to short prompts end after 1 to 40 tokens, or not at all."""
    with torch.no_grad():
        model.get_output_embeddings().weight[END] *= end_factor
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
