"""Rows of `artifacts list` and `artifacts show`."""

import os

import pytest

from nemo_runspec.artifacts.listing import describe, list_entries
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.artifacts.removal import unneeded
from nemo_runspec.errors import UserError

RECORD = {"type": "Dataset", "created_at": "2026-01-02T03:04:05+00:00", "inputs": {"data": "raw:1@ab"}}


def test_latest_of_each_or_all_of_one_and_corrupt_ones_are_listed_too(registry, payload):
    for name in ("b", "a", "a"):
        version = registry.publish(name, payload, RECORD)
    assert list(list_entries(registry)) == ["a:2", "b:1"]
    assert list(list_entries(registry, all_versions=True)) == ["a:1", "a:2", "b:1"]
    (version.directory / "artifact.json").write_text("{")
    first = registry.resolve("a:1")
    assert (first.record["num_files"], first.size_bytes) == (3, 264)
    assert list_entries(registry, "a") == {"a:1": first, "a:2": "corrupt"}
    with pytest.raises(UserError, match="no artifact 'c'"):
        list_entries(registry, "c")


@pytest.fixture
def close(monkeypatch):
    """`close(folder)`: it may not be read. Its mode alone would stop nobody who is root."""
    listdir = os.listdir

    def refuse(path, closed):
        if path == closed:
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    return lambda folder: monkeypatch.setattr(os, "listdir", lambda path: refuse(path, folder))


def test_a_registry_that_may_not_be_read_is_named(registry, payload, close):
    registry.publish("a", payload, RECORD)
    close(registry.root)
    for call in (registry.names, lambda: list_entries(registry)):
        with pytest.raises(UserError, match=f"^{registry.root}: cannot be read: Permission denied$"):
            call()


def test_an_artifact_whose_folder_may_not_be_read_hides_no_other(registry, payload, close):
    for name in ("mine", "theirs"):
        registry.publish(name, payload, RECORD)
    close(registry.root / "theirs")
    assert list_entries(registry) == {"mine:1": registry.resolve("mine"), "theirs": "unreadable"}
    with pytest.raises(UserError, match="no artifact 'mime'") as refused:
        registry.resolve("mime")
    assert refused.value.hint == "did you mean mine?"
    # What it needs is not known, so nobody may say that others are not needed.
    for call in (lambda: registry.resolve("theirs"), lambda: unneeded(registry)):
        with pytest.raises(UserError, match=f"^{registry.root}/theirs: cannot be read: Permission denied$"):
            call()


def test_an_unreadable_record_is_not_called_corrupt(registry, payload, monkeypatch):
    registry.publish("a", payload, RECORD)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(registry.store), "read", refuse)
    assert list_entries(registry) == {"a:1": "unreadable"}
    with pytest.raises(UserError, match=r"manifest\.sha256: cannot be read: Permission denied"):
        registry.resolve("a")


def test_description_shows_every_part_of_the_record_and_every_file(registry, payload):
    record = {
        **RECORD,
        "fields": {"rows": 3, "train_path": "art://./train.bin", "absent": None},
        "sources": [{"name": "python-stdlib 3.11.7", "sha256": "f" * 64}],
        "metrics": {"loss": 1.25},
    }
    version = registry.publish("a", payload, record)
    rows = describe(version)
    assert ("fields.train_path", str(version.path / "train.bin")) in rows and ("metrics.loss", "1.25") in rows
    assert ("inputs.data", "raw:1@ab") in rows and ("sources", f"python-stdlib 3.11.7  {'f' * 64}") in rows
    assert ("digest", version.digest) in rows and ("size", "264 B in 3 files") in rows
    assert [text.split("  ")[1] for label, text in rows if label == "file"] == sorted(version.files)
    assert not any(label == "fields.absent" for label, _ in rows)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999_700, "1 MB"), (7.5e12, "7.5 TB")],
)
def test_sizes(size, text):
    assert human_size(size) == text
