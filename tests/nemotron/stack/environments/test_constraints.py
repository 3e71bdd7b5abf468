"""Constraints of published records: what NeMo Gym's environment was recorded to say, and definitions by hand."""

from __future__ import annotations

import math
import random
import unicodedata
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.environments import Solution, Task, from_gym, prompt_messages, verify
from nemotron.stack.environments.constraints import follows, follows_loosely, sentences_of

from .recorded_cases import cases

pytest.importorskip("py3langid")

RECORDED = cases("gym_instruction_following")
ERROR = "error"
# Recorded cases that score otherwise here: the flaw that each shows, and the reward here.
DIFFERENT: dict[str, tuple[str, float | str]] = {
    "0002": ("a keyword is found in the middle of another word", 0.0),
    "0009": ("an empty response follows a constraint that only forbids", 0.0),
    "0059": ("NaN passes as JSON", 0.0),
    "0090": ("a full-width comma is not seen", 0.0),
    "0093": ("a full-width full stop is not seen", 0.0),
    "0096": ("a full-width exclamation mark is not seen", 0.0),
    "0112": ("an empty response follows", 0.0),
    "0156": ("a digit is a palindrome", 0.25),
    "0179": ("a record without constraints is passed by every response", ERROR),
    "0180": ("a record without constraints is failed by every response", ERROR),
    "0181": ("an unknown constraint is not followed by any response", ERROR),
    "0182": ("an unknown constraint is not followed by any response", ERROR),
    "0184": ("constraints without arguments are dropped", ERROR),
    "0185": ("constraints without arguments are dropped", ERROR),
    "0187": ("an empty response follows", 0.0),
    "0188": ("a missing response follows", 0.0),
    "0189": ("unknown arguments make a constraint one that no response follows", ERROR),
    "0191": ("a keyword is read as a regular expression", 0.0),
    "0192": ("an unknown relation makes a constraint one that no response follows", ERROR),
}


def number_of(case: dict[str, Any]) -> str:
    return str(case["id"])[-4:]


def task(spec: dict[str, Any]) -> Task:
    return Task("instruction_following", "", "", spec, Solution("", ""))


def test_recorded_rewards_but_for_the_flaws() -> None:
    assert len(RECORDED) == 193
    differing = {}
    for case in RECORDED:
        spec = {name: case["inputs"][name] for name in ("instruction_id_list", "kwargs")}
        verdict = verify(task(spec | case["options"]), case["inputs"]["text"] or "")
        assert math.isnan(verdict.score) == (verdict.status == "error")
        assert (verdict.score > 0) == (verdict.status == "score")
        ours = ERROR if verdict.status == "error" else pytest.approx(verdict.score)
        if ours != (ERROR if "raises" in case["outputs"] else case["outputs"]["reward"]):
            differing[number_of(case)] = ours
    assert differing == {number: reward for number, (_, reward) in DIFFERENT.items()}


def test_at_least_25_constraints_are_recorded_followed_and_not_followed() -> None:
    followed: dict[str, set[float]] = {}
    for case in RECORDED:
        constraints = case["inputs"]["instruction_id_list"]
        if len(constraints) == 1 and number_of(case) not in DIFFERENT and "raises" not in case["outputs"]:
            followed.setdefault(constraints[0], set()).add(case["outputs"]["reward"])
    assert sum(rewards >= {0.0, 1.0} for rewards in followed.values()) >= 40


BY_HAND: list[tuple[str, dict[str, Any], str, str]] = [
    # constraint, arguments, a text that follows it, and one that does not
    ("keywords:existence", {"keywords": ["c++", "猫"]}, "I like C++ and 黒猫.", "I like C and 猫."),
    ("keywords:existence", {"keywords": ["form"]}, "a formal one", "to inform"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a \uff43\uff41\uff54 here"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "cats", "a c\u200bat here"),
    ("keywords:existence", {"keywords": ["\uff21\uff22"]}, "it is \uff21\uff22", "it is A"),
    (
        "keywords:letter_frequency",
        {"letter": "\u2026", "let_frequency": 2, "let_relation": "at least"},
        "wait\u2026 no\u2026",
        "wait\u2026",
    ),
    ("keywords:exclude_word_harder", {"keyword": "cat", "instruction": "a cat"}, "cats", "The end is a cat."),
    ("keywords:letter_frequency", {"letter": "É", "let_frequency": 2, "let_relation": "at least"}, "éÉ", "ée"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a", "aA"),
    ("letters:letter_counting", {"N": 3, "relation": "less than"}, "a 1 b", "abc"),
    ("keywords:no_adjacent_consecutive", {}, "cat apple", 'an "apple" but'),
    ("keywords:palindrome", {}, "A Level, then.", "I say: a b 1 — 22"),
    ("keywords:keyword_specific_position", {"keyword": "cat", "n": 2, "m": 3}, "Yes. See the cat.", "See the cat."),
    ("keywords:start_end", {}, "So it is so", "So it is so."),
    ("count:lowercase_counting", {"N": 1}, "THE CAT sat", "DAS über AND es"),
    ("count:count_unique", {}, "one two, three", "one two One"),
    ("count:count_increment_word", {"keyword1": "cat", "keyword2": "dog"}, "dog cat dogs", "dog cat"),
    (
        "count:counting_composition",
        {"n_sent": 2, "n_words": 2},
        "A b. C d.\n***\nE f. G h.\n* * *\nI j. K l.",
        "A b. C d.\n***\nE f. G h.\n***\nI j. K l m.",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Dr. No. Yes!", "Dr. No."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "About 3.5 e.g. here.",
        "a! b",
    ),
    ("length_constraints:number_words", {"num_words": 2, "relation": "less than"}, "one", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "Cats"},
        "'cats' sleep\n\n\n\nDogs bark",
        "Cats sleep",
    ),
    ("language:response_language", {"language": "fr"}, "Le chat dort sur la table de la cuisine.", "The cat sleeps."),
    ("language:response_language", {"language": "ja"}, "猫はテーブルの上で寝ています。", "123 456"),
    ("change_case:english_capital", {}, "THE CAT SAT", "DER ÄLTERE HUND SCHLÄFT"),
    ("change_case:english_lowercase", {}, "the cat sat", "der hund schläft unter dem tisch in der küche"),
    ("change_case:english_lowercase", {}, "the cat sat", "le chat dort sur la table de la cuisine avec son ami"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "THE cat SAT",
        "THE cat sat",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [street 1]", "[] [ ] [name"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. P. S. One more.", "Stop.s. is P.P.S."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "List:\n* a\n  - b", "* a\n***\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "My answer is yes. My answer is no."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a b* **c**", "** ** *a*"),
    ("detectable_format:multiple_sections", {"section_spliter": "Day.", "num_sections": 1}, "Day. 1", "Days 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": Infinity}'),
    ("detectable_format:title", {}, "<<A day>>\nText", "<< <> >>"),
    ("detectable_format:square_brackets", {}, "[a] [b]", "[a b]"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>> now", "word"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>>", "<<I <<am>>"),
    ("detectable_format:sentence_hyphens", {}, "One is.-Two is.-Three.", "One is.- Two is."),
    ("combination:two_responses", {}, "a\n******\nb", "a******a"),
    ("combination:two_responses", {}, "a******b", "a******b******c"),
    ("copy:copying_multiple", {"prompt_to_repeat": "Hi.", "N": 2}, "hi. ****** Hi.", "Hi.******Hi.******Hi."),
    ("copy:repeat_phrase", {"phrase": "a b c", "small_n": 2}, "a x c, a y c", "a b c, a y c"),
    ("copy:repeat_phrase", {"phrase": "a b a", "small_n": 2}, "a x a a y a", "a x a y a"),
    ("copy:repeat_phrase", {"phrase": "a b c", "small_n": 1}, "a a\na x c", "a\nx c"),
    ("detectable_format:title", {}, "a > b << A day >> and >>", "<<A day\nof>> >> <<>>"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "BC", "abc"),
    ("startend:quotation", {}, '"a"', '""'),
    ("startend:end_checker", {"end_phrase": "Bye."}, '"So: bye."', "Bye. Then."),
    ("first_word:first_word_sent", {"first_word": "so"}, "So it is. So it was.", "So it is. It was."),
    ("last_word:last_word_sent", {"last_word": "so"}, "It is so. Was it so?", "It is so. It was"),
    ("last_word:last_word_answer", {"last_word": "so"}, "It is so!", "so it is"),
    ("paragraphs:paragraphs2", {}, "a\n\nb\n", "a\n\n\n\nb"),
    ("punctuation:no_comma", {}, "a; b", "a، b"),
    ("punctuation:punctuation_dot", {}, "a!", "wait…"),
    ("punctuation:punctuation_exclamation", {}, "a.", "a\u203c"),
]


@pytest.mark.parametrize(("constraint", "arguments", "good", "bad"), BY_HAND)
def test_by_hand(constraint: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(constraint, arguments, good)
    assert not follows(constraint, arguments, bad)
    assert not follows(constraint, arguments, " \n")


@pytest.mark.parametrize(
    ("constraint", "arguments"),
    [
        ("keywords:existance", {}),
        ("keywords:existence", {}),  # the keywords are missing
        ("keywords:existence", {"keywords": "cat"}),  # letters, not words
        ("keywords:existence", {"keywords": ["cat", ""]}),  # the empty text is found everywhere
        ("keywords:frequency", {"keyword": "cat", "frequency": math.nan, "relation": "at least"}),
        ("keywords:frequency", {"keyword": "cat", "frequency": math.inf, "relation": "less than"}),
        ("length_constraints:number_words", {"num_words": "10", "relation": "at least"}),
        ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}),
        ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 2, "let_relation": "at least"}),
        ("punctuation:no_comma", {"keyword": "cat"}),
    ],
)
@pytest.mark.parametrize("text", ["", "cat, dog"])
def test_a_broken_record_is_an_error_for_every_answer(constraint: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        follows(constraint, arguments, text)
    assert verify(task({"instruction_id_list": [constraint], "kwargs": [arguments]}), text).status == "error"


@pytest.mark.parametrize(
    ("constraint", "arguments", "text"),
    [
        ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "c\u200bat c\u200bat"),
        ("keywords:letter_frequency", {"letter": "a", "let_frequency": 1, "let_relation": "less than"}, "\uff41"),
        ("letters:letter_counting", {"N": 1, "relation": "less than"}, "\uff41"),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "less than"},
            "\u24b6 \u24b7",
        ),
    ],
)
def test_other_forms_of_a_character_are_counted(constraint: str, arguments: dict[str, Any], text: str) -> None:
    assert not follows(constraint, arguments, text)
    assert follows(constraint, arguments, "1")


def test_an_unknown_language_is_an_error_and_named() -> None:
    with pytest.raises(UserError, match="unknown language 'ger'"):
        follows("language:response_language", {"language": "ger"}, "Guten Tag")


def test_null_arguments_are_absent_and_whole_floats_are_whole() -> None:
    arguments = {"num_words": 2.0, "relation": "at least", "keywords": None, "language": None}
    assert follows("length_constraints:number_words", arguments, "one two")
    assert follows("punctuation:no_comma", None, "one two")
    place = {"keyword": "dog", "n": 2.0, "m": 1.0}
    assert follows("keywords:keyword_specific_position", place, "A cat. dog runs.")
    assert follows("new:copy_span_idx", {"prompt_to_repeat": "a cat", "n_start": 2.0, "n_end": 5.0}, "cat")


@pytest.mark.parametrize(
    ("text", "loosely"),
    [
        ("Sure, here it is:\nall is well", True),  # without the first line
        ("all is well\nWas it good, then?", True),  # without the last line
        ("Sure, gladly:\nall is well\nNext, please", True),  # without both
        ("Sure, here it is:", False),  # nothing is left
        ("a, b\nc, d\ne, f", False),
    ],
)
def test_the_loose_reading_drops_lines(text: str, loosely: bool) -> None:
    assert not follows("punctuation:no_comma", {}, text)
    assert follows_loosely("punctuation:no_comma", {}, text) == loosely
    loose = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "reading": "loose"}
    assert verify(task(loose), text).score == float(loosely)


def test_the_loose_reading_drops_asterisks() -> None:
    assert not follows("startend:end_checker", {"end_phrase": "the end."}, "This is **the end.**")
    assert follows_loosely("startend:end_checker", {"end_phrase": "the end."}, "This is **the end.**")


def test_an_unknown_reading_is_an_error() -> None:
    spec = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "reading": "lose"}
    assert verify(task(spec), "a").status == "error"


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "no." Then left.', ['He said "no."', "Then left."]),
        ("Dr. J. Smith paid 3.50 at St. Paul. Fine", ["Dr. J. Smith paid 3.50 at St. Paul.", "Fine"]),
        ("Wait... what?!\nOk.", ["Wait...", "what?!", "Ok."]),
        ("", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert sentences_of(text) == sentences


RECORD = {
    "id": 7,
    "responses_create_params": {"input": [{"role": "user", "content": "Name two cats. No commas."}]},
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [None, {"num_words": 2, "relation": "at least", "language": None}],
    "grading_mode": "fraction",
}


def test_a_published_record_is_a_task_wherever_it_has_its_fields() -> None:
    fields = {name: RECORD[name] for name in ("instruction_id_list", "kwargs", "grading_mode")}
    nested = {"responses_create_params": RECORD["responses_create_params"], "verifier_metadata": fields}
    for record in (RECORD, nested):
        each = from_gym("instruction_following", record)
        assert prompt_messages(each) == [{"role": "user", "content": "Name two cats. No commas."}]
        assert [verify(each, answer).score for answer in ("Tom and Kit", "Tom, Kit", "Tom")] == [1.0, 0.5, 0.5]
        assert Task.from_dict(each.to_dict()) == each
    whole = {name: value for name, value in RECORD.items() if name != "grading_mode"}
    assert verify(from_gym("instruction_following", whole), "Tom, Kit").status == "wrong"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kwargs": [{}]}, "2 constraints with 1 arguments"),
        ({"instruction_id_list": [], "kwargs": []}, "0 constraints with 0 arguments"),
        ({"instruction_id_list": ["no:comma", "no:word"]}, "unknown constraint 'no:comma'"),
        ({"kwargs": [{}, {"num_words": 2, "relation": "under"}]}, "unknown relation 'under'"),
        ({"grading_mode": "share"}, "unknown grading_mode 'share'"),
    ],
)
def test_a_published_record_that_nothing_could_follow_is_refused(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_gym("instruction_following", RECORD | fault)


def _adversarial(rng: random.Random) -> list[tuple[dict[str, Any], str]]:
    """Pairs of a spec and an answer that does not follow it, made from a text that does."""
    good = [(constraint, arguments, text) for constraint, arguments, text, _ in BY_HAND]
    bad = [(constraint, arguments, text) for constraint, arguments, _, text in BY_HAND]
    never = {"instruction_id_list": ["combination:repeat_prompt"], "kwargs": [{"prompt_to_repeat": "Say yield now."}]}
    pairs: list[tuple[dict[str, Any], str]] = []
    for _ in range(20):
        for constraint, arguments, text in bad:  # beside a constraint that the answer does follow
            other, others, _ = rng.choice(good)
            spec = {"instruction_id_list": [constraint, other], "kwargs": [arguments, others]}
            pairs.append((spec, rng.choice([text, f"\n{text} ", f"<think>{rng.choice(good)[2]}</think>{text}"])))
    for constraint, arguments, text in good:
        spec = {"instruction_id_list": [constraint], "kwargs": [arguments]}
        pairs += [(spec, empty) for empty in ("", " \n\t", "\u200b", f"<think>{text}</think>", f"<think>{text}")]
    look_alike = str.maketrans("aeo", "\u0430\u0435\u043e")  # Cyrillic
    for text in ("say yield later.", "Sаy yield now.", "Now: Say yield now.", '"Say yield now."', "NaN", "Infinity"):
        pairs += [(never, text), (never, text.translate(look_alike)), (never, text[::-1]), (never, "\\boxed{" + text)]
        pairs.append((never, unicodedata.normalize("NFKD", text) + " say yield now." * 10_000))
    return pairs


def test_no_false_pass_on_1000_adversarial_answers() -> None:
    pairs = _adversarial(random.Random(0))
    assert len(pairs) >= 1000
    assert [(spec, answer) for spec, answer in pairs if verify(task(spec), answer).status != "wrong"] == []


@pytest.mark.parametrize(
    ("constraint", "arguments", "text"),
    [
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "." * 500_000),
        ("detectable_format:json_format", {}, "```json" + "\n" * 100_000 + "x"),
    ],
)
def test_what_a_model_repeats_without_end_is_checked_in_linear_time(
    constraint: str, arguments: dict[str, Any], text: str
) -> None:
    assert not follows(constraint, arguments, text)
