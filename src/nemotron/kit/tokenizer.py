"""A `tokenizer.json` as every step reads it."""

from __future__ import annotations

from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, first_line


def read_tokenizer(content: str | bytes, location: str = "") -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, which encodes whole texts, the same each time.

    What the file says of truncation, padding and dropout is not done: transformers' `save_pretrained` writes there how
    the tokenizer was called last. UserError, which names `location`: it cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_buffer(content.encode() if isinstance(content, str) else content)
    except Exception as error:  # the library raises nothing narrower
        problem = f"not a readable tokenizer ({first_line(error)})"
        raise UserError(f"{location}: {problem}" if location else problem) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer
