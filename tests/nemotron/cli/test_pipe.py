"""`nano3 pipe` on stand-in scripts that publish real artifacts: order, skipping, table, report, exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked import OF_OWN_COMMANDS, forked_steps

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemo_runspec.job import RecipeConfig
from nemotron.cli.commands.nano3 import pipe

STEPS = ["data-pretrain", "pretrain", "data-sft", "sft", "data-rl", "rl", "genrm", "rlhf", "rl-final", "eval"]

MODELS = {"base": "pretrain", "sft": "sft", "rl": "rl", "rlhf": "rlhf", "final": "final"}

SCRIPT = '''"""Stands in for {name}."""
# /// script
# [tool.runspec]
# schema = "1"
# docs = "Stands in for {name}."
# name = "{name}"
# setup = "none"
# [tool.runspec.run]
# launch = "direct"
# [tool.runspec.config]
# dir = "{configs}"
# schema = "{schema}:Config"
# ///
import json
import sys

import numpy as np
from safetensors.numpy import save_file

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, run_main
from nemotron.kit import Dataset, Model, Results, open_run


def main():
    cfg = load_script_config(__file__)
    with open_run(cfg, script=__file__) as run:
        if cfg.fail:
            raise RunFailed("told to fail")
        run.output_dir.mkdir(exist_ok=True)
        (run.output_dir / "payload.txt").write_text(f"{name} {{cfg.value}}")
        if cfg.run.output and "-data-" in cfg.run.output:
            Dataset(path=run.output_dir, num_examples=1, sources=["thin air"]).save()
        elif cfg.run.output:
            (run.output_dir / "config.json").write_text("{{}}")
            save_file({{"weight": np.ones(1)}}, run.output_dir / "model.safetensors")
            Model(path=run.output_dir, num_steps=1).save()
        if cfg.run.results:
            Results(metrics=json.loads(cfg.metrics)).save()
            if not json.loads(cfg.metrics).get("in_band", True):
                raise RunFailed("1 of 1 numbers are outside their bands")


if __name__ == "__main__":
    sys.exit(run_main(main))
'''

SCHEMA = """
from pydantic import BaseModel, ConfigDict

class Run(BaseModel):
    model_config = ConfigDict(extra="allow")
    config: str = ""
    script: str = ""
    output: str | None = None
    results: str | None = None

class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: Run
    value: int = 0
    fail: bool = False
    metrics: str = "{}"
"""


def evaluation(passed: bool) -> str:
    scores = {"greedy": 0.5, "greedy_95": [0.4, 0.6], "sampled": 0.4, "sampled_95": [0.3, 0.5]}
    return json.dumps(
        {
            "tasks": {role: {"mean": scores, "families": {"math": scores}} for role in MODELS},
            "baselines": {"math": {"constant": 0.1, "nearest_neighbour": 0.1, "seen_fraction": 0.1}},
            "comparisons": {},
            "text": {},
            "bands": [
                {"name": "sft.greedy_mean", "value": 0.5, "relation": ">=", "bound": 0.45, "passed": True},
                {"name": "rl.sampled_gain", "value": 0.1, "relation": ">=", "bound": 0.05, "passed": passed},
            ],
            "in_band": passed,
            "not_run": ["code_generation"],
        }
    )


Pipe = Callable[..., int]
OF_STEPS = (*OF_OWN_COMMANDS, "numpy", "safetensors.numpy", "nemo_runspec.config", "nemotron.kit", "pydantic")


def make_recipes(root: Path) -> None:
    """Stand-ins for the four stages, each with a config called t."""
    previous = {"sft": "pretrain", "rl": "sft"}
    for stage in ("pretrain", "sft", "rl"):
        folder = root / stage
        write(folder, "data_prep.py", f"nano3/data/prep/{stage}", "config/data_prep", f"output: nano3-{stage}-data-t")
        before = f"model: nano3-{previous[stage]}-model-t\n  " if stage in previous else ""
        write(
            folder,
            "rlvr.py" if stage == "rl" else "train.py",
            f"nano3/{stage}",
            "config",
            f"{before}data: nano3-{stage}-data-t\n  output: nano3-{stage}-model-t",
        )
    for name, judge in (("genrm", ""), ("rlhf", "judge: nano3-genrm-model-t\n  ")):
        run = f"model: nano3-rl-model-t\n  {judge}output: nano3-{name}-model-t"
        write(root / "rl", f"{name}.py", f"nano3/{name}", f"config/{name}", run)
    (root / "rl/config/t-final.yaml").write_text(
        "run:\n  script: rlvr.py\n  model: nano3-rlhf-model-t\n  output: nano3-final-model-t\n"
    )
    models = "\n  ".join(f"{role}: nano3-{stage}-model-t" for role, stage in MODELS.items())
    results = f"{models}\n  results: nano3-eval-results-t"
    write(root / "eval", "evaluate.py", "nano3/eval", "config", results, f"metrics: '{evaluation(True)}'")


def set_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """`run("pretrain:value=3", start="sft", force=True)` on the stand-ins under `root`; returns the exit code."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(root / "output"))
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(root / "output/artifacts"))
    monkeypatch.setenv("PYTHONPATH", str(Path(pipe.__file__).resolve().parents[4]))
    folders = ["pretrain", "pretrain", "sft", "sft", *["rl"] * 5, "eval"]
    steps = [replace(s, script=root / "recipes" / f / s.script.name) for s, f in zip(pipe.STEPS, folders, strict=True)]
    monkeypatch.setattr(pipe, "STEPS", steps)
    monkeypatch.setattr("nemo_runspec.execution.local._wait", forked_steps(OF_STEPS))

    def run(
        *overrides: str,
        start: str | None = None,
        end: str | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> int:
        cfg = RecipeConfig(config_name="t", overrides=overrides, force=force, dry_run=dry_run, argv=("nemotron",))
        return pipe._execute_pipe(cfg, start, end)

    return run


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """A pipe of which nothing has run."""
    make_recipes(tmp_path / "recipes")
    return set_up(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the pipe has run once."""
    root = tmp_path_factory.mktemp("pipe")
    make_recipes(root / "recipes")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert set_up(root, monkeypatch)() == 0
    return root


@pytest.fixture
def done(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """A pipe all of whose steps are published, in a copy of its own."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return set_up(tmp_path, monkeypatch)


def write(folder: Path, script: str, name: str, configs: str, run: str, more: str = "") -> None:
    (folder / configs).mkdir(parents=True, exist_ok=True)
    (folder / "schema.py").write_text(SCHEMA)
    (folder / script).write_text(SCRIPT.format(name=name, configs=f"./{configs}", schema="schema.py"))
    (folder / configs / "t.yaml").write_text(f"run:\n  script: {script}\n  {run}\n{more}\n")


def versions(tmp_path: Path) -> dict[str, int]:
    registry = Registry(tmp_path / "output/artifacts")
    return {name: len(registry.versions(name)) for name in registry.names()}


def started(out: str) -> list[str]:
    """Names of the steps that ran, in order, from the headings."""
    lines = [line.split("] ", 1)[1] for line in out.splitlines() if line.startswith("[")]
    return [line.partition(":")[0] for line in lines if ": skipped" not in line and ": failed" not in line]


@pytest.mark.slow
def test_all_steps_run_in_order_then_table_and_report(
    fresh: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fresh() == 0
    out = capfd.readouterr().out
    assert started(out) == STEPS
    table = out[out.index("What each stage reached") :]
    for word in ("greedy mean", "0.500", ">= 0.45", "sampled gain", "0.100", ">= 0.05", "wall time"):
        assert word in table
    assert "outside" not in table
    assert "not run, as no sandbox started: code_generation; means and bands are without it\n" in table
    walls = next(line for line in table.splitlines() if line.startswith("wall time"))
    assert all(f" {step} " in walls for step in STEPS)  # one line, also where no terminal says how wide it is
    page = tmp_path / "output/nano3/report-t.html"
    assert f"report: {page}" in out
    assert "nano3-eval-results-t:1" in page.read_text()
    assert set(versions(tmp_path).values()) == {1} and len(versions(tmp_path)) == 10


@pytest.mark.slow
def test_published_steps_are_skipped_and_a_change_runs_what_depends_on_it(
    done: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert done() == 0
    out = capfd.readouterr().out
    assert started(out) == []
    assert "data-pretrain skipped" in out and set(versions(tmp_path).values()) == {1}
    assert done("sft:value=3") == 0
    assert started(capfd.readouterr().out) == ["sft", "rl", "eval"]


def test_from_a_stage_begins_with_its_data_and_leaves_earlier_ones_alone(
    done: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert done(start="rl", force=True) == 0
    assert started(capfd.readouterr().out) == ["data-rl", "rl", "genrm", "rlhf", "rl-final", "eval"]
    assert versions(tmp_path)["nano3-sft-model-t"] == 1
    assert versions(tmp_path)["nano3-rl-model-t"] == 2


def test_to_a_step_ends_with_it(fresh: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fresh(end="data-sft") == 0
    out = capfd.readouterr().out
    assert started(out) == STEPS[:3] and "report: " not in out and "What each stage reached" not in out
    assert fresh(start="sft", end="sft") == 0
    assert started(capfd.readouterr().out) == ["sft"]
    assert "nano3-rl-data-t" not in versions(tmp_path)


def test_from_a_stage_needs_what_comes_before_it(fresh: Pipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nano3-pretrain-model-t"):
        fresh(start="sft")
    assert versions(tmp_path) == {}


def test_a_number_outside_its_band_fails_the_command_but_not_the_report(
    done: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "output/nano3/report-t.html").unlink()
    outside = f"eval:metrics={json.dumps(evaluation(False))}"
    assert done(outside) == 1
    out = capfd.readouterr().out
    assert "outside" in out[out.index("What each stage reached") :]
    assert (tmp_path / "output/nano3/report-t.html").exists()
    assert "failed with exit code 1" in out and "goes on" not in out  # it would fail again
    assert done(outside) == 1  # published by now, and still outside


@pytest.mark.parametrize("passed", [True, False])
def test_the_evaluation_is_found_under_whatever_name_it_publishes(
    done: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str], passed: bool
) -> None:
    page = tmp_path / "output/nano3/report-t.html"
    page.unlink()
    renamed = ["eval:run.results=another-name", f"eval:metrics={json.dumps(evaluation(passed))}"]
    assert done(*renamed) == (0 if passed else 1)
    out = capfd.readouterr().out
    assert "What each stage reached" in out and ("outside" in out) is not passed
    assert "another-name:1" in page.read_text()
    assert done(*renamed) == (0 if passed else 1)  # skipped, or failing again


def test_without_bands_there_is_a_report_and_no_table(
    done: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert done(f"eval:metrics={json.dumps(json.dumps(json.loads(evaluation(True)) | {'bands': []}))}") == 0
    out = capfd.readouterr().out
    assert "no bands" in out and "What each stage reached" not in out and "report: " in out


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("about: Nano: more\nmodels: {}\n", "report.yaml:1: malformed YAML"),
        ("about: Nano\n", "report.yaml: models must be a group of keys"),
        ("models:\n  base: {name: base, stage: pretrain}\n  sft: SFT\n", "report.yaml:3: models.sft needs a name"),
        (None, "cannot read .*report.yaml, which says what the report shows"),
    ],
)
def test_what_the_report_needs_is_read_before_anything_runs(
    fresh: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: str | None, message: str
) -> None:
    monkeypatch.setattr(pipe, "FAMILY", tmp_path)
    if about is not None:
        (tmp_path / "report.yaml").write_text(about)
    with pytest.raises(UserError, match=message):
        fresh(dry_run=True)
    assert fresh(end="pretrain", dry_run=True) == 0  # which writes no report


def test_an_evaluation_of_another_kind_has_no_table(done: Pipe, capfd: pytest.CaptureFixture[str]) -> None:
    assert done(f"eval:metrics={json.dumps('{}')}") == 0
    assert "What each stage reached" not in capfd.readouterr().out


def test_a_step_that_fails_ends_it_with_its_exit_code(
    done: Pipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert done("rl:fail=true") == 1
    out = capfd.readouterr().out
    assert started(out) == ["rl"]
    assert "rl: failed with exit code 1; the same command goes on from here" in out
    assert "What each stage reached" not in out
    assert done("eval:fail=true") == 1  # the evaluation of before is not passed off as this one's
    assert "What each stage reached" not in capfd.readouterr().out
    assert done() == 0
