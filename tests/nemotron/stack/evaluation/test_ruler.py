"""RULER's tasks: no prompt is longer than asked for, answers stand where they are said to, and the seed decides."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import chat
from nemotron.kit.schemas.evaluation import RulerConfig, RulerTask
from nemotron.stack.evaluation import ruler_score
from nemotron.stack.evaluation.retrieval import single_token_words
from nemotron.stack.evaluation.ruler import Material, Passage, Sample, make_samples
from nemotron.stack.evaluation.ruler_score import read_passages, score_ruler, sentences_of
from nemotron.stack.evaluation.scoring import Completion
from nemotron.stack.models import NemotronH

TASKS: tuple[RulerTask, ...] = get_args(RulerTask)
NAMES = [a + b + "an" for a in ("b", "d", "f", "g", "l", "m", "n", "p") for b in ("o", "el", "ar", "it", "un")]
TEXT = [f"The town of {name} has {i} houses and a river." for i, name in enumerate(NAMES, 100)]
PASSAGES = [
    Passage(text, f"How many houses has {name}?", (str(i),))
    for i, (text, name) in enumerate(zip(TEXT, NAMES, strict=True), 100)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([*TEXT, *(f"a {name} in {name} of {name}" for name in NAMES)] * 20, 600)


@pytest.fixture(scope="module")
def material(tokenizer: Tokenizer) -> Material:
    return Material([token[1:] for token, _ in single_token_words(tokenizer)], TEXT, PASSAGES)


def tokens_of(tokenizer: Tokenizer, sample: Sample) -> int:
    prompt = chat.render([{"role": "user", "content": sample.prompt}], add_generation_prompt=True, template="nano3")
    return len(tokenizer.encode(prompt, add_special_tokens=False))


@given(task=st.sampled_from(TASKS), length=st.integers(330, 1200), seed=st.integers(0, 9))
@settings(max_examples=20)
def test_no_prompt_is_too_long_and_answers_stand_where_they_are_said_to(
    tokenizer: Tokenizer, material: Material, task: RulerTask, length: int, seed: int
) -> None:
    def fits(sample: Sample) -> bool:
        return tokens_of(tokenizer, sample) <= length

    samples = make_samples(task, material, 2, seed, fits)
    assert samples == make_samples(task, material, 2, seed, fits)
    assert samples[0] != samples[1] and samples[0] == make_samples(task, material, 1, seed, fits)[0]
    for sample in samples:
        assert tokens_of(tokenizer, sample) <= length
        assert len(sample.answers) == len(sample.places) > 0
        for answer, place in zip(sample.answers, sample.places, strict=True):
            assert sample.prompt[place : place + len(answer)] == answer
        assert sample.recall(f"It is {', '.join(sample.answers).upper()}.") == 1.0 and sample.recall("") == 0.0
        assert 0 < sample.chance <= 1


def test_prompts_fill_their_length(tokenizer: Tokenizer, material: Material) -> None:
    largest_unit = {"niah_multikey_3": 120, "frequent_words": 60, "qa": 60}  # tokens
    for task in TASKS:
        for sample in make_samples(task, material, 3, 0, lambda sample: tokens_of(tokenizer, sample) <= 900):
            assert tokens_of(tokenizer, sample) > 900 - largest_unit.get(task, 40), task


def made(material: Material, task: RulerTask, characters: int = 3000) -> list[Sample]:
    return make_samples(task, material, 5, 1, lambda sample: len(sample.prompt) <= characters)


FACT = re.compile(r"The code for (\S+) is (\S+)\.")


@pytest.mark.parametrize(
    ("task", "keys", "asked"),
    [("niah_single_1", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 1, 4), ("niah_multiquery", 4, 4)],
)
def test_needles_are_as_many_as_the_paper_says(material: Material, task: RulerTask, keys: int, asked: int) -> None:
    for sample in made(material, task):
        facts = FACT.findall(sample.prompt)
        assert len({key for key, _ in facts}) == keys and len(facts) == max(keys, asked) == sample.candidates
        question = sample.prompt.rsplit("\n", 1)[1]
        told = [value for key, value in facts if re.search(rf"\b{key}\b", question)]
        assert sorted(told) == sorted(sample.answers) and len(told) == asked
        assert all(re.fullmatch("[1-9][0-9]{6}", value) for value in told)


def test_a_haystack_of_facts_has_nothing_else(material: Material) -> None:
    (sample, *_) = made(material, "niah_multikey_3")
    facts = FACT.findall(sample.prompt)
    assert len(facts) == sample.candidates > 10 and len(dict(facts)) == len(facts)
    assert sample.chance == pytest.approx(1 / len(facts))
    key = re.search(r"for (\S+)\?$", sample.prompt)
    assert key is not None and dict(facts)[key[1]] == sample.answers[0]
    rest = " ".join(FACT.sub("", sample.prompt).split())
    assert rest == f"Remember the codes in this text. What is the code for {key[1]}?"


def test_a_variable_copies_one_that_was_set_before_it(material: Material) -> None:
    for sample in made(material, "variable_tracking"):
        known = {"": ""}
        for name, value in re.findall(r"VAR (\w+) = (\w+)", sample.prompt):
            known[name] = known.get(value, value)  # a variable that was not set yet would stay a name
        asked = sample.prompt.rsplit(" ", 1)[1].rstrip("?")
        assert [name for name, value in known.items() if value == asked] == list(sample.answers)
        assert len(sample.answers) == 5 and asked.isdecimal()


@pytest.mark.parametrize(("task", "asked"), [("common_words", 10), ("frequent_words", 3)])
@pytest.mark.parametrize("characters", [600, 900, 1500, 4000, 20_000])
def test_the_words_asked_for_are_the_most_frequent_ones(
    material: Material, task: RulerTask, asked: int, characters: int
) -> None:
    for sample in made(material, task, characters):
        counts = Counter(sample.prompt.split("\n")[1].split())
        dots = counts.pop("...", None)
        ranked = counts.most_common()
        assert {word for word, _ in ranked[:asked]} == set(sample.answers)
        assert ranked[asked - 1][1] > ranked[asked][1] and len(counts) == sample.candidates
        if task == "frequent_words":
            assert dots is not None and dots > ranked[0][1] > ranked[1][1] > ranked[2][1]


def test_a_question_about_one_passage_stands_behind_all_of_them(material: Material) -> None:
    samples = made(material, "qa", 100_000)  # all fit
    assert [sample.candidates for sample in samples] == [len(PASSAGES)] * 5
    assert [sample.answers for sample in samples] == [passage.answers for passage in PASSAGES[:5]]
    assert len({sample.places for sample in samples}) > 1  # not always in the same place


def test_a_passage_with_several_questions_stands_in_a_prompt_once(material: Material) -> None:
    twice = [replace(passage, question="And then?") for passage in PASSAGES]
    samples = made(replace(material, passages=[*PASSAGES, *twice]), "qa", 100_000)  # all fit
    assert [sample.candidates for sample in samples] == [len(PASSAGES)] * 5


def test_recall_is_a_share_of_the_strings_or_any_of_them() -> None:
    sample = Sample("", "", ("red", "Blue", "green", "pink"), (0, 0, 0, 0), 8)
    assert sample.recall("blue, RED") == 0.5 and sample.chance == 0.5
    either = Sample("", "", ("red", "blue"), (0, 0), 8, any_of=True)
    assert either.recall("blue") == 1 and either.recall("pink") == 0 and either.chance == 1 / 8


@pytest.mark.parametrize("which", ["nano3", "plain chat", None])
def test_scores_are_of_what_the_model_says(
    which: str | None, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    small_model: Callable[..., NemotronH], plain_chat: str,
) -> None:  # fmt: skip
    template = plain_chat if which == "plain chat" else which
    end = {"nano3": "<think>\n", "plain chat": "assistant\n", None: "is"}[which]
    save_tokenizer(tokenizer, tmp_path, model_max_length=512, template="nano3")
    prompts: list[str] = []

    def generate_fn(*_: Any, max_new_tokens: int, **__: Any) -> Callable[..., list[Completion]]:
        def generate(asked: list[str], *, temperature: float, seed: int) -> list[Completion]:
            prompts.extend(asked)
            facts = [FACT.search(prompt) for prompt in asked]
            said = [fact[2] if fact and i % 2 else "nothing" for i, fact in enumerate(facts)]
            return [Completion(f"{text}</think>{text}" if which == "nano3" else text, 1, 0.0, True) for text in said]

        return generate

    monkeypatch.setattr(ruler_score, "model_generate_fn", generate_fn)
    config = RulerConfig(lengths=[400, 800], tasks=["niah_single_1", "niah_multikey_2"], per_task=8, max_new_tokens=16)
    scores = score_ruler(small_model("M"), tmp_path, [], config, template=template, thinking=True)
    assert list(scores) == ["400", "800"] and list(scores["400"]) == ["niah_single_1", "niah_multikey_2"]
    for at in scores.values():
        single, several = at["niah_single_1"], at["niah_multikey_2"]
        assert single["recall"] == 0.5 and single["recall_95"][0] < 0.5 < single["recall_95"][1]
        assert several["recall"] < 0.5 and several["chance"] < single["chance"] == 1.0
    lengths = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    assert max(lengths[:16]) <= 384 < min(lengths[16:]) and max(lengths) <= 784
    assert all(prompt.endswith(end) for prompt in prompts)
    short = config.model_copy(update={"lengths": [300], "tasks": ["frequent_words"], "max_new_tokens": 250})
    with pytest.raises(UserError, match=r"ruler\.lengths, 300: RULER's frequent_words does not fit"):
        score_ruler(small_model("M"), tmp_path, [], short, template=template, thinking=True)


def test_what_is_missing_is_said(material: Material, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="does not fit"):
        make_samples("niah_multiquery", material, 1, 0, lambda sample: len(sample.prompt) < 100)
    with pytest.raises(UserError, match="held-out text"):
        make_samples("niah_single_2", Material(material.words), 1, 0, lambda _: False)
    with pytest.raises(UserError, match="passages"):
        make_samples("qa", Material(material.words), 1, 0, lambda _: False)
    file = tmp_path / "passages.jsonl"
    file.write_text(
        json.dumps({"passage": "Bob has 3 cats.", "question": "How many?", "answer": ["3", "3 cats"]}) + "\n"
    )
    assert read_passages(file) == [Passage("Bob has 3 cats.", "How many?", ("3", "3 cats"))]
    text = "Two\u2028lines."  # a line ends at \\n alone; a mark at the beginning and empty lines are passed over
    file.write_text(
        "\ufeff" + json.dumps({"passage": text, "question": "?", "answer": "Two"}, ensure_ascii=False) + "\n\n"
    )
    assert read_passages(file) == [Passage(text, "?", ("Two",))]
    file.write_text('{"passage": "Bob has 3 cats.", "question": "How many?", "answer": "4"}')
    with pytest.raises(UserError, match=r"passages\.jsonl:1: the answer '4' does not stand"):
        read_passages(file)
    file.write_text('{"question": "How many?", "answer": "4"}')
    with pytest.raises(UserError, match="passage, question and answer expected"):
        read_passages(file)


def test_sentences_are_those_of_the_documents(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The town of boan has a river. It is old!\nthe end", add_special_tokens=False).ids
    sentences = sentences_of(tokenizer, [np.array(ids)])
    assert sentences == ["The town of boan has a river.", "It is old!", "the end"]
