"""Published multiple-choice records: verdicts as recorded, and no answer that passes without choosing the right one."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.environments import from_gym, verify
from nemotron.stack.environments.multiple_choice import GRADING_MODES

from .recorded_cases import cases

FLAWS = {
    84: (1.0, "the first `Answer:` counts; here the last one"),
    118: (0.0, "text that contains that of an option chooses it, `not ocean grove` too; here it has to be that text"),
    157: (1.0, "the first `answer:` of a line counts, and what follows it is no option; here the last one"),
}
BROKEN = {161: "a pattern that is no regular expression is ignored; here the record is refused"}


def record(**fields: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": "Which? A: three B: four C: five"},
        "options": [{"A": "three"}, {"B": "four"}, {"C": "five"}],
        "expected_answer": "B",
        **fields,
    }


def score(answer: str, **fields: Any) -> float:
    return verify(from_gym("mcqa", record(**fields)), answer, thinking=False).score


def test_recorded_rewards_but_for_the_flaws() -> None:
    recorded = cases("gym_mcqa")
    assert len(recorded) == 167
    differing, broken, unused = {}, [], 0
    for number, case in enumerate(recorded):
        options, inputs = case["options"], case["inputs"]
        if options["grading_mode"] not in GRADING_MODES:
            unused += 1  # lenient_answer_colon_md, which no recipe uses
            continue
        fields = {"template_metadata": options, **options, **inputs}
        try:
            scored = score(inputs["text"], **fields)
        except UserError:
            broken.append(number)
            continue
        if scored != case["outputs"]["reward"]:
            differing[number] = scored
    assert differing == {number: score for number, (score, _) in FLAWS.items()}
    assert broken == list(BROKEN) and unused == 24


@pytest.mark.parametrize("answer", ["B", "(B)", "$B$", "\\text{ B }", "B. four", "B) Four", "[B]", "{B}", "\\boxed{B}"])
def test_a_letter_in_a_box_is_right(answer: str) -> None:
    assert score(f"So \\boxed{{{answer}}}.") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "b",
        "B, C",
        "B or C",
        "B-level",
        "B. coli",
        "B) five",
        "B. No, it is C",
        "four",
        "",
        "BB",
        "Β",
        "𝐁",
        "Ｂ",
        "B\u0301",
        "B C",
    ],
)
def test_what_is_not_one_capital_letter_is_wrong(answer: str) -> None:
    assert score(f"\\boxed{{{answer}}}") == 0.0


def test_text_of_an_option_counts_where_the_mode_is_lenient() -> None:
    assert score("\\boxed{Four}", grading_mode="lenient_boxed") == 1.0
    assert score("\\boxed{not four}", grading_mode="lenient_boxed") == 0.0
    twice = [{"A": "four"}, {"B": "four"}]
    assert score("\\boxed{four}", grading_mode="lenient_boxed", options=twice) == 0.0
    assert score("answer: b\nAnswer: C", grading_mode="lenient_answer_colon") == 0.0
    assert score("The answer is\nAnswer: four", grading_mode="lenient_answer_colon") == 1.0
    assert score("My answer: it is odd. Answer: B", grading_mode="lenient_answer_colon") == 1.0
    assert score("Answer: B. Answer: A", grading_mode="lenient_answer_colon") == 0.0


def test_a_dotless_i_is_no_i() -> None:
    options = [{"H": "x"}, {"I": "y"}]
    pattern = {"output_regex": "Choice: (.)"}
    fields = {"options": options, "expected_answer": "I", "template_metadata": pattern}
    assert score("Choice: i", **fields) == 1.0
    assert score("Choice: ı", **fields) == 0.0
    assert score("Answer: ı", **{**fields, "template_metadata": None, "grading_mode": "lenient_answer_colon"}) == 0.0


def test_without_options_any_letter_may_be_chosen() -> None:
    assert score("\\boxed{B}", options=None) == 1.0
    assert score("\\boxed{Q}", options=None) == 0.0


def test_no_false_pass_on_a_thousand_answers() -> None:
    wrong = [
        "A",
        "C",
        "a",
        "c",
        "three",
        "five",
        "A. four",
        "C) four",
        "D",
        "NaN",
        "∞",
        "A and B",
        "B/C",
        "AB",
        "not B",
    ]
    wrong += [
        "neither B nor C",
        "B, no: C",
        "B\u200b",
        "Ｂ",
        "В",
        "B" * 5000,
        "{" * 5000,
        "four five",
        "B.C",
        "B?",
        "½",
    ]
    forms = ["{}", "so {} it is", "<b>{}</b>", "```\n{}\n```", "\\fbox{{{}}}", "boxed{{{}}}", "\\boxed{{{}"]
    boxed = ["\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}", "\\boxed{{ ({}) }}", "$\\boxed{{{}}}$."]
    colon = ["Answer: {}", "answer : {}", "The final answer:{}"]
    answers = [form.format(text) for form in forms + boxed + colon for text in wrong]
    # The right one where this mode does not look, or before the one that counts.
    passing_boxed = [
        f"{right} {last.format(text)}" for right in ("\\boxed{B}", "B") for last in boxed for text in wrong
    ]
    passing_colon = [
        f"{right}\n{last.format(text)}" for right in ("Answer: B", "B.") for last in colon for text in wrong
    ]
    cases = [(mode, answer) for mode in GRADING_MODES for answer in answers]
    cases += [(mode, answer) for mode in GRADING_MODES[:2] for answer in (*passing_boxed, "Answer: B", "B", "")]
    cases += [(GRADING_MODES[2], answer) for answer in (*passing_colon, "\\boxed{B}", "B", "")]
    assert len(cases) > 1000
    assert [case for case in cases if score(case[1], grading_mode=case[0]) != 0.0] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expected_answer": "D"}, "expected_answer 'D' is none of the options A, B, C"),
        ({"expected_answer": "4", "options": None}, "expected_answer must be a letter"),
        ({"options": ["three"]}, "options must be a list as"),
        ({"options": [{"one": "three"}]}, "options are named by one letter each"),
        ({"grading_mode": "strict_boxed"}, "grading_mode 'strict_boxed' is not known"),
        ({"template_metadata": {"output_regex": "("}}, "is not a regular expression"),
    ],
)
def test_a_broken_record_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_gym("mcqa", record(**change))


def test_a_server_without_environment_is_refused() -> None:
    with pytest.raises(UserError, match="no environment here"):
        from_gym("jailbreak_detection", record())
