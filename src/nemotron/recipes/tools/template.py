"""Which chat template a model is used with: its tokenizer's own, else that of the family that made the model."""

from __future__ import annotations

import json
from pathlib import Path

from nemotron.kit.chat_template import TEMPLATES


def chat_template_of(tokenizer: Path, producer: str | None) -> str | None:
    """The template as `kit.chat` takes it: the folder `tokenizer` if a template lies there, else the name of a family.

    Args:
        producer: of the model's record, as in `nano3/sft`; its family is the part before the slash.

    Returns:
        None where neither has one.
    """
    try:
        config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if (tokenizer / "chat_template.jinja").is_file() or (isinstance(config, dict) and "chat_template" in config):
        return str(tokenizer.absolute())
    family = (producer or "").partition("/")[0]
    return family if family in TEMPLATES else None
