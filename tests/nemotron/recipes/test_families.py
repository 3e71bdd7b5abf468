"""The recipes of the families fit together: what the pipe chains, the evaluation compares and the report names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_runspec.config.loader import LoadedConfig, load_config
from nemo_runspec.job import RecipeConfig
from nemo_runspec.pipeline import PlannedStep, Step, plan_pipeline
from nemo_runspec.runspec import parse
from nemotron.kit.steps import Recipe, RecipeStep, read_recipe

from .scripts import RECIPES

FAMILIES = sorted(path.parent.name for path in RECIPES.glob("*/report.yaml"))
SIZES = ("smoke", "tiny")


def config_of(step: RecipeStep, size: str) -> LoadedConfig:
    spec = parse(step.script, step.configs)
    return load_config(spec.config_dir, size + step.config_suffix, (), spec.config.format)


def run_of(step: RecipeStep, size: str) -> dict[str, Any]:
    """The `run` group of a step's config."""
    return vars(config_of(step, size).run)


def planned(recipe: Recipe, size: str) -> list[PlannedStep]:
    steps = [Step(step.name, step.script, step.config_suffix, configs=step.configs) for step in recipe.piped]
    return plan_pipeline(steps, RecipeConfig(config_name=size, dry_run=True))


@pytest.fixture(autouse=True)
def nothing_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path))
    monkeypatch.delenv("RUNSPEC_ARTIFACTS_ROOT", raising=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_a_pipe_reads_what_steps_before_it_write(family: str, size: str) -> None:
    """Nothing is published, so planning refuses an input that no step before writes; and all names are the family's."""
    recipe = read_recipe(RECIPES / family)
    steps = planned(recipe, size)
    written = [name for step in steps for name in step.job.resolved.outputs]
    assert len(set(written)) == len(written)
    assert all(name.startswith(f"{family}-") and f"-{size}" in name for name in written)
    runs = {step.job.resolved.run["family"] for step in steps}
    assert runs == {family}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_names_the_step_that_made_each_model_of_the_evaluation(family: str, size: str) -> None:
    recipe = read_recipe(RECIPES / family)
    steps = {step.name: step for step in recipe.steps}
    models = yaml.safe_load((RECIPES / family / "report.yaml").read_text(encoding="utf-8"))["models"]
    evaluation = run_of(steps["eval"], size)
    evaluated = {role: evaluation.get(role) for role in models if evaluation.get(role)}
    assert evaluated == {role: run_of(steps[models[role]["stage"]], size)["output"] for role in evaluated}
    assert len(evaluated) >= (5 if family in ("lightning35", "nano3", "super3") else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_of_models_of_the_report(family: str) -> None:
    report = yaml.safe_load((RECIPES / family / "report.yaml").read_text(encoding="utf-8"))
    assert {curve["model"].partition("/")[0] for curve in report["curves"]} <= report["models"].keys()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ("lightning35", "nano3", "super3"))
def test_pretraining_reads_every_phase_of_the_data_and_decays_in_the_last(family: str, size: str) -> None:
    steps = {step.name: step for step in read_recipe(RECIPES / family).piped}
    configs = {name: config_of(step, size).data for name, step in steps.items()}
    phases = [phase["name"] for phase in configs["data-pretrain"]["blend"]]
    decays: dict[str | None, int] = {}  # by the phase that a step reads first; None: all of them
    for name, config in configs.items():
        if name.startswith("pretrain"):
            decays.setdefault(config["dataset"].get("phase"), config["scheduler"]["lr_wsd_decay_iters"])
    assert set(phases) <= decays.keys() or None in decays
    assert decays[phases[-1] if phases[-1] in decays else None] > 0
