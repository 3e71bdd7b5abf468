"""Publishing beside other processes, killed, and on a full disk: whole versions or none, and nothing left behind."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from publishers import go, published, start_publisher

from nemo_runspec.artifacts import Registry, aside, build, local_store
from nemo_runspec.errors import RunFailed


def test_four_processes_publish_one_name_and_one_is_killed(registry, tmp_path):
    """The last one is killed once it has published five versions."""
    workers, count, kill_after = ["a", "b", "c", "killed"], 15, 5
    processes = {worker: start_publisher(registry.root, worker, count, tmp_path) for worker in workers}
    for process in processes.values():
        go(process)
    reported = {"killed": [processes["killed"].stdout.readline() for _ in range(kill_after)]}
    processes["killed"].send_signal(signal.SIGKILL)
    for worker, process in processes.items():
        reported[worker] = reported.get(worker, []) + process.stdout.read().split()
        assert process.wait() == (-signal.SIGKILL if worker == "killed" else 0)
    found = published(registry)
    assert registry.versions("shared") == list(range(1, len(found) + 1))
    assert not [item for item, times in Counter(found).items() if times > 1]
    for worker in workers:
        indices = [index for who, index in found if who == worker]
        whole = count if worker != "killed" else len(indices)
        assert indices == list(range(whole))  # none lost, each once, in the order in which they were published
        # A killed process may have published one more than it could tell.
        assert len(indices) - len(reported[worker]) in ((0, 1) if worker == "killed" else (0,))
    registry.publish("shared", tmp_path / "a", {"type": "T"})
    assert not list((registry.root / ".aside").iterdir())
    assert 3 * count + kill_after <= len(found) <= 4 * count


def test_killed_at_any_moment_leaves_a_whole_version_or_none(registry, tmp_path):
    for attempt, delay in enumerate([0.0, 0.001, 0.002, 0.004, 0.008]):
        process = start_publisher(registry.root, f"w{attempt}", 1000, tmp_path)
        go(process)
        time.sleep(delay)
        process.kill()
        process.wait()
    found = published(registry)
    assert registry.versions("shared") == list(range(1, len(found) + 1))
    for attempt in range(5):
        indices = [index for worker, index in found if worker == f"w{attempt}"]
        assert indices == list(range(len(indices)))


def test_a_killed_publisher_in_the_middle_of_a_copy_is_cleaned_up_by_the_next(registry, tmp_path):
    """The payload is a pipe disguised as a huge file: the copy hangs in it, so the kill always hits the middle."""
    script = """
import sys, time
from pathlib import Path
from nemo_runspec.artifacts import Registry, build
def stuck(source, target):
    target.write_bytes(b"half")
    print("copying", flush=True)
    time.sleep(60)
build.copy_and_hash = stuck
Registry(sys.argv[1]).publish("big", Path(sys.argv[2]), {"type": "T"})
"""
    source = tmp_path / "source"
    source.write_text("content")
    process = subprocess.Popen([sys.executable, "-c", script, registry.root, source], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "copying\n"
    area = registry.root / ".aside"
    assert len(list(area.iterdir())) == 2
    other = registry.publish("small", source, {"type": "T"})  # a living publisher's directory stays
    assert other.version == 1 and len(list(area.iterdir())) == 2
    process.kill()
    process.wait()
    assert registry.publish("big", source, {"type": "T"}).version == 1
    assert not list(area.iterdir())


def test_what_another_host_left_is_removed_after_a_day_only(registry, tmp_path):
    area = registry.root / ".aside"
    (area / "other-host.77.abc").mkdir(parents=True)
    lock = area / "other-host.77.abc.lock"
    lock.touch()
    assert aside.remove_stale(area) == []
    os.utime(lock, (time.time() - 25 * 3600,) * 2)
    assert aside.remove_stale(area) == ["other-host.77.abc"]
    assert not list(area.iterdir())


@pytest.mark.parametrize(
    ("code", "text"), [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "no space"), (errno.EIO, "Input/output")]
)
@pytest.mark.parametrize("failing", ["copy_and_hash", "_write_synced", "fsync_directory"])
def test_a_full_disk_is_one_line_and_leaves_nothing(registry, tmp_path, monkeypatch, failing, code, text):
    source = tmp_path / "source"
    source.write_text("content")
    before = registry.publish("corpus", source, {"type": "T"})

    def full(*arguments):
        with contextlib.suppress(IndexError, AttributeError, OSError):
            arguments[1].write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        for module in (build, local_store):
            patch.setattr(module, failing, full, raising=module is build)
        with pytest.raises(RunFailed) as failed:
            registry.publish("corpus", source, {"type": "T"})
    assert text in failed.value.message and "corpus was not published" in failed.value.message
    assert "\n" not in failed.value.message
    assert source.read_text() == "content"
    assert registry.versions("corpus") == [1] and registry.verify("corpus") == [] and before.version == 1
    assert not list((registry.root / ".aside").iterdir())
    assert registry.publish("corpus", source, {"type": "T"}).version == 2


def test_ctrl_c_while_publishing_leaves_nothing(registry, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_text("content")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "copy_and_hash", interrupted)
    with pytest.raises(KeyboardInterrupt):
        registry.publish("corpus", source, {"type": "T"})
    assert Registry(registry.root).names() == [] and not list((registry.root / ".aside").iterdir())


def test_a_full_disk_keeps_no_version_from_being_removed(registry, payload, monkeypatch):
    """Its payload makes the room that it takes to note its number."""
    version = registry.publish("a", payload, {})
    write = local_store.write_in_one_step

    def full(path, text):
        if version.path.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(local_store, "write_in_one_step", full)
    registry.remove("a:1")
    assert registry.versions("a") == []
    assert registry.publish("a", payload, {}).ref == "a:2"
