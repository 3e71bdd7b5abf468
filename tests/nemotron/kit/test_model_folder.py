"""A directory in Hugging Face layout where a model's artifact is asked for."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from nemo_runspec.artifacts import Registry
from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.config.loader import load_config
from nemo_runspec.config.resolve import ResolvedConfig, resolve_config
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.kit import Dataset, Model, SFTPack, model_folder
from nemotron.kit.dataset_folder import add_dataset
from nemotron.kit.model_folder import adopt_model

SFT = Path(__file__).resolve().parents[3] / "src/nemotron/recipes/nano3/stage1_sft/train.py"
Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is needed to be taken for a model."""
    folder = tmp_path / "my model"
    folder.mkdir()
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "notes.txt").write_text("no part of it")
    return folder


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    rows = tmp_path / "rows"
    rows.mkdir()
    row = {"input_ids": [[1, 2]], "loss_mask": [[0, 1]], "seq_start_id": [[0]]}
    pyarrow.parquet.write_table(pyarrow.table(row), rows / "train.parquet")
    SFTPack(path=rows, num_examples=1, seq_len=8, chat_template="nano3").save("nano3-sft-data-tiny")
    return Registry(tmp_path / "artifacts")


@pytest.fixture
def resolve(registry: Registry) -> Resolve:
    """`resolve("run.model=x")`: the config of SFT, as a command and its script resolve it."""

    def run(*overrides: str, publish: bool = True) -> ResolvedConfig:
        spec = parse(SFT)
        return resolve_config(load_config(spec.config_dir, "tiny", overrides), spec, registry=registry, publish=publish)

    return run


def test_a_directory_is_published_once(registry: Registry, folder: Path) -> None:
    version = adopt_model(str(folder), registry)
    assert version is not None and version.ref == "my-model:1"
    assert sorted(version.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    model = Model.load("my-model")
    assert model.num_parameters == 3 * 4 + 5 and model.tokenizer_path == model.path and model.template is None
    assert [source.name for source in model.sources] == [str(folder)]
    assert adopt_model(str(folder), registry) == version
    (folder / "config.json").write_text('{"other": 1}')
    changed = adopt_model(str(folder), registry)
    assert changed is not None and changed.ref == "my-model:2"
    assert adopt_model(str(version.path), registry) == version  # a path in the registry is what lies there


def test_a_large_file_in_the_cache_of_the_hub_is_not_read_to_be_recognised(
    registry: Registry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies there under its sha256, and 63 GB of it are minutes; small ones under another hash."""
    weights, read = folder / "model.safetensors", list[Path]()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file, name in ((weights, sha256_file(weights)), (folder / "tokenizer.json", "a" * 40)):
        file.rename(blobs / name)
        file.symlink_to(blobs / name)
    version = adopt_model(str(folder), registry)

    def note(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(model_folder, "sha256_file", note)
    assert adopt_model(str(folder), registry) == version
    assert [path.name for path in read] == ["config.json", "tokenizer.json"]


def test_a_directory_is_published_where_it_is_looked_up(registry: Registry, folder: Path, tmp_path: Path) -> None:
    other = Registry(tmp_path / "artifacts of a profile")
    version = adopt_model(str(folder), other)
    assert version is not None and version.directory == other.local_root / "my-model/1"
    assert adopt_model(str(folder), other) == version
    assert other.names() == ["my-model"] and registry.names() == ["nano3-sft-data-tiny"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "it has no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no weights"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_is_published(
    registry: Registry, folder: Path, name: str, message: str
) -> None:
    (folder / name).unlink()
    for publish in (False, True):
        with pytest.raises(UserError, match=message):
            adopt_model(str(folder), registry, publish)
    assert registry.names() == ["nano3-sft-data-tiny"]


def test_training_goes_on_from_a_directory(resolve: Resolve, registry: Registry, folder: Path) -> None:
    planned = resolve(f"run.model={folder}", publish=False)  # a dry run
    assert planned.run["model"] == str(folder) and planned.inputs["model"] is None
    assert registry.names() == ["nano3-sft-data-tiny"]
    resolved = resolve(f"run.model={folder}")
    assert resolved.run["model"] == "my-model:1"
    assert resolved.data["checkpoint"]["pretrained_checkpoint"] == str(registry.resolve("my-model").path)


def test_a_place_that_is_no_model_is_refused_in_a_dry_run(resolve: Resolve, folder: Path, tmp_path: Path) -> None:
    for reference, message in (
        ("./nothing/here", "no directory ./nothing/here"),
        ("hf://no-slash", "not the address of a model"),
        (str(folder / "config.json"), "is a file, a directory expected"),
        ("nano3-sft-data-tiny", "nano3-sft-data-tiny:1 is of type SFTPack, not Checkpoint"),
    ):
        with pytest.raises(UserError, match="run.model = .*" + message):
            resolve(f"run.model={reference}", publish=False)
    with pytest.raises(UserError, match=r"^run.model = hf://no-slash: not the address of a model"):  # said once
        resolve("run.model=hf://no-slash", publish=False)
    with pytest.raises(UserError, match=r"run.data = .*: the name of an artifact expected, not a directory"):
        resolve(f"run.model={folder}", f"run.data={tmp_path}", publish=False)


def test_the_key_of_the_library_at_scale_is_the_same_door(
    resolve: Resolve, registry: Registry, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve(f"checkpoint.pretrained_checkpoint={folder}")
    assert resolved.run["model"] == "my-model:1" and list(resolved.inputs) == ["model", "data"]
    payload = str(registry.resolve("my-model").path)
    assert resolved.data["checkpoint"]["pretrained_checkpoint"] == payload
    assert resolved.data == resolve(f"run.model={folder}").data  # and so one fingerprint
    monkeypatch.chdir(folder.parent)
    for value in (folder.name, "my-model:1", payload, f"{payload}/"):  # a bare name, an artifact, its payload
        assert resolve(f"checkpoint.pretrained_checkpoint={value}").data == resolved.data
    for value, message in (
        ("nothing", "run.model = nothing: no artifact 'nothing'"),
        ("me/model", "run.model = me/model: no directory me/model"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(f"checkpoint.pretrained_checkpoint={value}", publish=False)
    with pytest.raises(UserError, match=f"run.model=my-model and checkpoint.pretrained_checkpoint={folder} name two"):
        resolve("run.model=my-model", f"checkpoint.pretrained_checkpoint={folder}")


def test_nothing_is_published_for_a_config_that_is_refused(resolve: Resolve, registry: Registry, folder: Path) -> None:
    for fault, message in (
        ("optimizer.lr=abc", "optimizer.lr = 'abc'"),
        ("run.data=nothing", "no artifact 'nothing'"),
    ):
        with pytest.raises(UserError, match=message):
            resolve(f"run.model={folder}", fault)
    assert registry.names() == ["nano3-sft-data-tiny"]


def test_the_chat_template_beside_the_tokenizer_is_the_models(registry: Registry, folder: Path) -> None:
    shutil.copytree(folder, other := folder.with_name("with-template"))
    (other / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    version = adopt_model(f"{other}/", registry)
    assert version is not None and Model.load(version.ref).template == str(version.path)


def test_data_becomes_an_artifact_as_it_is(registry: Registry, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}')
    (corpus / "empty.txt").touch()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["u", "v", "w"]}), corpus / "c.parquet")
    added = add_dataset(str(corpus), "corpus")
    assert added.ref == "corpus:1" and added.num_examples == 2 + 3 and added.train_path == added.version.path
    with pytest.raises(UserError, match="no file or folder"):
        add_dataset(str(tmp_path / "nowhere"), "corpus")
    (corpus / "d.jsonl").symlink_to("elsewhere.jsonl")
    with pytest.raises(UserError, match=r"corpus/d\.jsonl is a link to elsewhere\.jsonl, which is not there"):
        add_dataset(str(corpus), "corpus")
    assert Dataset.load("corpus").ref == "corpus:1"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'[{"text": "x"}, {"text": "y"}]'),
        ("a.jsonl", b'[{"text": "x"},\n{"text": "y"}]\n'),
        ("a.csv", b'text\n"x\ny"\nz\n'),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"text": "y"}\n', mtime=0)),
        ("a.jsonl", gzip.compress(b'{"text": "x"}\n{"text": "y"}\n', mtime=0)),
        ("a.txt", b"one\n\ntwo"),
    ],
)
def test_no_number_of_examples_stands_where_none_were_counted(
    registry: Registry, tmp_path: Path, name: str, content: bytes
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / name).write_bytes(content)
    (corpus / "counted.jsonl").write_text('{"text": "z"}\n')
    added = add_dataset(str(corpus), "corpus")
    assert added.num_examples is None
    assert Dataset.load("corpus").num_examples is None
    assert add_dataset(str(corpus / "counted.jsonl"), "counted").num_examples == 1


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_data_without_an_example_is_refused(registry: Registry, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="holds no data"):
        add_dataset(str(tmp_path / "a.jsonl"), "corpus")
