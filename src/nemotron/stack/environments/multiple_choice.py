"""Multiple choice: lettered options, one of them right, verified by the letter.

Generated kinds: the largest or smallest number, the word that starts or ends with a letter, the word of a category, the
odd one out. The careful reasoning trace goes through the options one by one; the short one names the choice at once.
`spec` is {"letter": …, "options": [text, …]}.

Published (`from_gym`): `spec` is {"expected_answer": letter, "options": {letter: text}, "grading_mode": …,
"output_regex": [pattern, …]}. The options may be missing. `grading_mode` says where the answer stands:

- strict_single_letter_boxed: a capital letter in the last `\\boxed{}`, which may be wrapped in `\\text{}`, brackets or
  `$`, and be followed by the text of its option: `\\boxed{B}`, `\\boxed{(B)}`, `\\boxed{B. four}`.
- lenient_boxed: that, or the text of one option in the last `\\boxed{}`.
- lenient_answer_colon: what follows the last `Answer:`, a letter or the text of one option.

Of patterns the first that is found counts, where it is found last; its group is a letter or the text of an option.
Where none is found, `grading_mode` decides; an answer over which one takes more than 1 s of processor time chooses
nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit.schemas.difficulty import MultipleChoiceDifficulty
from nemotron.stack.environments.boxed import last_boxed
from nemotron.stack.environments.gym import canonical_of, prompt_of, text_in
from nemotron.stack.environments.killable import OutOfTimeError
from nemotron.stack.environments.patterns import last_found
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong
from nemotron.stack.environments.words import CATEGORY_OF, word_list, words_by_category

FAMILY = "multiple_choice"
LETTERS = "ABCDEF"
STRICT, LENIENT_BOXED, ANSWER_COLON = GRADING_MODES = (
    "strict_single_letter_boxed",
    "lenient_boxed",
    "lenient_answer_colon",
)
_LETTER = re.compile(r"\(?([A-Z])[).:]?(?:\s+(\S+))?")
_TEXT = re.compile(r"\\text\{(.*)\}", re.DOTALL)
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ("$", "$"))
_PHRASINGS: dict[str, tuple[str, ...]] = {
    "largest": ("Which is the largest?", "Choose the largest number."),
    "smallest": ("Which is the smallest?", "Choose the smallest number."),
    "starts_with": ("Which starts with {}?", "Choose the word that starts with {}."),
    "ends_with": ("Which ends with {}?", "Choose the word that ends with {}."),
    "category": ("Which is a kind of {}?", "Choose the {}."),
    "odd_one_out": ("Which is the odd one out?", "Choose the odd one out."),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A question of one kind; `query`: the letter or category asked for; `options[0]` is the right one, unshuffled."""

    kind: str
    query: str
    options: tuple[str, ...]

    @property
    def canonical(self) -> str:
        """One string for all orders of the options."""
        return f"{FAMILY}|{self.kind}|{self.query}|{','.join(sorted(self.options))}"


def draw(rng: random.Random, difficulty: MultipleChoiceDifficulty) -> Problem:
    """Draw one problem."""
    kind, count = rng.choice(difficulty.kinds), difficulty.num_options
    if kind in ("largest", "smallest"):
        numbers = rng.sample(range(10 ** (difficulty.min_digits - 1), 10**difficulty.max_digits), count)
        numbers.sort(reverse=kind == "largest")
        return Problem(kind, "", tuple(map(str, numbers)))
    words = word_list(difficulty.words_per_category)
    if kind == "odd_one_out":
        odd = rng.choice(words)
        others = [
            category for category in words_by_category(difficulty.words_per_category) if category != CATEGORY_OF[odd]
        ]
        same = words_by_category(difficulty.words_per_category)[rng.choice(others)]
        return Problem(kind, "", (odd, *rng.sample(same, count - 1)))
    while True:  # until the first word is the only one with its property
        options = tuple(rng.sample(words, count))
        query = _property(kind, options[0])
        if all(_property(kind, other) != query for other in options[1:]):
            return Problem(kind, query, options)


def build(problem: Problem, difficulty: MultipleChoiceDifficulty, rng: random.Random) -> Task:
    """Shuffle and word the problem and draw its demonstration."""
    options = list(problem.options)
    rng.shuffle(options)
    letter = LETTERS[options.index(problem.options[0])]
    question = rng.choice(_PHRASINGS[problem.kind]).format(problem.query)
    prompt = question + "".join(f" {name}) {option}" for name, option in zip(LETTERS, options, strict=False))
    careful = rng.random() < difficulty.careful_share
    reasoning = _careful(problem.kind, options, problem.options[0]) if careful else f"{problem.options[0]} {letter}"
    spec = {"letter": letter, "options": options}
    solution = Solution(reasoning, letter, "careful" if careful else "short")
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def _property(kind: str, word: str) -> str:
    """What the question asks about a word: its first letter, its last letter, or its category."""
    if kind == "starts_with":
        return word[0]
    return word[-1] if kind == "ends_with" else CATEGORY_OF[word]


def _careful(kind: str, options: list[str], right_option: str) -> str:
    """A trace that ends with the letter of the answer, so that answering is copying.

    Numbers: the best so far and its letter, option by option: `14 A, 52 B, 52 B, 87 D`. Words: the property asked
    about, option by option, then the one that fits: `animal A, vehicle B, tool C, body D: vehicle B`.
    """
    if kind in ("largest", "smallest"):
        better = max if kind == "largest" else min
        so_far = [better(options[: end + 1], key=int) for end in range(len(options))]
        return ", ".join(f"{option} {LETTERS[options.index(option)]}" for option in so_far)
    asked = "category" if kind == "odd_one_out" else kind
    steps = [f"{_property(asked, option)} {name}" for name, option in zip(LETTERS, options, strict=False)]
    return f"{', '.join(steps)}: {steps[options.index(right_option)]}"


def from_gym(record: Mapping[str, Any]) -> Task:
    """A record for the resources server `mcqa`; UserError where it cannot be verified."""
    prompt, letter = prompt_of(record), text_in(record, "expected_answer").upper()
    options = _options(record.get("options"))
    mode = record.get("grading_mode") or STRICT
    if mode not in GRADING_MODES:
        raise UserError(f"grading_mode {mode!r} is not known", did_you_mean(str(mode), GRADING_MODES))
    if options and letter not in options:
        raise UserError(f"expected_answer {letter!r} is none of the options {', '.join(options)}")
    if not re.fullmatch("[A-Z]", letter):
        raise UserError(f"expected_answer must be a letter, not {letter!r}")
    spec: dict[str, Any] = {"expected_answer": letter, "options": options, "grading_mode": mode}
    metadata = record.get("template_metadata")
    patterns = metadata.get("output_regex") if isinstance(metadata, Mapping) else None
    answer = f"Answer: {letter}" if mode == ANSWER_COLON else f"\\boxed{{{letter}}}"
    if patterns:
        spec["output_regex"] = patterns if isinstance(patterns, list) else [patterns]
        for pattern in spec["output_regex"]:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as failure:
                raise UserError(f"output_regex {pattern!r} is not a regular expression: {failure}") from None
    return Task(FAMILY, prompt, canonical_of(FAMILY, prompt), spec, Solution("", answer))


def _options(value: Any) -> dict[str, str]:
    """[{"A": text}, {"B": text}] by letter; a letter without text, which files in columns have, is no option."""
    options: dict[str, str] = {}
    for entry in value or []:
        if not isinstance(entry, Mapping):
            raise UserError(f'options must be a list as [{{"A": "text"}}, {{"B": "text"}}], not of {entry!r}')
        options |= {str(letter).upper(): str(text) for letter, text in entry.items() if text is not None}
    if any(not re.fullmatch("[A-Z]", letter) for letter in options):
        raise UserError(f"options are named by one letter each, not {', '.join(options)}")
    return options


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if the answer is the letter (`B`, `(B)`, `B)`, `B.`), optionally followed by the text of that option; of a
    published question, if the letter or text is right where `grading_mode` or `output_regex` looks for it."""
    if "expected_answer" in spec:
        letter, expected = _published_letter(spec, answer), spec["expected_answer"]
        if letter is None:
            return wrong("no option where the answer has to stand")
        return right() if letter == expected else wrong(f"{letter} is not {expected}")
    letter, options = str(spec["letter"]), list(spec["options"])
    text = options[LETTERS.index(letter)]
    match = _LETTER.fullmatch(answer)
    if match is None:
        return wrong("not an option letter")
    if match.group(1) != letter:
        return wrong(f"{match.group(1)} is not {letter}")
    return right() if match.group(2) in (None, text) else wrong(f"option {letter} is {text}")


def answered(spec: dict[str, Any], answer: str) -> str | None:
    """What is compared of an answer: the letter of an option, with the text after it if it is not that of the option;
    None where it has none."""
    if "expected_answer" in spec:
        return _published_letter(spec, answer)
    match = _LETTER.fullmatch(answer)
    if match is None:
        return None
    letter, text = match.groups()
    known = dict(zip(LETTERS, spec["options"], strict=False))
    return letter if text in (None, known.get(letter)) else f"{letter} {text}"


def _published_letter(spec: Mapping[str, Any], answer: str) -> str | None:
    """The letter that a response to a published question chooses, or None."""
    options: dict[str, str] = spec.get("options") or {}
    for pattern in spec.get("output_regex") or []:
        try:
            found = last_found(pattern, answer)
        except OutOfTimeError:
            return None
        if found is not None:
            chosen = _unwrapped(found)
            return _allowed(chosen, options) or _option_with(chosen, options)
    match spec["grading_mode"]:
        case "strict_single_letter_boxed":
            return _boxed_letter(answer, options)
        case "lenient_boxed":
            return _boxed_letter(answer, options) or _option_with(_unwrapped(last_boxed(answer) or ""), options)
        case "lenient_answer_colon":
            ends = [match.end() for match in re.finditer(r"answer\s*:\s*(?=.)", answer, re.IGNORECASE)]
            chosen = _unwrapped(answer[ends[-1] :].split("\n")[0], brackets=()) if ends else ""
            return _allowed(chosen, options) or _option_with(chosen, options)
        case other:
            raise ValueError(f"unknown grading_mode {other!r}")


def _boxed_letter(answer: str, options: Mapping[str, str]) -> str | None:
    """The capital letter in the last box; None if anything follows it but the text of its option.

    `A, B`, `A or B`, `A-level` and `E. coli` (unless that is option E) choose nothing.
    """
    content = _unwrapped(last_boxed(answer) or "")
    match = re.fullmatch(r"\(?([A-Z])\)?(?:\s*[.):-]\s*(.*))?", content, re.DOTALL)
    if match is None or (letter := _allowed(match[1], options)) is None:
        return None
    return letter if not match[2] or _plain(match[2]) == _plain(options.get(letter, "")) else None


def _allowed(text: str, options: Mapping[str, str]) -> str | None:
    """The letter, if the text is one that may be chosen: that of an option, or any where the record lists none."""
    letter = text.upper() if text.isascii() else ""  # the upper case of a dotless i is an I
    return letter if re.fullmatch("[A-Z]", letter) and (not options or letter in options) else None


def _option_with(text: str, options: Mapping[str, str]) -> str | None:
    """The one option with this text, but for case and blanks."""
    letters = [letter for letter, option in options.items() if _plain(option) and _plain(option) == _plain(text)]
    return letters[0] if len(letters) == 1 else None


def _unwrapped(text: str, brackets: tuple[tuple[str, str], ...] = _BRACKETS) -> str:
    """Without `\\text{}` and brackets around all of it."""
    text = text.strip()
    while True:
        match = _TEXT.fullmatch(text)
        inner = match[1] if match else next((text[1:-1] for a, b in brackets if text[:1] == a and text[-1:] == b), text)
        if inner == text or len(text) < 2:
            return text
        text = inner.strip()


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def space_size(difficulty: MultipleChoiceDifficulty) -> int:
    """Number of different canonical tasks, exact: choices of the options, times what can be asked about them."""
    count, total = difficulty.num_options, 0
    words = word_list(difficulty.words_per_category)
    for kind in set(difficulty.kinds):
        if kind in ("largest", "smallest"):
            total += comb(10**difficulty.max_digits - 10 ** (difficulty.min_digits - 1), count)
        elif kind == "odd_one_out":
            size = difficulty.words_per_category
            total += len(words) // size * comb(size, count - 1) * (len(words) - size)
        else:
            properties = [_property(kind, word) for word in words]
            for value in set(properties):
                share = properties.count(value)
                total += share * comb(len(words) - share, count - 1)
    return total
