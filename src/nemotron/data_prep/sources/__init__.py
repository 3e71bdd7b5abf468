"""Records of JSON, CSV, Parquet, Arrow, text and WARC files, here and on object stores, the web and the Hub.

    files = list_files(["notes/", "s3://bucket/crawl/*.warc.gz"])                      # locations.py
    for piece in chain.from_iterable(pieces_of(file, 64 << 20) for file in files):     # reader.py
        for row in read_piece(piece, Reading(columns={"text": "body"}), report):       # reader.py, reading.py
            row.value["text"]

Files are read as a stream, in pieces that several processes can take. `Reading.on_error` says what a record or file
that is not right does: stop with its exact place, or be counted. `ReadReport` accounts for every record.

The modules, each of which imports only those before it: files, ranges, then the stores (web, stores, hub), locations;
reading, then the formats (lines, tables, warc), reader; planning.
"""
