"""YAML as configs use it: read with the line of every key, written so that it reads back as the same values.

The dialect is YAML 1.1 less its traps: `yes`, `no`, `on`, `off` and `12:30` are strings, `1e-5` is a number, dates stay
strings, and a key that stands twice in one mapping is an error. PyYAML is imported on first use: `--help` stays fast.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from nemo_runspec.errors import UserError, first_line

if TYPE_CHECKING:
    import yaml

# A key's path in a config: names of mappings, indices of lists.
KeyPath = tuple[str | int, ...]

_LIBYAML_MAX_CHARACTERS = 8192

_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]

_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |\.(?:inf|Inf|INF))$
    |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_INT = re.compile(r"[-+]?(?:0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_STR, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("str", "merge"))
# What a tag may not ask for: none of it is a value of a config.
_NO_VALUES = [f"tag:yaml.org,2002:{name}" for name in ("timestamp", "set", "binary", "omap", "pairs")]
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    (_MERGE, re.compile(r"<<$"), ["<"]),
)


@functools.cache
def _loader_class(name: str) -> type[yaml.SafeLoader]:
    """PyYAML's loader of that name with the dialect's rules: SafeLoader, or CSafeLoader, which has libyaml parse."""
    import yaml

    base: Any = getattr(yaml, name)

    class Loader(base):
        yaml_implicit_resolvers: ClassVar[_Resolvers] = {}
        yaml_constructors: ClassVar[dict[str | None, Any]] = {
            tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag not in _NO_VALUES
        }

    for tag, pattern, first in _RESOLVERS:
        Loader.add_implicit_resolver(tag, pattern, first)
    return Loader


@functools.cache
def _dumper_class() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        # The reader's own rules decide which strings need quotes, so that "1e-5" comes back as a string.
        yaml_implicit_resolvers: ClassVar[_Resolvers] = {}  # type: ignore[misc]

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, data: str) -> yaml.ScalarNode:
            # PyYAML would write these line breaks of Unicode as they are, and read them back as spaces.
            style = '"' if any(mark in data for mark in "\x85\u2028\u2029") else None
            return self.represent_scalar(_STR, data, style)

    Dumper.add_representer(str, Dumper.represent_str)
    for tag, pattern, first in _RESOLVERS:
        Dumper.add_implicit_resolver(tag, pattern, first)
    return Dumper


def read_yaml(text: str, where: str) -> tuple[Any, dict[KeyPath, str]]:
    """Parse one YAML document.

    Args:
        text: the document; empty means None.
        where: file name for messages.

    Returns:
        The value (mappings have string keys; an alias gives a copy of what its anchor holds) and, for every key and
        list item in it, `where:line`.

    Raises:
        UserError: malformed YAML, a key twice in a mapping, or a key that is no string; with file and line.
    """
    import yaml

    loader = None
    try:
        loader, node = _composed(text)
        if node is None:
            return None, {}
        lines: dict[KeyPath, str] = {}
        _note_lines(node, (), where, lines, ())
        return _unshared(loader.construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise UserError(f"{where}{line}: malformed YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise UserError(f"{where}: malformed YAML: {reason}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _composed(text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """The document, and the loader that makes values of it.

    libyaml takes a third of the time, where it is there. What it refuses is read again, for better messages; and it
    recurses in C, which would end the process where a text nests some 20,000 deep: a long one it does not get.
    """
    import yaml

    if yaml.__with_libyaml__ and len(text) <= _LIBYAML_MAX_CHARACTERS:
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            fast = _loader_class("CSafeLoader")(text)
            return fast, fast.get_single_node()
    loader = _loader_class("SafeLoader")(text)
    return loader, loader.get_single_node()


def _unshared(value: Any) -> Any:
    """A copy without shared parts: changing what an alias gave leaves the anchor and the other aliases alone."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _note_lines(
    node: yaml.Node, path: KeyPath, where: str, lines: dict[KeyPath, str], above: tuple[yaml.Node, ...]
) -> None:
    import yaml

    if any(node is other for other in above):
        line = node.start_mark.line + 1
        raise UserError(f"{where}:{line}: {dotted(path)} is an alias of what it stands in", "a config has no cycles")
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for position, (key, value) in enumerate(node.value):
            at = f"{where}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{at}: a key of a config is one word, not a list or a mapping")
            if key.value in seen:
                raise UserError(f"{at}: {'.'.join(map(str, (*path, key.value)))} stands twice")
            seen.add(key.value)
            if key.tag != _MERGE:  # as written: `1` and `true` would be one key, `null` would be None
                node.value[position] = yaml.ScalarNode(_STR, key.value, key.start_mark, key.end_mark), value
            lines[(*path, key.value)] = at
            _note_lines(value, (*path, key.value), where, lines, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = f"{where}:{value.start_mark.line + 1}"
            _note_lines(value, (*path, index), where, lines, above)


def read_scalar(text: str, where: str) -> Any:
    """The value of an override, parsed as YAML; nothing after the `=` is the empty string, and a comment is refused."""
    try:
        value = "" if text == "" else read_yaml(text, where)[0]
    except UserError as error:
        if error.message.endswith(" stands twice"):
            raise UserError(f"{where}: {error.message.partition(': ')[2]}") from None
        hint = "quote it, as in 'key=\"@text\"', or write it in YAML's [a, b] or {a: 1}"
        raise UserError(f"{where}: {text!r} is not a value", hint) from None
    if "#" in text and _ends_in_comment(text, value):
        raise UserError(f"{where}: {text!r}: what follows the # would be a comment", "quote it, as in 'key=\"run #3\"'")
    return value


def _ends_in_comment(text: str, value: Any) -> bool:
    """Whether more of a text changes nothing of its value."""
    with contextlib.suppress(UserError):
        return bool(read_yaml(f"{text}x", "")[0] == value)
    return False


def dump_yaml(value: Any, *, escape: bool) -> str:
    """YAML text of plain values. `escape` keeps a literal `${` from being read as an interpolation again."""
    import yaml

    text = yaml.dump(
        escape_interpolation(value) if escape else value,
        Dumper=_dumper_class(),
        sort_keys=False,
        allow_unicode=True,
        width=120,
        default_flow_style=False,
    )
    return str(text)


def escape_interpolation(value: Any) -> Any:
    r"""Plain values with every `${` written `\${`, which OmegaConf reads as the two characters."""
    if isinstance(value, dict):
        return {key: escape_interpolation(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolation(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def spelled(value: Any) -> str:
    """A value as YAML spells it, on one line."""
    from pydantic import BaseModel

    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(spelled, value)) + "]"
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return str(value) or "''"


def split_key(key: str) -> KeyPath:
    """`a.b[0].c` and `a.b.0.c` -> ("a", "b", 0, "c")."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", key) if part)


def dotted(path: Iterable[str | int]) -> str:
    """("a", "b", 0) -> `a.b.0`."""
    return ".".join(map(str, path))


def value_at(data: Any, path: KeyPath) -> Any:
    """The value at `path`, or None where it leads nowhere."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(cast(str, part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data
