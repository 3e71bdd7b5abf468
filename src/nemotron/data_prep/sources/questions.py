"""Evaluation questions of the user's own, read from files: for an evaluation to ask, for training data to leave out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.files import RECORD_FORMATS, redact
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import read_piece, reject, where, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport, check_kept
from nemotron.kit.schemas.questions import QuestionsConfig

Made = TypeVar("Made")
NOT_A_QUESTION = "not a valid question"


def read_questions(
    sources: Sequence[QuestionsConfig], make: Callable[[QuestionsConfig, dict[str, Any]], Made]
) -> list[Made]:
    """What `make` makes of the questions of all sources, in the order of their files.

    What `on_error: skip` leaves out is said on stderr.

    Args:
        make: is given a source and one of its rows: question, answer and, where the record has them, choices and
            match. A UserError of its own
            says that the row is no question.

    Raises:
        UserError: a source has none, or a record cannot be read, lacks a field, or is no question.
    """
    questions = []
    for source in sources:
        report = ReadReport()
        own = list(islice(_read(source, make, report), source.max_questions))
        if report.skipped:
            print(f"questions {source.name!r}: {report}", file=sys.stderr)
            for sample in report.samples:
                print(f"  {sample['where']}: {sample['reason']}", file=sys.stderr)
        read = len(own) + sum(report.skipped.values())
        check_kept(source.name, read=read, kept=len(own), dropped=report.skipped)
        if not own:
            raise UserError(f"questions {source.name!r}: no question in {', '.join(map(redact, source.paths))}")
        questions += own
    return questions


def question_texts(sources: Sequence[QuestionsConfig]) -> list[str]:
    """What no training text may contain, beside the generated tasks of the evaluation."""
    return read_questions(sources, lambda _, row: str(row["question"]))


def _read(
    source: QuestionsConfig, make: Callable[[QuestionsConfig, dict[str, Any]], Made], report: ReadReport
) -> Iterator[Made]:
    columns = {field: source.columns.get(field, field) for field in source.fields}
    present = ("question", "answer", *(["choices"] if source.match == "choice" else []))
    reading = Reading(source.on_error, columns=columns, required=("question",), present=present)
    for piece in map(whole, list_files(source.paths, RECORD_FORMATS, on_error=source.on_error)):
        for row in read_piece(piece, reading, report):
            try:
                made = make(source, row.value)
            except UserError as error:
                if source.on_error == "stop":
                    raise error.at(where(piece, row.index)) from None
                reject(piece, row.index, report, NOT_A_QUESTION, error.message)
                continue
            yield made
