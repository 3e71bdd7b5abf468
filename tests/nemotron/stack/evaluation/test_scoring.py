"""Scoring with generators that are no models, so that every score is known beforehand."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_runspec.errors import RunFailed
from nemotron.kit.schemas.difficulty import DEFAULT_FAMILIES as FAMILIES
from nemotron.kit.stop import StopRequested
from nemotron.stack.environments import Task, Verdict, generate_tasks, prompt_tools
from nemotron.stack.evaluation import scoring
from nemotron.stack.evaluation.comparison import compare
from nemotron.stack.evaluation.scoring import Completion, GenerateFn, evaluate_tasks, prompt_text

TASKS = [task for family in FAMILIES for task in generate_tasks(family, "eval", 40)]


def answers(right_share: dict[str, float]) -> GenerateFn:
    """A generator that demonstrates the solution with a probability of its family when sampled, always when greedy."""
    by_prompt = {prompt_text(task, "nano3"): task for task in TASKS}

    def generate(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        rng = random.Random(seed)
        out = []
        for prompt in prompts:
            task = by_prompt[prompt]
            for _ in range(samples):
                right = temperature == 0 or rng.random() < right_share[task.family]
                text = f"{task.solution.reasoning}\n</think>\n{task.solution.answer if right else 'no'}"
                out.append(Completion(text, 10 if right else 30, 0.5 if right else 1.5, right))
        return out

    return generate


def test_scores_are_what_the_generator_was_made_to_reach() -> None:
    shares = dict(zip(FAMILIES, (0.0, 0.25, 0.75, 1.0), strict=True))
    evaluation = evaluate_tasks(answers(shares), TASKS, template="nano3", samples=8)
    assert all(evaluation.greedy(family).estimate == 1.0 for family in FAMILIES)
    for family, share in shares.items():
        interval = evaluation.sampled(family)
        assert interval.low <= interval.estimate <= interval.high and abs(interval.estimate - share) < 0.08
    assert evaluation.sampled_TS.shape == (160, 8)
    ended = [[completion.finished for completion in row] for row in evaluation.sampled_completions]
    assert evaluation.sampled_TS.tolist() == ended  # the right ones do: each verdict is that of its own completion
    assert evaluation.mean("greedy").estimate == 1.0
    assert evaluation.mean("sampled").estimate == pytest.approx(evaluation.sampled_TS.mean())
    # every token of a right completion has entropy 0.5, of a wrong one 1.5, and wrong ones are three times as long
    assert evaluation.entropy("math") == 1.5 and evaluation.entropy("structured_output") == 0.5
    right = evaluation.sampled_TS.mean()
    assert evaluation.entropy() == pytest.approx((0.5 * right + 1.5 * 3 * (1 - right)) / (right + 3 * (1 - right)))


def test_verdicts_of_episodes_stand_among_those_that_are_made_here() -> None:
    tasks = [task for task in TASKS if task.family == "math"][:2]
    right = [Completion(f"</think>{task.solution.answer}", 3, 0.1, True) for task in tasks]
    episode = replace(right[0], text="", verdict=Verdict("score", 0.25))

    def generate(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        return right if temperature == 0 else [episode, right[0], right[0], episode]

    evaluation = evaluate_tasks(generate, tasks, template="nano3", samples=2)
    assert evaluation.greedy_T.tolist() == [1, 1]
    assert evaluation.sampled_TS.tolist() == [[0.25, 1], [0, 0.25]]  # the third is the answer to the other task


def test_metrics_and_generations_are_json_and_complete() -> None:
    evaluation = evaluate_tasks(answers(dict.fromkeys(FAMILIES, 0.5)), TASKS, template="nano3", samples=2)
    metrics = json.loads(json.dumps(evaluation.metrics(), allow_nan=False))
    assert list(metrics["families"]) == list(FAMILIES) and metrics["families"]["math"]["tasks"] == 40
    assert metrics["mean"]["greedy_tokens"] == 10 and metrics["mean"]["greedy_finished"] == 1.0
    records = evaluation.generations(3)
    assert len(records) == 12 and all(record["greedy_right"] for record in records)
    assert {record["family"] for record in records} == set(FAMILIES)


def test_a_tool_is_hallucinated_where_the_prompt_does_not_declare_it() -> None:
    tasks = generate_tasks("math", "eval", 30, 1, {"tool_share": 0.5})
    declared = sum(bool(prompt_tools(task)) for task in tasks)
    assert 0 < declared < len(tasks)

    def calling(
        prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1, **_: Any
    ) -> list[Completion]:
        """Greedily no call; of three samples one with a call of the calculator, one with one of something else."""
        called = [()] if temperature == 0 else [("calculator",), ("calculator", "search"), ()]
        return [Completion("1", 1, 0.1, True, called=names) for _ in prompts for names in called[:samples]]

    evaluation = evaluate_tasks(calling, tasks, template="nano3", samples=3)
    share = (declared * 1 + (len(tasks) - declared) * 2) / (4 * len(tasks))
    interval = evaluation.hallucinated_tool("math")
    assert interval.estimate == pytest.approx(share) and interval.low < interval.estimate < interval.high
    assert evaluation.metrics()["families"]["math"]["hallucinated_tool"] == interval.estimate


def test_without_samples_only_greedy_is_reported() -> None:
    evaluation = evaluate_tasks(answers(dict.fromkeys(FAMILIES, 0.5)), TASKS, template="nano3", samples=0)
    assert "sampled" not in evaluation.metrics()["mean"] and math.isnan(evaluation.entropy())


def test_pass_and_majority_of_several_samples_are_published_with_intervals() -> None:
    evaluation = evaluate_tasks(answers(dict.fromkeys(FAMILIES, 0.5)), TASKS, template="nano3", samples=4)
    metrics = evaluation.metrics()
    right_T = evaluation.sampled_TS[:40].sum(1)  # of math
    at_4 = metrics["families"]["math"]["pass_at_k"]
    assert list(at_4) == ["2", "4"] and at_4["4"] == (right_T > 0).mean()
    assert at_4["2"] == pytest.approx(np.mean([1 - math.comb(4 - int(c), 2) / 6 for c in right_T]))
    low, high = metrics["families"]["math"]["pass_at_k_95"]["4"]
    assert low < at_4["4"] < high
    assert metrics["mean"]["pass_at_k"]["4"] == pytest.approx((evaluation.sampled_TS.sum(1) > 0).mean())
    # "no" is no answer, so one right answer of four is the majority
    assert metrics["families"]["math"]["majority_at_k"] == at_4
    assert all("majority_at_k" not in metrics["families"][family] for family in FAMILIES[2:])
    single = evaluate_tasks(answers(dict.fromkeys(FAMILIES, 0.5)), TASKS, template="nano3", samples=1)
    assert "pass_at_k" not in single.metrics()["mean"]


def test_reasoning_that_is_never_closed_is_wrong_though_it_holds_the_answer() -> None:
    def unclosed(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        return [Completion(task.solution.answer, 5, 0.1, False) for task in TASKS for _ in range(samples)]

    assert evaluate_tasks(unclosed, TASKS, template="nano3", samples=0).mean("greedy").estimate == 0.0
    assert evaluate_tasks(unclosed, TASKS, samples=0, template="nano3", thinking=False).mean("greedy").estimate == 1.0


@pytest.mark.parametrize("thinking", [True, False])
def test_where_no_prompt_opens_reasoning_the_whole_response_is_the_answer(plain_chat: str, thinking: bool) -> None:
    by_prompt = {prompt_text(task, plain_chat, thinking): task for task in TASKS}

    def generate(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        right = [by_prompt[prompt].solution.answer for prompt in prompts for _ in range(samples)]
        return [Completion(f"<think>so</think>{t}" if i % 2 else t, 5, 0.1, True) for i, t in enumerate(right)]

    evaluation = evaluate_tasks(generate, TASKS, template=plain_chat, thinking=thinking, samples=2)
    assert (evaluation.greedy_T == 1).all() and (evaluation.sampled_TS == 1).all()
    majority = evaluation.majority_at(2, "math")
    assert majority is not None and majority.estimate == 1
    assert evaluation.prompt_format == "chat"  # there is no switch that could turn reasoning off


def test_a_message_that_turns_reasoning_off_is_seen_in_its_prompt() -> None:
    quiet = [replace(task, prompt=f"{task.prompt} /no_think") for task in TASKS[:2]]

    def generate(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        return [Completion(task.solution.answer, 5, 0.1, True) for task in quiet]

    evaluation = evaluate_tasks(generate, quiet, template="nano2", samples=0)
    assert evaluation.greedy_T.tolist() == [1, 1] and evaluation.prompt_format == "chat_no_think"


def test_a_model_without_chat_template_answers_in_the_second_line() -> None:
    def plain(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        assert list(prompts) == [f"{task.prompt}\n" for task in TASKS]
        return [Completion(f"{t.solution.reasoning}\n{t.solution.answer}\nmore", 5, 0.1, True) for t in TASKS]

    assert evaluate_tasks(plain, TASKS, samples=0, template=None).mean("greedy").estimate == 1.0


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.0234), (1.0, 0.9766, 1.0)])
def test_all_wrong_or_all_right_is_no_certainty(share: float, low: float, high: float) -> None:
    # Wilson, n = 160, z = 1.95996: 0 successes end at z^2 / (n + z^2) = 0.02344.
    evaluation = evaluate_tasks(answers(dict.fromkeys(FAMILIES, share)), TASKS, template="nano3", samples=2)
    interval = evaluation.mean("sampled")
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((share, low, high), abs=1e-4)
    assert evaluation.sampled("math").high - evaluation.sampled("math").low > 0.05  # 40 tasks


def test_partial_scores_count_as_what_they_are() -> None:
    evaluation = evaluate_tasks(answers(dict.fromkeys(FAMILIES, 1.0)), TASKS, template="nano3", samples=0)
    evaluation.greedy_T[:] = 0.5
    evaluation.greedy_T[0] = 1.0
    assert evaluation.greedy("math").estimate == pytest.approx(0.5125)


def test_too_many_verifier_errors_stop_the_evaluation_and_few_are_left_out() -> None:
    broken = [Task(t.family, t.prompt, t.canonical, {}, t.solution) if i % 40 == 0 else t for i, t in enumerate(TASKS)]
    generate = answers(dict.fromkeys(FAMILIES, 1.0))
    with pytest.raises(RunFailed, match=r"2\.5% of the responses"):
        evaluate_tasks(generate, broken, template="nano3", samples=1)
    evaluation = evaluate_tasks(generate, broken, template="nano3", samples=1, max_error_rate=0.03)
    assert evaluation.error_rate() == 4 / 160
    assert evaluation.mean("greedy").estimate == 1.0  # an error is not a zero
    assert np.isnan(evaluation.greedy_T).sum() == 4


def test_without_a_greedy_pass_the_samples_are_the_same() -> None:
    asked: list[float] = []

    def generate(prompts: Any, *, temperature: float, **options: Any) -> list[Completion]:
        asked.append(temperature)
        return answers(dict.fromkeys(FAMILIES, 0.5))(prompts, temperature=temperature, **options)

    both = evaluate_tasks(generate, TASKS, template="nano3", samples=3)
    sampled = evaluate_tasks(generate, TASKS, template="nano3", samples=3, with_greedy=False)
    assert asked == [0.0, 1.0, 1.0] and sampled.greedy_T.size == 0 and sampled.error_rate() == 0
    assert np.array_equal(sampled.sampled_means(), both.sampled_means())
    assert sampled.sampled_completions == both.sampled_completions


def test_the_reason_of_a_failed_verification_is_the_one_that_was_found() -> None:
    # This answer is only looked at in the second line of plain text: read in any other way it is no valid JSON, and
    # verification would end before it meets the broken schema.
    task = next(task for task in TASKS if task.family == "math")
    broken = Task(task.family, task.prompt, task.canonical, {"result": "twelve"}, task.solution)

    def plain(prompts: Sequence[str], *, temperature: float, seed: int, samples: int = 1) -> list[Completion]:
        return [Completion("7\n12\n", 3, 0.1, True) for _ in prompts for _ in range(samples)]

    with pytest.raises(RunFailed) as caught:
        evaluate_tasks(plain, [broken], samples=0, template=None)
    assert caught.value.hint == "first: math: ValueError: invalid literal for int() with base 10: 'twelve'"


def test_it_can_be_left_between_the_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[Task] = []

    def verify_all(tasks: Sequence[Task], *_: object) -> list[Verdict]:
        verdicts.extend(tasks)
        return [Verdict("score", 1.0)] * len(tasks)

    monkeypatch.setattr(scoring, "verify_all", verify_all)
    monkeypatch.setattr(scoring, "_VERIFIED_TOGETHER", 3)

    def poll() -> None:
        if len(verdicts) >= 3:
            raise StopRequested(signal.SIGTERM)

    generate = answers(dict.fromkeys(FAMILIES, 1.0))
    with pytest.raises(StopRequested):
        evaluate_tasks(generate, TASKS, template="nano3", samples=0, poll=poll)
    assert verdicts == TASKS[:3]


def test_a_gain_is_found_in_the_family_that_has_it_and_a_loss_is_named() -> None:
    before = evaluate_tasks(answers(dict.fromkeys(FAMILIES, 0.6)), TASKS, template="nano3", samples=8, seed=1)
    shares = dict(zip(FAMILIES, (0.9, 0.6, 0.6, 0.2), strict=True))
    after = evaluate_tasks(answers(shares), TASKS, template="nano3", samples=8, seed=2)
    comparison = compare(before, after, "sampled")
    assert comparison.families["math"].low > 0 and comparison.families["math"].p_adjusted < 0.01
    assert comparison.worse() == ["structured_output"]
    singles = [d.p_value for d in comparison.families.values()]
    assert all(d.p_adjusted >= d.p_value for d in comparison.families.values()) and min(singles) < 0.01
    assert comparison.mean.estimate == pytest.approx(after.sampled_TS.mean() - before.sampled_TS.mean())
    assert compare(before, after, "greedy").mean.estimate == 0.0


def test_only_the_same_tasks_can_be_compared() -> None:
    generate = answers(dict.fromkeys(FAMILIES, 1.0))
    with pytest.raises(ValueError, match="different tasks"):
        compare(
            evaluate_tasks(generate, TASKS[:80], template="nano3"),
            evaluate_tasks(generate, TASKS[80:], template="nano3"),
            "greedy",
        )


def test_counts_of_parts_add_up_to_the_rates_of_the_whole() -> None:
    generate = answers(dict(zip(FAMILIES, (0.1, 0.3, 0.6, 1.0), strict=True)))
    whole = evaluate_tasks(generate, TASKS, template="nano3", samples=1)
    # The second part has no task of two families, the third none at all.
    parts = [evaluate_tasks(generate, part, template="nano3", samples=1) for part in (TASKS[:90], TASKS[90:], [])]
    counts = [part.counts(FAMILIES) for part in parts]
    assert counts[0].keys() == counts[1].keys() == counts[2].keys()
    sums = {key: sum(count[key] for count in counts) for key in counts[0]}
    assert all(sums["greedy", family, "scored"] == 40 for family in FAMILIES)
    for family in FAMILIES:
        assert sums["greedy", family, "right"] / 40 == whole.greedy(family).estimate
