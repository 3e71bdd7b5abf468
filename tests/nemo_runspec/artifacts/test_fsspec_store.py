"""A registry behind a URL, on fsspec's file system in memory; tests/cluster/test_s3.py does the same on an S3."""

import hashlib
import json
import os
import threading
from pathlib import Path

import fsspec
import pytest

from nemo_runspec.artifacts import Registry, fsspec_store
from nemo_runspec.artifacts.fsspec_store import FsspecStore
from nemo_runspec.env.roots import cache_folder
from nemo_runspec.errors import RunFailed, UserError

RECORD = {"type": "Dataset", "fields": {"train_path": "art://./train.bin", "rows": 3}}
memory = fsspec.filesystem("memory")


@pytest.fixture
def root(tmp_path):
    url = f"memory://{tmp_path.name}/registry"
    yield url
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def read(monkeypatch):
    """The payload objects that were read."""
    found = []
    real = memory.get_file
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, path, *rest, **more: (found.append(path), real(path, *rest, **more))[1]
    )
    return found


def corrupt(root, file):
    path = f"/{root.removeprefix('memory://')}/{file}"
    data = bytearray(memory.cat_file(path))
    data[0] ^= 1
    memory.pipe_file(path, bytes(data))


def test_a_version_has_the_same_record_digest_and_files_as_a_local_one(machine, root, registry, payload):
    local, remote = registry.publish("corpus", payload, RECORD), Registry(root).publish("corpus", payload, RECORD)
    assert (remote.ref, remote.digest, remote.files) == (local.ref, local.digest, local.files)
    prefix = f"/{root.removeprefix('memory://')}"
    stored = {path.removeprefix(prefix): data for path, data in memory.cat(memory.find(prefix)).items()}
    folder = local.directory
    here = {f"/corpus/1/{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert {path: data for path, data in stored.items() if "/.claims/" not in path} == here


def test_what_is_published_on_one_machine_is_read_on_another(machine, root, payload, read, capsys):
    made = Registry(root).publish("corpus", payload, RECORD)
    machine("laptop")
    registry = Registry(root)
    version = registry.resolve("corpus")
    assert version.path != made.path and version.location == f"{root}/corpus/1/payload"
    assert version.record["fields"]["train_path"] == str(version.path / "train.bin")
    assert registry.names() == ["corpus"] and registry.versions("corpus") == [1] and registry.verify("corpus") == []
    assert read == [] and not version.path.exists()  # records need no payload
    assert registry.resolve_verified("corpus").path == version.path
    assert (version.path / "train.bin").read_bytes() == bytes(range(256)) and (version.path / "empty.txt").exists()
    assert len(read) == 3 and "fetching corpus:1 (3 files, 264 B) from memory://" in capsys.readouterr().err
    registry.resolve_verified("corpus:1").fetch()
    assert len(read) == 3 and capsys.readouterr().err == ""  # once a machine


def test_the_machine_that_published_needs_no_fetch(machine, root, payload, read):
    version = Registry(root).publish("corpus", payload, RECORD)
    assert (version.path / "train.bin").exists() and payload.exists()
    moved = Registry(root).publish("corpus", payload, RECORD, move=True)
    assert not payload.exists() and moved.digest == version.digest
    Registry(root).resolve_verified("corpus")
    assert read == []


def test_a_part_of_a_payload_can_be_fetched(machine, root, payload, read):
    Registry(root).publish("corpus", payload, RECORD)
    machine("laptop")
    version = Registry(root).resolve("corpus")
    assert [path.name for path in version.fetch("tokenizer/").rglob("*.*")] == ["vocab.json"] and len(read) == 1
    version.fetch()
    assert len(read) == 3


def test_what_fields_name_inside_another_payload_comes_along(machine, root, payload, read):
    Registry(root).publish("corpus", payload, RECORD)
    fields = {"tokenizer_path": "art://corpus:1/tokenizer", "dataset_path": "art://corpus:1", "path": "art://."}
    (payload / "only").mkdir()
    (payload / "only" / "w").write_text("w")
    Registry(root).publish("model", payload / "only", {"type": "Model", "fields": fields})
    machine("laptop")
    version = Registry(root).resolve_verified("model")
    assert (Path(version.record["fields"]["tokenizer_path"]) / "vocab.json").is_file()
    assert len(read) == 2  # the whole data set did not
    at = Registry(root).version_at(Path(version.record["fields"]["dataset_path"]))
    assert at.ref == "corpus:1"
    with pytest.raises(UserError, match="not in a published artifact"):
        Registry(root).version_at(at.registry.local_root)


def test_errors_are_those_of_a_local_registry(machine, root, payload):
    registry = Registry(root)
    assert registry.names() == [] and registry.versions("corpus") == []
    with pytest.raises(UserError, match="no artifact 'corpus' in memory://"):
        registry.resolve("corpus")
    version = registry.publish("corpus", payload, RECORD)
    with pytest.raises(UserError, match="no version 7") as refused:
        registry.resolve("corpus:7")
    assert refused.value.hint == "there is 1"
    with pytest.raises(UserError, match="not JSON"):
        registry.publish("x", payload, {"x": object()})
    assert registry.names() == [version.ref.partition(":")[0]]


@pytest.mark.parametrize(
    "file", ["artifact.json", "manifest.sha256", "payload/train.bin", "payload/tokenizer/vocab.json"]
)
def test_a_corrupt_object_is_found_wherever_it_is(machine, root, payload, file):
    Registry(root).publish("corpus", payload, RECORD)
    corrupt(root, f"corpus/1/{file}")
    (problem,) = Registry(root).verify("corpus:1")
    if file.startswith("payload"):
        assert problem == f"{root}/corpus/1/{file}: content differs from its sha256"
    machine("laptop")
    with pytest.raises(UserError, match=r"artifact corpus:1 is corrupt: memory://.*/corpus/1/") as refused:
        Registry(root).resolve_verified("corpus")
    assert "\n" not in refused.value.message
    assert not (Registry(root).local_root / "corpus" / "1" / file).exists() or not file.startswith("payload")
    assert not list((Registry(root).local_root / ".aside").glob("*"))


def test_missing_and_additional_objects_are_found(machine, root, payload):
    Registry(root).publish("corpus", payload, RECORD)
    prefix = f"/{root.removeprefix('memory://')}/corpus/1/payload"
    memory.rm_file(f"{prefix}/train.bin")
    memory.pipe_file(f"{prefix}/tokenizer/new", b"")
    assert Registry(root).verify("corpus") == [
        f"{root}/corpus/1/payload/train.bin: no such object",
        f"{root}/corpus/1/payload/tokenizer/new: was not published with it",
    ]
    machine("laptop")
    with pytest.raises(UserError, match=r"train\.bin: no such object"):
        Registry(root).resolve_verified("corpus")


def test_what_is_damaged_in_the_cache_is_fetched_again(machine, root, payload, read):
    version = Registry(root).publish("corpus", payload, RECORD)
    (version.path / "train.bin").write_bytes(b"other")
    (version.path / "empty.txt").unlink()
    (version.path / "left behind").write_text("")
    Registry(root).resolve_verified("corpus")
    assert (version.path / "train.bin").read_bytes() == bytes(range(256))
    assert sorted(path.rsplit("/", 1)[1] for path in read) == ["empty.txt", "train.bin"]
    assert not (version.path / "left behind").exists()


def test_another_registry_under_the_same_url_is_not_taken_for_the_one_in_the_cache(machine, root, payload, tmp_path):
    Registry(root).publish("corpus", payload, RECORD)
    memory.rm(f"/{root.removeprefix('memory://')}", recursive=True)
    (payload / "train.bin").write_bytes(b"something else")
    cache = os.environ["XDG_CACHE_HOME"]
    machine("laptop")
    Registry(root).publish("corpus", payload, RECORD)
    os.environ["XDG_CACHE_HOME"] = cache
    version = Registry(root).resolve_verified("corpus:1")
    assert (version.path / "train.bin").read_bytes() == b"something else"


def test_what_another_process_has_fetched_while_it_was_published_stays(machine, root, payload, monkeypatch):
    """The files that somebody reads are not taken away, not even to put the same ones there."""
    real = type(memory).put_file
    seen = {}

    def put(self, source, target, **more):
        real(self, source, target, **more)
        if target.endswith("manifest.sha256"):  # from now on the version exists
            reader = Registry(root).resolve_verified("corpus")
            seen.update({path: path.stat().st_ino for path in reader.path.rglob("*")})

    monkeypatch.setattr(type(memory), "put_file", put)
    Registry(root).publish("corpus", payload, RECORD)
    assert len(seen) == 4 and {path: path.stat().st_ino for path in seen} == seen


def test_a_version_is_put_into_the_mirror_while_nobody_else_is_at_it(machine, root, payload):
    registry = Registry(root)
    publisher = threading.Thread(target=lambda: registry.publish("corpus", payload, RECORD))
    with registry.store._lock("corpus", 1):
        publisher.start()
        publisher.join(0.5)
        assert publisher.is_alive() and Registry(root).versions("corpus") == [1]  # published, and not yet here
        assert not (registry.local_root / "corpus").exists()
    publisher.join(60)
    assert (registry.local_root / "corpus" / "1" / "payload" / "train.bin").is_file()


def test_the_mirror_of_another_registry_gives_way_to_what_is_published(machine, root, payload, read):
    old = Registry(root).publish("corpus", payload, RECORD)
    memory.rm(f"/{root.removeprefix('memory://')}", recursive=True)
    (payload / "train.bin").write_bytes(b"something else")
    new = Registry(root).publish("corpus", payload, RECORD)
    assert new.path == old.path and (new.path / "train.bin").read_bytes() == b"something else"
    assert read == [] and not list((new.registry.local_root / ".aside").iterdir())


def test_processes_that_fetch_at_once_without_locks_take_nothing_from_each_other(machine, root, payload, monkeypatch):
    Registry(root).publish("corpus", payload, RECORD)
    machine("laptop")

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fsspec_store.fcntl, "flock", no_locks)
    real = FsspecStore._mirror_record

    def mirror_record(self, version, aside):
        """Another process fetches everything after this one has seen that nothing is there."""
        monkeypatch.setattr(FsspecStore, "_mirror_record", real)
        mirrored = FsspecStore._mirrored

        def look(self, version):
            monkeypatch.setattr(FsspecStore, "_mirrored", mirrored)
            seen = mirrored(self, version)
            Registry(root).resolve("corpus").fetch()
            return seen

        monkeypatch.setattr(FsspecStore, "_mirrored", look)
        real(self, version, aside)

    monkeypatch.setattr(FsspecStore, "_mirror_record", mirror_record)
    version = Registry(root).resolve("corpus")
    version.fetch("tokenizer/")
    assert sorted(path.name for path in version.path.rglob("*.*")) == ["empty.txt", "train.bin", "vocab.json"]


def test_a_number_that_was_claimed_and_not_published_is_no_version(machine, root, payload, monkeypatch):
    registry = Registry(root)
    registry.publish("corpus", payload, RECORD)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", lambda *_, **__: (_ for _ in ()).throw(OSError("the line is dead")))
        with pytest.raises(RunFailed, match="the line is dead"):
            registry.publish("corpus", payload, RECORD)
    assert registry.versions("corpus") == [1] and registry.resolve("corpus").version == 1
    with pytest.raises(UserError, match="no version 2"):
        registry.resolve("corpus:2")
    assert registry.publish("corpus", payload, RECORD).version == 3
    assert registry.versions("corpus") == [1, 3] and not list((registry.local_root / ".aside").iterdir())
    with pytest.raises(UserError) as refused:
        registry.resolve("corpus:2")
    assert refused.value.hint == "there is 1, 3"


def test_a_store_that_does_not_refuse_to_create_twice_is_not_published_to(machine, root, payload, monkeypatch):
    real = type(memory).open
    monkeypatch.setattr(
        type(memory), "open", lambda self, path, mode="rb", **more: real(self, path, mode.replace("x", "w"), **more)
    )
    with pytest.raises(RunFailed, match="creates an object that exists already"):
        Registry(root).publish("corpus", payload, RECORD)
    assert Registry(root).names() == []


def test_the_source_may_change_while_it_is_uploaded(machine, root, payload, monkeypatch):
    """What is published is a copy made before, so that no upload disagrees with the manifest."""
    real = type(memory).put_file

    def put(self, *arguments, **more):
        (payload / "train.bin").write_bytes(b"changed")
        return real(self, *arguments, **more)

    monkeypatch.setattr(type(memory), "put_file", put)
    version = Registry(root).publish("corpus", payload, RECORD)
    assert version.files["train.bin"] == hashlib.sha256(bytes(range(256))).hexdigest()
    assert Registry(root).verify("corpus") == []


def test_the_cache_is_where_env_toml_says(machine, tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cluster" / "runspec" / "artifacts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/runspec/artifacts")
    (tmp_path / "env.toml").write_text('[cache]\ndir = "kept"\n')
    assert cache_folder() == tmp_path / "kept" / "runspec" / "artifacts"


def test_a_full_cache_is_one_line(machine, root, payload, monkeypatch, tmp_path):
    Registry(root).publish("corpus", payload, RECORD)
    (tmp_path / "file").write_text("")
    machine("file")  # no folder can be made in it
    with pytest.raises(RunFailed, match=r"corpus was not published to memory://.*Not a directory") as failed:
        Registry(root).publish("corpus", payload, RECORD)
    assert "\n" not in failed.value.message
    with pytest.raises((UserError, RunFailed), match="Not a directory"):
        Registry(root).resolve_verified("corpus")


def test_publishing_tells_the_later_jobs_of_its_pipeline(machine, root, payload, monkeypatch, tmp_path):
    folder = tmp_path / "made" / "when needed"
    monkeypatch.setenv("RUNSPEC_PUBLISHED_DIR", str(folder))
    for registry in (Registry(root), Registry(tmp_path / "local")):
        version = registry.publish("corpus", payload, RECORD)
        assert (folder / "corpus").read_text() == f"{version.pinned}\n"
    assert [path.name for path in folder.iterdir()] == ["corpus"]
    (tmp_path / "nowhere").write_text("a file")
    monkeypatch.setenv("RUNSPEC_PUBLISHED_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(RunFailed, match=r"corpus:2 is published, but .*nowhere cannot be written"):
        Registry(root).publish("corpus", payload, RECORD)
    assert json.loads(memory.cat_file(f"/{root.removeprefix('memory://')}/corpus/2/artifact.json"))["name"] == "corpus"


def test_missing_and_shortened_objects_are_noticed_without_reading_them(machine, root, payload, read):
    registry = Registry(root)
    version = registry.publish("corpus", payload, RECORD)
    registry.check_present(version)
    stored = f"/{root.removeprefix('memory://')}/corpus/1/payload/"
    content = memory.cat_file(f"{stored}train.bin")
    memory.pipe_file(f"{stored}train.bin", content[:-1])
    with pytest.raises(UserError, match=f"{root}/corpus/1/payload: {version.size_bytes - 1} bytes, .* were published"):
        registry.check_present(version)
    memory.rm(f"{stored}train.bin")
    with pytest.raises(UserError, match=f"corrupt: {root}/corpus/1/payload/train.bin: no such object"):
        registry.check_read(version)
    assert read == []


def test_a_removed_version_is_gone_everywhere_and_its_number_is_not_given_again(machine, root, payload):
    registry = Registry(root)
    registry.publish("corpus", payload, RECORD)
    second = registry.publish("corpus", payload, RECORD, run_files={"config.yaml": b"lr: 1"})
    assert Registry(root).resolve("corpus").run_file("config.yaml") == "lr: 1"
    registry.remove("corpus:2")
    assert registry.versions("corpus") == [1] and not second.directory.exists()
    prefix = f"/{root.removeprefix('memory://')}/corpus/"
    assert {path.removeprefix(prefix).partition("/")[0] for path in memory.find(prefix)} == {"1"}
    assert registry.publish("corpus", payload, RECORD).ref == "corpus:3"
