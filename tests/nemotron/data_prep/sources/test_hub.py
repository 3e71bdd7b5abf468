"""Datasets of the Hub, through the real client libraries, on a Hub-like server (hub_server.py)."""

from __future__ import annotations

import errno
import gzip
import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import PAGE, SIGNATURE, TOKEN, Hub, blob_id, running_hub

import nemotron
from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources import ranges
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.hub import HubAddress, find_hub_objects, match, parse_hub_address
from nemotron.data_prep.sources.locations import list_files, open_binary
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.kit.hub import what_failed

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub, and this process as its client with an empty cache and no token."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranges, "_FIRST_WAIT", 0.01)
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield hub


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return sink.getvalue()


def card(*configs: dict[str, Any]) -> bytes:
    """A dataset's card; JSON is YAML."""
    return f"---\nlicense: mit\nconfigs: {json.dumps(configs)}\n---\n# A dataset\n".encode()


def texts(location: str) -> list[str]:
    """The rows of a location, as the pipeline reads them."""
    rows: list[str] = []
    for file in list_files([location]):
        for piece in pieces_of(file, 1 << 20):
            rows += [row.value["text"] for row in read_piece(piece, Reading(), ReadReport())]
    return rows


def paths(location: str) -> list[str]:
    """Where in the repository its files are."""
    return [stored.uri.split("/", 5)[5] for stored in find_hub_objects(location)]


def test_json_and_csv_beside_other_data_are_not_read(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/n", {"a.jsonl": jsonl("a"), "labels.csv": b"text\nlabel\n", "in/b.json": jsonl("b")})
    for location in ("hf://org/n", "hf://datasets/org/n"):
        assert texts(location) == ["a"]
        assert capsys.readouterr().err.startswith("not read: 1 x .csv, 1 x .json; where .csv and .json are data")
    named = {"labels.csv": ["label"], "in": ["b"], "*.*": ["a", "label"]}  # by name, alone in a folder, by a glob
    assert {path: texts(f"hf://datasets/org/n/{path}") for path in named} == named


# --- Addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "address"),
    [
        ("hf://o/n", HubAddress("o/n")),
        (
            "hf://nvidia/Nemotron-CC-v2:High-Quality@main",
            HubAddress("nvidia/Nemotron-CC-v2", config="High-Quality", revision="main"),
        ),
        ("hf://o/n:c/train", HubAddress("o/n", config="c", split="train")),
        ("hf://o/n/train@refs/pr/3", HubAddress("o/n", split="train", revision="refs/pr/3")),
        ("hf://datasets/o/n", HubAddress("o/n")),
        ("hf://datasets/o/n@v1/a/*.parquet", HubAddress("o/n", revision="v1", path="a/*.parquet")),
        (
            "hf://datasets/o/n@refs/convert/parquet/a:b/0.parquet",
            HubAddress("o/n", revision="refs/convert/parquet", path="a:b/0.parquet"),
        ),
    ],
)
def test_addresses_follow_the_grammar(location: str, address: HubAddress) -> None:
    assert parse_hub_address(location) == address


@pytest.mark.parametrize("location", ["hf://", "hf://squad", "hf://o/n/a/b", "hf://o/n:", "hf://o/n@", "hf://o/n:c:d"])
def test_what_is_no_address_is_refused_with_the_grammar(location: str) -> None:
    with pytest.raises(UserError, match=r"not the address of a dataset\n.*hf://ORG/NAME\[:CONFIG\]\[/SPLIT\]"):
        parse_hub_address(location)


# --- Which files: the rules of `datasets` -----------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, bytes]] = {
    "card": {
        "README.md": card(
            {"config_name": "High-Quality", "data_files": "hq/*.jsonl", "default": True},
            {
                "config_name": "deep",
                "data_dir": "deep",
                "data_files": [{"split": "dev", "path": ["**/b*.jsonl", "a.jsonl"]}],
            },
            {"config_name": "by-names", "data_dir": "names/"},
            {"config_name": "hidden", "data_files": [".secret/*.jsonl"]},
        ),
        "hq/part-1.jsonl": jsonl("h1", "h2"),
        "hq/part-2.jsonl": jsonl("h3"),
        "hq/below/not.jsonl": jsonl("no"),
        "deep/a.jsonl": jsonl("a"),
        "deep/x/y/b1.jsonl": jsonl("b1"),
        "deep/b2.jsonl": jsonl("b2"),
        "deep/c.jsonl": jsonl("no"),
        "names/test.jsonl": jsonl("t"),
        "names/train-1.jsonl": jsonl("n1"),
        "names/train-2.jsonl": jsonl("n2"),
        ".secret/s.jsonl": jsonl("s"),
    },
    "sharded": {
        "data/train-00000-of-00002.parquet": parquet("a", "b"),
        "data/train-00001-of-00002-0123abcd.parquet": parquet("c"),
        "data/math-00000-of-00001.parquet": parquet("m"),
        "data/validation-00000-of-00001.parquet": parquet("v"),
        "README.md": b"no front matter",
        "config.json": b"{}",
    },
    "folders": {
        "README.md": card(),
        "en/train/1.jsonl": jsonl("e1"),
        "train/1.jsonl": jsonl("1"),
        "my-train-part/1.jsonl": jsonl("m"),
        "eval/1.jsonl": jsonl("t"),
        "training/deep/er/1.jsonl": jsonl("d"),
        "other/1.jsonl": jsonl("no"),
        "__cache__/train/1.jsonl": jsonl("no"),
        ".hidden/train/1.jsonl": jsonl("no"),
    },
    "file names": {
        "my_train_file.jsonl": jsonl("1"),
        "train.jsonl": jsonl("2"),
        "sub/dev.jsonl": jsonl("v"),
        "constrained.jsonl": jsonl("no"),
        "x-eval.jsonl": jsonl("t"),
        ".gitattributes": b"*.parquet filter=lfs",
    },
    "anything": {"b.jsonl": jsonl("b"), "sub/a.jsonl": jsonl("a"), "sub/.c.jsonl": jsonl("no")},
    "large": {"data.jsonl.gz": gzip.compress(jsonl(*(random.Random(i).randbytes(30).hex() for i in range(400))))},
}

# `datasets` itself, as a user would call it: every config and split, streamed.
REFERENCE = """
import json, sys
from datasets import get_dataset_config_names, get_dataset_split_names, load_dataset
out = {}
for name, commit in json.load(sys.stdin).items():
    for config in get_dataset_config_names(name, revision=commit):
        for split in get_dataset_split_names(name, config, revision=commit):
            rows = load_dataset(name, config, split=split, revision=commit, streaming=True)
            out[f"{name}:{config}/{split}"] = [row["text"] for row in rows]
print(json.dumps(out))
"""
# And what is to be compared with it, in a process that is told where the Hub is as users tell it.
OURS = """
import json, sys
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.kit.hub import what_failed
out = {}
for name in json.load(sys.stdin):
    rows = out[name] = []
    for file in list_files([f"hf://{name}"]):
        for piece in pieces_of(file, 1 << 20):
            rows += [row.value["text"] for row in read_piece(piece, Reading(), ReadReport())]
print(json.dumps(out))
"""


def run(script: str, value: Any, hub: Hub, home: Path) -> Any:
    """What a script prints, in a process that is a client of `hub`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "PYTHONPATH": str(Path(nemotron.__file__).parents[1])}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(value), env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_rows_are_those_of_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with running_hub() as hub:
        commits = {
            f"org/{name.replace(' ', '-')}": hub.add(f"org/{name.replace(' ', '-')}", files)
            for name, files in LAYOUTS.items()
        }
        theirs = run(REFERENCE, commits, hub, tmp_path / "theirs")
        ours = run(OURS, list(theirs), hub, tmp_path / "ours")
    assert {name: sorted(rows) for name, rows in ours.items()} == {name: sorted(rows) for name, rows in theirs.items()}
    assert "no" not in {text for rows in ours.values() for text in rows}
    assert len(theirs) == 15


def test_without_names_it_is_the_default_config_and_train(hub: Hub) -> None:
    hub.add("org/card", LAYOUTS["card"])
    assert paths("hf://org/card") == ["hq/part-1.jsonl", "hq/part-2.jsonl"]
    assert paths("hf://org/card:deep") == ["deep/b2.jsonl", "deep/x/y/b1.jsonl", "deep/a.jsonl"], "its only split"
    hub.add("org/sharded", LAYOUTS["sharded"])
    assert [path[5:10] for path in paths("hf://org/sharded")] == ["train", "train"]
    assert texts("hf://org/sharded/math") == ["m"]


def test_the_files_of_a_commit_are_listed_once(hub: Hub) -> None:
    hub.add("org/many", {**LAYOUTS["card"], "more.jsonl": jsonl("a")})
    list_files(["hf://org/many:High-Quality", "hf://org/many:deep", "hf://org/many:by-names"])
    pages = [request for request in hub.requests if "/tree/" in request]
    assert len(pages) == -(-(13 + 7) // PAGE), "13 files and 7 folders"


def test_files_of_a_repository_by_path(hub: Hub) -> None:
    commit = hub.add("org/card", LAYOUTS["card"])
    (found,) = find_hub_objects("hf://datasets/org/card/deep/a.jsonl")
    assert found.uri == f"hf://datasets/org/card@{commit}/deep/a.jsonl"
    assert found.version == blob_id(LAYOUTS["card"]["deep/a.jsonl"])
    assert paths("hf://datasets/org/card/deep/*.jsonl") == ["deep/a.jsonl", "deep/b2.jsonl", "deep/c.jsonl"]
    assert len(paths("hf://datasets/org/card/deep")) == 4, "a folder is all that is in it"
    assert paths(found.uri) == ["deep/a.jsonl"], "what is listed can be named"


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("**/train[-._ 0-9]*", "train.jsonl", True),
        ("**/train[-._ 0-9]*", "constrained.jsonl", False),
        ("*", "a/b.jsonl", False),
        ("**", "a/.b/c.jsonl", False),
        ("**", "README.md", False),
        ("README.md", "README.md", True),
        ("a[1].jsonl", "a[1].jsonl", True),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    assert match(pattern, [path]) == ([path] if matches else [])


# --- Pinned, streamed, tried again ------------------------------------------------------------------------------------


def test_a_branch_that_moves_on_does_not_change_what_was_listed(hub: Hub) -> None:
    hub.add("org/n", {"train.jsonl": jsonl("old")})
    (old,) = list_files(["hf://org/n"])
    hub.repositories["org/n"].commit({"train.jsonl": jsonl("new")})
    (new,) = list_files(["hf://org/n@main"])
    assert open_binary(old).read() == jsonl("old") and open_binary(new).read() == jsonl("new")
    assert (old.uri, old.version) != (new.uri, new.version)


def test_one_row_group_of_a_large_file_is_read_without_the_rest(hub: Hub) -> None:
    sink = io.BytesIO()
    table = pa.table({"text": [random.Random(i).randbytes(40).hex() for i in range(40_000)]})
    pq.write_table(table, sink, row_group_size=1000, compression="none")
    hub.add("org/n", {"train.parquet": sink.getvalue()})
    (file,) = list_files(["hf://org/n"])
    before = hub.bytes_sent
    with open_binary(file) as stream:
        assert pq.ParquetFile(stream).read_row_group(17).equals(table.slice(17_000, 1000))
    assert hub.bytes_sent - before < file.size / 8
    assert not any(path.startswith("HEAD") for path in hub.requests), "no whole-file download by the client"


def length(file: SourceFile) -> int:
    with open_binary(file) as stream:
        return len(stream.read())


def test_forked_workers_read_what_their_parent_listed(hub: Hub) -> None:
    hub.add("org/n", {f"train-{n}.jsonl": b"x" * 10_000 * (n + 1) for n in range(4)})
    files = list_files(["hf://org/n"])
    length(files[0])  # so that the parent has a connection
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(length, files).get(timeout=60) == [10_000, 20_000, 30_000, 40_000]


def test_a_hub_that_is_busy_or_hangs_up_is_asked_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    data = jsonl(*(str(n) for n in range(2000)))
    hub.add("org/n", {"train.jsonl": data})
    hub.failures = 2
    (file,) = list_files(["hf://org/n"])
    hub.failures, hub.cut = 2, 1
    assert open_binary(file).read() == data
    hub.failures = 1000
    with pytest.raises(RunFailed, match="the Hub answered 503"):
        open_binary(file).read()


# --- Refusals ---------------------------------------------------------------------------------------------------------


def refusal(location: str) -> str:
    with pytest.raises(UserError) as caught:
        list_files([location])
    text = str(caught.value)
    assert text.count("\n") <= 1 and TOKEN not in text and SIGNATURE not in text
    return text


def test_refusals_name_the_nearest(hub: Hub) -> None:
    hub.add("org/numbers", LAYOUTS["card"])
    hub.repositories["org/numbers"].commit({}, ref="release-1")
    assert "no such dataset" in refusal("hf://org/nmbers") and "did you mean hf://org/numbers?" in refusal(
        "hf://org/nmbers"
    )
    assert "HF_TOKEN" in refusal("hf://nobody/at-all")
    assert "did you mean High-Quality?" in refusal("hf://org/numbers:high-qualty")
    assert "did you mean dev?" in refusal("hf://org/numbers:deep/devv")
    assert "did you mean release-1?" in refusal("hf://org/numbers@release1")
    assert "did you mean hf://datasets/org/numbers/deep/a.jsonl?" in refusal("hf://datasets/org/numbers/deep/aa.jsonl")


def test_no_config_and_no_split_is_guessed(hub: Hub) -> None:
    two = card({"config_name": "x", "data_files": "x.jsonl"}, {"config_name": "y", "data_files": "y.jsonl"})
    hub.add("org/two", {"README.md": two, "x.jsonl": jsonl("x"), "y.jsonl": jsonl("y")})
    assert refusal("hf://org/two").endswith("hf://org/two:x; its configs: x, y")
    splits = card({"config_name": "c", "data_files": [{"split": "math", "path": "a"}, {"split": "code", "path": "b"}]})
    hub.add("org/splits", {"README.md": splits})
    assert refusal("hf://org/splits").endswith("hf://org/splits:c/math; its splits: math, code")


def test_a_loading_script_is_refused_even_beside_data(hub: Hub) -> None:
    hub.add("org/scripted", {"scripted.py": b"raise SystemExit('was run')", "train.jsonl": jsonl("a")})
    assert "needs its loading script scripted.py" in refusal("hf://org/scripted")
    assert texts("hf://datasets/org/scripted/train.jsonl") == ["a"], "its files can be named"


def test_shards_of_no_split_are_not_passed_over(hub: Hub) -> None:
    files = {f"data/{name}-00000-of-00001.jsonl": jsonl("a") for name in ("train", "my-part")}
    hub.add("org/n", files)
    assert "'my-part', as its files are named, is not the name of a split" in refusal("hf://org/n")


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ([{"data_files": "a"}], "config_name"),
        ("all", "not valid"),
        ([{"config_name": "x", "data_files": [{"split": "a", "path": "1"}, {"split": "a", "path": "2"}]}], "twice"),
        ([{"config_name": "x", "data_files": "https://elsewhere.example/x.jsonl"}], "names files elsewhere"),
        ([{"config_name": "x", "data_files": "../../other/x.jsonl"}], "names files elsewhere"),
        ([{"config_name": "x", "data_files": "nothing/*.jsonl"}], "no file matches nothing/"),
    ],
)
def test_a_card_that_is_wrong_is_one_line(hub: Hub, configs: Any, says: str) -> None:
    readme = f"---\nconfigs: {json.dumps(configs)}\n---\n".encode()
    hub.add("org/n", {"README.md": readme, "x.jsonl": jsonl("a")})
    assert says in refusal("hf://org/n")


def test_a_gated_dataset_needs_the_token_and_never_shows_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = jsonl(*(str(n) for n in range(2000)))
    hub.add("org/gated", {"README.md": card(), "train.jsonl": data}, gated=True)
    said, hint = refusal("hf://org/gated").split("\n")
    assert said == "hf://org/gated is gated: access denied"
    assert hint == f"accept its terms at {hub.endpoint}/datasets/org/gated, and set HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert "hf_of_somebody_else" not in refusal("hf://org/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (file,) = list_files(["hf://org/gated"])
    assert open_binary(file).read() == data
    assert TOKEN in hub.tokens and not hub.leaked, "the token must not go to the other host"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RunFailed, match="access denied: it is gated"):
        open_binary(file).read()


# --- Without the Hub --------------------------------------------------------------------------------------------------


def test_offline_it_is_read_from_the_cache_or_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, snapshot_download

    files = {"README.md": card(), "train-1.jsonl": jsonl("a"), "train-2.jsonl": jsonl(*map(str, range(2000)))}
    commit = hub.add("org/n", files)
    online = list_files(["hf://org/n"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal("hf://org/n")
    assert "HF_HUB_OFFLINE is set, and the local cache has no complete copy of main" in text
    assert text.endswith("hf download org/n --repo-type dataset")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = Path(snapshot_download("org/n", repo_type="dataset"))
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision in ("", "@main", f"@{commit}"):
        assert list_files([f"hf://org/n{revision}"]) == online, "the same plan with and without the Hub"
    assert b"".join(open_binary(file).read() for file in online) == files["train-1.jsonl"] + files["train-2.jsonl"]
    assert len(hub.requests) == asked
    (folder / "train-1.jsonl").unlink()
    assert "no complete copy" in refusal("hf://org/n"), "a part must not pass for the whole"


def test_a_hub_out_of_reach_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "hf://org/n: the Hub was not reached (ConnectError)" in refusal("hf://org/n")


def test_a_full_disk_is_not_called_a_hub_out_of_reach() -> None:
    assert what_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == "No space left on device"
    refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    assert what_failed(refused) == "the Hub was not reached (Connection refused)"


def test_a_file_of_the_cache_that_was_cut_is_noticed(hub: Hub) -> None:
    from huggingface_hub import snapshot_download

    hub.add("org/n", {"train.jsonl": jsonl("a", "b")})
    (file,) = list_files(["hf://org/n"])
    cached = Path(snapshot_download("org/n", repo_type="dataset")) / "train.jsonl"
    cached.resolve().write_bytes(b"{")
    with pytest.raises(RunFailed, match="copy in the local cache is not whole"):
        open_binary(file)
