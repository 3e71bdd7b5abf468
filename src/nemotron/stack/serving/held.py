"""What an answer may be held to, as grammars in llguidance's dialect of Lark: a JSON schema, or calls of tools.

Blanks are where the chat templates and `json.dumps` have them, and the parameters of a call come in the order in which
they are declared. In XML a text stands as it is and all else as JSON, as `parse_tool_calls` reads them: one of the
texts of an `enum`, else any text, whatever its declaration says of length, pattern and format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron.kit.chat import Tool, alternatives, declared_types, function_of

# As json.dumps writes it: where any blanks are allowed, a weak model goes on with blanks.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_answer(schema: Mapping[str, Any], lead: str) -> str:
    """JSON of a schema; `lead`, what a template has between reasoning and answer, may come before it."""
    return f"start: {_lead(lead)}answer\nanswer: {_json(schema)}\n"


def calls_in_xml(tools: Sequence[Tool], lead: str, is_one: bool) -> str:
    """Calls of these tools as Nemotron 3 writes them; one, or any number from one on."""
    functions = [function_of(tool) for tool in tools]
    names = " | ".join(f"function_{i}" for i in range(len(functions)))
    lines = [
        f"start: {_lead(lead)}call{'' if is_one else '+'}",
        f'call: <tool_call> "\\n" ({names}) "</function>\\n" </tool_call> "\\n"?',
        'text[suffix="</parameter>"]: /(.|\\n)*/',
    ]
    for i, function in enumerate(functions):
        parameters = function.get("parameters") or {}
        parts = [json.dumps(f"<function={function['name']}>\n")]
        for j, (name, about) in enumerate((parameters.get("properties") or {}).items()):
            parts.append(f"parameter_{i}_{j}{'' if name in (parameters.get('required') or ()) else '?'}")
            value = _value(about, parameters)
            end = "\n" if value == "text" else "\n</parameter>\n"
            begin = json.dumps(f"<parameter={name}>\n")
            lines.append(f"parameter_{i}_{j}: {begin} {value} {json.dumps(end)}")
        lines.append(f"function_{i}: {' '.join(parts)}")
    return "\n".join(lines) + "\n"


def _value(declaration: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """A value in XML; `text`, with the tag behind it, where any text is allowed."""
    defined = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    if "string" not in declared_types(declaration, parameters):
        return _json({**defined, **declaration})
    values = []
    for each in alternatives(declaration, parameters):
        if "const" in each:
            const = each["const"]
            values.append(json.dumps(const if isinstance(const, str) else json.dumps(const, ensure_ascii=False)))
        else:
            values.append("text" if "string" in declared_types(each, parameters) else _json({**defined, **each}))
    return "text" if "text" in values or not values else f"({' | '.join(values)})"


def calls_in_a_list(tools: Sequence[Tool], lead: str, is_one: bool) -> str:
    """Calls of these tools as Nano v2 writes them: a JSON list between two tags."""
    functions = [function_of(tool) for tool in tools]
    names = " | ".join(f"function_{i}" for i in range(len(functions)))
    more = "" if is_one else '(", " call)* '
    lines = [f'start: {_lead(lead)}"<TOOLCALL>[" call {more}"]</TOOLCALL>"', f"call: {names}"]
    for i, function in enumerate(functions):  # each schema on its own, for `$ref` is resolved in the whole of one
        begin = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        lines.append(f'function_{i}: {json.dumps(begin)} {_json(_arguments(function))} "}}"')
    return "\n".join(lines) + "\n"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object"} | dict(function.get("parameters") or {"properties": {}, "additionalProperties": False})


def _lead(lead: str) -> str:
    return f"{json.dumps(lead)}? " if lead else ""


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': STYLE})}"
