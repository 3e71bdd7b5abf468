"""Saving and loading typed artifacts, as recipe scripts do."""

import datetime
import json
import math
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import Field, ValidationError
from safetensors.numpy import save_file
from tiny_payloads import write_model

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemotron import kit
from nemotron.kit import (
    Artifact,
    Checkpoint,
    Dataset,
    Model,
    Preferences,
    PretrainBlend,
    Results,
    RLPrompts,
    SFTPack,
    Source,
    artifact,
    open_run,
    pipes,
)
from nemotron.kit.chat_template import keep_template, load_template
from nemotron.kit.lineage import walk
from nemotron.kit.payloads import check_weights


class Curated(Dataset):
    """A recipe's own kind."""

    dropped: dict[str, int] = Field(default={})


def dataset(out, **more):
    return Dataset(path=out, num_examples=2, train_path=out / "train.jsonl", **more)


def test_the_whole_example_works(out, tmp_path, registry):
    data = dataset(out).save("nano3-pretrain-data-tiny")
    assert (data.ref, data.uri) == ("nano3-pretrain-data-tiny:1", "art://nano3-pretrain-data-tiny:1")
    assert data.path == registry.root / "nano3-pretrain-data-tiny" / "1" / "payload"
    assert data.train_path == data.path / "train.jsonl"

    Checkpoint(path=write_model(tmp_path / "weights"), num_steps=7, dataset_path=data.path, metrics={"loss": 2.5}).save(
        "nano3-pretrain-model-tiny"
    )

    pipes._read = {"model": "art://nano3-pretrain-model-tiny:latest", "data": data.uri}
    checkpoint = Checkpoint.load()
    assert (checkpoint.num_steps, checkpoint.metrics) == (7, {"loss": 2.5})
    assert Dataset.load(path=checkpoint.dataset_path).ref == data.ref
    assert abs(datetime.datetime.now(datetime.UTC) - checkpoint.created_at) < datetime.timedelta(minutes=1)
    assert checkpoint.producer.script and checkpoint.producer.fingerprint is None
    for where in (
        checkpoint.uri,
        checkpoint.ref,
        checkpoint.path,
        str(checkpoint.path),
        checkpoint.path / "model.safetensors",
    ):
        assert Checkpoint.load(where).digest == checkpoint.digest
    assert Dataset.from_uri("art://nano3-pretrain-data-tiny:latest").num_examples == 2


def test_records_hold_no_path_of_this_machine_except_a_users_own(out, tmp_path, registry):
    data = dataset(out).save("data")
    write_model(tmp_path / "w")
    own = tmp_path / "tokenizer"
    own.mkdir()
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    template = keep_template(str(tmp_path / "own.jinja"), tmp_path / "w")
    model = Model(
        path=tmp_path / "w", num_steps=1, dataset_path=data.train_path, tokenizer_path=own, chat_template=template
    ).save("model")
    fields = json.loads((model.version.directory / "artifact.json").read_text())["fields"]
    assert fields["path"] == "art://." and fields["dataset_path"] == "art://data:1/train.jsonl"
    assert fields["tokenizer_path"] == str(own) and fields["chat_template"] == "art://./chat_template"
    moved = Registry(shutil.move(registry.root, tmp_path / "moved"))
    again = Model.load(moved.root / "model" / "1" / "payload")
    assert again.dataset_path == moved.root / "data" / "1" / "payload" / "train.jsonl"
    assert again.template is not None and load_template(again.template).source == "{{ messages }}"


def test_kinds_load_as_their_own_type_or_any_base_and_as_nothing_else(out):
    columns = {name: [[1]] for name in ("input_ids", "loss_mask", "seq_start_id")}
    pq.write_table(pa.table(columns), out / "rows.parquet")
    SFTPack(path=out, num_examples=2, seq_len=512, chat_template="nano3").save("pack")
    Curated(path=out, num_examples=2, dropped={"short": 3}).save("curated")
    assert Dataset.load("pack").seq_len == 512 and isinstance(Artifact.load("pack"), SFTPack)
    assert Dataset.load("curated").dropped == {"short": 3}
    with pytest.raises(UserError, match="pack:1 is of type SFTPack, not Checkpoint") as caught:
        Checkpoint.load("pack")
    assert caught.value.hint is None
    with pytest.raises(UserError, match=r"curated:1 is of type .*test_artifact\.Curated, not SFTPack") as caught:
        SFTPack.load("curated")
    assert caught.value.hint == "give one of pack"
    with pytest.raises(UserError, match="not PretrainBlend"):
        PretrainBlend.load("pack")


def test_a_kind_whose_class_is_elsewhere_loads_as_what_was_asked_for(out, registry):
    record = {
        "type": "Elsewhere",
        "types": ["Elsewhere", "Dataset", "Artifact"],
        "fields": {"path": "art://.", "num_examples": 5, "strange": 1},
        "metrics": {},
        "sources": [],
    }
    registry.publish("x", out, record)
    loaded = Dataset.load("x")
    assert type(loaded) is Dataset and loaded.num_examples == 5
    registry.publish("x", out, {**record, "fields": {"path": "art://.", "num_examples": "many"}})
    with pytest.raises(UserError, match="x:2 does not fit Dataset: num_examples"):
        Dataset.load("x")


def test_misspelt_fields_and_missing_files_are_refused(out):
    with pytest.raises(ValidationError):
        Dataset(path=out, num_examples=2, trainpath=out)
    with pytest.raises(ValidationError):
        Dataset(path=out, num_examples=0)
    with pytest.raises(UserError, match=r"Dataset\.valid_path: .*nowhere does not exist"):
        Dataset(path=out, num_examples=2, valid_path=out / "nowhere").save("x")
    (out / "stream.bin").write_text("tokens")
    (out / "stream.idx").write_text("")
    assert PretrainBlend(path=out, num_examples=2, train_path=out / "stream").save("x").train_path.name == "stream"
    with pytest.raises(UserError, match="is not in a published artifact"):
        PretrainBlend.load(path=out)
    with pytest.raises(UserError, match="no artifact 'nothing'"):
        Dataset.load("nothing")


def test_one_file_is_a_payload_too(out):
    data = Dataset(path=out / "train.jsonl", num_examples=1).save("one")
    assert data.path.name == "train.jsonl" and Dataset.load("one").path == data.path
    moved = Dataset(path=out, num_examples=1).save("one", move=True)
    assert not out.exists() and moved.version.version == 2


def test_sources_are_names_or_files_with_their_sha256(out):
    source = Source(name="mine.jsonl", sha256="7c" * 32)
    data = dataset(out, sources=["python-stdlib 3.11.7", source]).save("data")
    assert Dataset.load("data").sources == [Source(name="python-stdlib 3.11.7"), source]
    assert data.version.record["sources"][0] == {"name": "python-stdlib 3.11.7"}
    with pytest.raises(ValidationError):
        Source(name="x", sha256="short")


def test_a_file_of_an_input_is_no_raw_source(out, tmp_path):
    first = dataset(out, sources=["raw.txt"]).save("first")
    model = Checkpoint(
        path=write_model(tmp_path / "weights"),
        num_steps=1,
        dataset_path=first.path,
        sources=[str(first.train_path), str(out / "train.jsonl"), "corpus"],
    ).save("model")
    assert [source["name"] for source in model.version.record["sources"]] == [str(out / "train.jsonl"), "corpus"]


def test_results_without_files_carry_their_metrics_as_the_payload(tmp_path):
    (tmp_path / "empty").mkdir()
    metrics = {"greedy": 0.7, "families": {"math": [0.6, 0.8]}, "broken": math.nan}
    saved = Results(path=tmp_path / "empty", metrics=metrics).save("results")
    written = json.loads((saved.path / "results.json").read_text())
    assert written == {"greedy": 0.7, "families": {"math": [0.6, 0.8]}, "broken": None}
    assert Results.load("results").metrics == written
    with pytest.raises(UserError, match="Results needs path="):
        Results(metrics=metrics)


def test_the_pipe_hands_over_by_type_or_by_key(out):
    dataset(out).save("a")
    dataset(out).save("b")
    pipes._read = {"train": "art://a:1", "valid": "art://b:1"}
    with pytest.raises(UserError, match=r"2 of type Dataset: train \(Dataset\), valid \(Dataset\)"):
        Dataset.load()
    assert Dataset.load(key="valid").ref == "b:1"
    with pytest.raises(UserError, match="no 'model'"):
        Dataset.load(key="model")
    with pytest.raises(UserError, match="0 of type Checkpoint"):
        Checkpoint.load()
    pipes._read = {}
    with pytest.raises(UserError, match="nothing on stdin"):
        Dataset.load()


def test_reference_and_relative_path_are_told_apart(out, monkeypatch):
    data = dataset(out).save("data")
    monkeypatch.chdir(data.path.parent)
    assert Dataset.load("./payload").ref == "data:1"
    assert Dataset.load(Path("payload")).ref == "data:1"


# --- What a script publishes without open_run, as in a tutorial --------------------------------------------


def test_a_script_without_a_run_has_names_inputs_and_an_environment(out, tmp_path, registry, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "data_curation.py")])
    data = dataset(out).save()
    assert data.ref == "data_curation-data:1" and data.inputs == {}
    Dataset(path=out / "valid.jsonl", num_examples=1).save("held-out")
    artifact._scripts[:] = [artifact._Script()]  # another process
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "training.py"), "--steps", "3"])
    read = Dataset.load(path=data.path)
    weights = write_model(tmp_path / "weights")
    model = Checkpoint(
        path=weights, num_steps=3, dataset_path=read.path, tokenizer_path=Dataset.load("held-out").path
    ).save()
    assert model.ref == "training-model:1" and model.producer.argv == ["training.py", "--steps", "3"]
    assert {role: ref.partition("@")[0] for role, ref in model.inputs.items()} == {
        "data": "data_curation-data:1",
        "held-out:1": "held-out:1",
    }
    artifact._scripts[:] = [artifact._Script()]
    # Nothing was loaded, but a field points into an artifact.
    again = Checkpoint(path=weights, num_steps=3, dataset_path=data.train_path).save()
    assert again.inputs == {"dataset": data.version.pinned}
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert Results(path=out, metrics={}).save().ref == "results:1"
    assert [node.ref for node in walk("training-model").inputs] == ["data_curation-data:1"]
    environment = json.loads(model.version.run_file("environment.json"))
    assert environment["python"] == platform.python_version() and model.version.run_file("config.yaml") is None


def test_a_version_carries_config_metrics_and_environment_of_its_run(script, out, registry, tmp_path):
    dataset(out).save("raw")
    with open_run(load_script_config(script, ["--config", "tiny", "lr=0.25"]), script) as run:
        run.metrics.log(1, loss=2.5)
        with run.phase("train"):
            pass
        model = Model(path=write_model(tmp_path / "w"), num_steps=1).save()
    shutil.rmtree(tmp_path / "output" / "toy")
    moved = Registry(shutil.move(registry.root, tmp_path / "moved"))
    version = moved.resolve(model.ref)
    assert "lr: 0.25" in version.run_file("config.yaml")
    assert json.loads(version.run_file("metrics.jsonl"))["loss"] == 2.5
    assert json.loads(version.run_file("phases.jsonl"))["phase"] == "train"
    assert set(json.loads(version.run_file("code.json"))) == {"schema.py"}
    assert moved.verify(model.ref) == []
    config = version.directory / "run" / "config.yaml"
    config.write_text(config.read_text().replace("0.25", "0.5"))
    assert moved.verify(model.ref) == [f"{config}: content differs from its sha256"]
    assert version.digest == Checkpoint.load(version.path).digest  # the payload's, which the run is no part of
    assert (
        subprocess.run(
            ["sha256sum", "-c", "manifest.sha256"], cwd=version.directory, capture_output=True, text=True, check=False
        ).stdout.count("FAILED")
        == 1
    )


# --- What is refused before it gets a version -------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["<f8", "<f4", "<f2"])
def test_weights_that_are_not_finite_are_refused(tmp_path, registry, dtype, value):
    weights = np.linspace(-1, 1, 100).astype(dtype)
    folder = write_model(tmp_path / "w")
    save_file({"a": weights, "step": np.array([7])}, folder / "model.safetensors")
    assert check_weights(folder) == 2
    weights[77] = value
    save_file({"a": weights}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"^m is not published: .*tensor a has values that are NaN or infinite"):
        Model(path=folder, num_steps=1).save("m")
    assert registry.names() == []


def test_half_precision_formats_of_other_libraries_are_looked_at_too(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_tensors

    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        for value, good in ((1.5, True), (torch.finfo(dtype).max, True), (math.nan, False)):
            save_tensors({"a": torch.tensor([0.5, value, -1.0]).to(dtype)}, tmp_path / "w.safetensors")
            if good:
                assert check_weights(tmp_path) == 1
            else:
                with pytest.raises(UserError, match="NaN or infinite"):
                    check_weights(tmp_path)


def test_payloads_that_are_not_what_their_type_says_are_refused(tmp_path, out, registry):
    folder = write_model(tmp_path / "w")
    whole = (folder / "model.safetensors").read_bytes()
    for content, what in (
        (b"", "not a whole safetensors file"),
        (whole[:-1], "not a whole safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "it holds no tensor"),
    ):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=what):
            Model(path=folder, num_steps=1).save("x")
    save_file({"a": np.zeros((0, 3), np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor a is empty, its shape is \[0, 3\]"):
        Checkpoint(path=folder, num_steps=1).save("x")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="not a model in Hugging Face layout"):
        Model(path=folder, num_steps=1).save("x")
    (out / "train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"Dataset\.train_path: .*train\.jsonl is empty"):
        dataset(out).save("x")
    with pytest.raises(UserError, match="no token stream in it"):
        PretrainBlend(path=out, num_examples=1).save("x")
    with pytest.raises(UserError, match="no row in 0 Parquet files"):
        SFTPack(path=out, num_examples=1, seq_len=8, chat_template="nano3").save("x")
    pq.write_table(pa.table({"input_ids": [[1]]}), out / "rows.parquet")
    with pytest.raises(UserError, match="no column loss_mask and seq_start_id"):
        SFTPack(path=out, num_examples=1, seq_len=8, chat_template="nano3").save("x")
    (out / "train.jsonl").write_text('{"chosen": "a", "text": "b"}\n')
    with pytest.raises(UserError, match=r"train\.jsonl:1: no rejected") as refused:
        Preferences(path=out, num_examples=1, train_path=out / "train.jsonl").save("x")
    assert refused.value.hint == "it has chosen, text"
    (out / "train.jsonl").write_text("chosen\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: not a JSON object: 'chosen"):
        RLPrompts(path=out, num_examples=1, train_path=out / "train.jsonl").save("x")
    assert registry.names() == []


def test_a_field_that_is_no_number_is_refused_and_a_metric_becomes_null(out):
    class Scored(Dataset):
        score: float

    with pytest.raises(UserError, match=r"Scored\.score is nan: a field is a finite number"):
        Scored(path=out, num_examples=1, score=math.nan).save("x")
    assert dataset(out, metrics={"loss": math.nan}).save("x").version.record["metrics"] == {"loss": None}


def test_two_scripts_may_each_have_a_type_of_the_same_name(out, tmp_path):
    class Checkpoint(Dataset):  # as a recipe might call its own
        pass

    Checkpoint.__qualname__ = "Checkpoint"
    mine = Checkpoint(path=out, num_examples=1).save("mine")
    assert mine.version.record["types"] == [f"{__name__}.Checkpoint", "Dataset", "Artifact"]
    assert type(Dataset.load("mine")) is Checkpoint
    with pytest.raises(UserError, match="not Checkpoint"):
        kit.Checkpoint.load("mine")
    package = tmp_path / "lab" / "stage"
    package.mkdir(parents=True)
    (tmp_path / "lab" / "__init__.py").touch()
    (package / "__init__.py").touch()
    script = package / "train.py"
    script.write_text(
        "from nemotron.kit import Dataset\nfrom nemotron.kit.artifact import type_name\n"
        "class Checkpoint(Dataset): pass\nprint(type_name(Checkpoint))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "lab.stage.train.Checkpoint\n"


class PointedAt(Dataset):
    """By the field of the model that points to it."""

    @classmethod
    def role(cls):
        return "dataset"


def test_an_input_is_looked_for_where_what_was_made_of_it_lies(tmp_path, monkeypatch):
    def publish(folder, text):
        monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / f"registry-{folder}"))
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(text)
        data = PointedAt(path=tmp_path / folder, num_examples=1).save("data-x")
        weights = write_model(tmp_path / folder / "weights")
        return data, Checkpoint(path=weights, num_steps=1, dataset_path=data.path).save("model-x")

    (first, made), (second, _) = publish("one", "1\n"), publish("two", "2\n")
    assert first.ref == second.ref and first.digest != second.digest
    found = PointedAt.input_of(Checkpoint.load(path=made.path))  # from where the second is `data-x:1`
    assert found.digest == first.digest
