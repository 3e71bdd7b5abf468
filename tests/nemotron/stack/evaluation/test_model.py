"""Generation for evaluation with a small random model: order, grouping, determinism, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.stack.environments import generate_tasks
from nemotron.stack.evaluation.model import (
    evaluate_model,
    load_tokenizer,
    model_generate_fn,
    reasoning_budget,
    stop_token_ids,
)
from nemotron.stack.evaluation.scoring import evaluate_tasks, prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import turns
from nemotron.stack.models.decoding.generate import Generation

PROMPTS = ["a", "What is 12+7?", "def f(x):", "a", "zzzzzzzzzzzzzzzz", "12"]

CALL = "<tool_call><function=calculator><parameter=expression>1+2</parameter></function></tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["What is 12+7? def f(x): return x"], 300)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokenizer lies."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("M*E", vocab_size=tokenizer.get_vocab_size())


def test_completions_come_in_the_order_of_the_prompts(model: NemotronH, folder: Path) -> None:
    together = model_generate_fn(model, folder, "nano3", max_new_tokens=6, batch_size=4)(
        PROMPTS, temperature=0.0, seed=0
    )
    alone = model_generate_fn(model, folder, "nano3", max_new_tokens=6, batch_size=1)
    assert [done.text for done in together] == [alone([p], temperature=0.0, seed=0)[0].text for p in PROMPTS]
    assert len({done.text for done in together}) > 2
    assert all(done.num_tokens == 6 or done.finished for done in together)
    assert all(0 < done.entropy < torch.log(torch.tensor(300.0)) for done in together)


def test_samples_of_a_prompt_stand_together_and_the_seed_decides(model: NemotronH, folder: Path) -> None:
    generate = model_generate_fn(model, folder, "nano3", max_new_tokens=6, batch_size=8)
    greedy = generate(PROMPTS, temperature=0.0, seed=0, samples=3)
    assert [done.text for done in greedy] == [
        done.text for done in generate(PROMPTS, temperature=0.0, seed=0) for _ in range(3)
    ]
    first, again, other = (generate(PROMPTS, temperature=1.0, seed=seed, samples=3) for seed in (1, 1, 2))
    assert first == again and first != other
    assert len({done.text for done in first[:3]}) > 1


@pytest.mark.parametrize("template", [None, "nano3"])
@pytest.mark.parametrize("stop", ["</s>", "<|im_end|>", ""])
def test_right_answers_are_right_whatever_ends_them(
    model: NemotronH, folder: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, stop: str
) -> None:
    tokenizer, tasks = load_tokenizer(folder), generate_tasks("multiple_choice", "eval", 5)
    texts = [f"{t.solution.reasoning}\n{'</think>' if template else ''}{t.solution.answer}{stop}" for t in tasks]
    tokens = {prompt_text(t, template): tokenizer.encode(text).ids for t, text in zip(tasks, texts, strict=True)}

    def generated(model: NemotronH, prompts: list[list[int]], *_: object, **__: object) -> Generation:
        out = [tokens[tokenizer.decode(prompt, skip_special_tokens=False)] for prompt in prompts]
        return Generation(out, [[0.0]] * len(out), [bool(stop)] * len(out), [1.0] * len(out))

    monkeypatch.setattr(turns, "generate", generated)
    evaluation = evaluate_model(model, folder, tasks, ResponsesConfig(samples=0), template=template)
    assert evaluation.greedy_T.tolist() == [1] * 5
    assert not any(record["greedy"].endswith(">") for record in evaluation.generations(5))


@pytest.mark.parametrize(
    ("tool_share", "text", "share"),
    [
        (0.0, "hm</think>CALL", 1.0),
        (0.0, "CALL</think>12", 0.0),  # thought of, not called
        (0.0, "hm</think>12", 0.0),
        (1.0, "hm</think>CALL", 0.0),
        (1.0, "hm</think>" + CALL.replace("calculator", "search"), 1.0),
    ],
)
def test_hallucinated_tools_are_counted(
    model: NemotronH, folder: Path, monkeypatch: pytest.MonkeyPatch, tool_share: float, text: str, share: float
) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text.replace("CALL", CALL) + "<|im_end|>").ids

    def generated(model: NemotronH, prompts: list[list[int]], *_: object, **__: object) -> Generation:
        n = len(prompts)
        return Generation([list(ids)] * n, [[0.0] * len(ids)] * n, [True] * n, [1.0] * n)

    monkeypatch.setattr(turns, "generate", generated)
    tasks = generate_tasks("math", "eval", 3, 0, {"tool_share": tool_share})
    settings = ResponsesConfig(samples=0, max_turns=2)
    evaluation = evaluate_model(model, folder, tasks, settings, template="nano3")
    assert evaluation.hallucinated_tool().estimate == share


def test_a_call_is_seen_where_no_prompt_opens_reasoning(
    model: NemotronH, folder: Path, plain_chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = load_tokenizer(folder).encode(f"{CALL}<|im_end|>").ids
    monkeypatch.setattr(turns, "generate", lambda *_, **__: Generation([list(ids)], [[0.0] * len(ids)], [True], [1.0]))
    generate = model_generate_fn(model, folder, plain_chat)
    (completion,) = generate(["<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"], temperature=0.0, seed=0)
    assert completion.called == ("calculator",)


def test_a_template_whose_end_of_turn_is_no_token_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="has no token <SPECIAL_12>, which ends a turn of chat template nano2"):
        stop_token_ids(folder, "nano2")


def test_progress_counts_responses(model: NemotronH, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate = model_generate_fn(model, folder, "nano3", max_new_tokens=6, batch_size=4, show_progress=True)
    generate(PROMPTS, temperature=1.0, seed=0, samples=2)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("sampled   4/12   33%") and last.startswith("sampled  12/12  100%") and "tok/s" in last


def test_a_signal_stops_generation(model: NemotronH, folder: Path) -> None:
    def poll() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_generate_fn(model, folder, "nano3", max_new_tokens=6, poll=poll)(PROMPTS, temperature=0.0, seed=0)


def test_a_model_on_disk_scores_as_the_one_in_memory(model: NemotronH, folder: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tasks = generate_tasks("multiple_choice", "eval", 4)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    loaded = NemotronH.from_pretrained(tmp_path)
    settings = ResponsesConfig(samples=2, max_new_tokens=5)
    on_disk = evaluate_model(loaded, folder, tasks, settings, template="nano3")
    in_memory = evaluate_model(model, folder, tasks, settings, template="nano3")
    assert on_disk.greedy_completions == in_memory.greedy_completions
    assert on_disk.sampled_completions == in_memory.sampled_completions


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def rambler(tokenizer: Tokenizer, small_model: Callable[..., NemotronH]) -> NemotronH:
    """Writes neither `</think>` nor an end of its own accord."""
    model = small_model("M*E", vocab_size=tokenizer.get_vocab_size())
    with torch.no_grad():
        model.lm_head.weight[[tokenizer.token_to_id(token) for token in ("</think>", "<|im_end|>", "</s>")]] = 0.0
    return model


def test_a_budget_ends_reasoning_as_the_template_does(
    rambler: NemotronH, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, settings = generate_tasks("math", "eval", 4), ResponsesConfig(samples=1, max_new_tokens=12)
    generate, written = turns.generate, []

    def recorded(*words: Any, **options: Any) -> Generation:
        out = generate(*words, **options)
        written.extend(out.tokens)
        return out

    monkeypatch.setattr(turns, "generate", recorded)
    free = evaluate_model(rambler, folder, tasks, settings, template="nano3")
    evaluate_model(rambler, folder, tasks, settings, template="nano3", max_reasoning=5)
    end = load_tokenizer(folder).encode("\n</think>\n", add_special_tokens=False).ids
    assert len(written) == 16 and len(end) == 3
    reasoning = [row for row in range(8) if len(written[row]) == 12]  # those drawn by chance may end before
    assert len(reasoning) > 4
    for row in reasoning:
        assert end[1] not in written[row] and written[8 + row][:8] == [*written[row][:5], *end]
    budget = replace(reasoning_budget(folder, "nano3", 7, 12), max_tokens=12)
    generate_fn = model_generate_fn(rambler, folder, "nano3", max_new_tokens=12, budget=budget)
    large = evaluate_tasks(generate_fn, tasks, template="nano3", samples=1, seed=settings.seed)
    assert large.greedy_completions == free.greedy_completions
    assert large.sampled_completions == free.sampled_completions
    with pytest.raises(UserError, match="a reasoning budget of 9 leaves no answer in 12 new tokens"):
        evaluate_model(rambler, folder, tasks, settings, template="nano3", max_reasoning=9)


def test_a_budget_leaves_a_prompt_alone_that_opens_the_answer(rambler: NemotronH, folder: Path) -> None:
    """As one whose question says `/no_think` does under Nano 2's template."""
    ask = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n<think>"
    prompts = [f"{ask}\n", f"{ask}</think>"]
    free, held = (
        model_generate_fn(rambler, folder, "nano3", max_new_tokens=12, budget=budget)(
            prompts, temperature=0.0, seed=0, samples=2
        )
        for budget in (None, reasoning_budget(folder, "nano3", 5, 12))
    )
    assert ["</think>" in completion.text for completion in held] == [True, True, False, False]
    assert held[2:] == free[2:] and held[:2] != free[:2]


def test_a_budget_of_a_tokenizer_whose_tags_are_several_tokens(tmp_path: Path) -> None:
    """As that of Nano v2, and as the one that its recipe trains."""
    tokenizer = train_tokenizer(["words of </think>", "> \n\n"] * 9, 300, template="nano2")
    save_tokenizer(tokenizer, tmp_path, model_max_length=99, template="nano2")
    budget = reasoning_budget(tmp_path, "nano2", 7, 40)
    assert len(budget.tag_ids) > 1
    assert tokenizer.decode(budget.end_ids) == "\n</think>\n\n"
    assert "</think>" in tokenizer.decode(budget.tag_ids) and not tokenizer.decode(budget.tag_ids).startswith("\n")


def test_a_budget_of_nothing_is_reasoning_off(rambler: NemotronH, folder: Path) -> None:
    tasks, settings = generate_tasks("math", "eval", 4), ResponsesConfig(samples=1, max_new_tokens=6)
    none = evaluate_model(rambler, folder, tasks, settings, template="nano3", max_reasoning=0)
    off = evaluate_model(rambler, folder, tasks, settings, template="nano3", thinking=False)
    assert none.prompt_format == "chat_no_think" and none.greedy_completions == off.greedy_completions
    on = evaluate_model(rambler, folder, tasks, settings, template="nano3", thinking=False, max_reasoning=3)
    assert on.greedy_completions == off.greedy_completions, "there is no reasoning to end"
    assert none.sampled_completions == off.sampled_completions != []
