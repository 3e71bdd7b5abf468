"""Which chat template a model is used with: the one that it was trained under, as far as that is known."""

from __future__ import annotations

from pathlib import Path

from nemotron.kit.chat_template import has_template
from nemotron.kit.chat_templates import TEMPLATES


def chat_template_of(tokenizer: Path, recorded: str | None, producer: str | None) -> str | None:
    """The template as `kit.chat` takes it: a name, or the folder `tokenizer` where its own is meant.

    A model that a recipe made has been trained under the template in its record. Of a model from elsewhere its
    tokenizer knows best. Where neither names one, as for a base model, it is that of the family that made the model.

    Args:
        recorded: `chat_template` of the model's record.
        producer: of the model's record, as in `nano3/sft`; its family is the part before the slash.

    Returns:
        None where nothing names one.
    """
    if producer is not None and recorded is not None:
        return recorded
    if has_template(tokenizer):
        return str(tokenizer.absolute())
    family = (producer or "").partition("/")[0]
    return recorded or (family if family in TEMPLATES else None)
