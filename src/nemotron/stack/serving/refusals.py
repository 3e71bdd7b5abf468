"""A request that is not answered: why not, in one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from nemo_runspec.errors import did_you_mean, nearest
from nemotron.stack.serving.requests import shown

# Kinds of pydantic's errors -> what is expected in place of the value, with what the error says of it.
_EXPECTED = {
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
    "too_short": "at least {min_length} in it",
    "too_long": "at most {max_length} in it",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


class ApiError(Exception):
    """A request that is not answered: HTTP status, one line why, and the rest of OpenAI's shape of an error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it. What no UTF-8 can say, from a request, is escaped."""
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message, param = (
            text and text.encode(errors="backslashreplace").decode() for text in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def what_is_wrong(error: RequestValidationError, body: type[BaseModel]) -> ApiError:
    """The first field of a body of this kind that is wrong: its value, and what is served in place of it."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}")
    problems = [(_place(problem, error.body), problem) for problem in error.errors()]
    # Where a field may be one of several things, each of them has an error: what got farthest into it is meant.
    of_field = [(place, problem) for place, problem in problems if place[:1] == problems[0][0][:1]]
    place, problem = max(of_field, key=lambda each: len(each[0]))
    if not place and problem["type"] != "string_unicode":
        return ApiError(400, "the body is no JSON object; send one, as Content-Type: application/json")
    param = ".".join(map(str, place)) or None
    return ApiError(400, f"{param or 'a key'}: {_sentence(problem, place, body)}", param=param)


def _place(problem: Mapping[str, Any], body: object) -> list[str | int]:
    """Where in a body a problem is: pydantic's place without its names for the branches of a union."""
    place: list[str | int] = []
    parts = problem["loc"][1:]
    for i, part in enumerate(parts):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
        elif not (problem["type"] == "missing" and i + 1 == len(parts)):
            continue
        place.append(part)
    return place


def _keys_at(place: Sequence[str | int], body: type[BaseModel]) -> list[str]:
    """The keys that there are at a place of a body of this kind; none where any may be."""
    kinds = [body]
    for name in place:
        if isinstance(name, str):  # a number is a place in a list
            fields = [field for kind in kinds for key, field in kind.model_fields.items() if name in (key, field.alias)]
            kinds = [kind for field in fields for kind in _models_in(field.annotation)]
    return [field.alias or key for kind in kinds for key, field in kind.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _sentence(problem: Mapping[str, Any], place: Sequence[str | int], body: type[BaseModel]) -> str:
    kind, about = problem["type"], problem.get("ctx") or {}
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        guess = nearest(str(place[-1]), _keys_at(place[:-1], body))
        return "unknown key" + (f", did you mean {guess!r}?" if guess else "")
    if kind == "value_error":
        return str(about["error"])
    if kind == "string_unicode":
        return "has a lone surrogate, which no UTF-8 can say"
    value = problem["input"]
    if kind == "literal_error":
        choices = [word.strip("'").replace("False", "false") for word in re.split(r", | or ", about["expected"])]
        return f"{shown(value)} is not served; {did_you_mean(str(value), choices)}"
    marks = body.model_fields[str(place[0])].metadata if len(place) == 1 and place[0] in body.model_fields else ()
    if bounds := [bound for bound in _BOUNDS if bound in about]:
        limits = {bound: getattr(mark, bound) for mark in marks for bound in _BOUNDS if hasattr(mark, bound)}
        limits = limits or {bound: about[bound] for bound in bounds}
        if {"ge", "le"} <= set(limits):
            least, most = limits["ge"], limits["le"]
            served = f"{least} to {most} is" if least < most else f"only {least} is, which changes nothing"
        else:
            served = f"{' and '.join(f'{_BOUNDS[name]} {limits[name]}' for name in limits)} is"
        return f"{shown(value)} is not served; {served}"
    if kind not in _EXPECTED:
        return f"{shown(value)} is not served: {problem['msg']}"
    return f"{shown(value)} is not served; {_EXPECTED[kind].format(**about)} is expected"
