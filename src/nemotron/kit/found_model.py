"""A model that is to be used: where it is, and how it is talked to. Serving, chat and lm-eval find theirs here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.inputs import is_place
from nemotron.kit.chat_template import has_template
from nemotron.kit.chat_templates import TEMPLATES
from nemotron.kit.model_folder import artifact_name, check_model_folder, model_folder, read_origin


@dataclass(frozen=True)
class FoundModel:
    """A model, and what is known of its training.

    folder: of its config and weights. tokenizer: the folder of its tokenizer. name: what to call it.
    template: the chat template that it answers under, as `kit.chat` takes it; None: none is known.
    is_base: it was trained to complete text alone. reasons: it was trained to reason, or that is not known.
    """

    folder: Path
    tokenizer: Path
    name: str
    template: str | None
    is_base: bool
    reasons: bool


def find_model(word: str) -> FoundModel:
    """What a name, a directory or hf://ORG/NAME stands for; a model of the Hub is downloaded.

    UserError: there is no such model, or it cannot be read here.
    """
    if is_place(word):
        folder, record, name = model_folder(word)[0], {}, artifact_name(word)
    else:
        version = Registry.default().resolve_verified(word)
        folder, record, name = version.path, version.record, version.name
    fields, producer = record.get("fields") or {}, (record.get("producer") or {}).get("name")
    tokenizer = Path(fields.get("tokenizer_path") or folder)
    check_model_folder(folder, tokenizer)
    recorded, origin = fields.get("chat_template"), read_origin(folder)
    trained_here = bool(fields.get("num_steps"))  # and so the record says under which template, if any
    return FoundModel(
        folder,
        tokenizer,
        name,
        template=chat_template_of(tokenizer, recorded, producer),
        # A directory that an export made says how it was trained.
        is_base=origin.is_base if origin else trained_here and recorded is None,
        reasons=(origin.reasoning if origin else fields.get("reasoning")) is not False,
    )


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
