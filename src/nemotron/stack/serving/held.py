"""What an answer may be held to, as grammars in llguidance's dialect of Lark: a JSON schema, or calls of tools.

Blanks are where the chat templates and `json.dumps` have them, and the parameters of a call come in the order in which
they are declared. A parameter without a type, or of type string, is text, as `parse_tool_calls` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron.kit.chat import Tool, function_of
from nemotron.stack.serving.grammar import STYLE


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
            value, end = "text", "\n"
            are_texts = all(isinstance(value, str) for value in about.get("enum", ()))
            if "enum" in about and are_texts and about.get("type", "string") == "string":
                value, end = f"({' | '.join(map(json.dumps, about['enum']))})", "\n</parameter>\n"
            elif not are_texts or about.get("type", "string") != "string":
                value, end = f"value_{i}_{j}", "\n</parameter>\n"
                defined = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
                lines.append(f"value_{i}_{j}: {_json(defined | about)}")
            begin = json.dumps(f"<parameter={name}>\n")
            lines.append(f"parameter_{i}_{j}: {begin} {value} {json.dumps(end)}")
        lines.append(f"function_{i}: {' '.join(parts)}")
    return "\n".join(lines) + "\n"


def calls_in_a_list(tools: Sequence[Tool], lead: str, is_one: bool) -> str:
    """Calls of these tools as Nano v2 writes them: a JSON list between two tags."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": _arguments(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in map(function_of, tools)
    ]
    listed = {"type": "array", "items": {"anyOf": calls}, "minItems": 1} | ({"maxItems": 1} if is_one else {})
    return f'start: {_lead(lead)}"<TOOLCALL>" calls "</TOOLCALL>"\ncalls: {_json(listed)}\n'


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object"} | dict(function.get("parameters") or {"properties": {}, "additionalProperties": False})


def _lead(lead: str) -> str:
    return f"{json.dumps(lead)}? " if lead else ""


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': STYLE})}"
