"""Words of a command line -> options, flags and `key=value` overrides, in any order and position.

`--option value` and `--option=value` mean the same. Nothing is skipped or guessed: an unknown option, an option without
its value, a value for a flag, an option given twice and a stray word are all errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_runspec.errors import UserError, did_you_mean, nearest


@dataclass(frozen=True)
class Options:
    """`values` and `flags` by the names that the caller gave them; `overrides` in the order of the command line."""

    values: dict[str, str] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    overrides: tuple[str, ...] = ()


def parse_words(
    words: Sequence[str],
    *,
    valued: Mapping[str, str],
    flags: Mapping[str, str],
    known: Iterable[str] = (),
) -> Options:
    """Sort `words` into options, flags and overrides.

    Args:
        valued: options that take a value, spelling -> name, as in {"-c": "config", "--config": "config"}.
        flags: options that take none, spelling -> name.
        known: further options that somebody else has already taken out; only for suggestions.

    Raises:
        UserError: see the module.
    """
    values: dict[str, str] = {}
    flags_set: set[str] = set()
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if "=" not in word:
                configs = " or ".join(option for option in valued if option.startswith("--config"))
                hint = f"a config is chosen with {configs} {word}; a key is set with key=value" if configs else None
                raise UserError(f"unexpected word {word!r}", _cut_override(word, rest, overrides) or hint)
            overrides.append(word)
            continue
        option, equals, value = word.partition("=")
        if option in flags:
            if equals:
                raise UserError(f"option {option} takes no value, but was given {value!r}")
            flags_set.add(flags[option])
        elif option in valued:
            # The next word is the value, unless it is an option or an override: then the value was forgotten.
            if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
                value = rest.pop(0)
            if not value:
                hint = f"as in {option} {_EXAMPLES.get(valued[option], 'NAME')}"
                if rest and "/" in rest[0].partition("=")[0]:  # a path, and no key has a slash
                    hint = f"a value that has = in it: {option}={rest[0]}"
                raise UserError(f"option {option} needs a value", hint)
            if valued[option] in values:
                raise UserError(f"option {option} is given twice")
            values[valued[option]] = value
        else:
            choices = [*valued, *flags, *known]
            hint = did_you_mean(option, choices, "options")
            if (equals or "." in option) and nearest(option, choices) is None:
                hint = f"a key of the config is set without dashes: {option.lstrip('-')}={value or 'VALUE'}"
            raise UserError(f"unknown option {option}", hint)
    return Options(values, frozenset(flags_set), tuple(overrides))


def _cut_override(word: str, rest: Sequence[str], overrides: Sequence[str]) -> str | None:
    """The hint where the shell has cut an override at a blank and `word` is a part of it; None where it is none."""
    before = overrides[-1] if overrides else ""
    if sum(map(before.count, "[{")) > sum(map(before.count, "]}")):
        return f"a value with blanks stands in quotes: '{before} {word} …'"
    if before.endswith("="):
        return f"no blanks around =: {before}{word}"
    if rest and rest[0].startswith("="):
        value = rest[0][1:] or "".join(rest[1:2])
        return f"no blanks around =: {word}={value}"
    return None


_EXAMPLES = {"config": "tiny", "run": "PROFILE", "batch": "PROFILE"}
