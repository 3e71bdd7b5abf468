"""`nemotron artifacts`: what it lists and traces is what was published, and a flipped byte is found."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from nemo_runspec.artifacts import Registry, Version, removal
from nemo_runspec.artifacts.local_store import LocalStore
from nemo_runspec.errors import RunFailed, UserError
from nemotron.cli.commands.artifacts import LONGEST_TEXT
from nemotron.cli.main import app


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Version]:
    """Data made from a raw source, two versions of a model made from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "store"))
    registry = Registry(tmp_path / "store")

    def publish(name: str, text: str, inputs: dict[str, str], sources: list[dict[str, str]]) -> Version:
        file = tmp_path / "payload.bin"
        file.write_text(text)
        record = {
            "type": "Model" if "model" in name else "Dataset",
            "fields": {"step": 7},
            "metrics": {"loss": 1.5, "samples": "s" * 5000},
            "created_at": "2025-01-02T03:04:05+00:00",
            "producer": {"script": "train.py", "name": "nano3/pretrain"},
            "inputs": inputs,
            "sources": sources,
        }
        return registry.publish(name, file, record)

    data = publish("some-data", "d" * 2500, {}, [{"name": "the book", "sha256": "ab" * 32}])
    first = publish("some-model", "first", {"data": data.pinned}, [])
    second = publish("some-model", "second", {"data": data.pinned}, [])
    return {"data": data, "first": first, "second": second}


def run(line: str) -> Result:
    return CliRunner().invoke(app, ["artifacts", *line.split()])


def close(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of this artifact is somebody else's, and may not be read."""
    versions = LocalStore.versions

    def refuse(store: LocalStore, name: str) -> list[int]:
        if name == closed:
            raise UserError(f"{closed}: permission denied")
        return versions(store, name)

    monkeypatch.setattr(LocalStore, "versions", refuse)


def test_list_shows_the_latest_version_of_each_and_all_of_a_named_one(published: dict[str, Version]) -> None:
    rows = [line.split() for line in run("list").output.splitlines()]
    assert rows == [
        ["some-data:1", "Dataset", "2.5", "kB", "2025-01-02T03:04:05", published["data"].digest[:12]],
        ["some-model:2", "Model", "6", "B", "2025-01-02T03:04:05", published["second"].digest[:12]],
    ]
    assert [line.split()[0] for line in run("list some-model").output.splitlines()] == ["some-model:1", "some-model:2"]
    assert len(run("list --all").output.splitlines()) == 3


def test_list_of_an_empty_registry_says_how_to_fill_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path))
    done = run("list")
    assert done.exit_code == 0
    assert "nemotron nano3 pipe -c tiny" in done.output


def test_show_gives_the_record_and_the_files(published: dict[str, Version]) -> None:
    lines = dict(line.split(maxsplit=1) for line in run("show some-model:1").output.splitlines())
    assert lines["artifact"] == "some-model:1"
    assert lines["digest"] == published["first"].digest
    assert lines["metrics.loss"] == "1.5"
    assert lines["metrics.samples"] == "s" * LONGEST_TEXT + "… (5,000 characters, all of them with --json)"
    assert lines["inputs.data"] == published["data"].pinned
    assert json.loads(run("show some-model:1 --json").output)["metrics"] == {"loss": 1.5, "samples": "s" * 5000}


def test_lineage_walks_to_the_raw_source(published: dict[str, Version]) -> None:
    done = run("lineage some-model --digits 16")
    lines = done.output.splitlines()
    assert done.exit_code == 0
    assert "some-model:2" in lines[0] and published["second"].digest[:16] in lines[0]
    assert "some-data:1" in lines[1] and published["data"].digest[:16] in lines[1]
    assert "the book" in lines[2] and "abababababababab" in lines[2]
    assert lines[-1] == "1 raw source"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    os.chmod(path, 0o644)  # noqa: PTH101
    path.write_bytes(bytes(data))


def test_verify_finds_one_flipped_byte_and_names_the_file(published: dict[str, Version]) -> None:
    assert run("verify").output.splitlines() == ["some-data:1: ok", "some-model:1: ok", "some-model:2: ok"]
    victim = published["first"].path / "payload.bin"
    flip(victim, 3)
    done = run("verify")
    assert done.exit_code == 1
    assert f"{victim}: content differs" in done.output
    assert "1 of 3 versions are corrupt" in done.output
    assert run("verify some-model:2").exit_code == 0
    (published["first"].directory / "artifact.json").unlink()
    assert "artifact.json: No such file" in run("verify some-model:1").output


def test_verify_reads_nothing_where_a_name_is_unknown_and_goes_on_behind_an_unreadable_folder(
    published: dict[str, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run("verify some-data some-modle")
    assert refused.output == "" and isinstance(refused.exception, UserError)
    close("some-data", monkeypatch)
    done = run("verify")
    assert done.exit_code == 1 and "some-data: corrupt\n  some-data: permission denied\n" in done.output
    assert "some-model:2: ok" in done.output


def test_lineage_fails_when_a_record_on_the_way_was_changed(published: dict[str, Version]) -> None:
    flip(published["data"].directory / "artifact.json", 40)
    done = run("lineage some-model")
    assert done.exit_code == 1
    assert "broken: some-data:1" in done.output


def left(tmp_path: Path) -> dict[str, list[int]]:
    registry = Registry(tmp_path / "store")
    return {name: registry.versions(name) for name in registry.names()}


def test_rm_refuses_what_others_were_made_from_and_gives_no_number_twice(
    published: dict[str, Version], tmp_path: Path
) -> None:
    refused = run("rm some-data:1")
    assert isinstance(refused.exception, UserError) and refused.exception.message == (
        "some-data:1 is needed by some-model:1, some-model:2"
    )
    assert run("rm some-model:2").output == "removed some-model:2 (6 B); the latest is now some-model:1\n"
    assert left(tmp_path) == {"some-data": [1], "some-model": [1]}
    assert not list((tmp_path / "store" / ".aside").glob("*"))
    source = tmp_path / "again"
    source.write_text("third")
    assert Registry(tmp_path / "store").publish("some-model", source, {}).ref == "some-model:3"
    assert isinstance(run("rm some-model:2").exception, UserError)  # no such version
    # All versions of a name together with what they were made from need no force.
    assert run("rm some-model some-data:1").output.splitlines()[-1] == "2.51 kB freed"
    assert left(tmp_path) == {}
    assert Registry(tmp_path / "store").publish("some-model", source, {}).ref == "some-model:4"


def test_rm_compares_the_digest_of_a_reference(published: dict[str, Version], tmp_path: Path) -> None:
    refused = run(f"rm some-model:2@{published['first'].digest}").exception
    assert isinstance(refused, UserError) and "has digest" in refused.message
    assert left(tmp_path) == {"some-data": [1], "some-model": [1, 2]}
    assert run(f"rm some-model:2@{published['first'].registry.resolve('some-model:2').digest[:12]}").exit_code == 0
    assert left(tmp_path) == {"some-data": [1], "some-model": [1]}


def test_rm_passes_by_folders_that_may_not_be_read(
    published: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry(tmp_path / "store").publish("theirs", tmp_path / "payload.bin", {})
    close("theirs", monkeypatch)
    assert "some-data:1 is needed by some-model:1, some-model:2" in str(run("rm some-data:1").exception)
    assert run("rm some-model:1").output == "removed some-model:1 (5 B)\n"


def test_rm_passes_by_what_another_command_has_removed_meanwhile(
    published: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_by = removal.needed_by

    def slow(registry: Registry, refs: list[str]) -> dict[str, list[str]]:
        users = needed_by(registry, refs)
        registry.remove("some-model:1")
        return users

    monkeypatch.setattr(removal, "needed_by", slow)
    assert run("rm some-model some-data").output.splitlines()[0] == "removed some-model:2 (6 B)"
    assert left(tmp_path) == {}


def test_rm_with_force_says_whose_lineage_ends(published: dict[str, Version], tmp_path: Path) -> None:
    done = run("rm --force some-data")
    assert done.exit_code == 0
    assert "the lineage of some-model:1, some-model:2 ends at some-data:1, which is removed" in done.output
    assert "broken: some-data:1" in run("lineage some-model").output


def test_gc_keeps_the_latest_of_each_name_and_all_that_they_come_from(
    published: dict[str, Version], tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "store")
    source = tmp_path / "payload.bin"
    source.write_text("newer")
    registry.publish("some-data", source, {})  # some-data:1 is not the latest, and the latest model was made from it
    registry.publish("third", source, {"fields": {"near": "art://some-model:1/payload.bin"}})  # a field counts, too
    assert run("gc --dry-run").output.startswith("nothing to remove")
    registry.publish("third", source, {})
    assert run("gc --dry-run").output.splitlines() == ["some-model:1  5 B", "third:1  5 B", "2 versions, 10 B"]
    assert run("gc --dry-run --yes").output == run("gc --dry-run").output
    refused = run("gc")
    assert isinstance(refused.exception, UserError) and refused.exception.message.startswith("nothing was removed")
    assert sum(map(len, left(tmp_path).values())) == 6
    assert run("gc --yes").output.splitlines()[-1] == "10 B freed"
    assert left(tmp_path) == {"some-data": [1, 2], "some-model": [2], "third": [2]}
    assert run("lineage some-model").exit_code == 0


def test_gc_keeps_what_a_run_reads_that_has_not_finished(
    published: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    state = tmp_path / "output/nano3/sft/tiny-0123/run.json"
    state.parent.mkdir(parents=True)
    for word, removed in (("running", "nothing to remove"), ("finished", "some-model:1")):
        state.write_text(json.dumps({"state": word, "inputs": {"model": published["first"].pinned}}))
        assert run("gc --dry-run").output.startswith(removed)
    state.write_text(json.dumps({"state": "running", "inputs": {"model": published["first"].pinned}}))
    assert "some-model:1 is read by a run that is at work" in str(run("rm some-model:1").exception)


@pytest.mark.parametrize("job_dir", ["output/jobs", "elsewhere"])
def test_gc_keeps_what_a_job_is_pinned_to_that_has_not_started(
    job_dir: str, published: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNSPEC_OUTPUT_ROOT", raising=False)
    if job_dir == "elsewhere":
        (tmp_path / "env.toml").write_text('[big]\nexecutor = "slurm"\njob_dir = "elsewhere"\n')
    job = tmp_path / job_dir / "experiments/demo/demo_1700000000/train"
    (job / "code").mkdir(parents=True)
    (job / "code/job.yaml").write_text(f"inputs: {{model: '{published['first'].pinned}', data: null}}\n")
    (job / "sbatch_train_17.out").touch()
    assert run("gc --dry-run").output.startswith("nothing to remove")
    assert f"read by a job that has not started: {job}" in str(run("rm some-model:1").exception)
    (job / "log-train_17_0.out").touch()  # from here on its run says what it reads
    assert run("gc --dry-run").output.startswith("some-model:1")


def test_gc_removes_nothing_while_the_record_of_a_waiting_job_is_empty(
    published: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNSPEC_OUTPUT_ROOT", raising=False)
    record = tmp_path / "output/jobs/experiments/demo/demo_1700000000/train/code/job.yaml"
    record.parent.mkdir(parents=True)
    record.touch()
    refused = run("gc --yes")
    assert isinstance(refused.exception, UserError) and f"{record}: not the record" in refused.exception.message
    assert left(tmp_path) == {"some-data": [1], "some-model": [1, 2]}


def test_gc_removes_nothing_while_a_record_cannot_be_read(published: dict[str, Version], tmp_path: Path) -> None:
    record = published["second"].directory / "artifact.json"
    record.write_text(record.read_text() + " ")
    refused = run("gc --yes")
    assert isinstance(refused.exception, UserError) and "some-model:2 is corrupt" in refused.exception.message
    assert left(tmp_path) == {"some-data": [1], "some-model": [1, 2]}


def test_show_config_and_diff_read_what_the_versions_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "store"))
    registry, source = Registry(tmp_path / "store"), tmp_path / "w"
    source.write_text("w")

    def publish(lr: float, loss: float, module: str) -> None:
        files = {
            "config.yaml": f"optimizer: {{lr: {lr}}}\ntrain: {{steps: 5}}\n",
            "code.json": json.dumps({"lab.losses": module * 64}),
            "environment.json": json.dumps({"packages": {"torch": "2.13"}}),
        }
        record = {"type": "Model", "metrics": {"loss": loss}, "created_at": str(loss)}
        registry.publish("m", source, record, run_files={name: text.encode() for name, text in files.items()})

    publish(0.1, 2.5, "a")
    publish(0.2, 2.25, "b")
    assert run("show m:1 --config").output == "optimizer: {lr: 0.1}\ntrain: {steps: 5}\n"
    assert [line.split() for line in run("diff m:1 m").output.splitlines()] == [
        ["m:1", "m:2"],
        ["config.optimizer.lr", "0.1", "0.2"],
        ["metrics.loss", "2.5", "2.25"],
        ["code.lab.losses", "a" * 12, "b" * 12],
    ]
    assert not re.search(r" $", run("diff m:1 m").output, re.MULTILINE)
    assert run("diff m:1 m:1").output == "m:1 and m:1: no difference\n"

    for text in ("table" * 900 + "one" + "rest" * 900, "table" * 900 + "two" + "rest" * 900):
        registry.publish("long", source, {"metrics": {"samples": text}})
    assert [line.split() for line in run("diff long:1 long").output.splitlines()[1:]] == [
        ["metrics.samples", *("…" + "table" * 5 + word + "rest" * 18 + "…" for word in ("one", "two"))]
    ]
    registry.publish("bare", source, {})
    assert "bare:1 carries no config" in str(run("show bare --config").exception)


def test_watch_publishes_what_a_run_elsewhere_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "store"))
    saves = tmp_path / "saves"
    assert "no directory" in str(run(f"watch {saves} --name mine --once").exception)
    (saves / "iter_0000200").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (saves / "iter_0000200" / name).write_text(name)
    assert "no checkpoint that is new" in run(f"watch {saves} --name mine --once").output  # it is not noted yet
    assert "is one checkpoint" in str(run(f"watch {saves}/iter_0000200 --name mine --once").exception)
    assert "bad artifact name '-mine'" in str(run(f"watch {saves} --name=-mine --once").exception)
    (saves / "latest_checkpointed_iteration.txt").write_text("200")

    def leave(seconds: float) -> None:
        assert seconds == 5
        raise KeyboardInterrupt

    monkeypatch.setattr("nemotron.cli.commands.artifacts.time", SimpleNamespace(sleep=leave))
    assert run(f"watch {saves} --name mine --every 5").output == "mine:1: iteration 200\n"  # then Ctrl-C
    assert "no checkpoint that is new" in run(f"watch {saves} --name mine --once").output


def test_watch_says_once_what_is_wrong_and_watches_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "store"))
    saves, looks = tmp_path / "saves", list[float]()
    (saves / "iter_0000200").mkdir(parents=True)
    (saves / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(UserError, match="no whole Megatron checkpoint"):
        raise run(f"watch {saves} --name mine --once").exception or AssertionError

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:  # a slow disk has it all now
            for name in ("__0_0.distcp", ".metadata"):
                (saves / "iter_0000200" / name).write_text(name)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("nemotron.cli.commands.artifacts.time", SimpleNamespace(sleep=pause))
    result = run(f"watch {saves} --name mine")
    assert "mine:1: iteration 200" in result.output
    assert (result.output + capfd.readouterr().err).count("error:") == 1


def test_watch_goes_on_after_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = iter([RunFailed("no answer"), None])

    def register(*_: object) -> None:
        if failure := next(answers):
            raise failure

    def pause(_: float) -> None:
        if next(pauses):
            raise KeyboardInterrupt

    pauses = iter([False, True])
    monkeypatch.setattr("nemotron.kit.megatron.register_checkpoint", register)
    monkeypatch.setattr("nemotron.cli.commands.artifacts.time", SimpleNamespace(sleep=pause))
    result = run(f"watch {tmp_path} --name mine")
    assert next(answers, "looked twice") == "looked twice"
    assert (result.output + capfd.readouterr().err).count("no answer") == 1
