"""Answers in JSON, YAML, XML, TOML and CSV as plain data, read so that no answer can hang or mislead the check.

`read` gives objects, lists, text, numbers, booleans and null (and the dates of YAML and TOML, which no JSON schema has
a type for). What is not one document of the format raises ValueError: also a key twice, NaN and infinity, keys that are
not text, an XML document type (the way to entities that expand without end), and data beyond the limits below, which
aliases and merge keys of YAML reach with few characters.

XML and CSV have no types: `typed` reads their text as the schema says. XML becomes objects as xmltodict makes them: the
root is a key, attributes are `@name`, text beside them is `#text`, elements of one name a list, an empty element null.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal, get_args
from xml.etree import ElementTree

import yaml

from nemotron.kit.chat import alternatives

Format = Literal["json", "yaml", "xml", "toml", "csv"]
FORMATS = get_args(Format)
MAX_CHARS, MAX_VALUES, MAX_DEPTH = 200_000, 20_000, 64
MAX_DIGITS = 4300  # of an integer, as Python reads and shows them: those in hexadecimal may have more
MAX_TEXT = 10 * MAX_CHARS  # of keys and values: rows of CSV repeat their header, aliases of YAML anything
# A key of TOML, at the start of a line or within a table, of more parts than MAX_DEPTH: tomllib takes quadratic time.
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_DEEP_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*+(?:{_PART}[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}+", re.MULTILINE)
_NAMESPACE = re.compile(r"""xmlns(?::[^\s=<>'":]*)?\s*=\s*("[^"]*"|'[^']*')""")
_DATES = (datetime.date, datetime.time)  # a datetime is a date
_TOO_LONG = 10**MAX_DIGITS
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def read(text: str, form: Format) -> Any:
    """The data that `text` holds; ValueError if it is not one document of the format, or beyond the limits."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"{len(text)} characters, more than {MAX_CHARS}")
    try:
        match form:
            case "json":
                value = read_json(text)
            case "yaml":
                value = yaml.load(text, Loader=_Yaml)
            case "xml":
                value = _read_xml(text)
            case "toml":
                if _DEEP_KEY.search(text):
                    raise ValueError(f"a key of more than {MAX_DEPTH} parts")
                value = tomllib.loads(text)
            case "csv":
                value = _read_csv(text)
    # PyYAML's constructors raise what comes: KeyError for `!!bool maybe`, IndexError for an empty `!!int`.
    except (
        yaml.YAMLError, csv.Error, ElementTree.ParseError, ArithmeticError, RecursionError, LookupError, AttributeError,
        TypeError,
    ) as failure:  # fmt: skip
        raise ValueError(f"{type(failure).__name__}: {failure}") from None
    _check_plain(value)
    return value


def read_json(text: str) -> Any:
    """The JSON value; ValueError for one that Python's parser takes although it is none, or no single one."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object hook: with a key twice it is not one object that validates, whichever value a parser keeps."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def refuse_constant(name: str) -> None:
    """For `json.loads`, whose parser accepts NaN and Infinity: ValueError, as they are not JSON."""
    raise ValueError(f"{name} is not JSON")


class _Yaml(yaml.SafeLoader):
    """YAML 1.1 as PyYAML's safe loader reads it, without a key twice, and with merged keys up to the limit."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.flattened: set[yaml.Node] = set()
        self.num_pairs = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put in what merge keys stand for, once; called for a mapping, and whenever another one takes its pairs."""
        if node not in self.flattened:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(keys)) != len(keys):
                raise ValueError("a key occurs twice")
            self.flattened.add(node)
            super().flatten_mapping(node)
        self.num_pairs += len(node.value)
        if self.num_pairs > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} keys")


def _yaml_integer(loader: _Yaml, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_DIGITS:  # one to the base 60 takes quadratic time
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return int(loader.construct_yaml_int(node))


_Yaml.add_constructor("tag:yaml.org,2002:int", _yaml_integer)


def _read_xml(text: str) -> Any:
    if "<!DOCTYPE" in text:
        raise ValueError("a document type is not allowed")
    # The parser puts the name of its namespace before that of each element and attribute.
    if sum(map(len, _NAMESPACE.findall(text))) * (text.count("<") + text.count("=")) > MAX_TEXT:
        raise ValueError("namespaces with long names")
    root = ElementTree.fromstring(text)
    return {root.tag: _element(root)}


def _element(element: ElementTree.Element, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    value: dict[str, Any] = {f"@{name}": text for name, text in element.attrib.items()}
    children: dict[str, list[Any]] = {}
    for child in element:
        children.setdefault(child.tag, []).append(_element(child, depth + 1))
    value |= {tag: several if len(several) > 1 else several[0] for tag, several in children.items()}
    text = "".join([element.text or "", *(child.tail or "" for child in element)]).strip()
    if not value:
        return text or None
    return value | {"#text": text} if text else value


def _read_csv(text: str) -> list[dict[str, str]]:
    """A row an object under the names of the header; ValueError for a row of another length, or without any row."""
    if "\0" in text:  # which the other formats' parsers refuse by themselves
        raise ValueError("a null character")
    header, *rows = [row for row in csv.reader(io.StringIO(text), strict=True) if row] or [[]]
    if len(set(header)) != len(header):
        raise ValueError("a column occurs twice")
    if not rows:
        raise ValueError("no row below the header")
    if any(len(row) != len(header) for row in rows):
        raise ValueError("a row is not as long as the header")
    return [dict(zip(header, row, strict=True)) for row in rows]


def _check_plain(value: Any) -> None:
    """ValueError unless `value` is data that JSON has (and dates), within the limits."""
    level, num_values, num_chars = [value], 0, 0
    for _ in range(MAX_DEPTH):
        num_values += len(level)
        if num_values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        below: list[Any] = []
        for each in level:
            match each:
                case dict():
                    if not all(isinstance(key, str) for key in each):
                        raise ValueError("a key is not text")
                    num_chars += sum(map(len, each))
                    below += each.values()
                case list():
                    below += each
                case float() if not math.isfinite(each):
                    raise ValueError(f"{each} is not a number")
                case str():
                    num_chars += len(each)
                case int() if abs(each) >= _TOO_LONG:
                    raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
                case None | int() | float():
                    pass
                case _ if not isinstance(each, _DATES):
                    raise ValueError(f"{type(each).__name__} is no value of JSON")
            if len(below) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES} values")
            if num_chars > MAX_TEXT:
                raise ValueError(f"more than {MAX_TEXT} characters in its keys and values")
        if not below:
            return
        level = below
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def typed(value: Any, schema: Any, root: Any = None) -> Any:
    """Data of XML or CSV with its text read as one of the types that `schema` allows; text that is none of them stays
    text. `root`: the schema that references lead into, if not this one."""
    root = schema if root is None else root
    parts, kinds = alternatives(schema, root) if isinstance(root, Mapping) else [], list[tuple[Any, Any]]()
    for part in parts:
        stated = part.get("type", _TYPES.get(type(part.get("const"))))
        of_part = [(kind, part) for kind in (stated if isinstance(stated, list) else [stated])]
        if "const" not in part:
            kinds += of_part
        elif any((reading := _read_as(value, kind, part, root)) == part["const"] for kind, _ in of_part):
            return reading
    if value == "" and any("const" in part and part["const"] is None for part in parts):
        return None
    if len(kinds) > 1 and value in (None, "") and any(kind == "null" for kind, _ in kinds):
        return None
    readings = (
        _read_as(value, kind, part, root) for kind, part in kinds if len(kinds) == 1 or kind not in ("null", "string")
    )
    return next((reading for reading in readings if reading != value or not isinstance(reading, str)), value)


def _read_as(value: Any, kind: Any, schema: Mapping[str, Any], root: Any) -> Any:
    """As `typed`, for one of the types."""
    match kind:
        case "object" if isinstance(value, dict):
            properties = schema.get("properties") or {}
            return {key: typed(each, properties.get(key), root) for key, each in value.items()}
        case "array":
            return [typed(each, schema.get("items"), root) for each in _items(value, schema.get("items"))]
        case "string" if value is None:
            return ""
        case "integer" if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        case "number" if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            return float(value) if math.isfinite(float(value)) else value
        case "boolean" if isinstance(value, str):
            return _BOOLEANS.get(value.strip().lower(), value)
    return value


# JSON types of what a schema may name as the only value.
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _items(value: Any, schema: Any) -> list[Any]:
    """The items of a list in XML: repeated elements, or those in the only element, which may be a single one.

    `<a><item>1</item><item>2</item></a>` holds them in `item`, unless `item` is a property of what the list holds.
    """
    properties = schema.get("properties") or {} if isinstance(schema, Mapping) else {}
    if isinstance(value, dict) and len(value) == 1 and not value.keys() & properties.keys():
        value = next(iter(value.values()))
    if isinstance(value, list):
        return value
    return [] if value is None else [value]
