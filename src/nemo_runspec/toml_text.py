"""TOML with the line of every table and key, which tomllib does not give: errors name file, line and key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from nemo_runspec.errors import UserError

TomlPath = tuple[str, ...]

# A comment; a string of each kind; a character that opens or closes an array or a table; the end of a line.
_TOKEN = re.compile(
    r"""\#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[\[\]{}\n]""", re.DOTALL
)
_HEADER = re.compile(r"[ \t]*\[\[?(?P<key>(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|[^\[\]\"'#\n])+)\]")
_KEY = re.compile(r"[ \t]*(?P<key>(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|[A-Za-z0-9_. \t-])+?)[ \t]*=")
_PART = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class TomlText:
    """A parsed TOML document: its values, and the line on which each table and key stands in the file."""

    file: str
    data: dict[str, Any]
    lines: dict[TomlPath, int] = field(default_factory=dict)

    def where(self, *path: str) -> str:
        """`file:line` of a key; of the table it is in, where the key itself has no line of its own."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines[path]}" if path else self.file


def read_toml(text: str, file: str, first_line: int = 1) -> TomlText:
    """Parse `text`.

    Args:
        file: the name that errors use.
        first_line: the line of the file on which `text` begins.

    Raises:
        UserError: bad TOML, with file and line.
    """
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        match = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", message)
        line = int(match[1]) if match and match[1] else max(1, len(text.splitlines()))
        message = message[: match.start()] if match else message
        message = message[:1].lower() + message[1:]
        raise UserError(f"{file}:{first_line + line - 1}: bad TOML: {message}") from None
    return TomlText(file, data, {path: first_line + index for path, index in _key_lines(text).items()})


def _key_lines(text: str) -> dict[TomlPath, int]:
    """Index of the line on which each table and key of a valid document first stands.

    Strings and arrays over several lines are passed over: what looks like a key in them is none. The keys of an inline
    table stand on the line of the table.
    """
    lines: dict[TomlPath, int] = {}
    table: TomlPath = ()
    at, number = 0, 0
    while at < len(text):
        path: TomlPath = ()
        if header := _HEADER.match(text, at):
            path = table = _split_key(header["key"])
            at = header.end()
        elif key := _KEY.match(text, at):
            path = (*table, *_split_key(key["key"]))
            at = key.end()
        for end in range(1, len(path) + 1):
            lines.setdefault(path[:end], number)
        depth = 0
        while at < len(text):
            token = _TOKEN.search(text, at)
            if token is None:
                return lines
            at = token.end()
            number += token[0].count("\n")
            depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
            if token[0] == "\n" and depth <= 0:
                break
    return lines


def _split_key(dotted: str) -> TomlPath:
    """`a . "b.c"` -> ("a", "b.c")."""
    return tuple(tomllib.loads(f"key = {part}")["key"] if part[0] in "\"'" else part for part in _PART.findall(dotted))
