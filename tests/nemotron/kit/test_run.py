"""A run's directory and inputs, and what happens when it is killed, finished, run twice at once or by several ranks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_payloads import write_model

from nemo_runspec import errors
from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_config, load_script_config
from nemo_runspec.errors import Preempted, UserError
from nemo_runspec.job import build_job_config, save_configs
from nemo_runspec.profile import Env
from nemo_runspec.runspec import parse
from nemotron.kit import Checkpoint, Dataset, Model, Results, current_run, open_run
from nemotron.kit.metrics import read_metrics
from nemotron.kit.run import read_state


@pytest.fixture
def raw(out):
    return Dataset(path=out, num_examples=2, train_path=out / "train.jsonl", sources=["python-stdlib 3.11.7"]).save(
        "raw"
    )


def opened(script, *overrides):
    return open_run(load_script_config(script, ["--config", "tiny", *overrides]), script=script)


def test_a_run_has_a_directory_records_and_verified_inputs(script, raw, tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "work_began", False)
    run = opened(script)
    assert errors.work_began
    assert run.dir.parent == tmp_path / "output" / "toy" / "train"
    assert run.dir.name == f"tiny-{run.fingerprint}" and len(run.fingerprint) == 10
    assert run.inputs["data"].ref == "raw:1" and not run.resumed and current_run() is run
    assert run.output_dir.is_dir() and not any(run.output_dir.iterdir())
    assert "data: raw:1" in (run.dir / "config.yaml").read_text()
    environment = json.loads((run.dir / "environment.json").read_text())
    assert (
        environment["python"] == ".".join(map(str, sys.version_info[:3])) and environment["cpu_count"] == os.cpu_count()
    )
    samples = run.open_log("samples")
    samples.log(1, text="a")
    run.close()
    assert samples._stream is None
    assert current_run() is None and read_state(run.dir)["state"] == "finished"


def test_saving_takes_name_inputs_and_producer_from_the_run(script, raw):
    with opened(script, "lr=0.2") as run:
        write_model(run.output_dir)
        model = Model(path=run.output_dir, num_steps=3, dataset_path=run.inputs["data"].path).save()
        results = Results(metrics={"bpb": 2.5}).save()
    assert (model.ref, results.ref) == ("toy-train-model-tiny:1", "toy-train-results-tiny:1")
    assert model.inputs == {"data": f"raw:1@{raw.digest}"}
    producer = model.producer
    assert (producer.name, producer.fingerprint) == ("toy/train", run.fingerprint)
    assert producer.script.endswith("train.py") and producer.argv[0] == Path(sys.argv[0]).name
    assert run.registry.find_published("toy-train-model-tiny", run.fingerprint).ref == model.ref
    assert json.loads((results.path / "results.json").read_text()) == {"bpb": 2.5}


def test_a_run_that_goes_on_publishes_nothing_twice(script, raw, tmp_path, monkeypatch):
    def publish(run, value=1.0, **more):
        return Model(path=write_model(run.output_dir, value), num_steps=3, dataset_path=raw.path).save(**more)

    run = opened(script)
    publish(run)
    run.close(finished=False)  # stopped in its evaluation
    tracked = (run.registry.root / "lineage.jsonl").read_text()
    resumed = opened(script)
    assert resumed.resumed and publish(resumed, move=True).ref == "toy-train-model-tiny:1"
    assert not resumed.output_dir.exists()  # moved all the same
    assert (run.registry.root / "lineage.jsonl").read_text() == tracked
    assert len(read_metrics(run.dir / "published.jsonl")) == 1
    assert publish(resumed, 2.0).ref == "toy-train-model-tiny:2"  # another payload is another version
    resumed.close()
    afresh = opened(script)  # the last one had finished: this one publishes anew
    assert publish(afresh).ref == "toy-train-model-tiny:3"
    afresh.close(finished=False)
    (afresh.registry.root / "toy-train-model-tiny" / "3" / "payload" / "config.json").write_text("damaged")
    again = opened(script)
    assert again.resumed and publish(again).ref == "toy-train-model-tiny:4"  # nobody can use what is damaged


def test_a_run_that_goes_on_publishes_although_another_run_made_the_same(script, raw, tmp_path, monkeypatch):
    """Else `latest` would stay what was published in between."""

    def publish(run):
        with run:
            return Model(path=write_model(run.output_dir), num_steps=3, dataset_path=raw.path).save().ref

    assert publish(opened(script)) == "toy-train-model-tiny:1"
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(Registry.default().root))
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "elsewhere"))
    opened(script).close(finished=False)
    resumed = opened(script)
    assert resumed.resumed and publish(resumed) == "toy-train-model-tiny:2"


def test_killed_between_publishing_and_taking_note_of_it(script, raw):
    body = (
        "import os, sys; from nemo_runspec.config import load_script_config\n"
        "from nemotron.kit import Dataset, open_run\n"
        "from nemotron.kit.run import Run\n"
        "run = open_run(load_script_config(sys.argv[1], ['--config', 'tiny']), sys.argv[1])\n"
        "(run.output_dir / 'x').write_text('x')\n"
        "if not run.resumed: Run.has_noted = lambda *_: os.kill(os.getpid(), 9)\n"
        "print(Dataset(path=run.output_dir, num_examples=1).save(move=True).ref)\n"
        "run.close()\n"
    )
    command = [sys.executable, "-c", body, str(script)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == -9 and Registry.default().versions("toy-train-model-tiny") == [1]
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert second.stdout == "toy-train-model-tiny:1\n"
    journal = (Registry.default().root / "lineage.jsonl").read_text().splitlines()
    assert [json.loads(line)["saved"].partition("@")[0] for line in journal] == ["raw:1", "toy-train-model-tiny:1"]


def test_the_launcher_and_the_script_mean_the_same_directory(script, raw):
    spec = parse(script)
    job = build_job_config(load_config(spec.config_dir, "tiny", ["lr=0.2"]), spec, Env(), dry_run=False)
    folder = save_configs(job, spec)
    with open_run(load_script_config(script, ["--config", str(folder / "train.yaml")]), script=script) as run:
        assert run.dir == folder and run.fingerprint == job.run.fingerprint
    with opened(script, "lr=0.2") as again:
        assert again.dir == folder


def test_what_is_loaded_while_a_run_is_open_becomes_its_input(script, raw, tmp_path):
    teacher = Checkpoint(path=write_model(tmp_path / "w"), num_steps=1).save("teacher")
    with opened(script) as run:
        Dataset.load(path=run.inputs["data"].path)
        Checkpoint.load("teacher")
        model = Model(path=write_model(run.output_dir), num_steps=1).save()
    assert model.inputs == {"data": f"raw:1@{raw.digest}", "teacher": f"teacher:1@{teacher.digest}"}


def test_a_stopped_run_resumes_and_a_finished_one_starts_afresh(script, raw):
    with pytest.raises(Preempted), opened(script) as run:
        (run.output_dir / "half").write_text("")
        (run.dir / "checkpoints").mkdir()
        run.metrics.log(1, loss=2.0)
        raise Preempted("step 1")
    with opened(script) as again:
        assert again.dir == run.dir and again.resumed
        assert (again.output_dir / "half").exists() and (again.dir / "checkpoints").exists()
        assert again.metrics.num_records == 1
    assert read_state(again.dir)["attempts"] == 2
    (again.dir / "train.yaml").write_text("kept: true\n")
    with opened(script) as third:
        assert third.dir == run.dir and not third.resumed
        assert {entry.name for entry in third.dir.iterdir()} == {
            "code.json", "config.yaml", "environment.json", "out-payload", "run.json", "run.lock", "train.yaml",
        }  # fmt: skip
        assert not any(third.output_dir.iterdir())


@pytest.mark.parametrize("finished", [True, False])
def test_a_start_afresh_that_is_killed_leaves_nothing_to_go_on_with(script, raw, finished, monkeypatch):
    run = opened(script)
    for name in ("checkpoints", "adapters"):
        (run.dir / name).mkdir()
        (run.dir / name / "step-9").write_text("of the run before")
    run.close(finished=finished)
    entries = [run.dir / name for name in ("run.json", "checkpoints", "adapters")]

    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setenv("RUNSPEC_FRESH", "1")
        patch.setattr("nemotron.kit.run.shutil.rmtree", killed)
        patch.setattr(Path, "iterdir", lambda folder: iter(entries))  # which comes first is the file system's choice
        opened(script)
    with opened(script) as again:
        assert not again.resumed and not list(again.dir.glob("*/step-9"))


def test_an_unfinished_run_of_other_code_is_mentioned(script, raw, capsys):
    stopped = opened(script)
    stopped.close(finished=False)
    opened(script, "lr=0.3").close(finished=False)  # another config: nothing to mention
    assert "starting afresh" not in capsys.readouterr().err
    (script.parent / "schema.py").write_text((script.parent / "schema.py").read_text() + "\n# edited\n")
    edited = opened(script)
    edited.close()
    assert edited.dir != stopped.dir and not edited.resumed
    expected = f"starting afresh: {stopped.dir} has an unfinished run of this config, of other code (schema.py)"
    assert expected in capsys.readouterr().err


def test_another_config_or_another_input_is_another_run(script, raw, out):
    names = set()
    for overrides in ([], ["lr=0.3"]):
        with opened(script, *overrides) as run:
            names.add(run.dir.name)
    Dataset(path=out, num_examples=2).save("raw")  # the same content again: another version, the same run
    with opened(script) as run:
        names.add(run.dir.name)
        assert run.inputs["data"].ref == "raw:2"
    assert len(names) == 2
    (out / "train.jsonl").write_text("other")
    Dataset(path=out, num_examples=2).save("raw")
    with opened(script) as run:
        assert run.dir.name not in names


def test_killed_with_9_it_resumes_in_the_same_place(script, raw, tmp_path):
    body = (
        "import os, sys; from nemo_runspec.config import load_script_config; from nemotron.kit import open_run\n"
        "run = open_run(load_script_config(sys.argv[1], ['--config', 'tiny']), sys.argv[1])\n"
        "print(run.dir, run.resumed, flush=True)\n"
        "with run.phase('train'):\n"
        "    run.metrics.log(1, loss=1.0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", body, str(script)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == second.returncode == -9, first.stderr
    directory, resumed = first.stdout.split()
    assert resumed == "False" and second.stdout.split() == [directory, "True"]
    run = opened(script)
    assert str(run.dir) == directory and run.resumed and {phase for phase, _ in phases(run)} == {"train"}


def test_two_processes_do_not_run_the_same_thing(script, raw, tmp_path):
    body = (
        "import sys, time; from nemo_runspec.config import load_script_config; from nemotron.kit import open_run\n"
        "run = open_run(load_script_config(sys.argv[1], ['--config', 'tiny']), sys.argv[1])\n"
        "print(run.dir, flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", body, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline()
    with pytest.raises(UserError, match=f"process {process.pid} is running the same thing"):
        opened(script)
    assert current_run() is None
    process.kill()
    process.wait()
    assert opened(script).resumed


def test_a_flipped_byte_in_an_input_is_refused_before_anything_is_made(script, raw, tmp_path):
    raw.train_path.write_text('{"text": "A"}\n')
    with pytest.raises(UserError, match=r"artifact raw:1 is corrupt: .*train\.jsonl"):
        opened(script)
    assert not (tmp_path / "output" / "toy").exists() and current_run() is None


def test_resume_names_a_directory_and_another_config_is_refused_with_the_difference(script, raw, tmp_path):
    with opened(script) as run:
        (run.dir / "checkpoint").write_text("")
    moved = run.dir.rename(tmp_path / "moved")
    with opened(script, f"resume={moved}", "save_interval=20") as again:
        assert again.dir == moved and again.resumed and (moved / "checkpoint").exists()
    with pytest.raises(UserError) as refused:
        opened(script, f"resume={moved}", "save_interval=5", "lr=0.7")
    assert refused.value.hint == "different here: lr: 0.1 -> 0.7"
    script.write_text(script.read_text() + "# changed\n")
    with pytest.raises(UserError) as refused:
        opened(script, f"resume={moved}")
    assert "the script, or the content of an input" in refused.value.hint
    (script.parent / "schema.py").write_text((script.parent / "schema.py").read_text() + "\n# edited\n")
    with pytest.raises(UserError) as refused:
        opened(script, f"resume={moved}")
    assert refused.value.hint == "different here: schema.py"
    with pytest.raises(UserError, match="no run there"):
        opened(script, f"resume={tmp_path}/none")


def phases(run):
    return [(line["phase"], line["seconds"]) for line in read_metrics(run.dir / "phases.jsonl")]


def test_phases_add_up_over_attempts_and_count_when_they_fail(script, raw):
    run = opened(script)
    for seconds in (0.02, 0.03):
        with run.phase("train"):
            time.sleep(seconds)
    with pytest.raises(KeyError), run.phase("eval"):
        raise KeyError
    run.close(finished=False)
    with (run.dir / "phases.jsonl").open("a") as stream:
        stream.write('{"phase": "tra')  # killed while writing
    run = opened(script)
    with run.phase("train"):
        time.sleep(0.01)
    assert [phase for phase, _ in phases(run)] == ["train", "train", "eval", "train"]
    assert sum(seconds for phase, seconds in phases(run) if phase == "train") >= 0.06


def test_other_ranks_wait_for_rank_0_share_its_directory_and_write_nothing_of_its(script, raw, monkeypatch):
    body = (
        "import sys; from nemo_runspec.config import load_script_config; from nemotron.kit import open_run, Results\n"
        "run = open_run(load_script_config(sys.argv[1], ['--config', 'tiny']), sys.argv[1])\n"
        "run.metrics.log(1, loss=1.0)\n"
        "print(run.dir, run.resumed, run.inputs['data'].ref)\n"
        "try: Results(path=run.output_dir, metrics={}).save()\n"
        "except RuntimeError as error: print(error)\n"
    )
    opened(script).close()  # an older launch was here: its run.json must not be taken for this one's
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    # Both ranks are children of one launcher, as under torchrun.
    launcher = (
        "import os, subprocess, sys, time\n"
        "ranks = []\n"
        "for rank in ('1', '0'):\n"
        "    env = {**os.environ, 'RANK': rank}\n"
        "    command = [sys.executable, *sys.argv[1:]]\n"
        "    ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))\n"
        "    time.sleep(0.5)\n"
        "for rank in ranks: print(rank.communicate()[0], end='')\n"
    )
    command = [sys.executable, "-c", launcher, "-c", body, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    one, refused, zero = done.stdout.splitlines()
    assert one == zero and one.endswith(" False raw:1") and "rank 1 saves an artifact" in refused
    directory = Path(one.split()[0])
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 1
    assert (directory / "metrics.rank1.jsonl").exists()


def test_opening_two_runs_in_one_process_is_a_bug(script, raw):
    opened(script)
    with pytest.raises(RuntimeError, match="open already"):
        opened(script)
