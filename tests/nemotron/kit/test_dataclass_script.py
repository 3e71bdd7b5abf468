"""Scripts with a dataclass for a config: flags over a file, what they refuse, and whose inputs are whose."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
from pydantic import Field
from tests.nemotron.kit.test_artifact import write_model

from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset
from nemotron.kit.dataclass_script import output_folder, read_config, step


@dataclass
class Inner:
    lr: Annotated[float, Field(gt=0)] = 0.1


@dataclass
class Config:
    steps: Annotated[int, Field(ge=1)] = 5
    place: Path | None = None
    inner: Inner = field(default_factory=Inner)


def test_flags_win_over_the_file_which_wins_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run: {output: x}\nsteps: 7\ninner: {lr: 0.5}\n")
    assert read_config(Config, []) == Config()
    assert read_config(Config, ["--config", str(file)]) == Config(7, None, Inner(0.5))
    assert read_config(Config, [f"--config={file}", "--steps", "9", "--place", "a"]) == Config(9, Path("a"), Inner(0.5))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step: 7", "unknown key step"),
        ("inner: {lrr: 1}", "unknown key inner.lrr"),
        ("steps: 0", "steps = 0: Input should be greater than or equal to 1"),
        ("inner: {lr: x}", "inner.lr = 'x'"),
        ("- 1", "not a mapping"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_config(Config, ["--config", str(file)])
    assert message in refused.value.message and str(file) in refused.value.message


def test_a_flag_out_of_range_and_an_unknown_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"command line: inner.lr = -1.0: Input should be greater than 0"):
        read_config(Config, ["--inner.lr", "-1"])
    with pytest.raises(SystemExit) as left:
        read_config(Config, ["--stepss", "1"])
    assert left.value.code == 2 and "--stepss" in capsys.readouterr().err


def test_a_step_has_its_own_name_and_inputs_whoever_calls_it(tmp_path: Path) -> None:
    def script(name: str) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(step=step, Dataset=Dataset, Checkpoint=Checkpoint, __file__=str(tmp_path / f"{name}.py"))
        return module

    curation, training, other = script("data_curation"), script("training"), script("other")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.jsonl").write_text("{}\n")
    exec("@step\ndef main(path): return Dataset(path=path, num_examples=1).save()", vars(curation))
    exec("@step\ndef main(path, out): d = Dataset.load(path=path); return Checkpoint(path=out, num_steps=1).save()",
         vars(training))  # fmt: skip
    data = curation.main(tmp_path / "rows")
    checkpoint = training.main(data.path, write_model(tmp_path / "weights"))
    exec("@step\ndef main(path): return Dataset(path=path, num_examples=1).save()", vars(other))
    assert (data.ref, checkpoint.ref) == ("data_curation-data:1", "training-model:1")
    assert checkpoint.inputs == {"data": data.version.pinned}
    assert checkpoint.producer.script == "training.py"
    assert other.main(tmp_path / "rows").inputs == {}  # what training loaded is not its input


def test_the_lines_of_the_tutorial_work_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["training.py"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("{}\n")
    plain = Dataset.load(path=tmp_path / "data")  # a folder that no artifact stands behind
    dataset = Dataset(path=tmp_path / "data", num_examples=1).save()
    out = write_model(tmp_path / "out")
    checkpoint = Checkpoint(
        path=out, num_steps=3, training_loss=2.5, checkpoint_path=out, dataset_path=dataset.path
    )  # fmt: skip
    checkpoint.save()
    again = Checkpoint.load(path=checkpoint.path)
    assert (again.num_steps, again.training_loss, again.checkpoint_path) == (3, 2.5, checkpoint.path)
    assert again.dataset_path == dataset.path and again.created_at == checkpoint.created_at
    (raw,) = [s for s in checkpoint.version.record["sources"] if s["name"] == str(plain.path)]
    assert len(raw["sha256"]) == 64


def test_a_chosen_folder_stays_and_one_in_use_is_refused(tmp_path: Path) -> None:
    with output_folder(None) as folder:
        (folder / "x").write_text("")
    assert not folder.exists()
    with output_folder(tmp_path / "mine") as mine:
        (mine / "x").write_text("")
    assert (tmp_path / "mine/x").exists()
    with pytest.raises(UserError, match="is not empty"), output_folder(tmp_path / "mine"):
        pass
