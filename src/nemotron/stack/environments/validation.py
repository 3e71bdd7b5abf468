"""Whether a document validates under a JSON schema; how long that may take, its keywords say.

`structured_output.py` asks, where it may take long in a process of its own (`killable.py`).
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

from nemotron.stack.environments.formats import Format, read, typed

# Regular expressions, those in a document as well; items that are compared in pairs; references, by which alternatives
# within alternatives double the work at every level of a document; what is unevaluated, for which the library checks
# all beside it again, twice at every level of the schema. All else takes at most as long as schema times document.
_UNBOUNDED = re.compile(
    r'"(?:pattern|patternProperties|uniqueItems|unevaluatedItems|unevaluatedProperties|\$ref|\$dynamicRef)": '
    r'|"format": "regex"'
)
_FORMATS = FormatChecker(list(Draft202012Validator.FORMAT_CHECKER.checkers))


@_FORMATS.checks("regex", raises=(re.error, OverflowError, RecursionError))
def _is_regex(value: Any) -> bool:
    """As the library's, for which `((((…` is an exception and not a document that does not validate."""
    return not isinstance(value, str) or bool(re.compile(value))


def as_text(schema: Any) -> str:
    """The schema as JSON, the same text whatever the order of its keys."""
    return json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=4096)
def checked(schema_text: str) -> Draft202012Validator:
    """A validator for a schema (`as_text`) that was itself checked; a broken one raises jsonschema.SchemaError."""
    schema = json.loads(schema_text)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=_FORMATS)


def may_take_long(schema_text: str) -> bool:
    """Whether some document of moderate length takes minutes: a keyword of the schema (`as_text`) allows it."""
    return _UNBOUNDED.search(schema_text) is not None


def mismatch(schema_text: str, document: str, form: Format) -> str | None:
    """Why the document is not one of the format that validates under the schema (`as_text`); None: it is."""
    validator = checked(schema_text)
    try:
        value = read(document, form)
    except ValueError as failure:
        return f"not {form.upper()}: {failure}"
    if form in ("xml", "csv"):
        value = typed(value, validator.schema)
    try:
        found = next(validator.iter_errors(value), None)
    except OverflowError:
        return "a number that is beyond any float"
    return None if found is None else found.message[:200]
