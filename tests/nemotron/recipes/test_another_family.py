"""A family that is a folder of configs: its runs are made by the scripts of nano3, and are its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_runspec import job, pipeline
from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.profile import Env
from nemotron.kit import open_run

from .scripts import RECIPES

SCRIPT = "nano3/stage0_pretrain/train.py"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`recipes/made/stage0_pretrain`, beside the recipe of nano3; its config is nano3's tiny one under other names."""
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    monkeypatch.delenv("RUNSPEC_ARTIFACTS_ROOT", raising=False)
    shutil.copytree(RECIPES / "nano3", tmp_path / "recipes" / "nano3")
    folder = tmp_path / "recipes" / "made" / "stage0_pretrain"
    (folder / "config").mkdir(parents=True)
    config: dict[str, Any] = yaml.safe_load((RECIPES / "nano3/stage0_pretrain/config/tiny.yaml").read_text())
    config["run"] = {
        "script": SCRIPT,
        "family": "made",
        "data": "made-pretrain-data-tiny",
        "output": "made-pretrain-model-tiny",
    }
    # What the schema of nano3 states with nano3's numbers.
    config["model"] |= {"n_groups": 2, "conv_kernel": 4, "routed_scaling_factor": 1.0, "intermediate_size": 128}
    config["model"] |= {"layer_norm_epsilon": 1e-5, "moe_aux_loss_coeff": 0.0}
    config["optimizer"] |= {"adam_beta2": 0.95, "weight_decay": 0.1}
    config["evaluation"] = {"trigram_baseline": False}
    (folder / "config" / "tiny.yaml").write_text(yaml.safe_dump(config))
    payload = tmp_path / "payload"
    payload.write_text("x", encoding="utf-8")
    Registry.default().publish("made-pretrain-data-tiny", payload, {})
    return folder


def job_of(stage: Path, *overrides: str) -> job.Job:
    """As a command file of the family makes it."""
    spec = job.parse_runspec(stage.parents[1] / SCRIPT, stage / "config")
    train_config = job.parse_config(job.RecipeConfig(config_name="tiny", overrides=overrides), spec)
    spec = job.parse_runspec(job.find_script(stage / "config", train_config.run.script))
    return job.build_job_config(train_config, spec, Env(), dry_run=False)


def test_names_and_folders_are_the_family_s(stage: Path, tmp_path: Path) -> None:
    made = job_of(stage)
    assert made.run.dir.parent == tmp_path / "output" / "made" / "pretrain"
    assert made.run.name == "made-pretrain-tiny"
    assert made.resolved.outputs == ("made-pretrain-model-tiny",)
    config = job.save_configs(made, made.resolved.spec) / "train.yaml"
    script = stage.parents[1] / SCRIPT
    with open_run(load_script_config(script, ["--config", str(config)]), script=script) as run:
        assert (run.dir, run.name) == (made.run.dir, "made/pretrain")
        assert run.producer().name == "made/pretrain"


def test_a_pipe_takes_the_configs_of_the_family(stage: Path) -> None:
    step = pipeline.Step("pretrain", stage.parents[1] / SCRIPT, configs=stage / "config")
    (planned,) = pipeline.plan_pipeline([step], job.RecipeConfig(config_name="tiny"))
    assert planned.job.run == job_of(stage).run
    assert planned.job.resolved.outputs == ("made-pretrain-model-tiny",)


def test_a_command_refuses_a_config_for_the_script_of_another_stage(stage: Path) -> None:
    spec = job.parse_runspec(stage.parents[1] / "nano3/stage1_sft/train.py")
    cfg = job.RecipeConfig(config_name=str(stage / "config" / "tiny.yaml"))
    with pytest.raises(UserError, match="a script of the stage 'pretrain', and this is 'sft'"):
        job.parse_config(cfg, spec)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("run.family", f"run.script = '{SCRIPT}': run.family is missing"),
        ("model.hidden_size", "model.hidden_size is missing: its default is that of nano3"),
        ("evaluation", "evaluation.trigram_baseline is missing: its default is that of nano3"),
    ],
)
def test_nothing_of_nano3_is_taken_over_silently(stage: Path, remove: str, message: str) -> None:
    path = stage / "config" / "tiny.yaml"
    config = yaml.safe_load(path.read_text())
    group, _, key = remove.partition(".")
    if key:
        del config[group][key]
    else:
        del config[group]
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=message):
        job_of(stage)


def test_limits_of_data_preparation_are_stated_too_but_not_what_is_filled_in(stage: Path) -> None:
    script = stage.parents[1] / "nano3" / "stage0_pretrain" / "data_prep.py"
    spec = job.parse_runspec(script)
    config = yaml.safe_load((spec.config_dir / "tiny.yaml").read_text())
    config["run"] |= {"script": "nano3/stage0_pretrain/data_prep.py", "family": "made"}
    folder = stage / "config" / "data_prep"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    cfg = job.RecipeConfig(config_name="tiny", overrides=("curation.prose.digits={high: 0.2}",))
    spec = job.parse_runspec(script, folder)
    with pytest.raises(UserError, match="is missing: its default is that of nano3") as error:
        job.build_job_config(job.parse_config(cfg, spec), spec, Env(), dry_run=False)
    hint = error.value.hint or ""
    for key in ("curation.prose.word_count={", "curation.code.digits={", "curation.ngram=", "stdlib.enabled=true"):
        assert f" {key}" in hint
    for key in ("curation.prose.digits", "curation.prose.word_count.low", "stdlib.python"):
        assert f" {key}=" not in hint


def test_what_is_null_is_nobody_s_number(stage: Path) -> None:
    """The bands of an evaluation are none unless a config states them."""
    script = stage.parents[1] / "nano3" / "stage3_eval" / "evaluate.py"
    config = {"run": {"script": "nano3/stage3_eval/evaluate.py", "family": "made", "results": "made-results"}}
    path = stage / "eval.yaml"
    path.write_text(yaml.safe_dump(config))
    spec = job.parse_runspec(script, stage)
    with pytest.raises(UserError) as error:
        job.build_job_config(job.parse_config(job.RecipeConfig(config_name="eval"), spec), spec, Env(), dry_run=True)
    hint = error.value.hint or ""
    assert " tasks.per_family=" in hint and " bands." not in hint


def test_over_a_config_of_the_script_s_family_its_defaults_hold(stage: Path) -> None:
    folder = stage / "config"
    base = "../../../nano3/stage0_pretrain/config/tiny"
    (folder / "_own.yaml").write_text("run: {output: made-model, results: made-results}\noptimizer: {lr: 1.0e-3}\n")
    own = {"script": SCRIPT, "family": "made", "data": "made-pretrain-data-tiny"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"defaults": [base, "_own"], "run": own}))
    made = job_of(stage)
    assert made.resolved.data["optimizer"]["lr"] == 1e-3


def test_a_script_that_is_not_there_is_named(stage: Path) -> None:
    with pytest.raises(UserError, match="no such script"):
        job_of(stage, "run.script=nano3/stage0_pretrain/trian.py")
    with pytest.raises(UserError, match=r"run\.family = '\.\./nano3': must be words"):
        job_of(stage, "run.family=../nano3")
