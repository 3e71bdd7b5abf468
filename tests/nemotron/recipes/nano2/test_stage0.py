"""Stage 0 of Nano 2: its steps called from Python, and joined by a shell as its docstrings say."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.kit import Dataset, dataclass_script, pipes
from nemotron.kit.dataclass_script import read_config
from nemotron.recipes.nano2.stage0_pretrain import data_curation, evaluation, training, training_long
from nemotron.recipes.nano2.stage2_rl import training_ifeval
from nemotron.stack.environments import FAMILIES, plain_text
from nemotron.stack.evaluation.model import load_tokenizer

STAGE = Path(data_curation.__file__).parent
SMALL = "--tasks-per-family 2000 --vocab-size 300 --held-out 12"
SHORT = "--num-sequences 4000 --seq-length 32 --warmup-steps 1"


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small corpus in the place of the standard library, whose syntax trees take seconds."""
    texts = [f"def f{i}(x):\n    return x + {i} * {i * i} - len(str(x))\n" for i in range(60)]
    rows = [{"text": text, "split": "valid" if i % 4 == 0 else "train"} for i, text in enumerate(texts)]
    prose = [{**row, "text": f"The function number {i} returns its own argument plus the number {i} times {i * i}."}
             for i, row in enumerate(rows)]  # fmt: skip
    monkeypatch.setattr(data_curation.stdlib, "module_files", list)
    monkeypatch.setattr(data_curation.stdlib, "code_documents", lambda *_: iter([*rows, *rows]))
    monkeypatch.setattr(data_curation.stdlib, "prose_documents", lambda *_: iter(prose))


def curate(**changes: Any) -> Dataset:
    small = data_curation.Config(scale="full", tasks_per_family=100, vocab_size=300, held_out=12)
    return data_curation.main(replace(small, **changes))


def test_curation_keeps_one_of_each_and_mixes_three_phases(documents: None, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": f"my own line {i}"}) + "\n" for i in range(40)))
    dataset = curate(sources=(tmp_path / "mine.jsonl",), output_dir=tmp_path / "out")
    blend = json.loads((dataset.path / "blend.json").read_text())
    assert blend["sources"]["code"]["documents"] == 45  # 60, each twice, less those held out
    assert blend["sources"]["docs"]["valid_documents"] == 12
    assert [phase["until"] for phase in blend["phases"]] == [0.6, 0.9, 1.0]  # arXiv 2508.14444, section 2.3
    for phase in blend["phases"]:
        assert math.isclose(sum(phase["weights"].values()), 1) and math.isclose(phase["weights"]["own"], 0.3)
    tokenizer = load_tokenizer(dataset.path / "tokenizer")  # turns begin with the ids of the released one
    assert [tokenizer.token_to_id(f"<SPECIAL_{i}>") for i in (10, 11, 12)] == [10, 11, 12]
    assert (tmp_path / "out" / "blend.json").is_file() and dataset.ref == "nano2-pretrain-data:1"
    assert curate(sources=(tmp_path / "mine.jsonl",)).digest == dataset.digest
    few = json.loads((curate(sources=(tmp_path / "mine.jsonl",), held_out=1).path / "blend.json").read_text())
    assert blend["sources"]["own"]["valid_documents"] > 1
    assert [few["sources"]["own"][name] for name in ("documents", "valid_documents")] == [39, 1]  # none is lost
    share = json.loads((curate(scale="medium").path / "blend.json").read_text())
    assert share["sources"]["docs"]["documents"] == 45 * 30 // 100
    assert share["sources"]["docs"]["valid_documents"] == 12  # what is held out does not shrink


@pytest.mark.slow
def test_a_task_in_other_words_is_held_out_with_it(documents: None) -> None:
    config = data_curation.Config(scale="full", tasks_per_family=2_000)
    tasks = {}
    for task in data_curation.tasks_of(FAMILIES, 2_000, config):
        tasks[" ".join(plain_text(task).split())] = task.canonical
    by_split = data_curation.curate("tasks", data_curation.read_sources(config)["tasks"], config)
    held_out, trained = ({tasks[" ".join(text.split())] for text in by_split[split]} for split in ("valid", "train"))
    assert held_out and not held_out & trained


@pytest.mark.slow
def test_training_goes_by_the_seed_and_evaluation_by_the_checkpoint(documents: None, tmp_path: Path) -> None:
    data = curate()
    config = training.Config(dataset_path=data.path, num_sequences=96, seq_length=32, warmup_steps=1, lr=5e-3)
    checkpoint = training.main(config)
    assert (checkpoint.num_steps, checkpoint.tokens) == (12, 96 * 32)
    assert checkpoint.inputs == {"data": data.version.pinned}
    assert checkpoint.training_loss is not None and checkpoint.training_loss < math.log(300) - 0.3
    results = evaluation.main(evaluation.Config(checkpoint_path=checkpoint.path))
    assert results.inputs == {"model": checkpoint.version.pinned, "data": data.version.pinned}
    text = results.metrics["text"]
    assert set(text) == {"code", "docs", "tasks"}
    ratios = [scores["bits_per_byte"] / scores["trigram_bits_per_byte"] for scores in text.values()]
    assert all(0.7 < ratio < 1.5 for ratio in ratios)  # of the same bytes; twelve steps learn what a trigram counts
    two = evaluation.Config(checkpoint_path=checkpoint.path, num_documents=2, trigram=False)  # one of them is scored
    few = [evaluation.main(replace(two, num_documents=n)).metrics["text"]["code"]["tokens"] for n in (2, 3)]
    assert 0 < few[0] < few[1] < text["code"]["tokens"]
    # The same data in a plain folder, which nobody published.
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(data.path), str(copy)], check=True)
    twin = training.main(replace(config, dataset_path=copy, scale="full"))
    assert twin.digest == checkpoint.digest
    assert [source["name"] for source in twin.version.record["sources"]] == [str(copy)]


def test_a_config_names_artifacts_which_a_pipe_and_a_flag_go_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.jsonl").write_text("{}\n")

    def path_of(*words: str) -> Path | None:
        return read_config(training.Config, ["--config", *words]).dataset_path

    with pytest.raises(UserError, match="no artifact 'nano2-pretrain-data'"):
        path_of("tiny")
    assert path_of("tiny", "--dataset-path", "rows") == Path("rows")  # no such artifact is needed then
    with pytest.raises(SystemExit) as left:
        path_of("tiny", "--help")
    assert left.value.code == 0
    latest, mine = (
        Dataset(path=tmp_path / "rows", num_examples=1).save(name) for name in ("nano2-pretrain-data", "mine")
    )
    assert path_of("tiny") == latest.path
    own = tmp_path / "own.yaml"
    own.write_text("run: {data: mine}\ndataset_path: ${art:data,path}\noutput_dir: out/${run.data}\n")
    assert path_of(str(own)) == mine.path
    assert read_config(training.Config, ["--config", str(own)]).output_dir == Path("out/mine:1")
    pipes._read = {"data": mine.uri, "results": "art://of-no-interest:1"}
    assert path_of("tiny") == mine.path
    assert path_of("tiny", "--dataset-path=rows") == Path("rows")
    # A flag for one of two artifacts leaves the other to the pipe.
    of_two = read_config(training_ifeval.Config, ["--config", "tiny", "--base-path", str(latest.path)])
    assert (of_two.dataset_path, of_two.base_path) == (mine.path, latest.path)
    # What the file names may be of another day: a step before this one that failed is no reason to take it.
    pipes._read = {}
    monkeypatch.setattr(dataclass_script, "piped", lambda: True)
    with pytest.raises(UserError, match="nothing came through the pipe"):
        path_of("tiny")


@pytest.mark.slow
def test_the_long_phase_goes_on_from_the_model_and_the_trigram_counts_both(
    documents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{a}{b}{c}{d}" for a in "bdfg" for b in "aeiou" for c in "klmnp" for d in "aeiou"]
    functions = [f'def {word}(x):\n    """Return {word} times {word}."""\n    return x\n' for word in words]
    rows = [{"text": "\n\n".join(functions[i : i + 100]), "split": "valid" if i else "train"} for i in (0, 300)]
    monkeypatch.setattr(data_curation.stdlib, "code_documents", lambda *_: iter(rows))
    data = curate(held_out=2)
    base = training.main(training.Config(dataset_path=data.path, num_sequences=96, seq_length=32, warmup_steps=1))
    config = training_long.Config(base_path=base.path, num_sequences=1, lr=1e-3, weight_decay=0)
    longer = training_long.main(config)
    assert longer.inputs == {"model": base.version.pinned, "data": data.version.pinned}
    assert (longer.ref, longer.tokens) == ("nano2-long-model:1", 1024)
    # The learning rate is the same from the first step on: Adam's first moves the weights by it, whatever the gradient.
    before, after = (load_file(model.path / "model.safetensors") for model in (base, longer))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) == pytest.approx(1e-3, rel=1e-3)
    phases = [(evaluation.trained_tokens(phase, data), phase.tokens) for phase in (base, longer)]
    assert [len(tokens) for tokens, _ in phases] == [count for _, count in phases] == [96 * 32, 1024]
    metrics = evaluation.main(evaluation.Config(checkpoint_path=longer.path)).metrics
    assert set(metrics["text"]) == {"code", "docs", "tasks"}  # as without the phase
    long = metrics["long"]
    assert set(long["before"]["text"]) == {"0-128", "128-512", "512-1024", "512-1024 in windows of 128"}
    assert long["before"]["answers"]["loss"] != long["after"]["answers"]["loss"]
    with pytest.raises(UserError, match="is no model that training"):
        training_long.main(replace(config, base_path=longer.path))


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; cd '{folder}'; python() {{ '{sys.executable}' \"$@\"; }}; {line}"
    environment = {**os.environ, "PYTHONPATH": str(STAGE.parents[3])}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_shell_joins_the_steps(tmp_path: Path) -> None:
    curation = f"python {STAGE}/data_curation.py --scale tiny {SMALL}"
    train, evaluate = f"python {STAGE}/training.py {SHORT}", f"python {STAGE}/evaluation.py"
    # One pipe, from another directory.
    whole = run(f"{curation} | {train} | {evaluate}", tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout) == {
        "results": "art://nano2-pretrain-results:1",
        "model": "art://nano2-pretrain-model:1",
        "data": "art://nano2-pretrain-data:1",
    }
    # Through files, to the same weights; a checkpoint's file names its data.
    files = run(
        f"{curation} > dataset.json && {train} < dataset.json > checkpoint.json && {evaluate} < checkpoint.json"
        " > results.json && cat checkpoint.json",
        tmp_path,
    )
    assert files.returncode == 0, files.stderr
    assert json.loads(files.stdout)["data"] == "art://nano2-pretrain-data:2"
    registry = Registry(tmp_path / "output" / "artifacts")
    for name in ("data", "model", "results"):
        assert (
            registry.resolve(f"nano2-pretrain-{name}:1").digest == registry.resolve(f"nano2-pretrain-{name}:2").digest
        )
    assert sorted(path.name for path in (tmp_path / "output").glob("[!.]*")) == ["artifacts"]
    assert list((tmp_path / "output" / ".aside").iterdir()) == []
    # By path of the data, also of a folder that no artifact stands behind, which evaluation finds again.
    by_path = run(f"{train} --dataset-path output/artifacts/nano2-pretrain-data/1/payload", tmp_path)
    assert by_path.returncode == 0 and json.loads(by_path.stdout)["model"] == "art://nano2-pretrain-model:3"
    plain = f"cp -r output/artifacts/nano2-pretrain-data/1/payload plain && {train} --dataset-path plain | {evaluate}"
    assert json.loads(run(plain, tmp_path).stdout)["model"] == "art://nano2-pretrain-model:4"
    assert registry.resolve("nano2-pretrain-results:3").digest == registry.resolve("nano2-pretrain-results:1").digest
    # With the long-context phase between training and evaluation.
    longer = f"python {STAGE}/training_long.py --num-sequences 200"  # of which tiny is 2
    with_it = json.loads(run(f"cat checkpoint.json | {longer} | {evaluate}", tmp_path).stdout)
    assert (with_it["model"], with_it["results"]) == ("art://nano2-long-model:1", "art://nano2-pretrain-results:4")


@pytest.mark.e2e
@pytest.mark.slow
def test_the_stage_runs_as_a_module(tmp_path: Path) -> None:
    sizes = "--data.tasks-per-family 2000 --data.vocab-size 300 --data.held-out 12 --train.seq-length 32 "
    sizes += "--train.num-sequences 4000 --train.warmup-steps 1 --long.num-sequences 200"
    done = run(f"python -m nemotron.recipes.nano2.stage0_pretrain --scale tiny {sizes}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] == "art://nano2-pretrain-results:1"
    registry = Registry(tmp_path / "output" / "artifacts")
    data, model = registry.resolve("nano2-pretrain-data:1"), registry.resolve("nano2-pretrain-model:1")
    assert model.record["inputs"] == {"data": data.pinned}  # as through a pipe


@pytest.mark.e2e
@pytest.mark.slow
def test_what_fails_upstream_fails_the_pipe_in_one_line_each(tmp_path: Path) -> None:
    train, evaluate = f"python {STAGE}/training.py", f"python {STAGE}/evaluation.py"
    failed = run(f"python {STAGE}/data_curation.py --sources nowhere | {train} | {evaluate}", tmp_path)
    assert failed.returncode == 2 and failed.stdout == ""
    assert "nowhere" in failed.stderr
    assert "no Dataset came through the pipe" in failed.stderr
    assert "no Checkpoint came through the pipe" in failed.stderr
    assert "Traceback" not in failed.stderr
    broken = run(f"echo not json | {train}", tmp_path)
    assert broken.returncode == 2 and "not a JSON map of artifact references: not json" in broken.stderr
    empty = run(f"echo | {train}", tmp_path)
    assert empty.returncode == 2 and "no Dataset came through the pipe" in empty.stderr
    gone = run('echo \'{"data": "art://gone:3"}\' | ' + train, tmp_path)
    assert gone.returncode == 2 and "gone" in gone.stderr and "Traceback" not in gone.stderr
    assert not (tmp_path / "output" / "artifacts" / "nano2-pretrain-model").exists()


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of stage 0 in it, and dataset.json."""
    folder = tmp_path_factory.mktemp("curated")
    done = run(f"python {STAGE}/data_curation.py --scale tiny {SMALL} > dataset.json", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_pipes_at_once_a_reader_that_left_and_artifacts_that_moved(curated: Path, tmp_path: Path) -> None:
    shutil.copytree(curated, tmp_path, dirs_exist_ok=True)
    train, evaluate = f"python {STAGE}/training.py {SHORT}", f"python {STAGE}/evaluation.py --trigram False"
    curation = f"python {STAGE}/data_curation.py --scale tiny {SMALL}"
    pipes = [f"({curation} --seed {i} | {train} --seed {i} | {evaluate} > {i}.json)" for i in (1, 2)]
    both = run(f"{pipes[0]} & {pipes[1]} & wait", tmp_path)
    registry = Registry(tmp_path / "output" / "artifacts")
    lines = [json.loads((tmp_path / f"{seed}.json").read_text()) for seed in (1, 2)]
    for seed, line in zip((1, 2), lines, strict=True):  # each went on with its own
        assert registry.resolve(line["model"]).record["metrics"]["seed"] == seed, both.stderr
        data, model, results = (registry.resolve(line[role]) for role in ("data", "model", "results"))
        assert data.record["sources"][1]["detail"].endswith(f"seed {seed}")
        assert results.record["inputs"] == {"model": model.pinned, "data": data.pinned}
    left = run(f"{train} --config tiny < dataset.json | true", tmp_path)
    assert left.returncode == 0 and "Broken pipe" not in left.stderr
    last = registry.resolve("nano2-pretrain-model")
    assert last.version == 3 and last.record["inputs"]["data"].startswith("nano2-pretrain-data:1@")  # not the latest
    (tmp_path / "checkpoint.json").write_text('{"model": "art://nano2-pretrain-model:3"}')
    (tmp_path / "output").rename(tmp_path / "moved")
    lost = run(f"{evaluate} < checkpoint.json", tmp_path)
    assert lost.returncode == 2 and "no artifact 'nano2-pretrain-model'" in lost.stderr
    assert "Traceback" not in lost.stderr
    found = run(f"export RUNSPEC_ARTIFACTS_ROOT={tmp_path}/moved/artifacts; {evaluate} < checkpoint.json", tmp_path)
    assert found.returncode == 0, found.stderr  # the data, too, which the checkpoint names


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_ends_the_whole_pipe_and_publishes_nothing(curated: Path, tmp_path: Path) -> None:
    shutil.copytree(curated, tmp_path, dirs_exist_ok=True)
    training = f"{sys.executable} {STAGE}/training.py {SHORT} --num-sequences 100000000"
    pipe = f"cat dataset.json | {training} 2> log | {sys.executable} {STAGE}/evaluation.py"
    environment = {**os.environ, "PYTHONPATH": str(STAGE.parents[3])}
    process = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {pipe}"], cwd=tmp_path, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = tmp_path / "log"
    while not log.exists() or "loss" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and out == ""
    for said in (errors, log.read_text()):
        assert "error: interrupted" in said and "Traceback" not in said
    published = {path.name for path in (tmp_path / "output" / "artifacts").glob("[!.]*")}
    assert published == {"lineage.jsonl", "nano2-pretrain-data"}
