"""`evaluate_nemo.py` and its configs against the sources of the launcher and of NeMo-Gym: flags, keys, names."""

from __future__ import annotations

import ast
import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sources import Sources, unpacked

import nemotron.recipes
from nemo_runspec.config.loader import load_config
from nemotron.kit import nemo_programs
from nemotron.recipes.nano3.stage3_eval.evaluate_nemo import gym_command, launcher_config
from nemotron.recipes.nano3.stage3_eval.nemo_schema import NemoEvalConfig

RECIPES = Path(nemotron.recipes.__file__).parent
FOLDERS = {"nano3": RECIPES / "nano3/stage3_eval/config", "super3": RECIPES / "super3/stage4_eval/config"}
LAUNCHER, GYM = unpacked("nemo-evaluator-launcher", "nemo-gym")
PACKAGE = LAUNCHER / "nemo_evaluator_launcher"

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources([LAUNCHER, GYM])


def config_of(family: str, name: str) -> NemoEvalConfig:
    values = load_config(FOLDERS[family], name, ()).data
    for key in ("env", "family"):
        values["run"].pop(key, None)
    values["deployment"]["checkpoint_path"] = "/models/final"
    return NemoEvalConfig.model_validate(values)


def flags_in(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("-")]


# ---- nemo-evaluator-launcher


def launcher_flags(module: str, name: str, sources: Sources) -> set[str]:
    """Flags of one of its commands: a field of the dataclass, under its name and its aliases."""
    _, node = sources.definition(module, name)
    flags = set()
    for field in (entry for entry in node.body if isinstance(entry, ast.AnnAssign)):
        assert isinstance(field.target, ast.Name)
        flags.add(f"--{field.target.id}")
        for word in ast.walk(field.value) if field.value else ():
            if isinstance(word, ast.keyword) and word.arg == "alias":
                flags |= set(ast.literal_eval(word.value))
    return flags


COMMANDS = {"run": "Cmd", "status": "Cmd", "export": "ExportCmd"}


def launcher_faults(text: str, sources: Sources) -> list[str]:
    """Commands and flags with which the launcher is called, and that it does not have."""
    found, seen = [], set()
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Name) or call.func.id != "call" or len(call.args) < 3:
            continue
        words = [word.value for word in call.args[2:] if isinstance(word, ast.Constant)]
        command = words[0]
        seen.add(command)
        if command not in COMMANDS:
            found.append(f"no command {command}")
            continue
        flags = launcher_flags(f"nemo_evaluator_launcher.cli.{command}", COMMANDS[command], sources)
        found += [f"{command} has no {flag}" for flag in flags_in(words) if flag not in flags]
    assert seen
    return found


def test_the_launcher_has_every_flag_with_which_it_is_called(sources: Sources) -> None:
    text = Path(nemo_programs.__file__).read_text(encoding="utf-8")
    assert launcher_faults(text, sources) == []
    planted = text.replace('"--config-output"', '"--config-out"').replace('"--json"', '"--as-json"')
    assert launcher_faults(planted, sources) == ["run has no --config-out", "status has no --as-json"]
    assert launcher_faults(text.replace('"export"', '"exports"'), sources) == ["no command exports"]


def tasks_by_name() -> dict[str, list[str]]:
    """TASK and HARNESS.TASK -> the harnesses that have it."""
    found: dict[str, list[str]] = {}
    for task in yaml.safe_load((PACKAGE / "resources/all_tasks_irs.yaml").read_text(encoding="utf-8"))["tasks"]:
        for name in (task["name"], f"{task['harness']}.{task['name']}"):
            found.setdefault(name, []).append(task["harness"])
    return found


def config_faults(config: dict[str, Any], sources: Sources) -> list[str]:
    """Keys of a config of the launcher that it does not know, and tasks that it does not have, or has twice."""
    models = "nemo_evaluator_launcher.common.config_models"
    known = {
        "execution": yaml.safe_load((PACKAGE / "configs/execution/slurm/default.yaml").read_text()).keys(),
        "deployment": yaml.safe_load((PACKAGE / "configs/deployment/vllm.yaml").read_text()).keys(),
        "evaluation": sources.fields(models, "EvaluationModel").keys(),
    }
    found = [f"{group}.{key}" for group, keys in known.items() for key in config[group] if key not in keys]
    mounts, task_keys = sources.fields(models, "MountsModel"), sources.fields(models, "TaskModel")
    found += [f"mounts.{key}" for key in config["execution"]["mounts"] if key not in mounts]
    names = tasks_by_name()
    for task in config["evaluation"]["tasks"]:
        found += [f"tasks.{key}" for key in task if key not in task_keys]
        if len(harnesses := names.get(task["name"], [])) != 1:
            found.append(f"{task['name']}: {harnesses}")
    for default in config["defaults"]:
        for group, name in default.items() if isinstance(default, dict) else ():
            if not (PACKAGE / "configs" / group / f"{name}.yaml").is_file():
                found.append(f"defaults.{group}: {name}")
    return found


@pytest.mark.parametrize("family", FOLDERS)
def test_the_launchers_config_has_its_keys_and_tasks(family: str, sources: Sources) -> None:
    config = launcher_config(config_of(family, "base"), Path("/runs/1"))
    assert config_faults(config, sources) == []
    planted = copy.deepcopy(config)
    planted["execution"]["wall_time"] = planted["execution"].pop("walltime")
    planted["deployment"]["tensor_parallel"] = 8
    planted["evaluation"]["tasks"][0] = {"name": "adlr_mmlu_5_shot", "shots": 5}
    planted["evaluation"]["tasks"][1] = {"name": "humanevalplus"}  # of two harnesses
    planted["defaults"][1] = {"deployment": "vllm_0"}
    faults = [
        "execution.wall_time", "deployment.tensor_parallel", "tasks.shots", "adlr_mmlu_5_shot: []",
        "humanevalplus: ['simple_evals', 'bigcode-evaluation-harness']", "defaults.deployment: vllm_0",
    ]  # fmt: skip
    assert config_faults(planted, sources) == faults


def test_every_parameter_of_a_request_is_one_of_each_task() -> None:
    tasks = yaml.safe_load((PACKAGE / "resources/all_tasks_irs.yaml").read_text(encoding="utf-8"))["tasks"]
    for family in FOLDERS:
        config = launcher_config(config_of(family, "base"), Path("/runs/1"))
        params = config["evaluation"]["nemo_evaluator_config"]["config"]["params"]
        names = {task["name"].rpartition(".")[2] for task in config["evaluation"]["tasks"]}
        for task in (task for task in tasks if task["name"] in names and task["harness"] == "lm-evaluation-harness"):
            known = task["defaults"]["config"]["params"]
            assert set(params) <= set(known), task["name"]
            assert set(params["extra"]) <= set(known["extra"]), task["name"]


def test_what_is_read_of_the_launchers_results_is_what_it_writes(sources: Sources) -> None:
    _, states = sources.definition("nemo_evaluator_launcher.executors.base", "ExecutionState")
    values = {entry.value.value for entry in states.body if isinstance(entry, ast.Assign)}  # type: ignore[attr-defined]
    assert nemo_programs.UNFINISHED | {"success"} <= values and values - nemo_programs.UNFINISHED == {
        "success", "failed", "killed",
    }  # fmt: skip
    _, exporter = sources.definition("nemo_evaluator_launcher.exporters.local", "LocalExporter")
    text = ast.unparse(exporter)
    assert all(f"'{key}'" in text for key in ("benchmarks", "models", "scores", "job_id"))
    assert "processed_results." in text
    run = ast.unparse(sources.tree("nemo_evaluator_launcher.cli.run"))
    assert "{invocation_id}_config.yml" in run and "{invocation_id}.{idx}" in run


# ---- NeMo-Gym


def gym_flags(command: str, sources: Sources) -> set[str]:
    """Flags of a command of `gym`, from the table of its commands."""
    tree = sources.tree("nemo_gym.cli.main")
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (entry,) = [
        value
        for table in ast.walk(tree)
        if isinstance(table, ast.Dict)
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == command and isinstance(value, ast.Call)
    ]
    (listed,) = [word.value for word in entry.keywords if word.arg == "flags"]
    assert isinstance(listed, ast.Tuple)
    flags = set()
    for element in listed.elts:
        call = assigned[element.id] if isinstance(element, ast.Name) else element
        words = [
            word.value for word in ast.walk(call) if isinstance(word, ast.Constant) and isinstance(word.value, str)
        ]
        assert isinstance(call, ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id.startswith("_"):
            assert isinstance(call.args[0], ast.Constant)
            flags.add(f"--{call.args[0].value}")
        flags |= {word for word in words if word.startswith("-")}
    return flags


def gym_faults(words: list[str], sources: Sources) -> list[str]:
    """What of a command line Gym does not have: flags, files of configs, keys of its own servers."""
    found = [flag for flag in flags_in(words) if flag not in gym_flags(" ".join(words[:2]), sources)]
    given = dict(itertools.pairwise(words))
    configs = [path for flag, path in itertools.pairwise(words) if flag == "--config"]
    found += [path for path in configs if not (GYM / path).is_file()]
    model = given.get("--model-type", "")
    served = GYM / f"responses_api_models/{model}/configs/{model}.yaml"
    if not served.is_file():
        return [*found, f"no model type {model}"]
    server = yaml.safe_load(served.read_text(encoding="utf-8"))
    known = sources.fields(f"responses_api_models.{model}.app", "LocalVLLMModelConfig")
    for override in (word for word in words if word.startswith("++")):
        *path, key = override.removeprefix("++").partition("=")[0].split(".")
        place = server
        for name in path[:3]:
            place = place.get(name, {})
        if path[3:] == ["vllm_serve_kwargs"]:
            continue  # of vLLM
        if not place or key not in known:
            found.append(override)
    return found


@pytest.mark.parametrize("family", FOLDERS)
@pytest.mark.parametrize("name", ["default", "judged"])
def test_gym_has_every_flag_and_benchmark(family: str, name: str, sources: Sources) -> None:
    cfg = config_of(family, name)
    assert cfg.gym is not None
    cfg = cfg.model_copy(update={"gym": cfg.gym.model_copy(update={"config_paths": []})})  # the user's own
    for benchmark in cfg.gym.benchmarks:
        words = gym_command(cfg, benchmark, Path("/runs/1/rollouts.jsonl"))
        assert gym_faults(words, sources) == []
        (dataset,) = [
            dataset
            for server in yaml.safe_load((GYM / benchmark.config).read_text(encoding="utf-8")).values()
            if isinstance(server, dict)
            for agent in server.get("responses_api_agents", {}).values()
            for dataset in agent.get("datasets", [])
        ]
        assert dataset["type"] == words[words.index("--split") + 1]
    planted = [word.replace("gpus", "g").replace("--num-repeats", "--num-repeat") for word in words]
    planted = [word.replace("/config", "/konfig").replace("uses_reasoning_parser", "uses_parser") for word in planted]
    faults = gym_faults(planted, sources)
    assert len(faults) == 3 and faults[0] == "--num-repeat" and faults[1].startswith("benchmarks/")
    assert "no model type vllm" in gym_faults([word.replace("local_vllm_model", "vllm") for word in words], sources)


@pytest.mark.parametrize("family", FOLDERS)
@pytest.mark.parametrize("name", ["default", "judged"])
def test_no_prompt_is_as_long_as_what_the_model_is_served_with(family: str, name: str) -> None:
    """RULER's are as long as its script says, and a model that reasons gives no answer in what is left."""
    cfg = config_of(family, name)
    assert cfg.gym is not None
    for benchmark in cfg.gym.benchmarks:
        config = (GYM / benchmark.config).read_text(encoding="utf-8")
        for script in re.findall(r"prepare_script: (\S+)", config):
            lengths = map(int, re.findall(r"\blength=(\d+)", (GYM / script).read_text(encoding="utf-8")))
            assert max(lengths, default=0) < cfg.gym.vllm_serve_kwargs.max_model_len, benchmark.config


def test_options_of_vllm_are_those_that_gym_has_for_the_model() -> None:
    file = GYM / "responses_api_models/local_vllm_model/configs/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.yaml"
    (server,) = yaml.safe_load(file.read_text(encoding="utf-8")).values()
    theirs = server["responses_api_models"]["local_vllm_model"]
    cfg = config_of("nano3", "default")
    assert cfg.gym is not None
    ours = cfg.gym.vllm_serve_kwargs.model_dump() | cfg.deployment.model_dump(exclude={"checkpoint_path"})
    del ours["max_model_len"]  # of vLLM alone
    assert {key: theirs["vllm_serve_kwargs"][key] for key in ours} == ours
    assert (cfg.gym.temperature, cfg.gym.top_p) == (theirs["extra_body"]["temperature"], theirs["extra_body"]["top_p"])


def test_what_is_read_of_gyms_results_is_what_it_writes(sources: Sources) -> None:
    helper = ast.unparse(sources.tree("nemo_gym.rollout_collection"))
    assert (
        "output_fpath.stem + '_aggregate_metrics'" in helper and "'agent_metrics': agg_result.agent_metrics" in helper
    )
    assert "mean/reward" in (GYM / "resources_servers/mcqa/app.py").read_text(encoding="utf-8")


def test_published_scores_stand_in_both_families() -> None:
    """A few figures of the reports, each for the benchmark that it is of."""
    for family, name, expected in (
        ("nano3", "base", {"adlr_mmlu": 78.56, "piqa": 84.33, "ruler-128k-completions": 82.92}),
        ("super3", "base", {"adlr_mmlu": 85.89, "piqa": 85.31}),
    ):
        evaluator = config_of(family, name).nemo_evaluator
        assert evaluator is not None
        assert expected.items() <= {task.name: task.published for task in evaluator.tasks}.items()
    for family, gpqa in (("nano3", 73.04), ("super3", 79.23)):
        gym = config_of(family, "default").gym
        assert gym is not None
        scores = {benchmark.config: (benchmark.num_repeats, benchmark.published) for benchmark in gym.benchmarks}
        assert scores["benchmarks/gpqa/config.yaml"] == (8, gpqa)
