"""A server of a scripted engine, with the tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_server import Served
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>",
)  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose tokens are bytes and the special tokens of Nemotron 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture
def served(tokenizer_folder: Path) -> Served:
    """A server of a model that chats as Nemotron 3 Super."""
    return Served(tokenizer_folder, "super3")


@pytest.fixture
def serve(tokenizer_folder: Path) -> Callable[..., Served]:
    """`serve(template, api_key=…)`: another server."""
    return lambda template="super3", **options: Served(tokenizer_folder, template, **options)
