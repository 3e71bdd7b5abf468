"""`evaluate_nemo.py` with stand-ins for the programs that it runs: what it asks them, reads, publishes, and skips."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from tiny_payloads import write_model

import nemotron.recipes
from nemo_runspec.artifacts import Registry
from nemo_runspec.config.loader import load_config
from nemotron.kit import Model
from nemotron.recipes.nano3.stage3_eval.nemo_schema import NemoEvalConfig

STAGE = Path(nemotron.recipes.__file__).parent / "nano3/stage3_eval"
CONFIGS = {"nano3": STAGE / "config", "super3": STAGE.parents[1] / "super3/stage4_eval/config"}
# Half of the rewards of a benchmark are 1; the second benchmark fails where the folder has a file `broken`.
GYM = """
import json, pathlib, sys
words = sys.argv[1:]
log = pathlib.Path(LOG)
with log.open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[1] == "run":
    if "benchmarks/b/config.yaml" in words and (log.parent / "broken").exists():
        sys.exit(3)
    output = pathlib.Path(words[words.index("--output") + 1])
    output.parent.mkdir(parents=True)
    reward = 0.5 if "benchmarks/a/config.yaml" in words else 0.25
    summary = [{"agent_ref": {"name": "x"}, "agent_metrics": {"mean/reward": reward}, "key_metrics": {}}]
    output.with_name("rollouts_aggregate_metrics.json").write_text(json.dumps(summary))
"""
# Pending once, then done; scores in the launcher's own layout, the second task's before the first one's.
LAUNCHER = """
import json, pathlib, sys
words = sys.argv[1:]
log = pathlib.Path(LOG)
with log.open("a") as file:
    file.write(json.dumps(words) + "\\n")
calls = [json.loads(line)[0] for line in log.read_text().splitlines()]
if words[0] == "run":
    folder = pathlib.Path(words[words.index("--config-output") + 1])
    folder.mkdir(parents=True)
    (folder / "abc123_config.yml").write_text("")
elif words[0] == "status":
    state = "running" if calls.count("status") == 1 else "success"
    print(json.dumps([{"status": "success"}, {"status": state}]))
else:
    folder = pathlib.Path(words[words.index("--output-dir") + 1])
    for index in (1, 0):
        out = folder / "abc123" / f"abc123.{index}"
        out.mkdir(parents=True)
        entry = {"job_id": f"abc123.{index}", "scores": {"acc": index / 10}}
        models = {"models": {"served": [entry]}}
        (out / "processed_results.json").write_text(json.dumps({"benchmarks": {f"task{index}": models}}))
"""
BENCHMARKS = "gym.benchmarks=[{config: benchmarks/a/config.yaml, num_repeats: 4, published: 51.5}, "
BENCHMARKS += "{config: benchmarks/b/config.yaml, num_repeats: 1, published: null}]"
TASKS = "nemo_evaluator.tasks=[{name: first, published: 1.0}, {name: second}]"


class House:
    """A folder with a registry, a model, and programs of ours in front of the PATH."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "calls.jsonl"
        for name, text in (("gym", GYM), ("nemo-evaluator-launcher", LAUNCHER)):
            program = root / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!{sys.executable}\nLOG = {str(self.log)!r}{text}")
            program.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(root / "artifacts"))
            Model(path=write_model(root / "model"), num_steps=1).save("start")

    def run(self, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "RUNSPEC_ARTIFACTS_ROOT": str(self.root / "artifacts"), "RUNSPEC_OUTPUT_ROOT": str(self.root / "output"),
            "PYTHONPATH": str(STAGE.parents[3]), "PATH": path or f"{self.root / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip
        # The launcher is asked once a minute.
        code = "import nemotron.kit.nemo_programs as p; p.POLL_SECONDS = 0; import runpy, sys; "
        code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", code, str(STAGE / "evaluate_nemo.py"), "--config", *words, "run.model=start:1"]
        options = {"cwd": self.root, "env": environment, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def results(self, name: str) -> dict[str, object]:
        metrics = Registry(self.root / "artifacts").resolve(name).record["metrics"]
        assert metrics["model"].startswith("start:1")
        benchmarks: dict[str, object] = metrics["benchmarks"]
        return benchmarks


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_benchmarks_are_asked_one_by_one_and_none_twice(house: House) -> None:
    (house.root / "broken").touch()
    failed = house.run("default", BENCHMARKS)
    assert failed.returncode == 1 and "gym eval ended with 3" in failed.stderr
    (house.root / "broken").unlink()
    assert house.run("default", BENCHMARKS).returncode == 0
    asked = [(words[1], words[words.index("--config") + 1]) for words in house.calls()]
    a, b = "benchmarks/a/config.yaml", "benchmarks/b/config.yaml"
    assert asked == [("prepare", a), ("run", a), ("prepare", b), ("run", b), ("prepare", b), ("run", b)]
    run = house.calls()[1]
    given = dict(itertools.pairwise(run))
    assert given["--num-repeats"] == "4" and given["--temperature"] == "1.0"
    assert Path(given["--model"]).name and (Path(given["--model"]) / "config.json").is_file()
    assert house.results("nano3-eval-results-default") == {
        "a-config": {"score": 50.0, "published": 51.5, "num_repeats": 4},
        "b-config": {"score": 25.0, "published": None, "num_repeats": 1},
    }


def test_the_launchers_tasks_get_the_scores_of_their_jobs(house: House) -> None:
    done = house.run("base", TASKS)
    assert done.returncode == 0, done.stderr
    assert [words[0] for words in house.calls()] == ["run", "status", "status", "export"]
    assert house.results("nano3-eval-results-base") == {
        "first": {"published": 1.0, "reported": {"acc": 0.0}},
        "second": {"published": None, "reported": {"acc": 0.1}},
    }


def test_without_the_program_nothing_begins(house: House) -> None:
    refused = house.run("default", BENCHMARKS, path="/usr/bin:/bin")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-2:] == [
        "error: no program gym here", "it is in nemo-gym==0.4.0, in an environment of its own",
    ]  # fmt: skip


def config_of(family: str, name: str) -> dict[str, object]:
    values = load_config(CONFIGS[family], name, ()).data
    for key in ("env", "family"):
        values["run"].pop(key, None)
    return values


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", ["default", "judged", "base"])
def test_configs_of_both_families_are_of_the_schema(family: str, name: str) -> None:
    NemoEvalConfig.model_validate(config_of(family, name))


def test_a_config_is_for_one_of_the_two_programs() -> None:
    base, default = config_of("nano3", "base"), config_of("nano3", "default")
    for both in (default | {"nemo_evaluator": base["nemo_evaluator"]}, {**default, "gym": None}):
        with pytest.raises(ValidationError, match="state either nemo_evaluator"):
            NemoEvalConfig.model_validate(both)
    base["nemo_evaluator"]["tasks"] *= 2  # type: ignore[index]
    with pytest.raises(ValidationError, match="listed twice: adlr_agieval_en_cot"):
        NemoEvalConfig.model_validate(base)
