"""Publishing, resolving and verifying, and what is refused."""

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import ArtifactError, UserError

RECORD = {"type": "Dataset", "fields": {"train_path": "art://./train.bin", "rows": 3}}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x01
    path.write_bytes(bytes(data))


def test_a_version_holds_the_payload_the_record_and_checksums_that_sha256sum_accepts(registry, payload):
    version = registry.publish("corpus", payload, RECORD)
    assert (version.ref, version.uri, version.version) == ("corpus:1", "art://corpus:1", 1)
    assert (version.path / "train.bin").read_bytes() == bytes(range(256))
    assert (payload / "train.bin").exists()
    stored = json.loads((version.directory / "artifact.json").read_text())
    assert stored["type"] == "Dataset" and stored["num_files"] == 3 and stored["size_bytes"] == 256 + 8
    if shutil.which("sha256sum"):
        check = ["sha256sum", "--strict", "-c", "manifest.sha256"]
        assert subprocess.run(check, cwd=version.directory, capture_output=True).returncode == 0


def test_the_digest_is_over_names_and_contents_and_nothing_else(registry, payload, tmp_path):
    first = registry.publish("corpus", payload, {**RECORD, "created_at": "yesterday", "metrics": {"loss": 1.5}})
    lines = {"empty.txt": b"", "tokenizer/vocab.json": b'{"a": 1}', "train.bin": bytes(range(256))}
    assert first.digest == sha("".join(f"{sha(data)}  {name}\n" for name, data in sorted(lines.items())).encode())
    moved = shutil.copytree(payload, tmp_path / "elsewhere")
    os.utime(moved / "train.bin", (0, 0))
    assert registry.publish("another-name", moved, {"type": "Other"}).digest == first.digest
    (moved / "train.bin").rename(moved / "valid.bin")
    assert registry.publish("corpus", moved, RECORD).digest != first.digest


def test_references_resolve_to_their_version(registry, payload):
    for number in (1, 2, 3):
        (payload / "n").write_text(str(number))
        registry.publish("corpus", payload, RECORD)
    digest = registry.resolve("corpus:2").digest
    for ref in ("corpus:2", "art://corpus:2", f"corpus:2@{digest}", f"art://corpus:2@{digest[:8]}"):
        assert (registry.resolve(ref).path / "n").read_text() == "2"
    for ref in ("corpus", "corpus:latest", "art://corpus", "art://corpus:latest"):
        assert registry.resolve(ref).version == 3
    assert registry.names() == ["corpus"] and registry.versions("corpus") == [1, 2, 3]
    with pytest.raises(UserError, match="has digest"):
        registry.resolve("corpus:1@" + "0" * 64)


def test_an_unknown_name_is_refused_with_the_nearest_one(registry, payload):
    registry.publish("nano3-sft-data-tiny", payload, RECORD)
    with pytest.raises(UserError) as refused:
        registry.resolve("nano3-sft-data-tyni")
    assert refused.value.hint == "did you mean nano3-sft-data-tiny?"
    assert (type(refused.value), refused.value.name) == (ArtifactError, "nano3-sft-data-tyni")
    with pytest.raises(UserError, match="no version 7"):
        registry.resolve("nano3-sft-data-tiny:7")
    with pytest.raises(UserError, match="no artifact"):
        registry.verify("nothing")
    assert Registry(registry.root / "not-there").names() == []


def test_paths_in_fields_come_back_absolute_and_move_with_the_registry(registry, payload, tmp_path):
    registry.publish("base", payload, RECORD)
    fields = {
        "train_path": "art://./train.bin",
        "dataset_path": "art://base:1/tokenizer",
        "own": "/data/x",
        "path": "art://.",
    }
    registry.publish("model", payload, {"type": "Model", "fields": fields})
    moved = Registry(shutil.move(registry.root, tmp_path / "moved"))
    version = moved.resolve("model")
    assert version.record["fields"] == {
        "train_path": str(tmp_path / "moved/model/1/payload/train.bin"),
        "dataset_path": str(tmp_path / "moved/base/1/payload/tokenizer"),
        "own": "/data/x",
        "path": str(version.path),
    }
    assert moved.verify("model") == []


def test_a_record_may_name_a_file_whose_name_is_not_utf8(registry, payload):
    sources = [{"name": "/data/caf\udce9.jsonl"}]
    assert registry.publish("data", payload, {**RECORD, "sources": sources}).record["sources"] == sources
    assert registry.verify("data") == []


def test_every_single_flipped_byte_is_found(registry, payload):
    (payload / "train.bin").write_bytes(b"tokens" * 5)
    version = registry.publish("corpus", payload, RECORD)
    assert registry.verify("corpus:1") == []
    tried = 0
    for path in (p for p in version.directory.rglob("*") if p.is_file()):
        for position in range(path.stat().st_size):
            flip(path, position)
            problems = registry.verify("corpus:1")
            assert problems, f"byte {position} of {path.name}"
            flip(path, position)
            tried += 1
    assert tried > 600 and registry.verify("corpus:1") == []


def test_a_flipped_byte_names_the_file_and_the_artifact(registry, payload):
    version = registry.publish("nano3-sft-model-tiny", payload, RECORD)
    flip(version.path / "train.bin", 100)
    assert registry.resolve("nano3-sft-model-tiny").version == 1
    with pytest.raises(ArtifactError) as refused:
        registry.resolve_verified("nano3-sft-model-tiny")
    assert str(version.path / "train.bin") in refused.value.message
    assert (refused.value.name, refused.value.corrupt) == ("nano3-sft-model-tiny", True)


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"schema": 1}', "\xff", None])
def test_a_corrupt_record_is_refused_and_explained(registry, payload, damage):
    version = registry.publish("corpus", payload, RECORD)
    record = version.directory / "artifact.json"
    record.unlink() if damage is None else record.write_bytes(damage.encode("latin-1"))
    with pytest.raises(UserError) as refused:
        registry.resolve("corpus:1")
    assert "corpus:1 is corrupt" in refused.value.message and str(record) in refused.value.message
    assert "\n" not in refused.value.message
    assert registry.verify("corpus:1") == [refused.value.message]
    assert registry.publish("corpus", payload, RECORD).version == 2  # the next one takes its place
    assert registry.resolve("corpus").version == 2


def test_a_record_that_was_edited_with_its_checksum_is_still_refused(registry, payload):
    """Who repairs the manifest's line for the record cannot change the payload digest with it."""
    version = registry.publish("corpus", payload, RECORD)
    record, manifest = version.directory / "artifact.json", version.directory / "manifest.sha256"
    old = record.read_bytes()
    new = old.replace(version.digest.encode(), b"0" * 64)
    record.write_bytes(new)
    manifest.write_text(manifest.read_text().replace(sha(old), sha(new)))
    with pytest.raises(UserError, match="do not give the digest"):
        registry.resolve("corpus:1")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "./x", "a//x", "."])
def test_a_manifest_that_leads_out_of_its_version_is_refused(registry, payload, name):
    version = registry.publish("corpus", payload, RECORD)
    manifest = version.directory / "manifest.sha256"
    manifest.write_text(f"{manifest.read_text()}{'0' * 64}  payload/{name}\n")
    with pytest.raises(UserError, match="which has no place here"):
        registry.resolve("corpus:1")


def test_missing_and_additional_files_are_found(registry, payload):
    version = registry.publish("corpus", payload, RECORD)
    (version.path / "empty.txt").unlink()
    (version.path / "new.txt").write_text("")
    problems = registry.verify("corpus:1")
    assert [p.partition(": ")[0] for p in problems] == [str(version.path / "empty.txt"), str(version.path / "new.txt")]


def test_links_are_replaced_by_what_they_point_to(registry, payload, tmp_path):
    (tmp_path / "far.txt").write_text("far")
    (payload / "link.txt").symlink_to(tmp_path / "far.txt")
    version = registry.publish("corpus", payload, RECORD)
    assert not (version.path / "link.txt").is_symlink() and (version.path / "link.txt").read_text() == "far"
    (payload / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="dangling"):
        registry.publish("corpus", payload, RECORD)
    (payload / "dangling").unlink()
    (payload / "loop").symlink_to(payload, target_is_directory=True)
    with pytest.raises(UserError, match=r"loop: it is not a file, nor a link to one"):
        registry.publish("corpus", payload, RECORD)
    (version.path / "added").symlink_to(tmp_path, target_is_directory=True)
    assert registry.verify("corpus:1") == [f"{version.path / 'added'}: was not published with it"]


def test_move_takes_the_files_and_leaves_no_source(registry, payload):
    inode = (payload / "train.bin").stat().st_ino
    copied = registry.publish("corpus", payload, RECORD)
    moved = registry.publish("corpus", payload, RECORD, move=True)
    assert not payload.exists() and moved.digest == copied.digest
    assert (moved.path / "train.bin").stat().st_ino == inode
    assert registry.verify("corpus:2") == []


def test_one_file_can_be_a_payload(registry, payload):
    version = registry.publish("one", payload / "train.bin", RECORD)
    assert list(version.files) == ["train.bin"]
    registry.publish("one", payload / "train.bin", RECORD, move=True)
    assert not (payload / "train.bin").exists() and (payload / "empty.txt").exists()


def test_what_cannot_be_published_is_refused_and_nothing_appears(registry, payload, tmp_path):
    (tmp_path / "hollow" / "inner").mkdir(parents=True)
    os.mkfifo(payload / "fifo")
    refusals = [
        ("corpus", tmp_path / "nowhere", RECORD, "does not exist"),
        ("corpus", tmp_path / "hollow", RECORD, "holds no file"),
        ("corpus", payload, RECORD, "not a file"),
        ("bad/name", tmp_path / "hollow", RECORD, "bad artifact name"),
        ("corpus", tmp_path, RECORD, "lies in it"),
        ("corpus", payload / "train.bin", {"digest": "x"}, "registry itself writes"),
        ("corpus", payload / "train.bin", {"x": float("nan")}, "not JSON"),
        ("corpus", payload / "train.bin", {"x": object()}, "not JSON"),
    ]
    for name, source, record, reason in refusals:
        with pytest.raises(UserError, match=reason):
            registry.publish(name, source, record)
    (payload / "fifo").unlink()
    (payload / "new\nline").write_text("")
    with pytest.raises(UserError, match="file called"):
        registry.publish("corpus", payload, RECORD)
    assert registry.names() == [] and not list((registry.root / ".aside").glob("*"))


def test_finding_what_a_fingerprint_published(registry, payload):
    for fingerprint in ("aaaa", "bbbb", "aaaa", "cccc"):
        registry.publish("model", payload, {**RECORD, "producer": {"fingerprint": fingerprint}})
    assert registry.find_published("model", "aaaa").version == 3
    assert registry.find_published("model", "dddd") is None and registry.find_published("none", "aaaa") is None


def test_no_number_is_given_again_however_many_versions_are_removed(registry, payload):
    for _ in range(3):
        registry.publish("corpus", payload, RECORD)
    for ref in ("corpus:3", "corpus:2", "corpus:1"):
        registry.remove(ref)
    assert registry.publish("corpus", payload, RECORD).ref == "corpus:4"
