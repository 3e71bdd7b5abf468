"""Documents in shards, for the tests of the steps that read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemotron.data_prep.curation.step import Document, list_documents, read_documents, write_documents


def write_shards(folder: Path, documents: Sequence[Document], shards: int) -> list[Path]:
    """Deal documents out to so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        write_documents(folder / f"part-{number}.jsonl.zst", documents[number::shards])
    return list_documents(folder)


def read_all(folder: Path) -> dict[str, Document]:
    """Documents of all shards, by their id."""
    return {document["id"]: document for path in list_documents(folder) for document in read_documents(path)}


def texts(folder: Path) -> dict[str, str]:
    """id -> text."""
    return {id: document["text"] for id, document in read_all(folder).items()}
