"""nemotron FAMILY chat: talk to the model of a stage, the same for every family that says which models it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.cli.tool import become_tool

if TYPE_CHECKING:
    from nemo_runspec.artifacts.registry import Registry


@dataclass(frozen=True)
class FamilyModels:
    """The models that the steps of a family make, by stage.

    Args:
        command: what comes before `chat` on the command line.
        base: models that complete text, in the order of training.
        aligned: models that answer, in the order of training.
        defaults: without `--stage` chat takes the last of these that there is.
        names_end_with_config: as in nano3-rl-model-tiny; `--config` has to be given. Otherwise the models of config
            `tiny`, the default, have no such end.
        base_config: the config whose base model the help asks.
    """

    family: str
    command: str
    base: tuple[str, ...]
    aligned: tuple[str, ...]
    defaults: tuple[str, ...]
    names_end_with_config: bool
    base_config: str = "tiny"

    @property
    def stages(self) -> tuple[str, ...]:
        return (*self.base, *self.aligned)

    def artifact(self, stage: str, config: str) -> str:
        """The name of the artifact of a stage."""
        name = f"{self.family}-{stage}-model"
        return f"{name}-{config}" if self.names_end_with_config or config != "tiny" else name

    def chosen(self, registry: Registry, stage: str | None, config: str) -> str:
        """The model of a stage, or the last default that there is; where there is none, the last that a config makes.

        UserError: there is none, and no step has a config of this name.
        """
        from nemotron.kit.commands import makers_by_artifact

        stages = [stage] if stage else reversed(self.defaults)
        names = [self.artifact(each, config) for each in stages]
        existing = [name for name in names if registry.versions(name)]
        if existing:
            return existing[0]
        made = [name for name in names if name in makers_by_artifact()]
        if not made:
            prefix = f"{self.family}-{stage or self.defaults[0]}-model"
            made = [name for name in makers_by_artifact() if name.startswith(prefix)]
            configs = [name.removeprefix(prefix).removeprefix("-") or "tiny" for name in made]
            raise UserError(f"no model of config '{config}': there is no {names[0]}", did_you_mean(config, configs))
        return made[0]


def chat_help(models: FamilyModels) -> str:
    """What `--help` says."""
    stages = ", ".join(f"{stage} (completes text)" if stage in models.base else stage for stage in models.stages)
    artifact = models.artifact("STAGE", "CONFIG" if models.names_end_with_config else "tiny")
    defaults, command = ", ".join(models.defaults), f"{models.command} chat"
    configs = ("tiny", models.base_config)
    chat, base = (f"{command} -c {config}" if models.names_end_with_config else command for config in configs)
    return f"""Talk to the model of a stage.

    Stages: {stages}. Reads the artifact {artifact}; without --stage the last of {defaults} that there is.
    Reasoning goes to stderr, dimmed on a terminal; the answer goes to stdout.

    \b
    Examples:
      {chat}
      {chat} --stage sft --reasoning-budget 8 "What is 728+654?"
      {command} -m ./my-model
      echo "def main(" | {base} --stage pretrain
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
                help="Whose model, of those above; with --model, as which of them it is asked.",
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
        switch = "--thinking" if thinking else "--no-thinking"
        if None not in (reasoning_budget, thinking) and thinking != bool(reasoning_budget):
            raise UserError(
                f"{switch} and --reasoning-budget {reasoning_budget} contradict each other", "give one of them"
            )
        if stage is not None and stage not in models.stages:
            raise UserError(f"unknown stage '{stage}'", did_you_mean(stage, models.stages))
        if model is not None and config is not None:
            raise UserError("--config and --model both name a model", "give one of them")
        if model is None and config is None and models.names_end_with_config:
            hint = f"as in {models.command} chat -c tiny"
            raise UserError("which model? neither --config nor --model names one", hint)
        from nemo_runspec.artifacts.registry import Registry
        from nemotron.kit.chat_template import load_template
        from nemotron.kit.chat_templates import TEMPLATES
        from nemotron.kit.found_model import find_model

        found = find_model(model or models.chosen(Registry.default(), stage, config or "tiny"))
        complete = stage in models.base if stage else found.is_base and template is None
        of_answers = {"--reasoning-budget": reasoning_budget, "--template": template, switch: thinking}
        given = [option for option, value in of_answers.items() if value is not None]
        if complete and given:
            raise UserError(f"{given[0]} is for answers, and this model completes text", "leave it out")
        if not complete and template is None and found.template is None:
            hint = f"--template takes one by name ({', '.join(TEMPLATES)}) or path"
            raise UserError(f"no chat template in {found.tokenizer}, and none is known of the model", hint)
        if thinking is False or reasoning_budget == 0:
            load_template(str(template or found.template)).check_switch("enable_thinking")
        if thinking is None:
            thinking = found.reasons or bool(reasoning_budget)
        become_tool(
            "chat.py",
            model=found.folder,
            tokenizer=found.tokenizer,
            template=None if complete else template or found.template,
            max_reasoning=reasoning_budget if thinking else 0,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=seed,
            prompt=prompt,
        )

    return chat
