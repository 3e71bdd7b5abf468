"""Pass rates of prompts, as the script publishes them, and RL that draws by them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import RunFailed, UserError, run_main
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model, RLPrompts
from nemotron.kit.commands import command_hint
from nemotron.kit.schemas.rl import CurriculumConfig
from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.environments import generate_tasks
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import turns
from nemotron.stack.models.decoding.generate import Generation
from nemotron.stack.rl.prompts import PromptSource, read_prompts
from nemotron.stack.training.distributed import ALONE

TASKS = [task for family in ("math", "multiple_choice") for task in generate_tasks(family, "train", 12, distinct=True)]
RIGHT = {task.canonical: index % 9 for index, task in enumerate(TASKS)}  # of 8 rollouts

TEMPERATURES: list[float] = []  # that the model was asked at


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Callable[..., NemotronH]) -> Registry:
    """Prompts, and a model that answers each task right in the first of its rollouts, as often as RIGHT says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [__file__])
    tokenizer = train_tokenizer([task.prompt + task.solution.answer for task in TASKS], 400)
    save_tokenizer(tokenizer, tmp_path / "model", model_max_length=256, template="nano3")
    small_model("M*E", vocab_size=tokenizer.get_vocab_size()).save_pretrained(tmp_path / "model")
    Model(path=tmp_path / "model", num_steps=1, chat_template="nano3").save("start")
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "train.jsonl").write_text("".join(json.dumps({"task": task.to_dict()}) + "\n" for task in TASKS))
    (prompts / "valid.jsonl").write_text(json.dumps({"task": TASKS[0].to_dict()}) + "\n")
    files = {"train_path": prompts / "train.jsonl", "valid_path": prompts / "valid.jsonl"}
    RLPrompts(path=prompts, num_examples=len(TASKS), **files).save("prompts")
    by_prompt = {tuple(tokenizer.encode(prompt_text(t, "nano3"), add_special_tokens=False).ids): t for t in TASKS}

    def answer(model: NemotronH, prompts: Sequence[Sequence[int]], *_: Any, **options: Any) -> Generation:
        TEMPERATURES.append(options["temperature"])
        tokens = []
        for task in (by_prompt[tuple(prompt)] for prompt in prompts):
            for sample in range(options["samples_per_prompt"]):
                text = task.solution.answer if sample < RIGHT[task.canonical] else "no"
                tokens.append(tokenizer.encode(f"so</think>{text}<|im_end|>", add_special_tokens=False).ids)
        return Generation(tokens, [[0.0] * len(ids) for ids in tokens], [True] * len(tokens), [0.0] * len(tokens))

    monkeypatch.setattr(turns, "generate", answer)
    return Registry(tmp_path / "output" / "artifacts")


def measure(*words: str) -> int:
    script = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep_curriculum")
    sys.argv = [str(script.__file__), "--config", "curriculum", "run.model=start", "run.data=prompts", *words]
    return int(run_main(script.main, command_hint))


def test_each_prompt_has_the_share_of_its_rollouts_that_are_right(registry: Registry) -> None:
    TEMPERATURES.clear()
    assert measure() == 0
    assert set(TEMPERATURES) == {1.0}  # a greedy answer says nothing of a pass rate
    version = registry.resolve("nano3-rl-data-curriculum")
    records = [json.loads(line) for line in (version.path / "train.jsonl").read_text().splitlines()]
    assert [record["task"] for record in records] == [task.to_dict() for task in TASKS]
    for record in records:
        assert record["pass_rate"] == RIGHT[record["task"]["canonical"]] / 8
    assert json.loads((version.path / "valid.jsonl").read_text())["task"] == TASKS[0].to_dict()
    assert {reference.partition("@")[0] for reference in version.record["inputs"].values()} == {"start:1", "prompts:1"}
    assert version.record["metrics"]["prompts_by_pass_rate"]["math"] == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    source = PromptSource(version.path / "train.jsonl", {"math": 1.0}, 11, 0)
    source.follow(CurriculumConfig(), 1)
    assert all(RIGHT[task.canonical] < 8 for task in source.batch(0))


def test_rlvr_draws_by_the_rates_where_its_config_says_so(registry: Registry) -> None:
    assert measure() == 0
    rlvr = importlib.import_module("nemotron.recipes.nano3.stage2_rl.rlvr")
    base = {
        "run": {"model": "start", "data": "nano3-rl-data-curriculum"},
        "policy": {"model_name": registry.resolve("start").path, "generation": {"max_new_tokens": 8}},
        "grpo": {"max_num_steps": 2, "num_prompts_per_step": 6},
        "env": {"families": {"math": 1, "multiple_choice": 1}},
    }

    def rates(**curriculum: Any) -> list[list[float]]:
        data = {"path": registry.resolve("nano3-rl-data-curriculum").path, **curriculum}
        source = rlvr.open_data(RLConfig.model_validate({**base, "data": data}), ALONE).source
        return [[RIGHT[task.canonical] / 8 for task in source.batch(step)] for step in range(2)]

    easy, hard = rates(curriculum={"start_mean": 1.0, "end_mean": 0.0, "std": 0.05, "drop_pass_rate": 2.0})
    assert easy.count(1.0) == 2 and easy.count(0.0) < 2 <= hard.count(0.0) and sum(hard) < sum(easy)
    assert rates() == rates(curriculum=None) != [easy, hard]


def test_rlvr_refuses_what_it_could_not_train_on_before_it_begins(registry: Registry, tmp_path: Path) -> None:
    rlvr = importlib.import_module("nemotron.recipes.nano3.stage2_rl.rlvr")

    def begin(path: Path, family: str = "math", **policy: int) -> None:
        settings = {
            "run": {"model": "start", "data": "prompts"}, "data": {"path": path},
            "policy": {"model_name": registry.resolve("start").path, "generation": {"max_new_tokens": 8}, **policy},
            "grpo": {"max_num_steps": 2, "num_prompts_per_step": 6, "max_rollout_turns": 2},
            "env": {"families": {family: 1}},
        }  # fmt: skip
        rlvr.open_data(RLConfig.model_validate(settings), ALONE)

    math = registry.resolve("prompts").path
    begin(math, max_total_sequence_length=256)
    with pytest.raises(UserError, match=r"sequence_length 20 has no room for a prompt of \d+ tokens and 8 new ones"):
        begin(math, max_total_sequence_length=20)
    lines = [json.dumps({"task": task.to_dict()}) for task in generate_tasks("workplace_assistant", "train", 2)]
    calls = tmp_path / "calls" / "train.jsonl"
    calls.parent.mkdir()
    calls.write_text("\n".join(lines))
    RLPrompts(path=calls.parent, num_examples=2, train_path=calls).save("calls")
    begin(registry.resolve("calls").path, "workplace_assistant", max_total_sequence_length=4096)
    tokenizer = train_tokenizer([task.prompt for task in TASKS], 400, "nano2")
    save_tokenizer(tokenizer, tmp_path / "model", model_max_length=256, template="nano2")
    Model(path=tmp_path / "model", num_steps=1, chat_template="nano2").save("start")
    with pytest.raises(UserError, match="tasks of several turns; the template of start:2 tells earlier turns anew"):
        begin(registry.resolve("calls").path, "workplace_assistant", max_total_sequence_length=4096)
    calls.write_text('{"responses_create_params": {}}')
    with pytest.raises(UserError, match=r"train\.jsonl:1 has no task\nrecords of NeMo Gym are for train_nemo_rl"):
        read_prompts(calls)


def test_only_the_first_prompts_of_each_family_are_measured(registry: Registry) -> None:
    assert measure("num_prompts=5") == 0
    path = registry.resolve("nano3-rl-data-curriculum").path / "train.jsonl"
    kept = [json.loads(line)["task"]["canonical"] for line in path.read_text().splitlines()]
    assert kept == [task.canonical for task in (*TASKS[:5], *TASKS[12:17])]


def test_prompts_whose_verification_may_fail_are_left_out_up_to_a_share(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (registry.resolve("prompts").path / "train.jsonl").read_text().splitlines()
    broken = json.loads(lines[3])
    broken["task"]["spec"] = {}
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join([*lines[:3], json.dumps(broken), *lines[4:]]))
    RLPrompts(path=folder, num_examples=len(lines), train_path=folder / "train.jsonl").save("broken")
    assert measure("run.data=broken") == 1
    told = capsys.readouterr().err
    assert "4.2% of the responses could not be verified, more than max_error_rate 0.01 allows" in told
    assert measure("run.data=broken", "max_error_rate=0.1") == 0
    version = registry.resolve("nano3-rl-data-curriculum")
    assert len((version.path / "train.jsonl").read_text().splitlines()) == len(TASKS) - 1


@pytest.mark.parametrize(("allowed", "stops"), [(0.01, True), (0.2, False)])
def test_validation_and_final_evaluation_allow_as_many_errors_as_training(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, allowed: float, stops: bool
) -> None:
    rlvr = importlib.import_module("nemotron.recipes.nano3.stage2_rl.rlvr")
    start = registry.resolve("start").path
    settings = {
        "run": {"model": "start", "data": "prompts"}, "data": {"path": registry.resolve("prompts").path},
        "policy": {"model_name": start, "generation": {"max_new_tokens": 8}},
        "grpo": {"max_num_steps": 2, "num_prompts_per_step": 6, "max_error_rate": allowed},
        "env": {"families": {"math": 1}},
    }  # fmt: skip
    cfg = RLConfig.model_validate(settings)
    assert cfg.evaluation.max_error_rate == allowed
    assert RLConfig.model_validate(settings | {"evaluation": {"max_error_rate": 0.5}}).evaluation.max_error_rate == 0.5
    data = rlvr.open_data(cfg, ALONE)
    data.valid = [replace(TASKS[0], spec={}), *TASKS[1:10]]
    model = NemotronH.from_pretrained(start)
    stop = SimpleNamespace(poll=lambda: None)
    session: Any = SimpleNamespace(ranks=ALONE, stop=stop, dealt_out=nullcontext, autocast=nullcontext())
    too_many = r"no verdict on 2 of 20 responses, .* grpo\.max_error_rate 0\.01"
    with pytest.raises(RunFailed, match=too_many) if stops else nullcontext():
        assert rlvr.validate(cfg, session, model, data)["valid_greedy"] == 8 / 9
    with_others = {"errors": 0.0, "responses": 180.0}  # of another rank: 2 of 200 are the allowed share
    monkeypatch.setattr(rlvr, "sum_metrics", lambda mine, _: {k: v + with_others.get(k, 0) for k, v in mine.items()})
    assert rlvr.validate(cfg, session, model, data)["valid_greedy"] == 8 / 9


@pytest.mark.parametrize("thinking", [True, False])
def test_the_final_evaluation_asks_as_training_did(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, thinking: bool
) -> None:
    rlvr = importlib.import_module("nemotron.recipes.nano3.stage2_rl.rlvr")
    asked: list[bool] = []

    def score(*_: Any, thinking: bool = True, **__: Any) -> None:
        asked.append(thinking)
        raise UserError("enough")

    monkeypatch.setattr(rlvr, "train", lambda *_: None)
    monkeypatch.setattr(rlvr, "publish_model", lambda *_, **__: None)
    monkeypatch.setattr(rlvr, "score_tasks", score)
    words = ["run.model=start", "run.data=prompts", "env.families={math: 1}", f"env.enable_thinking={thinking}"]
    monkeypatch.setattr(sys, "argv", [str(rlvr.__file__), "--config", "smoke", *words])
    assert run_main(rlvr.main, command_hint) == 2
    assert asked == [thinking]


def test_a_model_without_chat_template_is_refused(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    Model(path=registry.resolve("start").path, num_steps=1).save("base")
    assert measure("run.model=base") == 2
    assert "base:1 has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"agent_ref": {"name": "mcqa"}}, "train.jsonl:1 has no task"),
        (
            {"task": {**TASKS[0].to_dict(), "family": "halves"}},
            "has prompts of 'halves', which is neither a family nor one of `environments`",
        ),
    ],
)
def test_prompts_that_nothing_here_verifies_are_refused_before_a_model_answers(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any], told: str
) -> None:
    TEMPERATURES.clear()
    path = tmp_path / "others" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(record) + "\n")
    RLPrompts(path=path.parent, num_examples=1, train_path=path).save("others")
    assert measure("run.data=others") == 2
    assert told in capsys.readouterr().err and not TEMPERATURES
