"""`nemotron data tokenize` as a user runs it: payload, mixture, kills, changed inputs, errors, memory."""

from __future__ import annotations

import io
import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.stack.training.loaders import BlendLoader, held_out_documents

from .. import scripts
from ..scripts import published

SCRIPT = "data/tokenize/tokenize_documents.py"
WORDS = "rivers mountains letters machines year day model reads many every single words about the and of"


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=rng.randrange(20, 200))) + f" {i}" for i in range(count)]


def write(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    save_tokenizer(train_tokenizer(texts(50), 400), tmp_path / "tok", model_max_length=512, template="nano3")
    for i in range(4):
        write(tmp_path / "docs" / f"{i}.jsonl", texts(150, i))
    (tmp_path / "docs" / "readme.md").write_text("# A page\n\nof prose\n")
    (tmp_path / "docs" / "table.csv").write_text("a,b\n")
    return tmp_path


WORDS_OF_ALL = ("own", "tokenizer=tok", "seq_length=128")


def run(cwd: Path, *words: str, cpus: int | None = None) -> subprocess.CompletedProcess[str]:
    return scripts.run(cwd, SCRIPT, *WORDS_OF_ALL, *words, cpus=cpus)


def test_a_folder_of_mixed_files_becomes_training_data(here: Path) -> None:
    result = run(here, "sources=[docs]", "splits.valid=0.1", "splits.test=0.1")
    version = published(here, result)
    assert "not read: 1 x .csv" in result.stderr
    blend = json.loads((version.path / "blend.json").read_text())
    source = blend["sources"]["docs"]
    assert source["documents"] + source["valid_documents"] + source["test_documents"] == 601
    assert version.record["type"] == "PretrainBlend"
    assert version.record["fields"]["num_examples"] == source["documents"]
    assert version.record["metrics"]["not_read"] == {".csv": 1}
    counts = json.loads((version.path / "counts.json").read_text())["docs"]
    assert sum(counts["lengths"]["train"].values()) == source["documents"]
    tokenizer = Tokenizer.from_file(str(here / "tok/tokenizer.json"))
    assert (blend["eos_id"], blend["vocab_size"]) == (2, tokenizer.get_vocab_size())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (version.path / "tokenizer" / name).read_bytes() == (here / "tok" / name).read_bytes()
    # What training reads.
    loader = BlendLoader(version.path, 128, 20, seed=1)
    assert loader.next_batch(4).input_ids_BL.shape == (4, 128)
    assert len(held_out_documents(version.path)["docs"]) == source["valid_documents"]
    # A digest is of content: the same elsewhere, and with one process in place of several.
    words = ("sources=[docs]", "splits.valid=0.1", "splits.test=0.1")
    assert published(here, run(here, *words, cpus=1)).digest == version.digest
    again = here / "elsewhere"
    again.mkdir()
    (here / "docs").rename(again / "docs")
    (here / "tok").rename(again / "tok")
    assert published(again, run(again, *words)).digest == version.digest


def test_mixture_is_recorded_and_a_blend_that_asks_too_much_is_refused(here: Path) -> None:
    a = "{name: a, paths: [docs/0.jsonl], weight: 3, repeats: 2}"
    sources = f"sources=[{a}, {{name: b, paths: [docs/1.jsonl, docs/2.jsonl], weight: 1}}]"
    version = published(here, run(here, sources, "train_tokens=12800"))
    mixture = json.loads((version.path / "mixture.json").read_text())
    shares = {row["source"]: row["realised"] for row in mixture["sources"]}
    assert shares == {"a": 0.75, "b": 0.25}
    blend = json.loads((version.path / "blend.json").read_text())
    assert blend["phases"][0]["weights"] == {"a": 0.75, "b": 0.25}
    refused = run(here, sources, "train_tokens=12800000")
    assert refused.returncode == 2
    assert "source 'a'" in refused.stderr and "repeats is 2" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sources=[dcos]"], "docs"),
        (["sources=[bad]", "reading.on_error=stop"], "bad/x.jsonl:2"),
        (["sources=[bad]", "tokenizer=odd"], "names no eos_token"),
        (["sources=[bad]", "tokenizer=odd", "add_eos=false", "add_bos=true"], "names no bos_token"),
        (["sources=[bad]", "tokenizer=broken"], "not a readable tokenizer"),
        (["sources=[empty]"], "nothing is left of 1 read: 1 empty text"),
        (["sources=[docs, headed]"], "source 'headed' is empty: no document in "),
        (["sources=[{paths: [bad], max_tokens: 1}]"], "1 beyond max_tokens"),
    ],
)
def test_errors_are_two_lines_and_nothing_is_published(here: Path, words: list[str], complaint: str) -> None:
    write(here / "bad" / "x.jsonl", ["fine"])
    with (here / "bad" / "x.jsonl").open("a") as file:
        file.write('{"text": "cut\n')
    write(here / "empty" / "x.jsonl", [""])
    (here / "headed").mkdir()
    (here / "headed" / "x.csv").write_text("text,id\n")
    for name, content in (("odd", (here / "tok/tokenizer.json").read_text()), ("broken", "{")):
        (here / name).mkdir()
        (here / name / "tokenizer.json").write_text(content)
    result = run(here, *words)
    assert result.returncode == 2, result.stderr
    assert complaint in result.stderr
    assert len(result.stderr[result.stderr.index("error: ") :].splitlines()) <= 2
    assert not list((here / "output" / "artifacts").glob("*/*"))


def _pss(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


@pytest.mark.slow
def test_one_document_of_30_mb_among_many_takes_no_more_than_1_gb(here: Path) -> None:
    rng = random.Random(3)
    huge = "\n".join(" ".join(rng.choices(WORDS.split(), k=12)) for _ in range(410_000))
    assert 29e6 < len(huge) < 32e6
    write(here / "huge" / "x.jsonl", [*texts(2000, 1), huge, *texts(2000, 2)])
    child = scripts.start(here, SCRIPT, *WORDS_OF_ALL, "sources=[huge]", "splits.valid=0")
    peak = 0
    while child.poll() is None:
        pids = [str(child.pid), *Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        peak = max(peak, sum(_pss(int(pid)) for pid in pids))
        time.sleep(0.05)
    stdout, stderr = child.communicate()
    version = published(here, subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr))
    assert 0 < peak * 1024 < 1e9
    blend = json.loads((version.path / "blend.json").read_text())
    lengths = [n for p in blend["sources"]["huge"]["train"] for n in IndexedDataset(version.path / p).lengths]
    assert len(lengths) == 4001 and max(lengths) > 4_000_000


def test_a_wrong_column_ends_the_run_although_records_may_be_skipped(here: Path) -> None:
    rows = [*({"body": text} for text in texts(165)), *({"text": text} for text in texts(3))]
    (here / "other").mkdir()
    (here / "other" / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(here, "sources=[other]")
    assert result.returncode == 2, result.stderr
    message, hint = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert "source 'other': 165 of 168 records" in message and "165 times field is missing" in message
    assert "x.jsonl:1" in message and "fields there: body" in message
    assert "`columns`" in hint and "reading.max_skipped=1" in hint
    assert not list((here / "output" / "artifacts").glob("*/*"))
    allowed = published(here, run(here, "sources=[other]", "reading.max_skipped=1", "splits.valid=0"))
    assert allowed.record["fields"]["num_examples"] == 3
    published(here, run(here, "sources=[{paths: [other], columns: {text: body}}]"))


def test_broken_files_end_the_run_by_their_bytes_however_few_records_they_count_as(here: Path) -> None:
    write(here / "other" / "a.jsonl", texts(30))
    (here / "other" / "b.jsonl.gz").write_bytes(b"\x1f\x8b" + bytes((here / "other" / "a.jsonl").stat().st_size))
    result = run(here, "sources=[other]")
    assert result.returncode == 2, result.stderr
    assert "source 'other': 1 of 31 records cannot be read, with 50.0% of its bytes, more than" in result.stderr


def test_keys_of_other_commands_are_translated(here: Path) -> None:
    for key, ours in (("locations", "paths"), ("text_field", "columns: {text: …}")):
        result = run(here, f"sources=[{{{key}: docs}}]")
        assert result.returncode == 2 and f"here it is called sources.0.{ours}" in result.stderr
    (here / "blend.yaml").write_text("sources: [{locations: [docs]}]\n")
    assert "unknown key 'locations'; here it is called paths" in run(here, "blend=blend.yaml").stderr


def test_pages_of_a_crawl_give_their_main_text(here: Path) -> None:
    warcio = pytest.importorskip("warcio.warcwriter")
    pytest.importorskip("trafilatura")
    from warcio.statusandheaders import StatusAndHeaders

    prose = "The planted paragraph tells of rivers and mountains, of letters and machines, and of every single day. "
    (here / "crawl").mkdir()
    with (here / "crawl" / "pages.warc.gz").open("wb") as stream:
        writer = warcio.WARCWriter(stream, gzip=True)
        for number, body in enumerate((f"<p>{prose * 4}</p>", "", f"<p>{prose * 5}</p>")):
            html = (
                f"<html><head><title>t</title></head><body><nav>Home About</nav><article>{body}</article></body></html>"
            )
            headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html; charset=utf-8")], protocol="HTTP/1.1")
            record = writer.create_warc_record(
                f"https://a.example/{number}", "response", payload=io.BytesIO(html.encode()), http_headers=headers
            )
            writer.write_record(record)
    result = run(here, "sources=[crawl]", "splits.valid=0")
    version = published(here, result)
    source = json.loads((version.path / "blend.json").read_text())["sources"]["crawl"]
    assert source["documents"] == 2 and "1 page without a main text" in result.stderr
    tokenizer = Tokenizer.from_file(str(here / "tok/tokenizer.json"))
    text = tokenizer.decode(IndexedDataset(version.path / source["train"][0])[0][:-1].tolist())
    assert text.count("planted paragraph") == 4 and "<p>" not in text and "About" not in text
