"""lm-eval itself, offline, on our tasks: its verdicts and answers item by item against our own evaluation's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.recipes.tools import lm_eval_run, model_export
from nemotron.stack.environments import answer_of, generate_tasks, plain_text, to_messages
from nemotron.stack.environments.sandbox import sandbox_failure
from nemotron.stack.evaluation.lm_eval_model import NemotronLM
from nemotron.stack.evaluation.model import evaluate_model
from nemotron.stack.evaluation.scoring import Evaluation
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import turns
from nemotron.stack.models.decoding.generate import Generation

FAMILIES = ["math", "multiple_choice", "instruction_following", "structured_output", "code_generation"]
NUM_TASKS = 6

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., NemotronH]) -> Path:
    """A model that was never trained, with a tokenizer for the tasks."""
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    tasks = [task for family in FAMILIES for task in generate_tasks(family, "train", 40)]
    tokenizer = train_tokenizer([plain_text(task) for task in tasks], 500)
    save_tokenizer(tokenizer, folder, model_max_length=512, template="nano3")
    model = small_model("MEM*E-", 1, vocab_size=tokenizer.get_vocab_size(), moe_intermediate_size=16)
    model.save_pretrained(folder)
    return folder


def harness(model: Any, *tasks: str, **settings: Any) -> dict[str, Any]:
    """What lm-eval finds out, without its own tasks and without a network."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=str(lm_eval_run.TASKS), include_defaults=False, metadata={"num_tasks": NUM_TASKS, "seed": 0}
    )
    return dict(simple_evaluate(model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **settings))


def ours(model: NemotronH, folder: Path, template: str | None) -> dict[str, Evaluation]:
    return {
        family: evaluate_model(
            model, folder, generate_tasks(family, "eval", NUM_TASKS), ResponsesConfig(samples=0), template=template
        )
        for family in FAMILIES
    }


def half_right(tokenizer: Tokenizer, template: str | None) -> Callable[..., Generation]:
    """In place of decoding: the demonstration of a task, of every second one the end of it cut off."""
    tasks = [task for family in FAMILIES for task in generate_tasks(family, "eval", NUM_TASKS)]
    demonstrated = {}
    for i, task in enumerate(tasks):
        text = plain_text(task).removeprefix(f"{task.prompt}\n")
        if template is not None:
            answer = to_messages(task)[-1]
            text = f"{answer['reasoning_content']}\n</think>\n{answer['content']}"
        demonstrated[task.prompt] = text[: len(text) - 4 * (i % 2)]

    def generate(model: NemotronH, prompts: list[list[int]], *_: object, **__: object) -> Generation:
        texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        out = [
            tokenizer.encode(max(((p in text) * len(p), said) for p, said in demonstrated.items())[1]).ids
            for text in texts
        ]
        return Generation(out, [[0.0] * len(ids) for ids in out], [False] * len(out), [1.0] * len(out))

    return generate


@pytest.mark.parametrize("template", ["nano3", None])
def test_every_verdict_is_that_of_our_own_evaluation(
    folder: Path, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if failure := sandbox_failure("bubblewrap"):
        pytest.skip(failure)
    lm = NemotronLM(NemotronH.from_pretrained(folder), folder, template)
    monkeypatch.setattr(turns, "generate", half_right(lm._tokenizer, template))
    group = "nemotron" if template else "nemotron_base"
    tasks = [f"nemotron_{family}" for family in FAMILIES]
    results = harness(lm, group, apply_chat_template=template is not None)
    known = ours(lm.model, folder, template)
    assert set(tasks) <= set(results["samples"])
    shares = []
    for family, task in zip(FAMILIES, tasks, strict=True):
        verdicts = [sample["acc"] for sample in results["samples"][task]]
        assert verdicts == known[family].greedy_T.tolist()
        assert results["results"][task]["acc,none"] == pytest.approx(sum(verdicts) / NUM_TASKS)
        shares.append(sum(verdicts) / NUM_TASKS)
    assert 0 < sum(shares) < len(shares)


def test_every_answer_is_that_of_our_own_evaluation(folder: Path) -> None:
    lm = NemotronLM(NemotronH.from_pretrained(folder), folder, "nano3", thinking=False)
    results = harness(lm, "nemotron_math", "nemotron_multiple_choice", apply_chat_template=True)
    for family in ("math", "multiple_choice"):
        tasks = generate_tasks(family, "eval", NUM_TASKS)
        known = evaluate_model(
            lm.model, folder, tasks, ResponsesConfig(samples=0), template="nano3", thinking=False
        ).greedy_completions
        answers = [sample["resps"][0][0] for sample in results["samples"][f"nemotron_{family}"]]
        assert answers == [answer_of(completion.text) for completion in known] and len(set(answers)) > 1


def test_transformers_through_lm_evals_own_model_agrees(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    exported = tmp_path / "exported"
    model_export.main(
        model_export.Options(
            model=str(folder), output=str(exported), push=None, dtype="auto", max_shard_size="5GB", force=False
        )
    )
    theirs = HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=1, max_length=512)
    lm = NemotronLM(NemotronH.from_pretrained(folder), folder, None, max_length=512)
    (by_ours, by_theirs) = (
        harness(model, "nemotron_letters", "nemotron_math", limit=4, gen_kwargs={"max_gen_toks": 8})
        for model in (lm, theirs)
    )
    for mine, other in zip(*(each["samples"]["nemotron_letters"] for each in (by_ours, by_theirs)), strict=True):
        assert mine["arguments"] == other["arguments"]
        for (loglikelihood, is_greedy), (expected, greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert loglikelihood == pytest.approx(expected, abs=1e-5) and is_greedy == greedy
    answers, expected = (
        [sample["resps"][0][0] for sample in each["samples"]["nemotron_math"]] for each in (by_ours, by_theirs)
    )
    special = [str(token) for token in lm._tokenizer.get_added_tokens_decoder().values()]  # which `hf` leaves out
    assert len(set(answers)) == 4
    assert [reduce(lambda text, token: text.replace(token, ""), special, answer) for answer in answers] == expected


def test_the_command_runs_lm_eval_on_a_directory(folder: Path, tmp_path: Path) -> None:
    words = ["--tasks", "nemotron_math,nemotron_letters", "--apply_chat_template", "--metadata", "num_tasks=3"]
    words += ["--output_path", "scores", "--log_samples"]
    result = subprocess.run(
        [sys.executable, "-m", "nemotron", "lm-eval", str(folder), *words],
        cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "|nemotron_math" in result.stdout and "|Stderr|" in result.stdout
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    assert json.loads(scores.read_text())["n-samples"]["nemotron_math"]["effective"] == 3
    assert len(list((tmp_path / "scores").rglob("samples_*.jsonl"))) == 2
    for model, task, named in ((folder, "nemotron_mathh", "nemotron_mathh"), ("no-model", "nemotron_math", "no-model")):
        refused = subprocess.run(
            [sys.executable, "-m", "nemotron", "lm-eval", str(model), "--tasks", task],
            cwd=tmp_path, env={**os.environ, "RUNSPEC_ARTIFACTS_ROOT": str(tmp_path)}, capture_output=True, text=True,
        )  # fmt: skip
        last = refused.stderr.splitlines()[-2:]
        assert refused.returncode == 2 and any(named in line for line in last) and "Traceback" not in refused.stderr
