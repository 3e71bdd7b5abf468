"""How much the conversations of a source count in the loss: a record's own `loss_weight`, times that of its `category`.

Categories are whatever the records say, so a misspelt one in `loss_weights` shows only by being that of no record.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.files import Piece
from nemotron.data_prep.sources.reader import read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.kit.chat import UntrainableError

_NO_CATEGORY = "none"
_CATEGORIES_SHOWN = 8
# Stored bytes of a source that are read for its categories before the work: seconds, where tokenising takes minutes.
_LOOKED_AT = 10**9


def loss_weight(record: Mapping[str, Any], by_category: Mapping[str, float]) -> float:
    """What a record counts in the loss: its own weight times that of its category; 1 for what it does not say.

    UntrainableError: its own weight is no number from 0 on.
    """
    weight = record.get("loss_weight", 1.0)
    weight = 1.0 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise UntrainableError("loss_weight is no weight", f"loss_weight must be a number from 0 on, not {weight!r}")
    return float(weight) * by_category.get(category_of(record), 1.0)


def category_of(record: Mapping[str, Any]) -> str:
    """The category of a record, as `loss_weights` names it."""
    category = record.get("category")
    return _NO_CATEGORY if category is None else str(category)


def counted(categories: Mapping[str, int], loss_weights: Mapping[str, float] | None = None) -> str:
    """The records of each category and what they count in the loss, those with a weight first."""
    weights = loss_weights or {}
    order = sorted(categories, key=lambda name: (name not in weights, -categories[name], name))
    shown = [
        f"{name} {weights.get(name, 1):g} ({categories[name]:,})" if weights else f"{name} ({categories[name]:,})"
        for name in order[:_CATEGORIES_SHOWN]
    ]
    return ", ".join(shown) + (f" and {len(order) - len(shown):,} more" if len(order) > len(shown) else "")


def look_for_weights(
    name: str, pieces: Iterable[Piece], loss_weights: Mapping[str, float], columns: Mapping[str, str]
) -> None:
    """Read the records of source `name` until all that its config says of weights was met: a mistake costs no work.

    That is every category of `loss_weights`, and the column of `loss_weight` where `columns` names one. A long source
    is read in part; what is not met there is said on stderr, and `check_categories` decides in the end.
    UserError: the whole source was read, and no record has such a category or column.
    """
    sought = {field: columns.get(field, field) for field in ("category", "loss_weight")}
    reading = Reading("skip", columns=sought, required=())
    categories: Counter[str] = Counter()
    lacks_weight = "loss_weight" in columns
    no_weight = f"no record has a field {sought['loss_weight']!r}, which `columns` names as loss_weight"
    read_bytes = 0
    for piece in pieces:
        if read_bytes >= _LOOKED_AT:
            unmet = [f"no record has the category {wanted!r}" for wanted in loss_weights if wanted not in categories]
            unmet += [no_weight] * lacks_weight
            start = f"the first {human_size(read_bytes)} of source {name!r}"
            print(f"warning: in {start} {', '.join(unmet)}", file=sys.stderr)
            return
        read_bytes += piece.size
        for row in read_piece(piece, reading, ReadReport()):
            categories[category_of(row.value)] += 1
            lacks_weight = lacks_weight and row.value.get("loss_weight") is None
            if not lacks_weight and loss_weights.keys() <= categories.keys():
                return
    if not categories:  # no record can be read, which the work itself says better
        return
    if lacks_weight:
        raise UserError(f"source {name!r}: {no_weight}", "every record would count as 1")
    check_categories(name, loss_weights, categories, sought["category"])


def check_categories(name: str, loss_weights: Mapping[str, float], categories: Mapping[str, int], column: str) -> None:
    """UserError: a category that has a weight is that of no record of source `name`; `column`: where records say it."""
    for category in loss_weights:
        if category not in categories:
            if set(categories) <= {_NO_CATEGORY}:
                hint = f"no record has a field {column!r}; name the one that says it: columns: {{category: FIELD}}"
            else:
                hint = f"categories there: {counted(categories)}"
            raise UserError(
                f"source {name!r}: loss_weights names {category!r}, which is the category of no record", hint
            )
