"""RULER's tasks at any length: what a model finds, follows and counts in a text that fills its context.

C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (arXiv 2404.06654),
section 3 and its table of thirteen tasks: eight needles in a haystack, variable tracking, common and frequent words,
and questions about passages. Written from that description. lm-eval has the tasks, too, with haystacks and passages
that it downloads, from 4,096 tokens on. Here the text between facts is yours, facts are worded as in `retrieval`, which
long-context pretraining trains, and a length is any from 256 tokens: those of the prompt under its chat template and of
the answer together. The score is the paper's: the share of the strings asked for that stand in the answer. No torch.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.evaluation import RulerTask
from nemotron.stack.evaluation.retrieval import END, FACT

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
HOPS = 4  # of a variable's value, from the first that has it
COMMON_WORDS, COMMON_TIMES = 10, 3  # times as often as any other word: as 30 and 3 of the paper's are, at any length
ZIPF = 2.0  # exponent of the frequencies of coded words
FREQUENT_WORDS = 3


@dataclass(frozen=True)
class Sample:
    """A prompt and what has to stand in its answer.

    prefix: what the answer of a model that completes text begins with. answers: the strings; `any_of`: one of them will
    do. places: where in the prompt, in characters, each of them stands. candidates: strings of their kind in the text.
    """

    prompt: str
    prefix: str
    answers: tuple[str, ...]
    places: tuple[int, ...]
    candidates: int
    any_of: bool = False

    def recall(self, answer: str) -> float:
        """Share of the strings that stand in an answer, whatever the case; of `any_of` 1 or 0."""
        found = [string.lower() in answer.lower() for string in self.answers]
        return float(any(found)) if self.any_of else sum(found) / len(found)

    @property
    def chance(self) -> float:
        """Expected recall of naming as many of the candidates as are asked for, drawn at random."""
        return (1 if self.any_of else len(self.answers)) / self.candidates


@dataclass(frozen=True)
class Passage:
    """A passage, a question about it, and answers of which each is right; every one stands in the passage."""

    text: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Material:
    """What samples are made of: single words, sentences of text that stand between facts, passages."""

    words: Sequence[str]
    sentences: Sequence[str] = ()
    passages: Sequence[Passage] = ()


def make_samples(
    task: RulerTask, material: Material, count: int, seed: int, fits: Callable[[Sample], bool]
) -> list[Sample]:
    """`count` samples, each with as much text as `fits` allows; number i is a function of (seed, i) and the material.

    UserError: the material lacks what the task needs, or not even the facts alone fit.
    """
    if task == "qa" and not material.passages:
        raise UserError("RULER's qa asks about passages, and none are given", "name a file of them: ruler.passages")
    needs_words = task == "common_words" or (task in NEEDLES and NEEDLES[task].key == "word")
    if needs_words and len(material.words) < 2 * COMMON_WORDS:
        raise UserError(
            f"RULER's {task} takes {2 * COMMON_WORDS} words of one token, and the tokenizer has {len(material.words)}",
            "leave it out of ruler.tasks",
        )
    samples = []
    for i in range(count):

        def make(filler: int, number: int = i) -> Sample:
            rng = np.random.default_rng([seed, number])
            match task:
                case "variable_tracking":
                    return _variable_tracking(filler, rng)
                case "common_words":
                    return _common_words(material.words, filler, rng)
                case "frequent_words":
                    return _frequent_words(filler, rng)
                case "qa":
                    return _question(material.passages, filler, number, rng)
                case _:
                    return _needles(NEEDLES[task], material, filler, rng)

        samples.append(_longest(make, fits, _most_filler(task, material), task))
    return samples


def _most_filler(task: RulerTask, material: Material) -> float:
    """How much filler there is for a task."""
    if task == "qa":
        return len(material.passages) - 1
    needles = NEEDLES.get(task)
    if needles is not None and needles.haystack == "facts" and needles.key == "word":
        return len(material.words) ** 2 // 2  # keys of two words
    return math.inf


def _longest(make: Callable[[int], Sample], fits: Callable[[Sample], bool], most: float, task: str) -> Sample:
    """The sample with most filler that fits, `most` at most, found by doubling and halving."""
    best, filler, step = make(0), 0, 1
    if not fits(best):
        hint = "ask for longer ones in ruler.lengths, or leave it out of ruler.tasks"
        raise UserError(f"RULER's {task} does not fit", hint)
    while filler + step <= most and fits(sample := make(filler + step)):
        best, filler, step = sample, filler + step, 2 * step
    while step > 1:
        step //= 2
        if filler + step <= most and fits(sample := make(filler + step)):
            best, filler = sample, filler + step
    return best


# ---- needles in a haystack


@dataclass(frozen=True)
class Needles:
    """One of the paper's needle tasks. haystack: repeated sentences, the user's text, or facts that are not asked for.

    keys: facts differ in; values: of each key; asked: how many of the keys.
    """

    haystack: Literal["noise", "text", "facts"]
    keys: int = 1
    values: int = 1
    asked: int = 1
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"


NEEDLES: dict[RulerTask, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuid"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("facts"),
    "niah_multikey_3": Needles("facts", key="uuid", value="uuid"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, asked=4),
}


def _needles(kind: Needles, material: Material, filler: int, rng: np.random.Generator) -> Sample:
    if kind.haystack == "text" and not material.sentences:
        raise UserError("RULER's facts stand in held-out text, and there is none", "name it: run.pretrain_data=NAME")
    keys = _keys(kind.keys, kind.key, material.words, rng)
    facts = [(key, _value(kind.value, rng)) for key in keys for _ in range(kind.values)]
    at = rng.random(len(facts))
    begin = rng.random()
    if kind.haystack == "facts":
        others = _keys(filler, kind.key, material.words, rng, without=keys)
        units = [_fact(key, _value(kind.value, rng))[0] for key in others]
    else:
        sentences = material.sentences if kind.haystack == "text" else NOISE
        start = int(begin * len(sentences))
        units = [f" {sentences[(start + i) % len(sentences)]}" for i in range(filler)]
    text, starts = _strew([_fact(*fact)[0] for fact in facts], units, at)
    asked = [fact for fact in facts if fact[0] in keys[: kind.asked]]
    places = [starts[i] + _fact(*fact)[1] for i, fact in enumerate(facts) if fact[0] in keys[: kind.asked]]
    named = _listed(keys[: kind.asked])
    many = len(asked) > 1
    question = f"What are the codes for {named}?" if many else f"What is the code for {named}?"
    intro = "Remember the codes in this text.\n"
    return Sample(
        f"{intro}{text}\n{question}",
        f"The codes for {named} are" if many else FACT.replace("{key}", f" {named}").strip(),
        tuple(value for _, value in asked),
        tuple(len(intro) + place for place in places),
        len(facts) + (filler if kind.haystack == "facts" else 0),
    )


def _fact(key: str, value: str) -> tuple[str, int]:
    """A fact as text, and where in it the value stands."""
    before = FACT.replace("{key}", f" {key}") + " "
    return f"{before}{value}{END}".rstrip("\n"), len(before)


def _keys(
    count: int, kind: str, words: Sequence[str], rng: np.random.Generator, without: Sequence[str] = ()
) -> list[str]:
    """Different keys: a UUID each, or two words with a hyphen, since single ones do not last for long texts."""
    if kind == "word" and count > len(words) ** 2 // 2:
        raise UserError(f"{len(words)} words make too few keys for so long a text", "ask for a shorter one")
    keys: dict[str, None] = {}
    while len(keys) < count:
        key = _uuid(rng) if kind == "uuid" else "-".join(words[int(i)] for i in rng.integers(len(words), size=2))
        if key not in without:
            keys[key] = None
    return list(keys)


def _value(kind: str, rng: np.random.Generator) -> str:
    """A number of seven digits, or a UUID."""
    return _uuid(rng) if kind == "uuid" else str(rng.integers(10**6, 10**7))


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _strew(pieces: Sequence[str], units: Sequence[str], at: np.ndarray) -> tuple[str, list[int]]:
    """Pieces between units of text, each behind a share `at` of them; and where each piece begins, in characters."""
    text, starts, done = "", [0] * len(pieces), 0
    for i in np.argsort(at, kind="stable").tolist():
        place = int(at[i] * (len(units) + 1))
        text += "".join(units[done:place])
        starts[i], done = len(text), max(done, place)
        text += pieces[i]
    return text + "".join(units[done:]), starts


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---- following, counting, reading


def _variable_tracking(filler: int, rng: np.random.Generator) -> Sample:
    """A value is given to a variable, and from it to the next: which variables have it?"""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5))] = None
    variables, value = list(names), str(rng.integers(10_000, 100_000))
    pieces = [f"\nVAR {name} = {before}\n" for name, before in zip(variables, [value, *variables], strict=False)]
    units = [f" {NOISE[i % len(NOISE)]}" for i in range(filler)]
    # Each assignment stands behind the one that it copies.
    text, starts = _strew(pieces, units, np.sort(rng.random(len(pieces))))
    intro = "Follow the variables in this text.\n"
    return Sample(
        f"{intro}{text}\nWhich variables have the value {value}?",
        f"The variables that have the value {value} are",
        tuple(variables),
        tuple(len(intro) + start + len("\nVAR ") for start in starts),
        len(variables),
    )


def _common_words(words: Sequence[str], filler: int, rng: np.random.Generator) -> Sample:
    """Ten words stand in a list three times as often as any other: which?

    Where the words do not last, all stand there more often, in the same proportion.
    """
    order = rng.permutation(len(words)).tolist()
    common, others = [words[i] for i in order[:COMMON_WORDS]], [words[i] for i in order[COMMON_WORDS:]]
    rounds = max(1, math.ceil(filler / len(others)))
    listed = common * COMMON_TIMES * rounds + [others[i % len(others)] for i in range(filler)]
    rng.shuffle(listed)
    return _counted(listed, common, f"Which {COMMON_WORDS} words are the most common?", len(set(listed)))


def _frequent_words(filler: int, rng: np.random.Generator) -> Sample:
    """Coded words whose frequencies follow a power law; the most frequent is dots, the three after it are asked for."""
    num_words, total = 8 + filler // 20, 40 + filler
    weights = np.arange(1.0, num_words + 1) ** -ZIPF
    expected = total * weights / weights.sum()
    # Rounded so that those asked for differ from each other and from the rest, from 40 words on.
    first = np.arange(num_words) <= FREQUENT_WORDS
    counts = np.where(first, np.ceil(expected), np.maximum(1, np.floor(expected))).astype(int)
    names: dict[str, None] = {"...": None}
    while len(names) < num_words:
        names["".join(rng.choice(list("bcdfghjklmnpqrstvwxz"), 5))] = None
    coded = list(names)
    listed = [name for name, times in zip(coded, counts.tolist(), strict=True) for _ in range(times)]
    rng.shuffle(listed)
    question = f"Which {FREQUENT_WORDS} words are the most frequent, beside the dots?"
    return _counted(listed, coded[1 : 1 + FREQUENT_WORDS], question, num_words - 1)


def _counted(listed: Sequence[str], asked: Sequence[str], question: str, candidates: int) -> Sample:
    intro = "Count how often each word stands in this list.\n"
    begins, at = dict[str, int](), len(intro)
    for word in listed:
        begins.setdefault(word, at)
        at += len(word) + 1
    places = tuple(begins[word] for word in asked)
    return Sample(f"{intro}{' '.join(listed)}\n{question}", "These are", tuple(asked), places, candidates)


def _question(passages: Sequence[Passage], filler: int, number: int, rng: np.random.Generator) -> Sample:
    """A question about one passage among others."""
    asked = passages[number % len(passages)]
    # Several questions may be about one passage, which stands there once.
    others = list({passage.text: passage for passage in passages if passage.text != asked.text}.values())
    chosen = [others[int(i)] for i in rng.permutation(len(others))[:filler]]
    chosen.insert(int(rng.random() * (len(chosen) + 1)), asked)
    parts = [f"Passage {i}: {passage.text}\n" for i, passage in enumerate(chosen, 1)]
    at = chosen.index(asked)
    intro = "Answer from these passages.\n"
    begin = len(intro) + sum(map(len, parts[:at])) + len(f"Passage {at + 1}: ")
    return Sample(
        f"{intro}{''.join(parts)}Question: {asked.question}",
        "Answer:",
        asked.answers,
        tuple(begin + asked.text.index(answer) for answer in asked.answers),
        len(chosen),
        any_of=True,
    )
