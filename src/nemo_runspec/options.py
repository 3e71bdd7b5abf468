"""Words of a command line -> options, flags and `key=value` overrides, in any order and position.

`--option value` and `--option=value` mean the same. Nothing is skipped or guessed: an unknown option, an option without
its value, a value for a flag, an option given twice and a stray word are all errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_runspec.errors import UserError, did_you_mean


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
                raise UserError(f"unexpected word {word!r}", hint)
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
                example = _EXAMPLES.get(valued[option], "NAME")
                raise UserError(f"option {option} needs a value", f"as in {option} {example}")
            if valued[option] in values:
                raise UserError(f"option {option} is given twice")
            values[valued[option]] = value
        else:
            raise UserError(f"unknown option {option}", did_you_mean(option, [*valued, *flags, *known], "options"))
    return Options(values, frozenset(flags_set), tuple(overrides))


_EXAMPLES = {"config": "tiny", "run": "PROFILE", "batch": "PROFILE"}
