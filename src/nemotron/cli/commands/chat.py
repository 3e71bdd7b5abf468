"""nemotron FAMILY chat: talk to the model of a stage, the same for every family that says which models it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.cli.tool import become_tool

if TYPE_CHECKING:
    from nemo_runspec.artifacts.registry import Registry


@dataclass(frozen=True)
class FamilyModels:
    """The models that the steps of a family make, by stage.

    `base`: those that complete text; `aligned`: those that answer, in order; `last`: of which chat takes the last that
    there is where it is not told which. `by_config`: an artifact's name ends with the config's, which has to be given;
    otherwise the name of config `tiny` has no such end, and it is the default.
    """

    family: str
    base: tuple[str, ...]
    aligned: tuple[str, ...]
    last: tuple[str, ...]
    by_config: bool

    @property
    def stages(self) -> tuple[str, ...]:
        return (*self.base, *self.aligned)

    def artifact(self, stage: str, config: str) -> str:
        """The name of the artifact of a stage."""
        name = f"{self.family}-{stage}-model"
        return f"{name}-{config}" if self.by_config or config != "tiny" else name

    def last_artifact(self, registry: Registry, config: str) -> str:
        """The last model of `last` that there is; where there is none, the last that some config makes."""
        from nemotron.kit.commands import command_for

        names = [self.artifact(stage, config) for stage in reversed(self.last)]
        existing = [name for name in names if registry.versions(name)]
        return (existing or [name for name in names if command_for(name)] or names)[0]


def chat_help(models: FamilyModels) -> str:
    """What `--help` says."""
    stages = ", ".join(f"{stage} (completes text)" if stage in models.base else stage for stage in models.stages)
    artifact = models.artifact("STAGE", "CONFIG" if models.by_config else "tiny")
    command = f"nemotron {models.family} chat"
    chat = f"{command} -c tiny" if models.by_config else command
    return f"""Talk to the model of a stage.

    Stages: {stages}. Reads the artifact {artifact}; without --stage the last of {", ".join(models.last)} that there is.

    \b
    Examples:
      {chat}
      {chat} --stage sft --reasoning-budget 8 "What is 728+654?"
      {command} -m ./my-model
      echo "def main(" | {chat} --stage pretrain
    """


def chat_command(models: FamilyModels) -> Callable[..., None]:
    """The command of a family: finds the model, and lets `recipes/tools/chat.py` take its place."""

    def chat(
        prompt: Annotated[
            str | None, typer.Argument(help="One question. Without it: interactive, or one question from stdin.")
        ] = None,
        config: Annotated[
            str | None, typer.Option("--config", "-c", help="The config that trained the model, as in -c tiny.")
        ] = None,
        stage: Annotated[
            str | None,
            typer.Option(
                "--stage",
                "-s",
                help="Whose model, as named above.",
            ),
        ] = None,
        model: Annotated[
            str | None,
            typer.Option(
                "--model", "-m", help="Another model: NAME[:VERSION] of an artifact, a directory, hf://ORG/NAME."
            ),
        ] = None,
        template: Annotated[
            str | None,
            typer.Option("--template", help="Chat template, by name or path (default: the model's own)."),
        ] = None,
        thinking: Annotated[
            bool | None,
            typer.Option(
                "--thinking/--no-thinking", help="Reason before answering (default: as the model was trained)."
            ),
        ] = None,
        reasoning_budget: Annotated[
            int | None,
            typer.Option(min=0, help="Tokens of reasoning, at most; then it has to answer. 0: --no-thinking."),
        ] = None,
        temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
        max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, reasoning included.")] = 256,
        seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    ) -> None:
        if reasoning_budget is not None and reasoning_budget >= max_new_tokens:
            raise UserError(
                f"--reasoning-budget {reasoning_budget} leaves no answer in --max-new-tokens {max_new_tokens}"
            )
        if None not in (reasoning_budget, thinking) and thinking != bool(reasoning_budget):
            switch = "--thinking" if thinking else "--no-thinking"
            raise UserError(
                f"{switch} and --reasoning-budget {reasoning_budget} contradict each other", "give one of them"
            )
        if stage is not None and stage not in models.stages:
            raise UserError(f"unknown stage '{stage}'", did_you_mean(stage, models.stages))
        if model is not None and config is not None:
            raise UserError("--config and --model both name a model", "give one of them")
        if model is None and config is None and models.by_config:
            hint = f"as in nemotron {models.family} chat -c tiny"
            raise UserError("which model? neither --config nor --model names one", hint)
        from nemo_runspec.artifacts.registry import Registry
        from nemo_runspec.config.inputs import is_place
        from nemotron.kit.model_folder import read_origin

        if model is not None and is_place(model):  # a directory or a model of the Hub, as it is
            folder, record = model, {}
        else:
            registry = Registry.default()
            chosen = config or "tiny"
            name = model or (models.artifact(stage, chosen) if stage else models.last_artifact(registry, chosen))
            version = registry.resolve_verified(name)
            folder, record = str(version.path), version.record
        origin = read_origin(Path(folder).expanduser())  # a directory that an export made says how it was trained
        fields, producer = record.get("fields") or {}, record.get("producer") or {}
        made_by_script = bool(producer.get("name") or producer.get("script"))  # whose record says under which template
        is_base = origin.is_base if origin else made_by_script and fields.get("chat_template") is None
        complete = stage in models.base if stage else is_base and template is None
        if complete and reasoning_budget is not None:
            raise UserError("--reasoning-budget is for answers, and this model completes text", "leave it out")
        reasoning = origin.reasoning if origin else fields.get("reasoning")
        if thinking is None:
            thinking = reasoning is not False or bool(reasoning_budget)
        become_tool(
            "chat.py",
            model=folder,
            tokenizer=fields.get("tokenizer_path"),
            recorded_template=fields.get("chat_template"),
            producer=producer.get("name"),
            template=template,
            max_reasoning=reasoning_budget if thinking else 0,
            complete=complete,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            prompt=prompt,
        )

    return chat
