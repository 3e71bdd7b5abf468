"""A registry in a folder that several users share: all may publish, or are told before the work that they may not."""

import multiprocessing
import os
import stat
import tempfile
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError

RECORD = {"type": "Dataset"}
SHARED = 0o2777
OTHER_DISK = Path("/dev/shm")


@pytest.fixture
def shared():
    """A registry in a folder that everybody may write to; one in pytest's own folders is out of others' reach."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(SHARED)
        yield Registry(folder)


def as_user(uid, umask, call):
    """What `call` returns, or the message of what it raises, in a process of the user `uid`."""

    def work(results):
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.umask(umask)
        try:
            results.send(call())
        except Exception as error:
            results.send(f"{type(error).__name__}: {error}")

    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,))
    process.start()
    result = mine.recv()
    process.join()
    return result


def publish(registry, name):
    """Check, then publish, as a job does before and after its work."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").write_text("x")
        registry.check_writable([name])
        return registry.publish(name, folder, RECORD).ref


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become others")
def test_each_user_publishes_beside_the_others_whatever_their_umask(shared):
    for uid, umask, ref in ((12345, 0o022, "a:1"), (12346, 0o077, "b:1"), (12345, 0o022, "b:2"), (12346, 0o022, "a:2")):
        assert as_user(uid, umask, lambda ref=ref: publish(shared, ref[0])) == ref
    assert as_user(12347, 0o022, shared.names) == ["a", "b"]
    (shared.root / "a").chmod(0o755)  # as somebody has set it
    refusal = f"UserError: {shared.root}: artifacts cannot be published there: {shared.root}/a cannot be written to"
    assert as_user(12346, 0o022, lambda: publish(shared, "a")) == refusal
    assert as_user(12346, 0o022, lambda: publish(shared, "b")) == "b:3"


def test_folders_of_the_registry_have_its_permissions(shared):
    umask = os.umask(0o077)
    try:
        publish(shared, "a")
    finally:
        os.umask(umask)
    assert [stat.S_IMODE((shared.root / name).stat().st_mode) for name in (".aside", "a")] == [SHARED, SHARED]


@pytest.mark.parametrize("closed", [".aside", "a"])
def test_a_folder_of_another_user_is_refused_before_the_work(shared, monkeypatch, closed):
    publish(shared, "a")
    publish(shared, "b")
    monkeypatch.setattr("os.access", lambda path, mode: path != shared.root / closed)
    with pytest.raises(UserError, match=f"cannot be published there: {shared.root}/{closed} cannot be written to$"):
        shared.check_writable(["b", "a"])
    if closed == "a":
        shared.check_writable(["b"])


@pytest.mark.skipif(
    not OTHER_DISK.is_dir() or OTHER_DISK.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev,
    reason="there is no other disk",
)
def test_an_artifact_that_is_a_link_to_another_disk_is_refused_before_the_work(shared):
    with tempfile.TemporaryDirectory(dir=OTHER_DISK) as elsewhere:
        (shared.root / "a").symlink_to(elsewhere)
        with pytest.raises(UserError, match=f"cannot be published there: {shared.root}/a leads to another disk$"):
            shared.check_writable(["a"])
