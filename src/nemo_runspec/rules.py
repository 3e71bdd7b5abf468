"""What the value of a key in env.toml or in a script's block must be, in code and in the words of an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nemo_runspec.errors import nearest


@dataclass(frozen=True)
class Rule:
    """What the value of a key must be: its type, and a pattern, choices or limits; `text` completes "must be …"."""

    kind: type
    text: str
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None

    def allows(self, value: Any) -> bool:
        """Whether `value` may stand under the key; every entry of a list or a table counts."""
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            return False
        if isinstance(value, (list, dict)):
            items = value if isinstance(value, list) else value.values()
            return all(isinstance(item, str) and self._fits(item) for item in items)
        return self._fits(value)

    def _fits(self, value: Any) -> bool:
        if isinstance(value, str):
            return (self.pattern is None or re.fullmatch(self.pattern, value) is not None) and (
                not self.choices or value in self.choices
            )
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def choice(*choices: str) -> Rule:
    """One of a few words."""
    return Rule(str, f"one of {', '.join(choices)}", choices=choices)


def integer(least: int, most: int | None = None) -> Rule:
    """A whole number within limits."""
    limits = f">= {least}" if most is None else f"from {least} to {most}"
    return Rule(int, f"an integer {limits}", least=least, most=most)


# The name of an environment variable.
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
STRING = Rule(str, "a string")
TEXT = Rule(str, "a string that is not empty", r"(?s).*\S.*")
WORD = Rule(str, "a string without spaces", r"\S+")


def near_choice(value: object, rule: Rule) -> str | None:
    """The hint for a value that is almost one of the choices."""
    near = nearest(value, rule.choices) if isinstance(value, str) and rule.choices else None
    return f"did you mean {near}?" if near else None


def shown_value(value: object) -> str:
    """A value as TOML and YAML spell it, where that differs from Python (`true`, dates)."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (str, int, float, list, dict, type(None))) else str(value)
