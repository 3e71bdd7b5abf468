"""Pairs of a model's own answers: which are chosen, which rejected, and that they are what the model wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from nemo_runspec.errors import RunFailed
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.recipes.nano3.stage2_rl import data_prep_dpo
from nemotron.recipes.nano3.stage2_rl.data_prep_dpo import Answer, Answers, Sampler, check_verified, make_pairs
from nemotron.recipes.nano3.stage2_rl.dpo_data_schema import DPODataConfig
from nemotron.stack.environments import Task, generate_tasks, prompt_tools
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import turns
from nemotron.stack.models.decoding.generate import Generation

CALL = "<tool_call>\n<function={}>\n<parameter=expression>\n{}\n</parameter>\n</function>\n</tool_call>\n"


def config(samples: int = 4, **top: Any) -> DPODataConfig:
    generation = {"num_generations_per_prompt": samples, "max_turns": 2}
    return DPODataConfig.model_validate({"run": {"model": "m", "output": "o"}, "generation": generation, **top})


def task_of(tool_share: float) -> Task:
    (task,) = generate_tasks("math", "train", 1, 3, {"tool_share": tool_share})
    return task


def answer(content: str, score: float, *called: str) -> Answer:
    return Answer([{"role": "assistant", "content": content}], score, list(called))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["calculator 12+7=19 What is function parameter expression"], 400)


def drawn(pairs: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(p["category"], p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in pairs]


def test_a_right_answer_is_preferred_to_hallucinated_tools_first_and_to_wrong_ones() -> None:
    answers = [
        answer("right", 1.0), answer("wrong", 0.0), answer("called", 0.0, "calculator"),
        answer("called and right", 1.0, "calculator"),
    ]  # fmt: skip
    pairs = make_pairs(config(), Answers(task_of(0.0), answers))
    assert {each[:2] for each in drawn(pairs)} == {("hallucination_penalty", "right"), ("no_tools", "right")}
    assert [category for category, _, _ in drawn(pairs)] == [
        "hallucination_penalty",
        "hallucination_penalty",
        "no_tools",
    ]
    assert {rejected for category, _, rejected in drawn(pairs) if category != "no_tools"} == {
        "called",
        "called and right",
    }
    assert all("tools" not in pair for pair in pairs)


def test_with_tools_the_chosen_answer_calls_one() -> None:
    answers = [
        answer("right by luck", 1.0), answer("right", 1.0, "calculator"), answer("wrong", 0.0),
        answer("wrong tool", 1.0, "calculator", "search"),
    ]  # fmt: skip
    task = task_of(1.0)
    pairs = make_pairs(config(), Answers(task, answers))
    assert drawn(pairs) == [("hallucination_penalty", "right", "wrong tool"), ("with_tools", "right", "wrong")]
    assert all(pair["tools"] == prompt_tools(task) for pair in pairs)


def test_a_task_gives_each_pair_once_and_at_most_as_many_as_said() -> None:
    answers = [answer(f"right {i}", 1.0) for i in range(5)] + [answer(f"wrong {i}", 0.0) for i in range(3)]
    all_pairs = drawn(make_pairs(config(), Answers(task_of(0.0), answers)))
    assert len(set(all_pairs)) == len(all_pairs) == 15
    first = drawn(make_pairs(config(max_pairs_per_task=4), Answers(task_of(0.0), answers)))
    assert first == all_pairs[:4]
    assert {rejected for _, _, rejected in first} == {"wrong 0", "wrong 1", "wrong 2"}  # each before one a second time
    assert len({chosen for _, chosen, _ in first}) >= 3
    assert make_pairs(config(), Answers(task_of(0.0), answers[:5])) == []


def test_an_answer_that_never_stops_calling_is_wrong_and_ends_with_its_last_call(
    tokenizer: Tokenizer, small_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode(f"hm\n</think>\n{CALL.format('search', '1+1')}<|im_end|>", add_special_tokens=False).ids

    def generated(model: NemotronH, prompts: list[list[int]], *_: object, **options: Any) -> Generation:
        rows = len(prompts) * options["samples_per_prompt"]
        return Generation([list(ids)] * rows, [[0.0] * len(ids)] * rows, [True] * rows, [1.0] * rows)

    monkeypatch.setattr(turns, "generate", generated)
    model = small_model("M*E", vocab_size=tokenizer.get_vocab_size())
    sampler = Sampler(config(samples=2), model, tokenizer, "nano3", [tokenizer.token_to_id("<|im_end|>")])
    ((only,),) = [answers.answers for answers in sampler.answer([task_of(1.0)], "train")]
    assert [message["role"] for message in only.messages] == ["assistant", "tool", "assistant"]
    assert (only.score, only.called) == (0.0, ["search", "search"])
    assert sampler.counts["truncated"] == sampler.counts["hallucinated"] == 2


def test_programs_of_episodes_run_where_the_config_says(
    tokenizer: Tokenizer, small_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr(data_prep_dpo, "open_episode", lambda task, *how: opened.append(how))
    ids = tokenizer.encode("1<|im_end|>", add_special_tokens=False).ids
    one = Generation([ids] * 2, [[0.0] * len(ids)] * 2, [True] * 2, [1.0] * 2)
    monkeypatch.setattr(turns, "generate", lambda *_, **__: one)
    model = small_model("M*E", vocab_size=tokenizer.get_vocab_size())
    cfg = config(samples=2, sandbox="subprocess", enable_thinking=False)
    list(Sampler(cfg, model, tokenizer, "nano3", [ids[-1]]).answer([task_of(0.0)], "train"))
    assert len(opened) == 4 and set(opened) == {(False, "subprocess")}  # to answer, and for the messages of the answer


@pytest.mark.parametrize("tool_share", [0.0, 1.0])
def test_answers_are_what_the_model_wrote_and_judged_as_such(
    tool_share: float, tokenizer: Tokenizer, small_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tool_share)
    result, expression = task.solution.answer, task.prompt.split()[-1].strip("?.")
    call = f"calculator\n</think>\n{CALL.format('calculator', '1+1')}"
    texts = [f"hm\n</think>\n{result}", "hm\n</think>\n1", call, "hm\n</think>\n   1"]
    turn = {"number": 0}

    def generated(model: NemotronH, prompts: list[list[int]], *_: object, **options: Any) -> Generation:
        turn["number"] += 1
        written = texts if turn["number"] == 1 else [f"{expression}\n</think>\n{result}"] * len(prompts)
        ids = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids for text in written]
        return Generation(ids, [[0.0] * len(each) for each in ids], [True] * len(ids), [1.0] * len(ids))

    monkeypatch.setattr(turns, "generate", generated)
    model = small_model("M*E", vocab_size=tokenizer.get_vocab_size())
    sampler = Sampler(config(), model, tokenizer, "nano3", [tokenizer.token_to_id("<|im_end|>")])
    (answers,) = sampler.answer([task], "train")
    # The last one has blanks that the template does not write: its text would be other tokens.
    assert sampler.counts["other_tokens"] == 1 and sampler.counts["responses"] == 4
    assert sampler.counts["hallucinated"] == (1 if tool_share == 0 else 0)
    right, wrong, called = answers.answers
    assert right.messages == [{"role": "assistant", "content": result, "reasoning_content": "hm"}]
    assert (right.score, wrong.score, called.called) == (1.0, 0.0, ["calculator"])
    assert called.messages[0]["tool_calls"] == [{"name": "calculator", "arguments": {"expression": "1+1"}}]
    if tool_share == 0:
        assert len(called.messages) == 1 and called.score == 0.0
    else:
        assert called.messages[1:] == [
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": result, "reasoning_content": expression},
        ]
        assert called.score == 1.0


def test_answers_that_mostly_cannot_be_verified_are_not_published() -> None:
    check_verified({"verifier_errors": 1, "responses": 100}, 0.01)
    with pytest.raises(RunFailed, match="verification failed for 2 of 100 answers"):
        check_verified({"verifier_errors": 2, "responses": 100}, 0.01)
