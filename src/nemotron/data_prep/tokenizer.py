"""Train a byte-level BPE tokenizer and save it in Hugging Face layout, chat template included.

Ids of the special tokens are those of Nemotron 3 Nano (pad 0, bos 1, eos 2, `<|im_start|>` 10, `<|im_end|>` 11,
`<think>` 12, …); digits are single tokens, so that numbers have one spelling. Byte-level: every text round-trips,
nothing is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_runspec.errors import UserError
from nemotron.kit.chat import template_source

NUM_SPECIAL = 16
_NAMED = {
    0: "<pad>",
    1: "<s>",
    2: "</s>",
    10: "<|im_start|>",
    11: "<|im_end|>",
    12: "<think>",
    13: "</think>",
    14: "<tool_call>",
    15: "</tool_call>",
}
SPECIAL_TOKENS: tuple[str, ...] = tuple(_NAMED.get(i, f"<SPECIAL_{i}>") for i in range(NUM_SPECIAL))
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 10, 11
MIN_VOCAB_SIZE = NUM_SPECIAL + 256

# Words with their leading blank or punctuation mark, single digits, runs of punctuation, line ends with the blank lines
# around them, indentation. A merge never crosses these borders.
_SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """Learn `vocab_size` tokens (special ones and the 256 bytes included) from `texts`.

    Merges depend on the texts' content only, not on their order. A corpus too small for so many merges yields fewer
    tokens; `save_tokenizer` records the real number.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE} (special tokens and bytes), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, model_max_length: int, template: str = "nano3") -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (with the chat template) and `special_tokens_map.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {
        **named,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": template_source(template),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (directory / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n", "utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json` of a directory in Hugging Face layout.

    Text is encoded as the chat template produces it: special tokens in it are recognised. For running text of unknown
    origin use `encode_plain`. UserError if there is none or it cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"no tokenizer at {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a readable tokenizer ({str(error).splitlines()[0]})") from error


@lru_cache(maxsize=1)
def tokenizer_from(text: str) -> Tokenizer:
    """The tokenizer that `tokenizer.to_str()` wrote; the last one is kept, for tasks that get the same text each."""
    return Tokenizer.from_str(text)


def encode_plain(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of running texts; a `<|im_end|>` that stands in one is spelled out, not taken as the control token."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = before
