"""The environment of docs/guides/environments.md, from its page to prompts that RL draws and verifies."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError, run_main
from nemo_runspec.fingerprint import code_of
from nemotron.kit.commands import command_hint
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.recipes.nano3.stage2_rl.schema import EnvConfig, RLConfig
from nemotron.stack.environments import load_environments, split_of, verify
from nemotron.stack.evaluation.model import held_out_tasks
from nemotron.stack.rl.prompts import PromptSource, read_prompts

GUIDE = Path(__file__).parents[4] / "docs/guides/environments.md"
REFERENCES = {"halves": "halves.py:Halves"}


@pytest.fixture(autouse=True)
def halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the page, where the test works."""
    code = re.search(r"`halves.py`, new:\n\n```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    (tmp_path / "halves.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    return tmp_path / "halves.py"


def prepare(*words: str) -> int:
    script = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep")
    sys.argv = [str(script.__file__), "--config", "tiny", "tasks.families=[]", "evaluation_tasks=20", *words]
    return int(run_main(script.main, command_hint))


def rl_config(env: dict[str, object]) -> RLConfig:
    policy = {"model_name": "m", "generation": {"max_new_tokens": 8}}
    base = {"run": {"model": "m", "data": "d"}, "policy": policy, "data": {"path": "d"}}
    return RLConfig.model_validate(base | {"env": env})


def test_tasks_of_an_own_environment_are_prompts_that_it_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("environments={halves: halves.py:Halves}", "tasks.num_tasks=10000") == 0
    written = capsys.readouterr()
    assert "'env.families={halves: 1}' 'env.environments={halves: halves.py:Halves}'" in written.err
    version = Registry(tmp_path / "output" / "artifacts").resolve(json.loads(written.out)["data"])
    assert version.record["fields"]["families"] == ["halves"]
    assert [source["detail"] for source in version.record["sources"]][-1] == "halves.py:Halves"
    train, valid = version.path / "train.jsonl", version.path / "valid.jsonl"
    assert len(train.read_text().splitlines()) == 100  # 1 % of num_tasks: as many as of a family
    environments = load_environments(REFERENCES)
    source = PromptSource(train, {"halves": 1.0}, 16, 0, environments)
    source.check_single_responses("why")
    with pytest.raises(UserError, match="share of 'tenth' rounds to none of 4 prompts a step"):
        (tmp_path / "two.jsonl").write_text(train.read_text() + train.read_text().replace('"halves"', '"tenth"'))
        PromptSource(tmp_path / "two.jsonl", {"halves": 10.0, "tenth": 1.0}, 4, 0, environments | {"tenth": None})
    with pytest.raises(UserError, match="halves has tasks of several turns; why"):
        episodes: Any = SimpleNamespace(open_episode=lambda spec: None)
        PromptSource(train, {"halves": 1.0}, 16, 0, {"halves": episodes}).check_single_responses("why")
    tasks = source.batch(0)
    assert len(tasks) == 16 and len(read_prompts(valid, environments)["halves"]) > 0
    for task in tasks:
        right = str(int(task.prompt.split()[-1].rstrip("?")) // 2)
        assert verify(task, f"so</think>{right}", thinking=True).status == "score"
        assert verify(task, f"so</think>{right}0", thinking=True).status == "wrong"
    # The same prompts without a config that says what verifies them: nothing does.
    assert verify(read_prompts(train)["halves"][0], "1").status == "error"


def test_evaluation_asks_tasks_that_data_preparation_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("environments={halves: halves.py:Halves}", "tasks.num_tasks=200000") == 0
    version = Registry(tmp_path / "output" / "artifacts").resolve(json.loads(capsys.readouterr().out)["data"])
    trained = {task.prompt for task in read_prompts(version.path / "train.jsonl")["halves"]}
    asked = held_out_tasks(4, ResponsesConfig(families=["math"], environments=REFERENCES))
    assert [task.family for task in asked] == ["math"] * 4 + ["halves"] * 4
    halves = asked[4:]
    assert trained and not trained & {task.prompt for task in halves}
    for task in halves:
        assert verify(task, str(int(task.prompt.split()[-1].rstrip("?")) // 2)).score == 1.0


def test_an_endless_environment_of_few_prompts_ends_and_its_duplicates_are_not_counted(
    halves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_prep = importlib.import_module("nemotron.recipes.nano3.stage2_rl.data_prep")
    drawn = 0

    class Endless:
        def __init__(self, numbers: list[int]) -> None:
            self.numbers = numbers

        def tasks(self) -> Iterator[dict[str, Any]]:
            nonlocal drawn
            for number in itertools.cycle(self.numbers):
                drawn += 1
                yield {"prompt": f"What is half of {number}?", "spec": {"right": str(number // 2)}}

        def verify_answer(self, spec: dict[str, Any], answer: str) -> bool:
            return answer == spec["right"]

    splits: dict[str, list[int]] = {"train": [], "valid": [], "eval": []}
    for number in range(0, 400, 2):
        splits[split_of(f"endless|what is half of {number}?")].append(number)
    train, valid, held_out = splits["train"][0], splits["valid"][0], splits["eval"][0]
    monkeypatch.setattr(data_prep.own, "MAX_FRUITLESS", 50)
    cfg: Any = SimpleNamespace(environments={"endless": "endless.py:Endless"})

    given: Counter[str] = Counter()

    def kept(numbers: list[int]) -> set[tuple[str, str]]:
        nonlocal drawn
        drawn, sizes = 0, {"train": 2, "valid": 1}
        tasks = list(data_prep._environment_tasks(cfg, {"endless": Endless(numbers)}, sizes))
        given.update(split for _, split, _ in tasks)
        return {(split, task.prompt) for _, split, task in tasks}

    both = {("train", f"What is half of {number}?") for number in splits["train"][:2]}
    assert kept([train, train, splits["train"][1], valid]) == both | {("valid", f"What is half of {valid}?")}
    assert kept([train, held_out]) == {("train", f"What is half of {train}?"), ("eval", f"What is half of {held_out}?")}
    assert drawn < 60 and given["eval"] > 20  # which data preparation counts
    for other, counts in ((splits["eval"][1], "eval 2"), (valid, "eval 1, valid 1")):
        with pytest.raises(UserError, match="gave no task to train on") as refused:
            kept([held_out, other])
        assert refused.value.hint == f"its 2 different tasks, by the hash of their prompts: {counts}"


@pytest.mark.parametrize(("num_tasks", "is_told"), [(1000, False), (100_000, True)])
def test_what_is_said_twice_is_a_loss_where_prompts_are_missing(
    halves: Path, capsys: pytest.CaptureFixture[str], num_tasks: int, is_told: bool
) -> None:
    """Each prompt ten times over: enough for ten prompts, not for a thousand."""
    halves.write_text(halves.read_text().replace("in range(0, 2000, 2)", "in [2 * (n // 10) for n in range(2000)]"))
    assert (
        prepare("environments={halves: halves.py:Halves}", f"tasks.num_tasks={num_tasks}", "tasks.num_valid_tasks=100")
        == 0
    )
    assert ("warning: source 'halves'" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("return iter(())", "environment halves gave no task"),
        ("yield {'prompt': 'One?'}", "environment halves, task 0: spec must be a mapping"),
        (
            "yield {'prompt': 'One?', 'spec': {'right': '1'}, 'answer': '2'}",
            "environment halves, task 0: its own answer is not right: its score is 0",
        ),
    ],
)
def test_an_environment_without_good_tasks_is_refused(
    environment: str, message: str, halves: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, _, rest = halves.read_text().partition("        for number")
    halves.with_name("other.py").write_text(f"{head}        {environment}\n{rest[rest.index('    def verify') - 1 :]}")
    assert prepare("environments={halves: other.py:Halves}") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"families": {"halfs": 1}, "environments": REFERENCES}, "halfs is neither a family nor .* mean halves?"),
        ({"families": {"halves": 1}}, "an environment of yours"),
        ({"environments": {"math": "halves.py:Halves"}}, "math is a family that there is already"),
        ({"environments": {"halves": "halves.py"}}, "write FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ({"environments": {"halves": "halfs.py:Halves"}}, "no such file: halfs.py"),
    ],
)
def test_a_config_that_names_no_environment_is_refused(env: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rl_config({"families": {"math": 1}} | env)


def test_a_change_of_the_environment_is_another_run(halves: Path) -> None:
    script = Path(str(importlib.import_module("nemotron.recipes.nano3.stage2_rl.rlvr").__file__))
    config = EnvConfig(families={"halves": 1.0}, environments=REFERENCES).model_dump()
    before = code_of(script, config)
    assert "halves.py:Halves" in before
    halves.write_text(halves.read_text() + "# changed\n")
    assert code_of(script, config) != before
    assert "nemotron.stack.environments.sandbox_driver" in before  # what runs programs counts, too
