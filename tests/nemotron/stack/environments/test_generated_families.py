"""A thousand wrong answers to generated tasks of each family whose rewards train the tiny models: none passes.

What makes an answer wrong is how it is made from the right one, so that nothing here repeats what the verifier does.
Reading is strict: an answer in a sentence, in brackets or in a fence is not the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from nemotron.stack.environments import Task, generate_tasks, verify

FULL_WIDTH = str.maketrans("0123456789ABCDEF", "０１２３４５６７８９ＡＢＣＤＥＦ")


def wrapped(right: str, other: str) -> Iterator[str]:
    """The right answer where it does not count: undecided, inside of something else, or disowned."""
    yield from ("", " ", f"{right} or {other}", f"{other}\n{right}", f"{right}\n{other}", f"not {right}")
    yield from (f"<think>{right}</think>", f"<think>{right}", f"```\n{right}\n```", f"[{right}]", f"{right}\x00")
    yield from (
        f"Answer: {right}",
        f"\\boxed{{{right}}}\\boxed{{{other}}}",
        f"\u200b{right}",
        f"{right} ?",
        "x" * 10_000,
    )


def wrong_integers(task: Task, rng: random.Random) -> Iterator[str]:
    right = task.solution.answer
    value, place = int(right), rng.randrange(len(right))
    yield from (str(value + offset) for offset in (1, -1, 10, -10, 2**32, 2**64) if value + offset != value)
    yield str(-value) if value else "00000000000000000001"
    digit = right[place] if right[place] != "-" else "7"
    yield right[:place] + digit + right[place:] + "3"
    yield from (f"{right}.5", f"{right}e1", f"{right}%", f"0x{right}", f"{right},{right}", f"{right[:1]} {right[1:]}.")
    yield from (f"{value + 1}-1", right.translate(FULL_WIDTH), f"{right}" + "0" * 19, task.prompt, f"\\boxed{{{right}")
    yield from wrapped(right, str(value + 1))


def wrong_options(task: Task, rng: random.Random) -> Iterator[str]:
    right, texts = task.spec["letter"], list(task.spec["options"])
    options = dict(zip("ABCDEFGH", texts, strict=False))
    others = [letter for letter in options if letter != right]
    other = rng.choice(others)
    yield from others
    yield from (f"{letter}) {options[letter]}" for letter in others)
    yield from (f"{letter} {options[right]}" for letter in others)  # another letter, the right text
    yield from (f"{right} {options[letter]}" for letter in others)  # the right letter, another text
    yield from (f"{right} {other}", f"{right}{other}", f"{right}, {other}", right.lower(), f"({right} {other})")
    yield from (options[right], right.translate(FULL_WIDTH), "".join(options), " ".join(options), task.prompt)
    yield from wrapped(right, other)


def wrong_lists(task: Task, rng: random.Random) -> Iterator[str]:
    right, kind, separator = task.solution.answer, task.spec["kind"], task.spec["separator"]
    join = {"commas": ", ", "dashes": "-", "any": " "}[separator]
    words = [word.strip() for word in right.split(join)]
    drop = rng.randrange(len(words))
    yield join.join(words[:drop] + words[drop + 1 :])
    yield from (join.join([*words, extra]) for extra in (words[0], words[-1], "zebra", "ZEBRA"))
    yield from (join.join(["zebra", *words[1:]]), join.join([*words[:-1], "zebra"]), join.join([words[0]] * 9))
    yield join.join([*words[:-1], words[0]])  # as many words, one of them twice
    yield join.join(word.swapcase() for word in words)
    yield join.join([words[0] + "s", *words[1:]])
    if kind in ("repeat", "first_last", "reorder"):
        yield join.join(reversed(words))
    if separator != "any":
        yield from (
            " ".join(words),
            "\n".join(words),
            "; ".join(words),
            ("-" if separator == "commas" else ",").join(words),
        )
    yield from (f"{right}{join}{right}", f"Here they are: {right}", f"1. {right}", f"{right}!", f"*{right}*")
    yield from wrapped(right, "zebra")
    yield task.prompt


@pytest.mark.parametrize(
    ("family", "wrong_answers"),
    [("math", wrong_integers), ("multiple_choice", wrong_options), ("instruction_following", wrong_lists)],
)
def test_no_false_pass_on_1000_wrong_answers(
    family: str, wrong_answers: Callable[[Task, random.Random], Iterator[str]]
) -> None:
    rng = random.Random(0)
    tasks = generate_tasks(family, "valid", 60, seed=5)
    assert [task.prompt for task in tasks if verify(task, task.solution.answer).score != 1] == []
    pairs = [(task, answer) for task in tasks for answer in wrong_answers(task, rng)]
    assert len(pairs) >= 1000
    passed = [(task.prompt, answer) for task, answer in pairs if verify(task, answer).status != "wrong"]
    assert passed == []
