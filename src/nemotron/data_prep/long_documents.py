"""The data of a long-context phase: documents of one length with questions about them, and their blend with other text.

Nemotron Nano 2 (arXiv 2508.14444, section 2) takes documents of more than 32k tokens, cuts them into chunks of 1,024,
has a large model write questions and answers about a tenth of the chunks, and appends them to the document. Here a
chunk is a definition in Python code, the question is what it does, and the answer is the first line of its docstring,
verbatim: the text that has it lies far back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from nemotron.data_prep.chat.pack import write_rows
from nemotron.data_prep.sources.documents import SPLITS, stable_hash
from nemotron.data_prep.tokens.blend import Blend, SourceFiles, add_shares, empty_source, write_blend_file
from nemotron.data_prep.tokens.encoding import plain_tokenizer
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter, token_dtype

LONG = "long"  # the source of such documents, and the folder of the data that their blend lies in
SHARE = 0.2  # of the tokens of the phase
LENGTH = 1024  # tokens of a document with its questions: 8 times the windows before (the paper's: 524,288, 64 times)
ASKED_ABOUT = 768  # tokens at its beginning: without them nothing tells the answers
MOST = 4  # questions about a text


@dataclass(frozen=True)
class LongPhase:
    """Sizes of a long-context phase; the defaults are Nano 2's.

    length: tokens of a document with its questions. asked_about: tokens at its beginning that have all the answers.
    share: of the tokens of the phase that are such documents. most: documents to train on; None: all there are.
    """

    length: int = LENGTH
    asked_about: int = ASKED_ABOUT
    share: float = SHARE
    most: int | None = None


# A definition whose head is one line, and the first line of its docstring, of at least 16 characters without quotes.
_DEFINITION = re.compile(
    r'^[ \t]*(?:async )?(?:def|class) (?!__)(\w+)[^\n]*:\n[ \t]+[rR]?"""([^\n"]{16,})(?:"""|\n)', re.MULTILINE
)


@dataclass(frozen=True)
class Question:
    """What is asked at the end of a document. `answer` stands in the document, word by word, after the same quotes."""

    name: str
    answer: str

    @property
    def asked(self) -> str:
        """What stands before the answer."""
        return f'\n\nQuestion: what does {self.name} do?\nAnswer: """'


def questions_about(text: str) -> list[Question]:
    """A question about each definition with a docstring; none about a name or with an answer that occurs twice."""
    found = [Question(name, answer.strip()) for name, answer in _DEFINITION.findall(text)]
    names, answers = [question.name for question in found], [question.answer for question in found]
    return [q for q in found if names.count(q.name) == 1 == answers.count(q.answer)]


def long_document(
    text: str, tokenizer: Tokenizer, eos_id: int, phase: LongPhase = LongPhase()
) -> tuple[np.ndarray, np.ndarray] | None:
    """The beginning of `text`, as much as fits, with up to MOST questions about it at its end: ids, label-aligned mask.

    ids, int32 [length], end in `eos_id`; mask, uint8 [length], is 1 where the next token is of an answer. Answers stand
    among the first `asked_about` tokens, questions behind these. None: the text is too short, or answers no question.
    """
    length, asked_about = phase.length, phase.asked_about
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if len(encoding.ids) < length:
        return None
    questions = questions_about(text[: encoding.offsets[asked_about][0]])
    end, answers = list[int](), list[int]()
    for question in sorted(questions, key=lambda question: stable_hash(question.name, text))[:MOST]:
        asked = tokenizer.encode(question.asked, add_special_tokens=False).ids
        answer = tokenizer.encode(f"{question.answer}\n", add_special_tokens=False).ids
        if asked_about + len(end) + len(asked) + len(answer) < length:
            end += asked + answer
            answers += [0] * len(asked) + [1] * len(answer)
    if not end:
        return None
    ids = [*encoding.ids[: length - len(end) - 1], *end, eos_id]
    mask = [*[0] * (length - len(end) - 2), *answers, 0, 0]  # a place earlier than the tokens: as labels
    return np.array(ids, np.int32), np.array(mask, np.uint8)


def by_hash(read: Callable[[], Iterable[str]], seed: int, batch: int) -> Iterator[str]:
    """The texts that `read()` gives out, which differ, in the order of their hashes with `seed`.

    Memory holds the `batch` that come first. Whoever wants more waits for another reading, for twice as many.
    """
    last = -1
    while True:
        hashed = ((stable_hash(str(seed), text), text) for text in read())
        found = nsmallest(batch, (pair for pair in hashed if pair[0] > last))
        yield from (text for _, text in found)
        if len(found) < batch:
            return
        last, batch = found[-1][0], 2 * batch


def write_long_phase(
    folder: Path,
    blend: Blend,
    texts: Mapping[str, Iterable[str]],
    tokenizer: Tokenizer,
    phase: LongPhase = LongPhase(),
    others: Mapping[str, tuple[float, Sequence[np.ndarray]]] | None = None,
) -> int:
    """Write `folder`/long: blend.json, a fifth of it long documents, the rest as in the last phase of `blend`, whose
    streams lie in `folder`; long-train.bin and .idx; valid.parquet, a held-out document a row.

    A stream of documents of one length is cut into windows of that length at their ends. `others` are further sources
    of such documents, with their share of the tokens: the ids of each, int32 [length]. Returns how many long documents
    there are to train on; where there are fewer than two, or none is held out, they get no share, and where there are
    no others either, nothing is written.
    """
    eos_id, tokenizer = blend["eos_id"] or 0, plain_tokenizer(tokenizer.to_str())
    train, valid = (
        list(islice(filter(None, (long_document(text, tokenizer, eos_id, phase) for text in texts[split])), most))
        for split, most in (("train", phase.most), ("valid", None))
    )
    documents = dict(others or {})
    if len(train) >= 2 and valid:
        documents[LONG] = phase.share, [ids for ids, _ in train]
        write_rows(folder / LONG / "valid.parquet", valid, phase.length, concatenate=False)
    if not documents:
        return 0
    (folder / LONG).mkdir(exist_ok=True)
    sources = {name: _from_below(source) for name, source in blend["sources"].items()}
    for name, (_, of_source) in documents.items():
        with IndexedDatasetWriter(folder / LONG / f"{name}-train", token_dtype(blend["vocab_size"])) as writer:
            writer.add_documents(np.concatenate(of_source), [phase.length] * len(of_source))
        written = {"train": [f"{name}-train"], "documents": len(of_source), "tokens": phase.length * len(of_source)}
        sources[name] = cast(SourceFiles, {**empty_source(), **written})
    shares = {name: share for name, (share, _) in documents.items()}
    phases = add_shares([{**blend["phases"][-1], "name": LONG, "until": 1.0}], shares)
    write_blend_file({**blend, "phases": phases, "sources": sources}, folder / LONG)
    for name, (_, of_source) in documents.items():
        held_out = f", {len(valid)} held out" if name == LONG else ""
        print(f"{name:6} {'train':6} {len(of_source):7,} documents{held_out}", file=sys.stderr)
    return len(train) if LONG in documents else 0


def _from_below(source: SourceFiles) -> SourceFiles:
    """The same streams, as a file in a folder beside them names them."""
    streams = {split: [f"../{prefix}" for prefix in source[split]] for split in SPLITS}
    return cast(SourceFiles, {**source, **streams})
