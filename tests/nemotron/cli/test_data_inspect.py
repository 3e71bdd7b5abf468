"""`data inspect`: the whole command as a user runs it, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nemotron.kit import Dataset, Results

Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[[str], str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    rows = [{"text": f"note {i} " + "word " * i} for i in range(40)]
    (tmp_path / "notes" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    return tmp_path / "notes"


def test_the_page_of_a_folder(here: Nemotron, folder: Path) -> None:
    done = here(f"data inspect {folder} --samples=2")
    assert done.returncode == 0, done.stderr
    assert "notes: documents" in done.stdout
    assert "length of 40 records in characters of text: 7 to 203, median" in done.stdout
    assert "all 40 records" in done.stdout and "█" in done.stdout
    assert done.stdout.count("a.jsonl:") == 2
    assert "a.jsonl:1\n  note 0" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_of_an_artifact(here: Nemotron, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "registry"
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(root))
    table = {
        "read": {"documents": 50, "bytes": 9},
        "kept": {"documents": 40, "bytes": 8},
        "dropped": {"too short": {"documents": 10, "bytes": 1}},
        "noted": {},
        "samples": {},
    }
    Dataset(path=folder, num_examples=40, metrics={"table": table}).save("my-notes")
    by_name = here("data inspect my-notes --json", RUNSPEC_ARTIFACTS_ROOT=str(root))
    assert by_name.returncode == 0, by_name.stderr
    report = json.loads(by_name.stdout)
    assert report["counts"]["artifact"] == "my-notes:1"
    assert report["counts"]["records"] == 40
    assert report["tables"]["outcome"][2] == {"outcome": "dropped: too short", "documents": 10, "bytes": 1}
    by_path = here(f"data inspect {root}/my-notes/1/payload --json")
    assert json.loads(by_path.stdout) == report


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("data inspect {folder}/../gone.jsonl", "gone.jsonl is a link to nowhere, and nothing is there", None),
        ("data inspect", "inspect what?", None),
        ("data inspect {folder}x", "no file, folder or artifact", "did you mean {folder}?"),
        ("data inspect {folder}/b.jsonl", "no file, folder or artifact", "did you mean {folder}/a.jsonl?"),
        ("data inspect {folder} --samples -1", "greater than or equal to 0", "see: nemotron data inspect --help"),
    ],
)
def test_a_mistake_is_refused_in_two_lines(
    line: str, message: str, hint: str | None, refused: Refused, folder: Path
) -> None:
    first, *rest = refused(line.format(folder=folder)).splitlines()
    assert first.startswith("error: ") and message in first
    assert rest == [] if hint is None else rest[0].startswith(hint.format(folder=folder))


def test_what_is_no_data_is_named(refused: Refused, folder: Path) -> None:
    Results(path=folder, metrics={"loss": 1.0}).save("my-results")
    first, hint = refused("data inspect my-results").splitlines()
    assert first == "error: my-results:1 is results, not data" and hint == "nemotron artifacts show my-results:1"
