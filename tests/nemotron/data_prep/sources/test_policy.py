"""Bad input, one kind at a time: `stop` names file, record and field; `skip` counts it and loses nothing else."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import read_piece, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport, check_kept, check_skipped

from .written import arrow, every_format, json_lines, parquet, pieces, read, response, warc, zstd

FINE = b'{"text": "fine"}\n'


def at(name: str, number: int) -> str:
    """How a record is named, as a regular expression: lines of a JSON array are not its records."""
    return f"{name}, record {number}" if name.startswith("array") else f"{name}:{number}"


def both(path: Path, complaint: str, reason: str, left: int, count: int = 1, **how: Any) -> UserError:
    """`stop` complains so; `skip` leaves so many records and counts so many of the reason."""
    with pytest.raises(UserError, match=complaint) as caught:
        read(path, **how)
    rows, report = read(path, on_error="skip", **how)
    assert len(rows) == report.records == left
    assert report.skipped == {reason: count}
    assert 1 <= len(report.samples) <= 5
    assert all(sample["where"].startswith(str(path)) for sample in report.samples)
    assert all(sample["reason"].startswith(reason) for sample in report.samples)
    return caught.value


@pytest.mark.parametrize(
    ("line", "complaint", "reason"),
    [
        (b'{"text": "x"', r"malformed JSON: Expecting ',' delimiter \(column 13\)", "malformed JSON"),
        (b"[1]", "not a JSON object: expected a JSON object, found list", "not a JSON object"),
        (b"not json", "malformed JSON", "malformed JSON"),
        (b'{"txt": "x"}', r"field 'text' is missing, did you mean 'txt'\?", "field is missing"),
        (b'{"text": 3}', "field 'text' is not text", "field is not text"),
        (b'{"text": null}', "field 'text' is null", "field is missing"),
        (b'{"text": "\xff"}', r"not UTF-8: byte 10 of the line", "not UTF-8"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8", "not UTF-8"),
        (b'{"text": "\\ud800"}', "malformed JSON: half of a surrogate pair", "malformed JSON"),
        (b'{"text": "x", "more": [{"\\ud800": [1]}]}', "malformed JSON: half of a surrogate pair", "malformed JSON"),
        (b"[" * 100_000, "malformed JSON", "malformed JSON"),
        (b'{"\\n": ' + b"[" * 800 + b"]" * 800 + b"}", "malformed JSON: maximum recursion depth", "malformed JSON"),
        (b'{"text": %s}' % (b"9" * 5000), "malformed JSON", "malformed JSON"),
        (b'{"text": "%s"}' % (b"x" * 5000), "longer than max_record_bytes: 5013 bytes", "longer than max_record_bytes"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_line(tmp_path: Path, line: bytes, complaint: str, reason: str, packed: bool) -> None:
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    content = FINE + b"\n" + line + b"\n" + FINE
    path.write_bytes(gzip.compress(content) if packed else content)
    limit = 4000 if "longer" in reason else 200_000
    both(path, rf"{path.name}:3: {complaint}", reason, left=2, max_record_bytes=limit)
    # A half of a pair is whole with the other half.
    path.write_bytes(gzip.compress(b'{"text": "\\ud83d\\ude00"}') if packed else b'{"text": "\\ud83d\\ude00"}')
    assert read(path)[0][0][1] == {"text": "😀"}


def test_the_exact_line_in_a_later_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(FINE * 1000 + b"{\n" + FINE * 10)
    both(path, r"a\.jsonl:1001: malformed JSON", "malformed JSON", left=1010, target_bytes=500)
    _, report = read(path, on_error="skip", target_bytes=500)
    assert report.samples[0]["where"] == f"{path}:1001"


def test_fields_of_every_format_are_named_with_the_nearest(tmp_path: Path) -> None:
    for name, path in every_format(tmp_path / "missing", [{"txt": "x", "n": i} for i in range(20)]).items():
        error = both(path, rf"{at(name, 1)}: field 'text' is missing, did you mean 'txt'\?", "field is missing", 0, 20)
        assert error.hint == "fields there: txt, n; a source's `columns: {text: txt}` takes another one"
    for name, path in every_format(tmp_path / "typed", [{"text": i} for i in range(20)]).items():
        both(path, rf"{at(name, 1)}: field 'text' is not text", "field is not text", 0, 20)
    for name, path in every_format(tmp_path / "nested", [{"a": {"b": i}} for i in range(20)]).items():
        both(path, rf"{at(name, 1)}: field 'a\.c' is missing", "field is missing", 0, 20, columns={"text": "a.c"})
    for name, path in every_format(tmp_path / "null", [{"text": "x", "m": i or None} for i in range(20)]).items():
        both(path, rf"{at(name, 1)}: field 'm' is null", "field is missing", 19, present=("m",))


def test_bytes_that_are_no_text_in_tables(tmp_path: Path) -> None:
    values = [b"fine", b"\xff\xfe", b"fine"]
    buffers = pa.array(values, pa.binary()).buffers()
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, buffers)})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        both(tmp_path / name, rf"{at(name, 2)}: not UTF-8", "not UTF-8", left=2)


def test_a_giant_row_of_a_table(tmp_path: Path) -> None:
    for name, path in every_format(tmp_path, [{"text": "a"}, {"text": "x" * 9000}, {"text": "b"}]).items():
        both(
            path,
            rf"{at(name, 2)}: longer than max_record_bytes",
            "longer than max_record_bytes",
            2,
            max_record_bytes=5000,
        )


def test_text_files(tmp_path: Path) -> None:
    blank = b"word " * 21_000 + b"\n\n"
    (tmp_path / "a.txt").write_bytes(blank + b"fine\xff\n\n" + b"more\n" * 30_000 + b"\n" + blank)
    both(tmp_path / "a.txt", r"a\.txt:2: not UTF-8: byte 105006", "not UTF-8", left=2)
    (tmp_path / "b.txt").write_bytes(blank + b"word " * 50_000 + b"\n\n" + blank)
    both(tmp_path / "b.txt", r"b\.txt:2: longer than", "longer than max_record_bytes", 2, max_record_bytes=200_000)


def test_an_empty_file_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": b"", "b.txt": b"", "c.jsonl.gz": gzip.compress(b""), "d.warc": b"", "e.jsonl": b"\n\n"
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "f.parquet")
    rows, report = read(tmp_path)
    assert rows == []
    assert report.skipped == {"empty file": 6}
    assert report.errors() == {}
    for name in ("g.jsonl.gz", "g.parquet", "g.arrow", "g.warc.gz"):  # nothing at all is no file of these
        (tmp_path / name).write_bytes(b"")
        both(tmp_path / name, rf"{name}: not a readable ", "damaged file", left=0)


def test_files_of_another_kind_than_their_names_say(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really PAR1")
    both(tmp_path / "a.parquet", r"a\.parquet: not a readable Parquet file \(", "damaged file", left=0)
    (tmp_path / "b.arrow").write_bytes(FINE * 3)
    both(tmp_path / "b.arrow", r"b\.arrow: not a readable Arrow file \(", "damaged file", left=0)
    (tmp_path / "c.warc.gz").write_bytes(gzip.compress(FINE))
    both(tmp_path / "c.warc.gz", r"c\.warc\.gz:1: not a readable WARC record \(no WARC header", "damaged file", left=0)
    (tmp_path / "d.jsonl").write_bytes(parquet([{"text": "x"}]))
    both(tmp_path / "d.jsonl", r"d\.jsonl: .*its bytes are Parquet", "damaged file", left=0)
    (tmp_path / "e.feather").write_bytes(b"FEA1....FEA1")
    both(tmp_path / "e.feather", r"e\.feather: .*Feather of version 1", "damaged file", left=0)


def files() -> dict[str, bytes]:
    """A file of each format in which a cut can be seen; 40 records."""
    rows = [{"text": f"row {i}", "m": [{"role": "user", "content": "é" * (i % 3)}]} for i in range(40)]
    pages = [response(f"http://e.org/{i}", b"<p>text</p>" * 5) for i in range(40)]
    return {
        "a.jsonl.gz": gzip.compress(json_lines(rows)),
        "a.jsonl.zst": zstd(json_lines(rows)),
        "a.parquet": parquet(rows, 10),
        "a.arrow": arrow(rows, 10),
        "s.arrow": arrow(rows, 10, stream=True),
        "a.warc": warc(pages, gz=False),
        "a.warc.gz": warc(pages),
    }


FILES = files()


@settings(max_examples=150)
@given(st.sampled_from(sorted(FILES)), st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_is_one_damaged_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, share: float
) -> None:
    data = FILES[name]
    path = tmp_path_factory.mktemp("cut") / name
    path.write_bytes(data[: int(share * len(data))])
    rows, report = read(path, on_error="skip", required=(), target_bytes=1000)
    if path.stat().st_size and data[path.stat().st_size :][:2] == b"\x1f\x8b" and name == "a.warc.gz":
        return  # between two members: whole, as far as anybody can tell
    if name == "s.arrow" and data[path.stat().st_size :].startswith(b"\xff\xff\xff\xff"):
        return  # between two messages of a stream, whose end need not be marked
    if name == "a.warc" and "damaged file" not in report.skipped:
        rest = data[path.stat().st_size :].lstrip(b"\r\n")
        assert not rest or rest.startswith(b"WARC/1.0")  # between two records
        return
    assert report.skipped["damaged file"] == 1
    [sample] = report.samples_of("damaged file")
    assert sample["where"].startswith(str(path))
    path.write_bytes(data)
    assert [value for _, value in read(path, required=())[0]][: len(rows)] == [value for _, value in rows]
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UserError, match=rf"{name}(:\d+)?: not a readable "):
        read(path, required=(), target_bytes=1000)


# The same examples each time: with one footer among many thousands pyarrow itself aborts the process.
@settings(max_examples=150, derandomize=True)
@given(st.sampled_from(sorted(FILES)), st.integers(0, 1 << 30), st.binary(min_size=1, max_size=6))
def test_any_damage_is_an_error_of_the_user_and_no_crash(
    tmp_path_factory: pytest.TempPathFactory, name: str, place: int, damage: bytes
) -> None:
    data = bytearray(FILES[name])
    place %= len(data)
    data[place : place + len(damage)] = damage
    path = tmp_path_factory.mktemp("damage") / name
    path.write_bytes(data)
    for on_error in ("stop", "skip"):
        report = ReadReport()
        try:
            for piece in pieces(path, target_bytes=1000):
                for row in read_piece(piece, Reading(on_error, required=()), report):  # type: ignore[arg-type]
                    json.dumps(row.value, ensure_ascii=False).encode()
        except UserError as error:
            assert on_error == "stop"
            assert name in error.message


def test_damage_in_one_row_group_leaves_the_others(tmp_path: Path) -> None:
    rows = [{"text": f"{i:04d} " + os.urandom(20).hex()} for i in range(4000)]
    data = bytearray(parquet(rows, 1000))
    group = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(1).column(0)
    begin = group.data_page_offset
    data[begin : begin + 30] = b"\xff" * 30
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    found, report = read(path, on_error="skip", target_bytes=20_000)
    assert report.skipped == {"damaged file": 1}
    assert {value["text"] for _, value in found} == {row["text"] for i, row in enumerate(rows) if i // 1000 != 1}
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file"):
        read(path)


def test_the_rest_behind_good_records_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(FINE * 3) + gzip.compress(FINE * 100_000)[:-9])
    with pytest.raises(
        UserError, match=r"not a readable gzip file \(.*\); what follows .*a\.jsonl\.gz:\d{5,} is not read"
    ):
        read(path)


def test_lines_before_the_place_where_a_small_file_is_cut_are_read(tmp_path: Path) -> None:
    lines = json_lines([{"text": os.urandom(40).hex()} for _ in range(1000)])
    for name, data in (("a.jsonl.gz", gzip.compress(lines)), ("a.jsonl.zst", zstd(lines))):
        path = tmp_path / name
        path.write_bytes(data[:-9])
        found, report = read(path, on_error="skip")
        assert report.skipped == {"damaged file": 1}
        assert len(found) * len(lines) / 1000 > len(lines) - 2**17 - 2**14  # a block of zstd, and a step
        assert name.endswith("zst") or len(found) > 990


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes((b"text\n" if name == "a.csv" else b"") + (FINE + b"\n") * 40_000)
    [piece] = pieces(path)
    rows = read_piece(piece, Reading("skip", required=()), ReadReport())
    next(rows)
    os.truncate(path, len(FINE) * 30_000)
    with pytest.raises(RunFailed, match=rf"{name} changed after it was listed"):
        list(rows)


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet", "a.txt"):
        path = tmp_path / name
        path.write_bytes(FINE if name != "a.parquet" else parquet([{"text": "x"}]))
        [piece] = pieces(path)
        path.unlink()
        with pytest.raises(UserError, match=rf"{name}: unreadable file: No such file or directory"):
            list(read_piece(piece, Reading(), ReadReport()))
        report = ReadReport()
        assert list(read_piece(piece, Reading("skip"), report)) == []
        assert report.skipped == {"unreadable file": 1}


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(FINE)
    (tmp_path / "a.jsonl").chmod(0)
    [piece] = pieces(tmp_path)
    report = ReadReport()
    with as_nobody():
        with pytest.raises(UserError, match=r"a\.jsonl: unreadable file: Permission denied"):
            list(read_piece(piece, Reading(), ReadReport()))
        assert list(read_piece(piece, Reading("skip"), report)) == []
    assert report.skipped == {"unreadable file": 1}
    (tmp_path / "shut").mkdir(mode=0)
    with as_nobody(), pytest.raises(UserError, match="Permission denied"):
        list_files([str(tmp_path / "shut" / "x.jsonl")])


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """As another user than root, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_page_is_no_text_yet(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(warc([response("http://e.org/", b"<p>x"), ("conversion", "http://e.org/", b"text", None)]))
    with pytest.raises(UserError, match=r"a\.warc\.gz:2: an HTML page, of which no text was taken yet"):
        read(path)
    rows, report = read(path, on_error="skip")
    assert [value["text"] for _, value in rows] == ["text"]
    assert report.errors() == {"field is missing": 1}


def test_a_broken_response_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    good = response("http://e.org/", b"<p>good</p>")
    data = warc([good, response("http://e.org/", b"bad"), good], gz=False)
    before, middle, after = data.rpartition(b"HTTP/1.1 200 OK")[0].rpartition(b"HTTP/1.1 200 OK")
    path.write_bytes(gzip.compress(before + b"this is no HTTP" + after + data[len(before + middle + after) :]))
    bomb = response("http://e.org/", gzip.compress(b"x" * 10_000_000), Content_Encoding="gzip")
    rows, report = read(path, required=())
    assert len(rows) == 2
    assert report.skipped == {"malformed HTTP response": 1, "WARC record of another kind": 1}
    path.write_bytes(warc([good, bomb, good]))
    rows, report = read(path, on_error="skip", required=(), max_record_bytes=1 << 20)
    assert len(rows) == 2
    assert report.errors() == {"longer than max_record_bytes": 1}


def test_reports_add_up(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(FINE * 3 + b"{\n" * 9 + b"[]\n")
    whole, parts = ReadReport(), ReadReport()
    for target, total in ((1 << 20, whole), (7, parts)):
        for piece in pieces(tmp_path, target_bytes=target):
            report = ReadReport()
            list(read_piece(piece, Reading("skip"), report))
            total.add(report)
    assert whole == parts
    assert whole.skipped == {"malformed JSON": 9, "not a JSON object": 1}
    assert [sample["where"].rpartition(":")[2] for sample in whole.samples] == ["4", "5", "6", "7", "8", "13"]


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_called_by_its_name(tmp_path: Path, name: str, encoding: str) -> None:
    (tmp_path / name).write_bytes(("\ufeff" + '{"text": "Wörter"}\n').encode(encoding))
    [file] = list_files([str(tmp_path / name)])
    with pytest.raises(UserError, match=r":1: not UTF-8: the file is UTF-16") as caught:
        list(read_piece(whole(file), Reading(), ReadReport()))
    assert caught.value.hint is not None and "iconv" in caught.value.hint


@pytest.mark.parametrize(
    ("records", "skipped", "share", "fails"),
    [(168, 165, 0.5, True), (20, 10, 0.5, False), (20, 11, 0.5, True), (9, 8, 0.5, False), (9, 9, 0.5, True),
     (9, 9, 1.0, True), (20, 20, 1.0, True), (20, 19, 1.0, False), (100, 1, 0.0, True), (100, 0, 0.0, False),
     (0, 0, 0.5, False)],
)  # fmt: skip
def test_a_source_of_which_too_much_is_left_out_is_an_error(
    records: int, skipped: int, share: float, fails: bool
) -> None:
    errors = {"field is missing": skipped} if skipped else {}
    samples = [{"where": "x.jsonl:1", "reason": "field is missing: field 'text' is missing (fields there: body)"}]
    if not fails:
        check_skipped("docs", records, errors, samples, share)
        return
    with pytest.raises(
        UserError, match=rf"source 'docs': {skipped} of {records} .*x\.jsonl:1.*fields there: body"
    ) as caught:
        check_skipped("docs", records, errors, samples, share)
    # What allows more is no remedy where nothing is left.
    assert ("max_skipped" in str(caught.value.hint)) == (skipped < records)


def test_a_source_whose_files_are_mostly_broken_is_an_error(tmp_path: Path) -> None:
    """However few errors that is, beside the records of the files that can be read."""
    for name in "abcde":
        data = gzip.compress(FINE * 100)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(data if name in "ab" else data[:20] + b"\xff" * (len(data) - 20))
    report = ReadReport()
    for file in list_files([str(tmp_path)]):
        of_file = ReadReport()
        list(read_piece(whole(file), Reading("skip"), of_file))
        report.add(of_file)
    assert (report.records, report.skipped) == (200, {"damaged file": 3})
    unread = report.unread_bytes / sum(path.stat().st_size for path in tmp_path.iterdir())
    assert unread == 3 / 5
    check_skipped("docs", 203, report.errors(), report.samples, 0.6, unread)
    with pytest.raises(UserError, match=r"3 of 203 records cannot be read, with 60\.0% of its bytes, more than .*0\.5"):
        check_skipped("docs", 203, report.errors(), report.samples, 0.5, unread)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.zst"])
def test_what_lies_behind_the_damage_of_a_file_is_not_read(tmp_path: Path, name: str) -> None:
    """A stray quote behind a tenth of a table; zeros in the place of the second half, as a crash leaves them."""
    numbers = random.Random(1)
    rows = [f"{numbers.getrandbits(400):x}" for _ in range(40_000)]
    if name == "a.csv":
        data = "\n".join(["text", *rows[:4000], '"a" b', *rows[4000:]]).encode()
    else:
        lines = b"".join(b'{"text": "%b"}\n' % row.encode() for row in rows)
        packed = zstd(lines)
        data = packed[: len(packed) // 2].ljust(len(packed), b"\0")
    (tmp_path / name).write_bytes(data)
    _, report = read(tmp_path / name, on_error="skip")
    share, unread = 0.1 if name == "a.csv" else 0.5, report.unread_bytes / len(data)
    assert report.skipped == {"damaged file": 1}
    assert report.records == pytest.approx(share * 40_000, rel=0.5)  # 1 MiB of content is decompressed at a time
    assert unread == pytest.approx(1 - share, abs=0.1)


@pytest.mark.parametrize(
    ("read", "kept", "outcome"),
    [(100, 50, ""), (100, 49, "warning"), (100, 1, "warning"), (100, 0, "error"), (1, 0, "error"), (0, 0, "")],
)
def test_most_of_a_source_dropped_is_said_and_all_of_it_refused(
    read: int, kept: int, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = {"too long": read - kept, "repeated": 0} if read else {}
    remedies = {"too long": "seq_length takes longer ones", "repeated": "never seen"}
    if outcome == "error":
        with pytest.raises(
            UserError, match=rf"^source 'mine': nothing is left of {read} read: {read} too long\n"
        ) as caught:
            check_kept("mine", read=read, kept=kept, dropped=dropped, remedies=remedies)
        assert caught.value.hint == "seq_length takes longer ones"
    else:
        check_kept("mine", read=read, kept=kept, dropped=dropped, remedies=remedies)
    line = f"warning: source 'mine': {read - kept} of {read} read are dropped: {read - kept} too long\n"
    assert capsys.readouterr().err == (f"{line}  seq_length takes longer ones\n" if outcome == "warning" else "")
