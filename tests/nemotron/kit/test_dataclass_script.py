"""Scripts with a dataclass for a config: flags over a file, what they refuse, and whose inputs are whose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import pytest
from pydantic import Field
from tests.nemotron.kit.test_artifact import write_model

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset, dataclass_script
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
        ("step: 7", "c.yaml:1: unknown key step = 7"),
        ("steps: 7\ninner: {lrr: 1}", "c.yaml:2: unknown key inner.lrr = 1"),
        ("steps: 0", "c.yaml:1: steps = 0: must be an integer >= 1"),
        ("inner: {lr: x}", "c.yaml:1: inner.lr = 'x': must be a number > 0"),
        ("inner: {lr: .inf}", "c.yaml:1: inner.lr = inf: must be a finite number"),
        ("- 1", "c.yaml:1: a config is a mapping of keys, not a list"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_config(Config, ["--config", str(file)])
    assert refused.value.message.endswith(message)


def test_a_file_of_values_alone_has_interpolations_but_no_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", "there")
    file = tmp_path / "c.yaml"
    file.write_text("steps: 7\nplace: ${oc.env:PLACE}/${steps}\n")
    assert read_config(Config, ["--config", str(file)]) == Config(7, Path("there/7"))
    file.write_text("run: {data: corpus}\nplace: ${art:data,path}\n")
    with pytest.raises(UserError, match=r"c\.yaml:2: place: only a single script's config names artifacts") as refused:
        read_config(Config, ["--config", str(file)])
    assert refused.value.hint == "give the folder of its payload: place: output/artifacts/NAME/1/payload"


def test_a_flag_out_of_range_and_an_unknown_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"command line: inner.lr = -1.0: Input should be greater than 0"):
        read_config(Config, ["--inner.lr", "-1"])
    with pytest.raises(UserError, match=r"command line: inner.lr = inf: Input should be a finite number"):
        read_config(Config, ["--inner.lr", "inf"])
    with pytest.raises(SystemExit) as left:
        read_config(Config, ["--stepss", "1"])
    assert left.value.code == 2 and "--stepss" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        read_config(Config, ["--help"])
    assert left.value.code == 0 and "--config NAME or FILE" in capsys.readouterr().out


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


def test_what_a_killed_script_left_is_removed_by_the_next(tmp_path: Path) -> None:
    work = (
        "import sys\nfrom nemotron.kit.dataclass_script import output_folder\n"
        "with output_folder(None) as folder:\n"
        "    (folder / 'x').write_text('')\n    print(folder, flush=True)\n    sys.stdin.read()\n"
    )
    environment = {**os.environ, "RUNSPEC_OUTPUT_ROOT": str(tmp_path / "output")}

    def begin() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, left = begin()
    living, kept = begin()
    assert left.is_dir() and kept.is_dir()  # a process that works loses nothing
    killed.kill()
    killed.communicate()
    last, own = begin()
    assert not left.exists() and kept.is_dir() and own.is_dir()
    for process in (living, last):
        process.communicate()
    assert not kept.exists() and list((tmp_path / "output").rglob("x")) == []


CURATION = """# /// script
# [tool.runspec]
# name = "toy/pretrain"
# setup = "none"
# config = {default = "tiny", schema = "curation.py:Config"}
# ///
import subprocess
from dataclasses import dataclass

from nemotron.kit import Dataset
from nemotron.kit.dataclass_script import output_folder, run_step, step


@dataclass
class Config:
    text: str = "a"  # what to write


@step
def main(config: Config) -> Dataset:
    print("what a library prints")
    subprocess.Popen(["sh", "-c", "sleep 0.5; echo what its server prints"])
    with output_folder(None) as folder:
        (folder / "train.jsonl").write_text(config.text)
        return Dataset(path=folder, num_examples=1).save()


if __name__ == "__main__":
    run_step(main, Config)
"""


TRAINING = """
from dataclasses import dataclass
from pathlib import Path

from nemotron.kit import Checkpoint, Dataset, dataclass_script
from nemotron.kit.dataclass_script import run_step, step


@dataclass
class Config:
    output_dir: Path
    dataset_path: Path | None = None


@step
def main(config: Config) -> Checkpoint:
    dataset = Dataset.load(path=config.dataset_path)
    config.output_dir.mkdir()
    (config.output_dir / "weights").write_text("of " + (dataset.path / "train.jsonl").read_text())
    checkpoint = Checkpoint(
        path=config.output_dir,
        num_steps=3,
        training_loss=2.5,
        checkpoint_path=config.output_dir,
        dataset_path=dataset.path,
    )
    checkpoint.save()
    return checkpoint


if __name__ == "__main__":
    run_step(main, Config)
"""


def test_main_in_the_shape_of_the_tutorial_joins_a_pipe_or_takes_a_folder(tmp_path: Path) -> None:
    (tmp_path / "curation.py").write_text("".join(line for line in CURATION.splitlines(True) if "sleep" not in line))
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/train.jsonl").write_text("b")
    lines = [
        "python curation.py --text a > dataset.json",
        "python training.py --output-dir out < dataset.json > checkpoint.json; cat checkpoint.json",
        "python training.py --output-dir other --dataset-path plain",  # no artifact stands behind it
    ]
    head = f"set -e; python() {{ '{sys.executable}' \"$@\"; }}\n"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(
        ["bash", "-c", head + "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        '{"data": "art://toy-pretrain-data:1", "model": "art://training-model:1"}',
        '{"model": "art://training-model:2"}',
    ], done.stderr
    registry = Registry(tmp_path / "output" / "artifacts")
    first, second = (registry.resolve(f"training-model:{version}") for version in (1, 2))
    assert (first.path / "weights").read_text() == "of a" and (second.path / "weights").read_text() == "of b"
    assert first.record["inputs"] == {"data": registry.resolve("toy-pretrain-data:1").pinned}
    assert second.record["inputs"] == {} and second.record["sources"][0]["name"] == str(tmp_path / "plain")


def test_a_step_that_another_script_calls_is_no_part_of_its_run(tmp_path: Path) -> None:
    for name in ("curation", "all"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiny.yaml").write_text("run: {output: toy-model}\n" if name == "all" else "{}\n")
    (tmp_path / "curation.py").write_text(CURATION.replace("config = {", 'config = {dir = "./curation", '))
    whole = CURATION.replace("toy/pretrain", "toy/all").replace("curation.py:", "all.py:")
    whole = whole.replace("config = {", 'config = {dir = "./all", ').replace("import Dataset\n", "import Checkpoint\n")
    head, _, _ = whole.partition("@dataclass")
    (tmp_path / "all.py").write_text(
        head.replace("from dataclasses", "import curation\nfrom dataclasses").replace(
            "dataclass\n", "dataclass, field\n"
        )
        + "@dataclass\nclass Config:\n    data: curation.Config = field(default_factory=curation.Config)\n\n\n"
        "@step\ndef main(config: Config) -> Checkpoint:\n"
        "    data = curation.main(config.data)\n"
        "    with output_folder(None) as folder:\n"
        "        (folder / 'weights').write_text('0')\n"
        "        return Checkpoint(path=folder, num_steps=1, dataset_path=data.path).save()\n\n\n"
        'if __name__ == "__main__":\n    run_step(main, Config)\n'
    )
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3] / 'src'}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-m", "nemo_runspec", "run", "all.py", "data.text=x"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    registry = Registry(tmp_path / "output" / "artifacts")
    data, model = registry.resolve("toy-pretrain-data:1"), registry.resolve("toy-model:1")
    assert (data.path / "train.jsonl").read_text() == "x" and data.record["producer"]["fingerprint"] is None
    assert model.record["producer"]["fingerprint"] is not None
    assert model.record["inputs"] == {"dataset": data.pinned}
    smoke = [*command, "run.output=toy-all-model-smoke"]  # must not be the newest version of what others go on from
    subprocess.run(smoke, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert registry.names() == ["toy-all-model-smoke", "toy-model", "toy-pretrain-data", "toy-pretrain-data-smoke"]


def test_a_launcher_makes_a_run_of_it_and_a_shell_one_line(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "tiny.yaml").write_text("run: {output: toy-corpus}\ntext: b\n")
    script = tmp_path / "curation.py"
    script.write_text(CURATION)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    by_hand = run("curation.py", "--config", "tiny", "--text", "c")
    assert by_hand.stdout == '{"data": "art://toy-pretrain-data:1"}\n', by_hand.stderr
    assert "what its server prints" in by_hand.stderr
    assert sorted(path.name for path in (tmp_path / "output").glob("[a-z]*")) == ["artifacts"]
    launched = run("-m", "nemo_runspec", "run", "curation.py", "text=d")
    assert launched.returncode == 0, launched.stderr
    version = Registry(tmp_path / "output" / "artifacts").resolve("toy-corpus")
    assert (version.path / "train.jsonl").read_text() == "d"
    (folder,) = (tmp_path / "output" / "toy" / "pretrain").iterdir()
    assert folder.name == f"tiny-{version.record['producer']['fingerprint']}"
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    refused = run("-m", "nemo_runspec", "run", "curation.py", "txt=d")
    assert (refused.returncode, refused.stderr) == (
        2, "error: command line: unknown key txt = 'd'\ndid you mean text?\n"
    )  # fmt: skip


def test_a_chosen_folder_stays_and_one_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with output_folder(None) as folder:
        (folder / "x").write_text("")
    assert not folder.exists()
    with output_folder(tmp_path / "mine") as mine:
        (mine / "x").write_text("")
    assert (tmp_path / "mine/x").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    with output_folder(Path("~/home")) as at_home:  # as `--output-dir=~/home` leaves the shell
        assert at_home == tmp_path / "home"
    with pytest.raises(UserError, match="is not empty"), output_folder(tmp_path / "mine"):
        pass


@dataclass
class Saving:
    output_dir: Path | None = None


@dataclass
class Steps:
    train: Saving = field(default_factory=Saving)


@pytest.mark.parametrize(("config", "flag"), [(Saving, "--output-dir"), (Steps, "--train.output-dir")])
def test_a_folder_in_use_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: type, flag: str
) -> None:
    (tmp_path / "model").touch()
    monkeypatch.setattr(sys, "argv", ["script.py", flag, str(tmp_path)])
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "a"))

    def main(config: Saving) -> NoReturn:
        pytest.fail("has begun to work")

    with pytest.raises(SystemExit) as left:
        dataclass_script.run_step(main, config)
    assert left.value.code == 2 and f"output_dir {tmp_path} exists and is not empty" in capsys.readouterr().err


@dataclass
class Whole:
    """A script that calls a step, and gives it its folder."""

    train: Saving = dataclass_script.step_config(Saving, "output_dir")


@dataclass
class Wider:
    """One that calls it, and has nothing to give."""

    stage: Whole = dataclass_script.step_config(Whole)


def test_a_flag_for_what_the_script_decides_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--stage.train.output-dir", "mine"])
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "a"))

    def main(config: Wider) -> NoReturn:
        pytest.fail("has begun to work")

    with pytest.raises(SystemExit) as left:
        dataclass_script.run_step(main, Wider)
    assert left.value.code == 2 and "stage.train.output_dir = mine: this script decides it" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "a" / "b"))

    def main(config: Config) -> NoReturn:
        pytest.fail("has begun to work")

    with pytest.raises(SystemExit) as left:
        dataclass_script.run_step(main, Config)
    assert left.value.code == 2 and list(tmp_path.iterdir()) == []
