"""How much memory reading takes: of a giant line, of a file that unpacks to much, of a long file."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = """
import re, resource, sys
from pathlib import Path
import pyarrow, pyarrow.parquet  # whatever they need is not what reading needs
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.sources import tables, warc
def peak():  # in kB; where there is /proc not getrusage, whose maximum counts what the process was forked from
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])

before = peak()
report = ReadReport()
count = 0
for file in list_files([sys.argv[1]]):
    for piece in pieces_of(file, 1 << 40):
        for row in read_piece(piece, Reading("skip", max_record_bytes=1 << 20, required=()), report):
            count += 1
grown = (peak() - before) / 1024
print(count, report.skipped.get("longer than max_record_bytes", 0), round(grown))
"""

LINE = b'{"text": "%s"}\n'


def measured(path: Path) -> tuple[int, int, int]:
    """Records, records that were too long, MB that the process grew by."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    count, too_long, grown = map(int, result.stdout.split())
    return count, too_long, grown


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt"])
def test_a_line_of_100_megabytes_is_not_held(tmp_path: Path, name: str) -> None:
    giant = LINE % (b"x" * 100_000_000)
    content = b"one\n\n" * 30_000 + giant + b"\n" + b"two\n" if name == "a.txt" else LINE % b"a" + giant + LINE % b"b"
    if name.endswith(".gz"):
        content = gzip.compress(content, 1)
    elif name.endswith(".zst"):
        content = bytes(pa.compress(content, "zstd", asbytes=True))
    (tmp_path / name).write_bytes(content)
    count, too_long, grown = measured(tmp_path / name)
    assert (count, too_long) == (2, 1)
    assert grown < 30


@pytest.mark.slow
def test_a_long_file_is_a_stream(tmp_path: Path) -> None:
    line = LINE % (b"word " * 200)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 60_000, 1))
    (tmp_path / "b.jsonl").write_bytes(line * 60_000)
    table = pa.table({"text": [f"{i} " + "word " * 200 for i in range(60_000)]})
    pq.write_table(table, tmp_path / "c.parquet", use_dictionary=False)
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    count, too_long, grown = measured(tmp_path)
    assert (count, too_long) == (240_000, 0)
    assert grown < 60  # of 240 MB
