"""Saving and loading typed artifacts, as recipe scripts do."""

import datetime
import json
import math
import shutil
from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.kit import Artifact, Checkpoint, Dataset, Model, PretrainBlend, Results, SFTPack, Source, pipes
from nemotron.kit.chat_template import keep_template, load_template


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

    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"0")
    Checkpoint(path=weights, step=7, dataset_path=data.path, metrics={"loss": 2.5}).save("nano3-pretrain-model-tiny")

    pipes._read = {"model": "art://nano3-pretrain-model-tiny:latest", "data": data.uri}
    checkpoint = Checkpoint.load()
    assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 2.5})
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
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "m").write_text("x")
    own = tmp_path / "tokenizer"
    own.mkdir()
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    template = keep_template(str(tmp_path / "own.jinja"), tmp_path / "w")
    model = Model(
        path=tmp_path / "w", step=1, dataset_path=data.train_path, tokenizer_path=own, chat_template=template
    ).save("model")
    fields = json.loads((model.version.directory / "artifact.json").read_text())["fields"]
    assert fields["path"] == "art://." and fields["dataset_path"] == "art://data:1/train.jsonl"
    assert fields["tokenizer_path"] == str(own) and fields["chat_template"] == "art://./chat_template"
    moved = Registry(shutil.move(registry.root, tmp_path / "moved"))
    again = Model.load(moved.root / "model" / "1" / "payload")
    assert again.dataset_path == moved.root / "data" / "1" / "payload" / "train.jsonl"
    assert again.template is not None and load_template(again.template).source == "{{ messages }}"


def test_kinds_load_as_their_own_type_or_any_base_and_as_nothing_else(out):
    SFTPack(path=out, num_examples=2, seq_len=512, chat_template="nano3").save("pack")
    Curated(path=out, num_examples=2, dropped={"short": 3}).save("curated")
    assert Dataset.load("pack").seq_len == 512 and isinstance(Artifact.load("pack"), SFTPack)
    assert Dataset.load("curated").dropped == {"short": 3}
    with pytest.raises(UserError, match="pack:1 is of type SFTPack, not Checkpoint") as caught:
        Checkpoint.load("pack")
    assert caught.value.hint is None
    with pytest.raises(UserError, match="curated:1 is of type Curated, not SFTPack") as caught:
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
    (out / "stream.bin").write_text("")
    (out / "stream.idx").write_text("")
    assert PretrainBlend(path=out, num_examples=2, train_path=out / "stream").save("x").train_path.name == "stream"
    with pytest.raises(UserError, match="has no name"):
        Dataset(path=out, num_examples=2).save()
    with pytest.raises(UserError, match="is not in a published artifact"):
        Dataset.load(path=out)
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
