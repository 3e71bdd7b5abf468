"""Text that every machine has, and the tokenizer alone on text: what the pipelines' speed is compared with."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from process import Clock


def library_lines() -> list[str]:
    """All lines of this Python's standard library."""
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return lines


def encode_alone(tokenizer_json: str, texts: list[str], *, specials_as_text: bool) -> tuple[float, float]:
    """Seconds of `encode_batch_fast`, as of `Clock`, in batches of 256; the ids are thrown away."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = specials_as_text
    clock = Clock()
    for i in range(0, len(texts), 256):
        tokenizer.encode_batch_fast(texts[i : i + 256], add_special_tokens=False)
    return clock.read()
