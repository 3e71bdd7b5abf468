"""Whether two answers in LaTeX mean the same, by math-verify, in a process that can be killed."""

from __future__ import annotations

from nemotron.stack.environments import math_comparison
from nemotron.stack.environments.killable import UndecidedError, Worker

_worker = Worker(math_comparison, cpu_seconds=5.0)


def equal(expected: str, answer: str) -> bool:
    """Whether `answer` means what `expected` does; both are LaTeX without `\\boxed` and delimiters.

    Raises:
        UndecidedError: out of time or memory, the library raised an exception, or it cannot read what is expected.
    """
    verdict = _worker.call(math_comparison.mean_the_same, expected, answer)
    if verdict is None:
        raise UndecidedError("the expected answer cannot be read")
    return verdict
