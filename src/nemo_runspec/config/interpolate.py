"""`${…}` in a config, by OmegaConf: other keys, `${oc.env:VAR,default}`, `${mul:a,b}`; its errors in one line.

`${art:…}` is not OmegaConf's: `resolve` has put the artifacts' values in before this.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.yaml_text import KeyPath, split_key
from nemo_runspec.errors import UserError, first_line
from nemo_runspec.secrets import looks_secret
from nemo_runspec.user_files import TO_COME

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException


def interpolate(data: dict[str, Any], origin: Callable[[KeyPath], str], group: str | None = None) -> dict[str, Any]:
    r"""Plain values of `data`, or of one group of it, with every interpolation replaced and `\${` read as text.

    Args:
        origin: where the value at a path was written, for errors.

    Raises:
        UserError: an interpolation that is malformed or leads nowhere, a key without a value (`???`); with its origin.
    """
    part = data[group] if group else data
    if not any(mark in repr(part) for mark in ("${", "???")):  # a help page: OmegaConf takes 0.1 s to import
        return copy.deepcopy(part)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_resolvers()
    try:
        tree = OmegaConf.create(data)
    except OmegaConfBaseException as error:
        raise _refusal(error, origin, "bad interpolation: ") from None
    try:
        values = OmegaConf.to_container(tree[group] if group else tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _refusal(error, origin) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _refusal(error: OmegaConfBaseException, origin: Callable[[KeyPath], str], prefix: str = "") -> UserError:
    from omegaconf.errors import MissingMandatoryValue

    key = getattr(error, "full_key", None) or ""
    at = f"{origin(split_key(key))}: {key}"
    if isinstance(error, MissingMandatoryValue):
        return UserError(f"{at} has no value", f"give one: {key}=…")
    cause: BaseException | None = error
    while cause is not None:  # an error of a resolver of ours arrives wrapped, and is the clearer one
        if isinstance(cause, UserError):
            return cause.at(at)
        cause = cause.__cause__ or cause.__context__
    return UserError(f"{at}: {prefix}{_reason(error)}")


def _reason(error: Exception) -> str:
    """OmegaConf's message without the lines on its own types, and without the name of a wrapped exception."""
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", first_line(error)).strip("\"'")


@functools.cache
def _register_resolvers() -> None:
    """Make `${mul:…}` known to OmegaConf, and keep secrets out of `${oc.env:…}` (once a process)."""
    from omegaconf import OmegaConf

    # OmegaConf 2.4 renamed the function, and warns about the old name.
    register: Callable[..., None] = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("mul", _mul, replace=True)
    register("oc.env", _env, replace=True)
    register("art", _art, replace=True)


def _env(name: str, *default: Any) -> str | None:
    """`${oc.env:NAME,default}`, as OmegaConf has it, except that what looks like a secret is refused."""
    from omegaconf.resolvers import oc

    if looks_secret(str(name)):
        raise UserError(
            f"${{oc.env:{name}}}: configs are written to files, and {name} looks like a secret: list it by name under"
            " secrets in a profile of env.toml instead; the script finds it in its environment"
        )
    value: str | None = oc.env(name, *default)
    return value


def _mul(*factors: Any) -> int | float | str:
    """`${mul:a,b,…}`: the product; whole when all factors are.

    A factor that stands for a value of an artifact, which is not known yet, leaves the product as a text.
    """
    if any(isinstance(factor, str) and factor.startswith("${") for factor in factors):  # the config that travels
        return f"${{mul:{','.join(map(str, factors))}}}"
    if any(is_to_come(factor) for factor in factors):
        return " * ".join(map(str, factors))
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise UserError(f"${{mul:…}}: {factor!r} is not a number")
    product: int | float = math.prod(factors)
    return product


def _art(*words: Any) -> str:
    """The `${art:…}` that `resolve` leaves: one in the `run` group, or one that is not spelt as below."""
    text = ",".join(map(str, words))
    raise UserError(f"${{art:{text}}}: write ${{art:KEY,FIELD}} in plain words, and not in the run group")


def to_come(key: str, field: str) -> str:
    """What stands for `${art:key,field}` while the artifact is not made yet."""
    return f"<{key}:{field} {TO_COME}"


def is_to_come(value: Any) -> bool:
    """Whether `value` is, or contains, what `to_come` returns."""
    return isinstance(value, str) and TO_COME in value
