"""Records of JSON Lines, Parquet, Arrow, text and WARC files, here and on object stores, the web and the Hub.

    files = list_files(["notes/", "s3://bucket/crawl/*.warc.gz"])
    for piece in chain.from_iterable(pieces_of(file, 64 << 20) for file in files):
        for row in read_piece(piece, Reading(columns={"text": "body"}), report):
            row.value["text"]

Files are read as a stream, in pieces that several processes can take. `Reading.on_error` says what a record or file
that is not right does: stop with its exact place, or be counted. `ReadReport` accounts for every record.
"""

from nemotron.data_prep.sources.files import (
    FORMATS,
    Compression,
    Format,
    SourceFile,
    described,
    format_of,
    list_files,
    open_binary,
)
from nemotron.data_prep.sources.pieces import Piece, can_be_cut, pieces_of, whole
from nemotron.data_prep.sources.reader import place, read_piece, row_id, where
from nemotron.data_prep.sources.reading import Reading, ReadReport, Row, check_skipped
from nemotron.data_prep.sources.user import UserSource, file_digests, page_text, read_documents, user_documents

__all__ = [
    "FORMATS",
    "Compression",
    "Format",
    "Piece",
    "ReadReport",
    "Reading",
    "Row",
    "SourceFile",
    "UserSource",
    "can_be_cut",
    "check_skipped",
    "described",
    "file_digests",
    "format_of",
    "list_files",
    "open_binary",
    "page_text",
    "pieces_of",
    "place",
    "read_documents",
    "read_piece",
    "row_id",
    "user_documents",
    "where",
    "whole",
]
