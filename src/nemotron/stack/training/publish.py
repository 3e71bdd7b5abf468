"""Publishing the model at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from nemotron.kit.artifact import Model
from nemotron.kit.chat_template import keep_template
from nemotron.kit.model_folder import copy_tokenizer
from nemotron.kit.run import Run
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import kept_values
from nemotron.stack.models.published.generation_config import write_generation_config

AnyModel = TypeVar("AnyModel", bound=Model)


def publish_model(
    run: Run,
    model: NemotronH,
    tokenizer_dir: Path,
    metrics: dict[str, Any],
    *,
    move: bool = False,
    **fields: Any,
) -> Model:
    """Publish `model` in Hugging Face layout, with the tokenizer of `tokenizer_dir`, as the artifact `run.output`.

    Args:
        tokenizer_dir: where it is a model's, token ids and length of its config and its generation_config.json are
            the new one's, too.
        metrics: for the artifact's record; the number of active parameters is added.
        move: leave no second copy in `run.output_dir`, where a run that goes on would find nothing that it needs.
        fields: of `Model`, but for paths and sizes that follow from the model.
    """
    model.save_pretrained(run.output_dir, others=kept_values(tokenizer_dir))
    return publish_written(run, model, tokenizer_dir, Model, metrics, move=move, **fields)


def publish_written(
    run: Run,
    model: NemotronH,
    tokenizer_dir: Path,
    kind: type[AnyModel],
    metrics: dict[str, Any],
    *,
    move: bool = False,
    **fields: Any,
) -> AnyModel:
    """The same where config and weights are in `run.output_dir` already; `kind`: what it is published as."""
    copy_tokenizer(tokenizer_dir, run.output_dir)
    # It lies in the data, or with a model from elsewhere: the new one has a copy of the template, and of nothing else.
    if isinstance(template := fields.get("chat_template"), Path):
        fields["chat_template"] = keep_template(str(template), run.output_dir)
    total, active = model.num_parameters()
    published = kind(
        path=run.output_dir,
        tokenizer_path=run.output_dir,
        num_parameters=total,
        metrics={**metrics, "active_parameters": active},
        **fields,
    )
    write_generation_config(run.output_dir, tokenizer_dir, kept_values(run.output_dir), published.template)
    return published.save(move=move)
