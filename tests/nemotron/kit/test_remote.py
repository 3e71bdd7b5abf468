"""Runs whose registry is behind a URL, and runs of code that travelled to a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from tiny_payloads import write_model

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.kit import Checkpoint, Dataset, Model, Results, open_run
from nemotron.kit import run as run_module
from nemotron.kit.lineage import walk
from nemotron.kit.producer import producer_of

memory = fsspec.filesystem("memory")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine("laptop")`: from now on this process has that machine's cache. The registry is in memory."""
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", f"memory://{tmp_path.name}")

    def become(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    become("node")
    yield become
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def raw(machine, out):
    (out / "tokenizer").mkdir()
    (out / "tokenizer" / "tokenizer.json").write_text("{}")
    return Dataset(path=out, num_examples=2, train_path=out / "train.jsonl", sources=["python-stdlib 3.11.7"]).save(
        "raw"
    )


def opened(script, *overrides):
    return open_run(load_script_config(script, ["--config", "tiny", *overrides]), script=script)


def train(script):
    with opened(script) as run:
        data = run.inputs["data"]
        write_model(run.output_dir)
        tokenizer = data.path / "tokenizer"
        return run, Model(path=run.output_dir, num_steps=3, dataset_path=data.path, tokenizer_path=tokenizer).save()


def test_a_chain_on_one_machine_and_its_end_on_another(script, raw, machine):
    run, model = train(script)
    assert model.path.is_relative_to(run.registry.local_root) and model.inputs == {"data": f"raw:1@{raw.digest}"}
    results = Results(metrics={"loss": 1.0}, path=model.path).save("results")
    assert results.digest == model.digest
    journal = (run.registry.local_root / "lineage.jsonl").read_text().splitlines()
    assert [json.loads(line)["saved"].partition("@")[0] for line in journal] == [
        "raw:1", "toy-train-model-tiny:1", "results:1",
    ]  # fmt: skip
    machine("laptop")
    tree = walk("toy-train-model-tiny")
    assert [node.ref for node in tree.inputs] == ["raw:1"] and not Registry.default().local_root.exists()
    there = Checkpoint.load("toy-train-model-tiny")
    assert (there.path / "config.json").read_text() == "{}"
    assert (there.tokenizer_path / "tokenizer.json").read_text() == "{}"
    assert not (there.dataset_path / "train.jsonl").exists()  # not before somebody asks for it
    data = Dataset.load(path=there.dataset_path)
    assert data.ref == "raw:1" and data.train_path.read_text() == '{"text": "a"}\n'
    with pytest.raises(UserError, match="not in a published artifact"):
        Dataset.load(path=Path("/nowhere/at/all"))


def test_the_run_and_its_fingerprint_are_the_same_on_every_machine(script, raw, machine, tmp_path):
    (script.parent / "config" / "tiny.yaml").write_text(
        "run: {data: toy-train-model-tiny}\ndata_path: ${art:data,dataset_path}/train.jsonl\nw: ${art:data,path}\n"
    )
    schema = script.with_name("schema.py")
    schema.write_text(
        schema.read_text().replace("lr: float", "data_path: str | None = None\n    w: str = ''\n    lr: float")
    )
    Model(path=write_model(tmp_path / "made"), num_steps=1, dataset_path=raw.path).save("toy-train-model-tiny")
    first = opened(script)
    assert Path(first.config["data_path"]).read_text() == '{"text": "a"}\n'
    first.close(finished=False)
    machine("another")
    second = opened(script)
    assert second.fingerprint == first.fingerprint and second.resumed and second.dir == first.dir
    assert second.config["data_path"] != first.config["data_path"]
    assert Path(second.config["data_path"]).read_text() == '{"text": "a"}\n'  # of an artifact that is no input


@pytest.mark.parametrize("named", ["/.vocab", "/../artifact.json", "/..", "", "/../manifest.sha256"])
def test_a_config_may_name_any_path_of_a_version_that_is_no_input(script, out, machine, tmp_path, named):
    (out / ".vocab").write_text("{}")
    raw = Dataset(path=out, num_examples=2, train_path=out / "train.jsonl", sources=["python-stdlib 3.11.7"]).save(
        "raw"
    )
    (script.parent / "config" / "tiny.yaml").write_text("run: {data: toy-train-model-tiny}\ndata_path: ''\n")
    schema = script.with_name("schema.py")
    schema.write_text(schema.read_text().replace("lr: float", "data_path: str | None = None\n    lr: float"))
    Model(path=write_model(tmp_path / "made"), num_steps=1, dataset_path=raw.path).save("toy-train-model-tiny")
    machine("another")
    path = Path(os.path.normpath(f"{Registry.default().resolve('raw').path}{named}"))
    with opened(script, f"data_path={path}"):
        assert path.exists()
        assert (Registry.default().resolve("raw").path / "train.jsonl").exists() == (named != "/.vocab")


def test_every_node_fetches_for_itself(script, raw, machine, monkeypatch):
    first = opened(script)
    machine("node1")
    run_module._current = None  # the other node has a process of its own
    for name, value in {"RANK": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    second = opened(script)
    assert second.dir == first.dir and second.inputs["data"].path != first.inputs["data"].path
    assert (second.inputs["data"].path / "train.jsonl").exists()
    first.close()


def test_force_holds_for_the_first_attempt_of_a_job_only(script, raw, monkeypatch):
    monkeypatch.setenv("RUNSPEC_FRESH", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    first = opened(script)
    (first.dir / "checkpoint").write_text("")
    first.close(finished=False)
    run = opened(script)
    assert run.dir == first.dir and not run.resumed and not (run.dir / "checkpoint").exists()
    run.close(finished=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert opened(script).resumed


@pytest.fixture
def bundle(script, tmp_path, monkeypatch):
    """The script as it lies on a node: `code/project/recipe/train.py`; beside `project/` what the launcher wrote."""
    code = tmp_path / "job" / "code"
    (code / "project").mkdir(parents=True)
    script.parent.rename(code / "project" / "recipe")
    (code / "launch.json").write_text("{}")
    (code / "job.yaml").write_text("argv: [nemotron, toy, train, --run, slurm]\n")
    (code / "train.yaml").write_text("run: {data: raw, output: made, config: tiny}\n")
    monkeypatch.setenv("RUNSPEC_JOB_DIR", str(tmp_path / "job"))
    monkeypatch.setenv("RUNSPEC_CODE_DIGEST", "c0de" * 16)
    monkeypatch.setenv("RUNSPEC_GIT_COMMIT", "abc-dirty")
    monkeypatch.chdir(code)
    return code


def test_code_that_travelled_is_recorded_as_it_was_at_home(bundle, raw, monkeypatch):
    script = bundle / "project" / "recipe" / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--config", "train.yaml"])
    with open_run(load_script_config(script), script=script) as run:
        model = Model(path=write_model(run.output_dir), num_steps=1).save()
    producer = model.producer
    assert (producer.script, producer.name) == ("recipe/train.py", "toy/train")
    assert (producer.code_digest, producer.git_commit) == ("c0de" * 16, "abc-dirty")
    assert producer.argv == ["nemotron", "toy", "train", "--run", "slurm"]
    assert (run.dir / "job.yaml").read_bytes() == (bundle / "job.yaml").read_bytes()
    assert (run.dir / "train.yaml").read_bytes() == (bundle / "train.yaml").read_bytes()
    assert json.loads((bundle.parent / "pins.json").read_text()) == {"raw": raw.version.pinned}


def test_a_repository_around_the_job_is_not_that_of_the_code(bundle, monkeypatch):
    """The default job_dir is `output/jobs` in the user's checkout."""
    home = bundle.parents[1]
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(home), *command], check=True)
    script = bundle / "project" / "recipe" / "train.py"
    producer = producer_of(script)
    assert (producer.script, producer.git_commit) == ("recipe/train.py", "abc-dirty")
    monkeypatch.delenv("RUNSPEC_GIT_COMMIT")  # code that came from no repository
    assert producer_of(script).git_commit is None
    monkeypatch.delenv("RUNSPEC_CODE_DIGEST")  # no code that travelled
    assert producer_of(script).script == "job/code/project/recipe/train.py"


def test_code_that_did_not_travel_has_no_digest(script, monkeypatch):
    for name in ("RUNSPEC_CODE_DIGEST", "RUNSPEC_GIT_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    producer = producer_of(parse(script).script_path)
    assert (producer.script, producer.code_digest, producer.git_commit) == ("train.py", None, None)
