"""`generation_config.json` of a model directory: what ends an answer, and how one is drawn where nobody says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.kit.chat_template import stop_tokens
from nemotron.kit.model_folder import GENERATION_FILE
from nemotron.kit.tokenizer import read_tokenizer


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What the file of the model in `folder` says; nothing where there is none. UserError: it cannot be read."""
    file = folder / GENERATION_FILE
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    return settings


def write_generation_config(folder: Path, source: Path, others: Mapping[str, Any], template: str | None) -> None:
    """Write that of the model in `folder`, whose tokenizer is there: it stops where our decoding does.

    Args:
        source: of the model that it was made of, whose settings it keeps, if that has some.
        others: as `hub_config`; token ids that are not among those settings come from there.
        template: under which it answers; None: a base model.

    Raises:
        UserError: the settings or the tokenizer cannot be read.
    """
    settings = read_generation_config(source)
    settings |= {key: others[key] for key in others if key.endswith("_token_id") and key not in settings}
    tokenizer = read_tokenizer((folder / "tokenizer.json").read_bytes(), str(folder / "tokenizer.json"))
    ends = settings.get("eos_token_id")
    ends = [*(ends if isinstance(ends, list) else [ends]), *map(tokenizer.token_to_id, stop_tokens(folder, template))]
    settings["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    (folder / GENERATION_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
