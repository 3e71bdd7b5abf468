"""The registry on an S3: publishers at once and killed, machines with caches of their own, one job of two nodes.

What does not depend on the store is tried in tests/nemo_runspec/artifacts.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from publishers import go, published, start_publisher

import nemo_runspec
from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import ArtifactError, RunFailed, UserError

from .desk import Desk
from .s3 import S3

SOURCE_ROOT = Path(nemo_runspec.__file__).parents[1]


@pytest.fixture
def root(s3: S3) -> str:
    """A registry of the test's own in the bucket, under a name that says nothing: `S3.stall` looks at whole URLs."""
    return f"s3://test/{secrets.token_hex(4)}"


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "train.bin").write_bytes(bytes(range(256)))
    (folder / "tokenizer" / "vocab #1+%?.json").write_text('{"a": 1}')
    (folder / "empty.txt").write_text("")
    return folder


def environment(server: S3, cache: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(SOURCE_ROOT), "RUNSPEC_OUTPUT_ROOT": str(cache.parent / "output")}
    return {**os.environ, **server.environment(cache), **own, **more}


def start(server: S3, root: str, worker: str, count: int, tmp_path: Path) -> subprocess.Popen[str]:
    """A publisher on a machine of its own, ready to go."""
    return start_publisher(root, worker, count, tmp_path, **environment(server, tmp_path / f"cache-{worker}"))


def test_a_laptop_reads_what_a_cluster_published_and_fetches_it_once(
    s3: S3, root: str, payload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Registry(root).publish("corpus", payload, {"type": "T", "fields": {"train_path": "art://./train.bin"}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "laptop"))
    registry = Registry(root)
    s3.requests()
    version = registry.resolve("corpus")
    assert version.digest == made.digest and version.path != made.path
    assert not any("/payload" in line for line in s3.requests())
    assert registry.resolve_verified("corpus").record["fields"]["train_path"] == str(version.path / "train.bin")
    assert sum("GET" in line and "/payload/" in line for line in s3.requests()) == 3
    assert (version.path / "tokenizer" / "vocab #1+%?.json").read_text() == '{"a": 1}'
    registry.resolve_verified("corpus")
    assert not any("/payload" in line for line in s3.requests())


@pytest.mark.slow
def test_processes_publish_one_name_at_once(s3: S3, root: str, tmp_path: Path) -> None:
    workers = {name: start(s3, root, name, 4, tmp_path) for name in ("a", "b", "c", "d")}
    for process in workers.values():
        go(process)
    reported = {}
    for name, process in workers.items():
        reported[name] = [int(line) for line in process.communicate()[0].split()]
        assert process.returncode == 0
    found = published(Registry(root))
    assert Counter(found) == Counter({(name, number): 1 for name in workers for number in range(4)})
    numbers = Registry(root).versions("shared")
    assert sorted(number for numbers in reported.values() for number in numbers) == numbers
    for name, mine in reported.items():
        assert [found[numbers.index(number)][0] for number in mine] == [name] * 4
    # Every publisher counted on: nothing was claimed twice, and nothing in vain.
    assert numbers == list(range(1, 17)) and Registry(root).resolve("shared").version == 16


@pytest.mark.slow
@pytest.mark.parametrize("moment", [".claims", "payload/who", "artifact.json", "manifest.sha256"])
def test_killed_in_the_middle_of_an_upload(s3: S3, root: str, tmp_path: Path, moment: str) -> None:
    first = start(s3, root, "first", 1, tmp_path)
    go(first)
    assert first.wait() == 0
    victim = start(s3, root, "victim", 1, tmp_path)
    s3.stall(moment)
    go(victim)
    s3.wait_until_stalled()
    registry = Registry(root)
    assert registry.versions("shared") == [1] and registry.resolve("shared").version == 1
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    s3.stall("")
    time.sleep(0.5)
    # The request for the manifest was on its way: the store has all of it, or it has none of it.
    whole = (
        [("first", 0), ("victim", 0)] if moment == "manifest.sha256" and registry.versions("shared") == [1, 2] else None
    )
    if whole is None:
        assert registry.versions("shared") == [1] and registry.verify("shared") == []
        with pytest.raises(UserError, match="no version 2"):
            registry.resolve("shared:2")
    second = start(s3, root, "second", 1, tmp_path)
    go(second)
    assert second.wait() == 0
    assert (
        published(Registry(root)) == [*(whole or [("first", 0)]), ("second", 0)]
        and registry.resolve("shared").version == 3
    )


@pytest.mark.slow
def test_killed_in_the_middle_of_a_large_file(s3: S3, root: str, tmp_path: Path) -> None:
    """Of a file that goes in parts, nothing is visible before the last one."""
    source = tmp_path / "large"
    with source.open("wb") as stream:
        for number in range(130):
            stream.write(bytes([number]) * (1 << 20))
    script = (
        "import sys; from nemo_runspec.artifacts import Registry; Registry(sys.argv[1]).publish('big', sys.argv[2], {})"
    )
    command = [sys.executable, "-c", script, root, str(source)]
    s3.stall("partNumber=2")
    process = subprocess.Popen(command, env=environment(s3, tmp_path / "victim"))
    s3.wait_until_stalled()
    process.kill()
    process.wait()
    s3.stall("")
    time.sleep(0.5)
    assert Registry(root).names() == []
    assert fsspec.filesystem("s3", use_listings_cache=False).find(f"{root}/big".removeprefix("s3://")) == []
    assert subprocess.run(command, env=environment(s3, tmp_path / "second")).returncode == 0
    version = Registry(root).resolve_verified("big")
    assert version.version == 2 and (version.path / "large").stat().st_size == 130 << 20


def test_a_flipped_byte_of_an_object_is_refused(
    s3: S3, root: str, payload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(root).publish("corpus", payload, {"type": "T"})
    path = f"{root}/corpus/1/payload/train.bin"
    client = fsspec.filesystem("s3", use_listings_cache=False)
    data = bytearray(client.cat_file(path))
    data[len(data) // 2] ^= 1
    client.pipe_file(path, bytes(data))
    assert Registry(root).verify("corpus:1") == [f"{path}: content differs from its sha256"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "laptop"))  # this machine has the version as it was made
    with pytest.raises(ArtifactError, match=r"corpus:1 is corrupt: s3://"):
        Registry(root).resolve_verified("corpus")


def test_processes_fetch_one_version_at_once(s3: S3, root: str, payload: Path, tmp_path: Path) -> None:
    (payload / "train.bin").write_bytes(os.urandom(3_000_000))
    Registry(root).publish("corpus", payload, {"type": "T"})
    script = (
        "import sys; from nemo_runspec.artifacts import Registry\n"
        "version = Registry(sys.argv[1]).resolve_verified('corpus')\n"
        "print(len((version.path / 'train.bin').read_bytes()))\n"
    )
    s3.requests()
    env = environment(s3, tmp_path / "node")
    command = [sys.executable, "-c", script, root]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["3000000\n"] * 3
    assert sum("GET" in line and "train.bin" in line for line in s3.requests()) == 1  # the others waited


@pytest.mark.slow
def test_killed_while_it_fetches(s3: S3, root: str, payload: Path, tmp_path: Path) -> None:
    for number in range(40):
        (payload / f"shard-{number}").write_bytes(os.urandom(200_000))
    Registry(root).publish("corpus", payload, {"type": "T"})
    script = "import sys; from nemo_runspec.artifacts import Registry; Registry(sys.argv[1]).resolve_verified('corpus')"
    command, env = [sys.executable, "-c", script, root], environment(s3, tmp_path / "node")
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stderr.readline().startswith("fetching corpus:1 (43 files, 8 MB)")
    time.sleep(0.1)
    process.kill()
    process.wait()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home = next((tmp_path / "node").glob("runspec/artifacts/*"))
    assert len([path for path in (home / "corpus" / "1").rglob("*") if path.is_file()]) == 43 + 2
    assert not list((home / ".aside").iterdir())


def test_what_the_store_refuses_is_one_line(s3: S3, payload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=r"^s3://nobody: there is no such bucket$"):
        Registry("s3://nobody").publish("corpus", payload, {})
    with pytest.raises(
        UserError, match=r"^s3://nobody/a: artifacts cannot be published there: there is no such bucket$"
    ):
        Registry("s3://nobody/a").check_writable()
    Registry("s3://test/new").check_writable()
    assert Registry("s3://test/new").names() == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(RunFailed, match=r"^s3://test/new: Could not connect to the endpoint") as failed:
        Registry("s3://test/new").resolve("corpus")
    assert "test-secret" not in str(failed.value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


SCRIPT = '''
"""Read a corpus."""
# /// script
# [tool.runspec]
# schema = "1"
# name = "toy/train"
# ///
import json, os
from nemo_runspec.config import load_script_config
from nemotron.kit import open_run
run = open_run(load_script_config(__file__), __file__)
data = run.inputs["data"]
print(json.dumps({"ref": data.ref, "dir": str(run.dir), "path": str(data.path), "resumed": run.resumed,
                  "text": (data.path / "train.jsonl").read_text()}), flush=True)
run.close(finished=not os.environ.get("STOPPED"))
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    (folder / "config").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT.lstrip())
    (folder / "config" / "default.yaml").write_text("run: {data: corpus, output: made}\npath: ${art:data,path}\n")
    return folder / "train.py"


def publish(root: str, payload: Path, text: str) -> str:
    (payload / "train.jsonl").write_text(text)
    return (
        Registry(root)
        .publish("corpus", payload, {"type": "Dataset", "types": ["Dataset"], "fields": {}, "sources": [{"name": "x"}]})
        .ref
    )


def ranks(
    server: S3, root: str, script: Path, folder: Path, between: Callable[[], object] = lambda: None, **more: str
) -> list[dict[str, object]]:
    """Two ranks on two nodes with caches of their own. `between` is called when rank 0 is ready, and before rank 1."""
    shared = {"RUNSPEC_ARTIFACTS_ROOT": root, "RUNSPEC_JOB_DIR": str(folder / "job"), "SLURM_JOB_ID": "7"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500", **more}
    shared["RUNSPEC_OUTPUT_ROOT"] = str(folder / "output")
    lines = []
    for rank in (0, 1):
        env = environment(server, folder / f"node{rank}" / "cache", **shared, RANK=str(rank))
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
            if rank == 0:
                between()
        assert process.returncode == 0, lines
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_nodes_and_a_requeued_attempt_agree_though_latest_moves(
    s3: S3, root: str, payload: Path, script: Path, tmp_path: Path
) -> None:
    publish(root, payload, "one")
    zero, one = ranks(s3, root, script, tmp_path, lambda: publish(root, payload, "two"), STOPPED="1")
    assert (zero["ref"], one["ref"]) == ("corpus:1", "corpus:1") and zero["dir"] == one["dir"]
    assert zero["text"] == one["text"] == "one" and zero["path"] != one["path"]  # two caches, one fingerprint
    pins = json.loads((tmp_path / "job" / "pins.json").read_text())
    assert list(pins) == ["corpus"] and pins["corpus"].startswith("corpus:1@")
    again, other = ranks(s3, root, script, tmp_path, SLURM_RESTART_COUNT="1", STOPPED="1")
    assert (again["ref"], other["ref"], again["dir"]) == ("corpus:1", "corpus:1", zero["dir"])
    assert again["resumed"] and other["resumed"]
    later = {"RUNSPEC_JOB_DIR": str(tmp_path / "another job"), "SLURM_JOB_ID": "8", "STOPPED": "1"}
    fresh = ranks(s3, root, script, tmp_path, **later)
    assert {rank["ref"] for rank in fresh} == {"corpus:2"} and fresh[0]["dir"] != zero["dir"]


def test_the_commands_read_records_and_no_payload(s3: S3, root: str, payload: Path, tmp_path: Path) -> None:
    publish(root, payload, "one")
    desk = Desk(tmp_path / "desk", environment(s3, tmp_path / "laptop", RUNSPEC_ARTIFACTS_ROOT=root))
    s3.requests()
    assert f"{root}/corpus/1/payload" in desk.run("nemotron artifacts show corpus")
    assert "corpus:1" in desk.run("nemotron artifacts list")
    assert "corpus:1" in desk.run("nemotron artifacts lineage corpus")
    assert not any("/payload/" in line for line in s3.requests()) and not (tmp_path / "laptop").exists()
    assert desk.run("nemotron artifacts verify") == "corpus:1: ok\n"
    assert any("/payload/" in line for line in s3.requests()) and not (tmp_path / "laptop").exists()
