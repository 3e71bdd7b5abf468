"""The script as a user starts it, on random models: it publishes, judges, and refuses what it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import OF_MODELS, run_forked

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.loader import load_config
from nemo_runspec.config.resolve import resolve_config
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model, Results, RLPrompts
from nemotron.recipes.nano3.stage3_eval import evaluate as script
from nemotron.stack.environments import FAMILIES, generate_tasks, plain_text
from nemotron.stack.models import NemotronH

ROOT = Path(__file__).parents[5]
SCRIPT = ROOT / "src/nemotron/recipes/nano3/stage3_eval/evaluate.py"
SMALL = [
    "run.pretrain_data=null",
    "run.sft_data=null",
    "run.rlhf=null",
    "run.final=null",
    "tasks.per_family=8",
    "tasks.samples=2",
    "tasks.max_new_tokens=6",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., NemotronH]) -> dict[str, str]:
    """Published artifacts of all stages, as environment variables for the script."""
    root = tmp_path_factory.mktemp("eval")
    variables = {"RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts"), "RUNSPEC_OUTPUT_ROOT": str(root / "output")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        texts = [plain_text(task) for family in FAMILIES for task in generate_tasks(family, "train", 100)]
        tokenizer = train_tokenizer(texts, 400)
        for seed, stage in enumerate(("pretrain", "sft", "rl")):
            small_model("M*E", seed, vocab_size=400).save_pretrained(root / stage)
            save_tokenizer(tokenizer, root / stage, model_max_length=256, template="nano3")
            template = None if stage == "pretrain" else "nano3"
            Model(path=root / stage, num_steps=1, chat_template=template).save(f"nano3-{stage}-model-tiny")
        prompts = root / "prompts"
        prompts.mkdir()
        records = [{"task": task.to_dict()} for family in FAMILIES for task in generate_tasks(family, "train", 50)]
        (prompts / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        RLPrompts(path=prompts, num_examples=200, train_path=prompts / "train.jsonl").save("nano3-rl-data-tiny")
        text = {"code": {"bits_per_byte": 2.0, "trigram_bits_per_byte": 2.25, "bytes": 100}}
        results = root / "results"
        results.mkdir()
        Results(path=results, metrics={"text": text}).save("nano3-pretrain-results-tiny")
    return {**os.environ, **variables, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def evaluate(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return evaluate_with(environment, "tiny", *SMALL, *words)


def evaluate_with(environment: dict[str, str], config: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run_forked(OF_MODELS, [str(SCRIPT), "--config", config, *words], Path.cwd(), environment)


@pytest.mark.slow
def test_untrained_models_are_published_and_outside_the_bands(environment: dict[str, str]) -> None:
    done = evaluate(environment, "tasks.reasoning_budgets=[1, 2]", "tasks.max_new_tokens=7")
    assert done.returncode == 1, done.stderr
    reference = json.loads(done.stdout.splitlines()[-1])["results"]
    assert reference.startswith("art://nano3-eval-results-tiny:")
    folder = Path(environment["RUNSPEC_ARTIFACTS_ROOT"]) / "nano3-eval-results-tiny" / reference.rpartition(":")[2]
    metrics = json.loads((folder / "artifact.json").read_text())["metrics"]
    assert set(metrics["tasks"]) == {"base", "sft", "rl"} and metrics["in_band"] is False
    assert [entry["name"] for entry in metrics["bands"] if entry["passed"]][:1] == ["base.below_trigram"]
    assert metrics["baselines"]["math"]["seen_tasks"] == len({t.canonical for t in generate_tasks("math", "train", 50)})
    assert set(metrics["comparisons"]) == {"sft - base", "rl - sft"}
    assert {role: list(controls) for role, controls in metrics["reasoning"].items()} == {
        "sft": ["1", "2", "off"], "rl": ["1", "2", "off"]
    }  # fmt: skip
    formats = [scores["prompt_format"] for scores in metrics["reasoning"]["sft"].values()]
    assert formats == ["chat", "chat", "chat_no_think"]
    lines = done.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.split() == ["reasoning", "sft", "tokens", "rl", "tokens"])
    controls = {"on": metrics["tasks"]["rl"]} | metrics["reasoning"]["rl"]
    for line, (control, scores) in zip(lines[first + 1 :], controls.items(), strict=False):
        assert control in line and line.split()[-1] == f"{scores['mean']['greedy_tokens']:.1f}"
    assert {"base", "sft", "rl"} < set(metrics["generations"][0])
    math = metrics["tasks"]["rl"]["families"]["math"]
    assert list(math["pass_at_k"]) == list(math["majority_at_k"]) == ["2"]
    assert "pass@k in %" in done.stderr and "majority@k in %" in done.stderr and "RULER" not in done.stderr
    assert "OUTSIDE" in done.stderr and done.stderr.count("error:") == 1
    assert "sft.greedy_mean" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_models_measured_side_by_side_have_the_numbers_of_one_after_the_other(environment: dict[str, str]) -> None:
    numbers = []
    words = ["ruler.lengths=[500, 600]", "ruler.tasks=[variable_tracking, frequent_words]", "ruler.per_task=2"]
    for processes in (1, 2):
        done = evaluate(environment, f"processes={processes}", f"run.results=in-{processes}", *words)
        assert done.returncode == 1 and "OUTSIDE" in done.stderr, done.stderr
        folder = Path(environment["RUNSPEC_ARTIFACTS_ROOT"]) / f"in-{processes}" / "1"
        numbers.append(json.loads((folder / "artifact.json").read_text())["metrics"])
    assert numbers[0] == numbers[1]
    for scores in numbers[0]["ruler"].values():
        assert list(scores) == ["500", "600"] and list(scores["600"]) == ["variable_tracking", "frequent_words"]
        assert 450 < scores["600"]["variable_tracking"]["tokens"] <= 600 - 64
    assert list(numbers[0]["ruler"]) == ["base", "sft", "rl"] and "RULER: recall in %" in done.stderr


@pytest.mark.slow
def test_a_signal_ends_the_processes_too(environment: dict[str, str]) -> None:
    command = [sys.executable, SCRIPT, "--config", "tiny", *SMALL, "run.results=stopped", "tasks.per_family=400"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        next(line for line in child.stderr if line.endswith(": evaluate\n"))
        children: list[str] = []
        deadline = time.monotonic() + 60
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        assert len(children) == 2
        child.terminate()
        rest = child.stderr.read()
    assert child.returncode == 143 and "error: stopped by SIGTERM" in rest and "Traceback" not in rest
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not Registry(Path(environment["RUNSPEC_ARTIFACTS_ROOT"])).versions("stopped")


def test_a_budget_that_leaves_no_answer_is_refused(environment: dict[str, str]) -> None:
    done = evaluate(environment, "tasks.reasoning_budgets=[6]")
    assert done.returncode == 2 and "6 leaves no answer in max_new_tokens 6" in done.stderr
    done = evaluate(environment, "tasks.reasoning_budgets=[1, 3]")  # `</think>` with its line breaks takes 3 of the 6
    assert done.returncode == 2 and "a reasoning budget of 3 leaves no answer in 6 new tokens" in done.stderr
    assert "greedy" not in done.stderr, "no model has been asked"


def test_models_can_be_left_out_and_nothing_is_refused(environment: dict[str, str]) -> None:
    done = evaluate(environment, "run.sft=null", "run.rl=null", "bands.base.below_trigram_min=0.2")
    assert done.returncode == 0, done.stderr
    done = evaluate(environment, "run.base=null", "run.sft=null", "run.rl=null")
    assert done.returncode == 2 and "no model to evaluate" in done.stderr


def test_an_evaluation_task_in_the_training_data_stops_the_run(environment: dict[str, str], tmp_path: Path) -> None:
    task = generate_tasks("math", "eval", 8)[0]
    (tmp_path / "train.jsonl").write_text(json.dumps({"task": task.to_dict()}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", environment["RUNSPEC_ARTIFACTS_ROOT"])
        RLPrompts(path=tmp_path, num_examples=1, train_path=tmp_path / "train.jsonl").save("leaked")
    done = evaluate(environment, "run.rl_data=leaked")
    assert done.returncode == 1 and "1 evaluation tasks of math are in the training data" in done.stderr


def test_any_models_are_asked_the_users_own_questions(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "quiz.jsonl").write_text('{"q": "1 + 1?", "a": [2, "two"]}\n{"q": "2 + 2?", "a": 4}\n')
    (tmp_path / "choice.jsonl").write_text('{"question": "Which?", "choices": ["x", "y"], "answer": "y"}\n')
    models = "run.models=[nano3-pretrain-model-tiny, nano3-rl-model-tiny, nano3-sft-model-tiny:1]"
    quiz = f"{{name: quiz, paths: [{tmp_path}/quiz.jsonl], columns: {{question: q, answer: a}}, match: contains}}"
    questions = f"questions=[{quiz}, {{name: mc, paths: [{tmp_path}/choice.jsonl], match: choice}}]"
    small = ["tasks.per_family=0", "tasks.samples=1", "tasks.max_new_tokens=6"]
    done = evaluate_with(environment, "own", models, questions, *small)
    assert done.returncode == 0, done.stderr
    reference = json.loads(done.stdout.splitlines()[-1])["results"].removeprefix("art://")
    folder = Path(environment["RUNSPEC_ARTIFACTS_ROOT"], *reference.split(":"))
    record = json.loads((folder / "artifact.json").read_text())
    tasks, names = record["metrics"]["tasks"], [f"nano3-{stage}-model-tiny" for stage in ("pretrain", "rl", "sft")]
    assert list(tasks) == names
    assert {name: entry["tasks"] for name, entry in tasks[names[1]]["families"].items()} == {
        "questions/quiz": 2, "questions/mc": 1
    }  # fmt: skip
    # What a model was trained with stands in its record.
    assert [tasks[name]["prompt_format"] for name in names] == ["plain", "chat", "chat"]
    assert [tasks[name]["samples"] for name in names] == [0, 1, 1]
    assert list(record["metrics"]["comparisons"]) == [f"{names[1]} - {names[0]}", f"{names[2]} - {names[1]}"]
    assert [pinned.partition("@")[0] for pinned in record["inputs"].values()] == [f"{name}:1" for name in names]


def config_of(name: str, *overrides: str) -> Any:
    spec = parse(SCRIPT)
    return resolve_config(load_config(spec.config_dir, name, overrides), spec, look_up=False).model


def test_other_models_do_not_take_the_name_of_the_stages_results() -> None:
    models = "run.models=[mine]"
    for stages in ([], [f"run.{stage}=null" for stage in ("base", "sft", "rl", "rlhf", "final")]):
        with pytest.raises(
            UserError, match="nano3-eval-results-smoke is for the stages of config smoke alone"
        ) as raised:
            config_of("smoke", models, *stages)
        assert "run.results=my-comparison" in str(raised.value)
    assert config_of("smoke", models, "run.results=mine-beside-smoke").run.models == ["mine:latest"]
    assert config_of("own", models).run.results == "nano3-eval-results-own"
    assert config_of("smoke", "run.rl=mine").run.results == "nano3-eval-results-smoke"


def test_a_model_that_is_called_like_a_stage_is_compared_as_any_other() -> None:
    cfg = config_of("own", "run.models=[mine, final, sft:2]")
    models = script.models_of(cfg)
    assert models == {"mine": "mine:latest", "final:latest": "final:latest", "sft:2": "sft:2"}
    assert script.pairs_of(models) == [("mine", "final:latest"), ("final:latest", "sft:2")]


def test_a_model_that_only_drafts_otherwise_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Callable[..., NemotronH]
) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    model = small_model("ME", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    tokenizer = train_tokenizer(["some words"], 300)

    def publish(name: str, template: str | None = "super3") -> Model:
        model.save_pretrained(tmp_path / name)
        save_tokenizer(tokenizer, tmp_path / name, model_max_length=256, template="super3")
        published = Model(path=tmp_path / name, num_steps=1, chat_template=template)
        published.save(name)
        return published

    models = {"swe2": publish("first"), "base": publish("untaught", template=None)}
    with torch.no_grad():
        next(iter(model.mtp.parameters())).add_(1)
        models["healed"] = publish("drafts-otherwise")
        model.backbone.norm_f.weight.add_(0.01)
        models["quantized"] = publish("answers-otherwise")
    assert script.first_with_same_answers(models) == {role: role for role in models} | {"healed": "swe2"}


def test_a_piped_model_is_evaluated_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path))
    (tmp_path / "payload").write_text("x")
    before = {"rl": "gone-model", "rlhf": "rl-model", "final": "rlhf-model"}
    for stage in ("pretrain", "sft", "rl", "rlhf", "final", None):
        producer = {"name": stage and f"mine/{'rl' if stage == 'final' else stage}"}
        record = {"producer": producer, "inputs": {"model": before.get(str(stage), "")}}
        Registry(tmp_path).publish(f"{stage}-model", tmp_path / "payload", record)

    def inputs(reference: str | None) -> dict[str, str]:
        monkeypatch.setattr(script, "read_pipe", lambda: {"model": reference} if reference else {})
        return script.piped_model()

    made_of_it = dict.fromkeys(("healed", "quantized", "qad"), "null")
    last = {"rlhf": "null", "final": "null", **made_of_it}
    later = {"sft_continued": "null", "rl": "null", "swe1": "null", "swe2": "null", **last}
    assert inputs("pretrain-model") == {"base": "pretrain-model", "sft": "null", **later}
    assert inputs("sft-model") == {"sft": "sft-model", **later}
    assert inputs("rl-model") == {"rl": "rl-model", "swe1": "null", "swe2": "null", **last}
    assert inputs("rlhf-model") == {"rlhf": "rlhf-model", "final": "null", **made_of_it}
    assert inputs("final-model") == {"final": "final-model", **made_of_it}
    assert inputs("None-model") == {"models": "[None-model]", "base": "null", "sft": "null", **later}
    assert inputs(None) == {}
