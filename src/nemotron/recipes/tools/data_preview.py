"""Which tokens a model is trained on, for `nemotron data preview`, which starts this script.

The source is a file, folder or address of conversations, which are rendered and tokenised here; packed Parquet rows, a
file or a folder of them; or a reference of a packed artifact. Of a packed row the first sequences are shown, and in its
title the loss weight of each, where one is not 1. On a terminal trained tokens are green and context is grey, each
token in another shade than its neighbour; elsewhere, or with NO_COLOR, trained text stands between {+ and +}. This is a
tool and no step of a recipe: it publishes nothing and carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemo_runspec.user_files import expanded
from nemotron.data_prep.chat.conversations import training_spans
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.data_prep.chat.spool import CONTROL_TOKEN, ChatSource, as_conversation, chat_reading, check_trainable
from nemotron.data_prep.sources.files import RECORD_FORMATS, SourceFile
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import read_piece, reject, where, whole
from nemotron.data_prep.sources.reading import ReadReport
from nemotron.data_prep.tokens.tokenizer import check_template_tokens, find_tokenizer, tokenizer_from
from nemotron.kit import Artifact, SFTPack
from nemotron.kit.chat import UntrainableError, control_tokens
from nemotron.kit.chat_template import load_template
from nemotron.kit.record_fields import ABOUT_IT, CONVERSATION
from nemotron.recipes.tools.data_names import artifact_called, find, tokenizer_beside
from nemotron.recipes.tools.options import run_tool
from nemotron.recipes.tools.packed_rows import packed_files, read_rows

FIELDS = (*CONVERSATION, *ABOUT_IT)
RESET = "\x1b[0m"
# Each kind of token in two shades, so that their borders are seen.
TRAINED, CONTEXT = ("\x1b[30;42m", "\x1b[30;102m"), ("\x1b[90m", "\x1b[37m")
RULE = "\x1b[36m"


@dataclass(frozen=True)
class Options:
    """Of `nemotron data preview`."""

    source: str | None
    number: int
    skip: int
    sequences: int
    template: str
    tokenizer: str | None
    columns: str | None
    ids: bool


class Row(NamedTuple):
    """What is shown together: a conversation, or a packed row with where each of its sequences starts."""

    title: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8 | np.float32]
    starts: list[int]


class Place(NamedTuple):
    """What the source was found to be. `tokenizer`: the one that lies with an artifact."""

    title: str
    packed: list[Path]
    files: list[SourceFile]
    tokenizer: str | None


# --- What is to be shown ----------------------------------------------------------------------------------------------


def place_of(source: str | None) -> Place:
    """UserError: there is nothing of that name, or it is neither conversations nor packed rows."""
    if source is None:
        raise UserError(
            "preview of what? give a file, a folder or an address of conversations, packed Parquet, or an artifact"
        )
    path = expanded(source)
    if path.is_file() or path.is_dir():
        if packed := packed_files(path):
            tokenizer = tokenizer_beside(path)
            return Place(source, packed, [], str(tokenizer) if tokenizer else None)
    elif (version := find(source)[1]) is not None:
        if version.record["type"] != "SFTPack":
            raise UserError(f"artifact {version.ref} holds no packed conversations: a {version.record['type']}")
        dataset = SFTPack.load(version.ref)
        paths = [path for path in (dataset.train_path, dataset.valid_path, dataset.test_path) if path is not None]
        packed = [file for path in paths for file in ([path] if path.is_file() else sorted(path.glob("*.parquet")))]
        return Place(f"artifact {version.ref}", packed, [], str(dataset.tokenizer_path or "") or None)
    return Place(source, [], list_files([source], RECORD_FORMATS), None)


def _tokenizer_of_artifact(location: str) -> str | None:
    """The tokenizer of the artifact of that name; None where it names none. UserError: that artifact has none."""
    version = None if expanded(location).exists() else artifact_called(location)
    if version is None:
        return None
    artifact = Artifact.load(version.ref)
    path = getattr(artifact, "tokenizer_path", None)
    if path is None:
        raise UserError(f"artifact {artifact.ref} has no tokenizer")
    return str(path)


def packed_rows(files: Iterable[Path]) -> Iterator[Row]:
    """Rows of packed Parquet, one at a time."""
    for file in files:
        for number, row in enumerate(read_rows(file)):
            title = f"{file.name} row {number}: {len(row.seq_start_id)} sequences"
            yield Row(title, row.input_ids, row.loss_mask, row.seq_start_id.tolist())


def first_sequences(row: Row, most: int) -> tuple[Row, int]:
    """A row cut behind its first sequences, and how many it has beyond them."""
    if len(row.starts) <= most:
        return row, 0
    end = row.starts[most]
    return Row(row.title, row.input_ids[:end], row.loss_mask[:end], row.starts[:most]), len(row.starts) - most


def weights_of(row: Row) -> str:
    """What the tokens of each sequence count in the loss, where some do not count 1."""
    ends = [*row.starts[1:], len(row.loss_mask)]
    weights = [f"{row.loss_mask[start:end].max():g}" for start, end in zip(row.starts, ends, strict=True)]
    return f", loss weight {', '.join(weights)}" if set(weights) - {"1"} else ""


def conversation_rows(
    files: list[SourceFile], template: str, tokenizer: Tokenizer, columns: dict[str, str]
) -> Iterator[Row]:
    """Conversations as they would be trained, span by span; the first of a file that cannot be say why on stderr."""
    source = ChatSource("preview", chat_reading(columns, "skip"))
    forbidden = control_tokens(template)
    for piece in map(whole, files):
        report = ReadReport()
        num_reported = 0
        for record in read_piece(piece, source.reading, report):
            num_reported = _tell(report, num_reported)
            place = where(piece, record.index)
            try:
                conversation = as_conversation(record.value, source, piece)
                check_trainable(conversation, template)
            except UntrainableError as error:
                reason = str(error).replace("\n", "; ").removeprefix(f"{error.reason}: ")
                reject(piece, record.index, report, error.reason, reason)
                continue
            content = conversation.key(template)
            if control := [token for token in forbidden if token in content]:
                reject(piece, record.index, report, CONTROL_TOKEN, f"{control[0]}, of {template}")
                continue
            spans = list(training_spans(conversation, template))
            for number, (ids, mask) in enumerate(encode_conversations(spans, tokenizer, template), start=1):
                of = f", sequence {number} of {len(spans)}" if len(spans) > 1 else ""
                yield Row(f"{place}{of}", ids, mask, [0])
        if _tell(report, num_reported) < sum(report.skipped.values()):
            print(f"{piece.file.name}: {report}", file=sys.stderr)


def _tell(report: ReadReport, num_reported: int) -> int:
    """What the reader left out since `num_reported` of its samples; returns how many there are now."""
    for sample in report.samples[num_reported:]:
        print(f"{sample['where']}: {sample['reason']}", file=sys.stderr)
    return len(report.samples)


# --- How it looks -----------------------------------------------------------------------------------------------------


def pieces_of_text(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of each token; a character whose bytes are spread over several tokens stands at the last of them."""
    pieces: list[str] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        if text.endswith("\ufffd") and end - begin < 8 and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text)
        begin = end
    return pieces


def colour(row: Row, texts: list[str], ids: bool) -> str:
    """Tokens in their shades. A line break is shown before it breaks the line."""
    out = []
    # The mask is aligned to labels: whether token i + 1 is trained stands at i.
    for i, text in enumerate(texts):
        trained = i > 0 and i not in row.starts and bool(row.loss_mask[i - 1])
        if i in row.starts and i:
            out.append(f"{RESET}\n{RULE}--- sequence at {i} ---{RESET}\n")
        shade = (TRAINED if trained else CONTEXT)[i % 2]
        shown = text.replace("\n", f"\\n{RESET}\n{shade}")
        number = f"[{row.input_ids[i]}]" if ids else ""
        out.append(f"{shade}{shown}{number}{RESET}")
    return "".join(out)


def plain(row: Row, texts: list[str], ids: bool) -> str:
    """Trained text between {+ and +}; with `ids` every token behind its number."""
    out = []
    inside = False
    for i, text in enumerate(texts):
        trained = i > 0 and i not in row.starts and bool(row.loss_mask[i - 1])
        if inside and not trained:
            out.append("+}")
        if i in row.starts and i:
            out.append(f"\n--- sequence at {i} ---\n")
        if trained and not inside:
            out.append("{+")
        inside = trained
        out.append(f"[{row.input_ids[i]}]{text}" if ids else text)
    return "".join(out) + ("+}" if inside else "")


def main(options: Options) -> None:
    """Show rows."""
    load_template(options.template)  # UserError: misspelt
    columns = _columns(options.columns)
    place = place_of(options.source)
    location = options.tokenizer or place.tokenizer
    if location is None:
        raise UserError(
            "which tokenizer? give --tokenizer=FOLDER, an artifact with one, or hf://ORG/MODEL",
            "as in --tokenizer nano3-pretrain-data-tiny, which nemotron nano3 data prep pretrain -c tiny makes",
        )
    location = _tokenizer_of_artifact(location) or location
    text = find_tokenizer(location).json_text()
    if place.packed and place.tokenizer and find_tokenizer(place.tokenizer).json_text() != text:
        raise UserError(
            f"{place.title} was packed with another tokenizer than {location}",
            f"leave --tokenizer out: its own is in {place.tokenizer}",
        )
    tokenizer = tokenizer_from(text)
    if place.files:
        check_template_tokens(tokenizer, location, options.template)
    rows = (
        packed_rows(place.packed)
        if place.packed
        else conversation_rows(place.files, options.template, tokenizer, columns)
    )
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    shown = 0
    for row in islice(rows, options.skip, options.skip + options.number):
        shown += 1
        trained = int(np.count_nonzero(row.loss_mask))
        title = f"{row.title}: {len(row.input_ids)} tokens, {trained} of them trained"
        row, left_out = first_sequences(row, options.sequences)
        title = f"=== {title}{weights_of(row)} ==="
        texts = pieces_of_text(tokenizer, row.input_ids.tolist())
        print(f"{RULE}{title}{RESET}" if coloured else title)
        print(colour(row, texts, options.ids) if coloured else plain(row, texts, options.ids))
        if left_out:
            note = f"… {left_out} more sequences in this row; --sequences={len(row.starts) + left_out} shows all"
            print(f"{RULE}{note}{RESET}" if coloured else note)
        print()
    if not shown:
        raise UserError(f"{place.title}: nothing to show" + (f" after the first {options.skip}" * bool(options.skip)))


def _columns(text: str | None) -> dict[str, str]:
    columns = {}
    for word in (text or "").split(",") if text else ():
        field, separator, column = word.partition("=")
        if field not in FIELDS or not separator or not column:
            hint = f"fields are {', '.join(FIELDS)}"
            raise UserError(f"--columns={text}: write FIELD=COLUMN, as messages=talk, with commas between", hint)
        columns[field] = column
    return columns


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
