"""Trackers, good and bad, and the walk from a model back to its raw sources."""

import json
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset, Results, lineage, open_run
from nemotron.kit.lineage import (
    FileTracker,
    MlflowTracker,
    RawSource,
    WandbTracker,
    format_lineage,
    iterate,
    problems,
    raw_sources,
    set_lineage_tracker,
    walk,
)

STDLIB = RawSource("python-stdlib 3.11.7", "ab" * 32)
OWN = RawSource("/data/mine.jsonl", "cd" * 32, "12 documents")


@pytest.fixture
def chain(registry, out):
    """data (two sources) -> base model -> SFT model, which also reads sft-data (made from data and a generator)."""

    def publish(name, kind, inputs=None, sources=(), script="recipes/train.py"):
        entries = [{"name": s.name, "sha256": s.sha256, "detail": s.detail} for s in sources]
        record = {
            "type": kind,
            "types": [kind],
            "fields": {},
            "metrics": {},
            "created_at": "2026-01-02T03:04:05+00:00",
            "producer": {"script": script, "name": None},
            "inputs": {role: version.pinned for role, version in (inputs or {}).items()},
            "sources": entries,
        }
        (out / "who").write_text(name)
        return registry.publish(name, out, record)

    data = publish("pretrain-data", "PretrainBlend", sources=[STDLIB, OWN])
    base = publish("base-model", "Model", {"data": data})
    sft_data = publish("sft-data", "SFTPack", {"tokenizer": data}, [RawSource("generator math")])
    return publish("sft-model", "Model", {"data": sft_data, "model": base}), data


def test_from_a_model_to_the_raw_sources_with_digests(chain, registry):
    model, data = chain
    node = walk("sft-model", registry)
    assert node.digest == model.digest and [(n.role, n.ref) for n in node.inputs] == [
        ("data", "sft-data:1"),
        ("model", "base-model:1"),
    ]
    assert node.inputs[1].inputs[0].digest == data.digest
    assert raw_sources(node) == [RawSource("generator math"), STDLIB, OWN]
    assert problems(node) == []


def test_the_tree_as_text(chain, registry):
    digest = {name: registry.resolve(name).digest[:8] for name in registry.names()}
    by = "by recipes/train.py"
    assert format_lineage(walk("sft-model", registry), digits=8) == [
        f"sft-model:1  {digest['sft-model']}  Model  {by}",
        f"├─ data: sft-data:1  {digest['sft-data']}  SFTPack  {by}",
        f"│  ├─ tokenizer: pretrain-data:1  {digest['pretrain-data']}  PretrainBlend  {by}",
        "│  │  ├─ source: python-stdlib 3.11.7  abababab",
        "│  │  └─ source: /data/mine.jsonl  cdcdcdcd  12 documents",
        "│  └─ source: generator math",
        f"└─ model: base-model:1  {digest['base-model']}  Model  {by}",
        f"   └─ data: pretrain-data:1  {digest['pretrain-data']}  (see above)",
    ]


def test_what_is_missing_or_replaced_is_shown_and_does_not_stop_the_walk(chain, registry, out):
    import shutil

    shutil.rmtree(registry.root / "base-model" / "1")
    shutil.rmtree(registry.root / "sft-data" / "1")
    (out / "who").write_text("someone else")
    registry.publish("sft-data", out, {"type": "SFTPack"})
    found = problems(walk("sft-model", registry))
    assert len(found) == 2 and "sft-data:1 has digest" in found[0] and "no artifact 'base-model'" in found[1]
    text = "\n".join(format_lineage(walk("sft-model", registry)))
    assert text.count("!! ") == 2
    with pytest.raises(UserError):
        walk("nothing", registry)


def test_rounds_of_data_made_by_the_model_before_are_walked_once_each(registry, out, monkeypatch):
    def publish(name, **inputs):
        record = {"type": "Model", "inputs": {role: version.pinned for role, version in inputs.items()}}
        (out / "who").write_text(name)
        return registry.publish(name, out, record)

    model = publish("model-0")
    for number in range(1, 11):
        data = publish(f"data-{number}", judge=model)
        model = publish(f"model-{number}", data=data, model=model)
    read, resolve = [], registry.resolve
    monkeypatch.setattr(registry, "resolve", lambda ref: read.append(ref) or resolve(ref))
    node = walk("model-10", registry)
    assert len(read) == 1 + 3 * 10  # the model, and three inputs a round
    assert [each.role for each in node.inputs] == ["data", "model"] and node.inputs[0].inputs[0].role == "judge"
    assert len(list(iterate(node))) == 1 + 2 * 10
    assert len(format_lineage(node)) == 1 + 3 * 10


def test_an_origin_that_nobody_stated_is_a_note_and_no_fault(registry, out):
    Dataset(path=out, num_examples=1).save("mine")
    node = walk("mine", registry)
    assert problems(node) == [] and node.note == "origin not stated"
    assert format_lineage(node)[0].endswith("(origin not stated)")


def test_every_save_is_in_the_journal(out, registry):
    data = Dataset(path=out, num_examples=1).save("data")
    model = Checkpoint(path=out, num_steps=1).save("model")
    lines = [json.loads(line) for line in (registry.root / "lineage.jsonl").read_text().splitlines()]
    assert [line["saved"] for line in lines] == [data.version.pinned, model.version.pinned]
    assert lines[1]["type"] == "Checkpoint" and lines[1]["created_at"] == model.created_at.isoformat()
    assert registry.names() == ["data", "model"]


def test_journal_lines_of_many_writers_do_not_tear(chain, registry):
    tracker, version = FileTracker(registry.root / "j.jsonl"), chain[0]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: tracker.saved(version), range(200)))
    lines = (registry.root / "j.jsonl").read_text().splitlines()
    assert len(lines) == 200 and all(json.loads(line)["saved"] == version.pinned for line in lines)


class Failing:
    def __init__(self, error):
        self.error = error

    def saved(self, version):
        raise self.error


class Hanging:
    def saved(self, version):
        time.sleep(30)


class Noting:
    def __init__(self):
        self.refs = []

    def saved(self, version):
        self.refs.append(version.ref)


@pytest.mark.parametrize("error", [RuntimeError("server is\ndown"), SystemExit(3), KeyboardInterrupt()])
def test_a_failing_tracker_costs_a_warning_and_nothing_else(out, registry, capsys, error):
    noting = Noting()
    set_lineage_tracker(Failing(error), noting)
    assert Dataset(path=out, num_examples=1).save("data").ref == "data:1"
    assert noting.refs == ["data:1"] and registry.verify("data") == []
    warning = capsys.readouterr().err
    assert warning.startswith("warning: Failing failed: ") and warning.count("\n") == 1
    assert (registry.root / "lineage.jsonl").exists()


def test_a_tracker_that_hangs_is_left_behind(out, monkeypatch, capsys):
    monkeypatch.setattr(lineage, "_TRACKER_SECONDS", 0.05)
    set_lineage_tracker(Hanging())
    assert Dataset(path=out, num_examples=1).save("data").ref == "data:1"
    assert "Hanging failed: no answer" in capsys.readouterr().err
    assert Dataset(path=out, num_examples=2).save("data").ref == "data:2"
    assert capsys.readouterr().err == ""  # waited for once


def test_an_unwritable_journal_does_not_lose_the_version(out, registry, capsys):
    (registry.root / "lineage.jsonl").mkdir(parents=True)
    assert Dataset(path=out, num_examples=1).save("data").ref == "data:1"
    assert "FileTracker failed" in capsys.readouterr().err


def fake_wandb(known):
    calls = []

    class Artifact:
        def __init__(self, name, type, metadata):
            self.name, self.type, self.metadata = name, type, metadata

        def add_reference(self, uri, checksum):
            calls.append(("reference", uri))

    def use(name):
        if name not in known:
            raise ValueError(f"{name} not found")
        calls.append(("use", name))

    def log(artifact, aliases):
        calls.append(("log", artifact.name, artifact.type, artifact.metadata["digest"], tuple(aliases)))

    run = types.SimpleNamespace(use_artifact=use, log_artifact=log)

    def init(**options):
        calls.append(("init", {name: value for name, value in options.items() if value is not None}))
        return run

    return types.SimpleNamespace(run=None, init=init, Artifact=Artifact), calls


def test_wandb_gets_artifact_and_inputs(chain, monkeypatch, capsys):
    module, calls = fake_wandb(known={"base-model:registry-1"})
    monkeypatch.setitem(sys.modules, "wandb", module)
    model = chain[0]
    set_lineage_tracker(WandbTracker("toy"))
    lineage.track(model, model.directory.parents[1])
    assert calls == [
        ("init", {"project": "toy", "job_type": "artifact"}),
        ("use", "base-model:registry-1"),
        ("reference", model.path.as_uri()),
        ("log", "sft-model", "Model", model.digest, ("latest", "registry-1")),
    ]
    assert "W&B knows no input sft-data:1" in capsys.readouterr().err


def test_a_run_tracks_its_saves_in_wandb_where_env_toml_says_so(script, out, tmp_path, monkeypatch, capsys):
    (tmp_path / "env.toml").write_text('[tool.wandb]\nproject = "toy"\nentity = "us"\nmode = "offline"\n')
    Dataset(path=out, num_examples=1).save("raw")
    module, calls = fake_wandb(known=())
    module.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", module)
    with open_run(load_script_config(script, ["--config", "tiny"]), script):
        Checkpoint(path=out, num_steps=1).save()
    assert calls[0] == ("init", {"project": "toy", "entity": "us", "mode": "offline", "job_type": "artifact"})
    assert calls[-1][1] == "toy-train-model-tiny"
    # A script that sets its own trackers keeps them.
    noting = Noting()
    set_lineage_tracker(noting)
    calls.clear()
    with open_run(load_script_config(script, ["--config", "tiny"]), script):
        Checkpoint(path=out, num_steps=2).save()
    assert (noting.refs, calls) == (["toy-train-model-tiny:2"], [])


def test_a_run_without_the_wandb_that_env_toml_names_goes_on(script, out, tmp_path, monkeypatch, capsys):
    (tmp_path / "env.toml").write_text('[tool.wandb]\nproject = "toy"\n')
    Dataset(path=out, num_examples=1).save("raw")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with open_run(load_script_config(script, ["--config", "tiny"]), script):
        assert Checkpoint(path=out, num_steps=1).save().ref == "toy-train-model-tiny:1"
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "[tool.wandb], but wandb is not installed: pip install" in warning


def test_mlflow_gets_a_run_with_tags_and_metrics(out, registry, monkeypatch):
    calls = {}

    class Started:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def started(run_name):
        calls["run"] = run_name
        return Started()

    module = types.SimpleNamespace(
        set_tracking_uri=lambda uri: calls.update(uri=uri),
        set_experiment=lambda name: calls.update(experiment=name),
        start_run=started,
        set_tags=lambda tags: calls.update(tags=tags),
        log_metrics=lambda metrics: calls.update(metrics=metrics),
        log_dict=lambda record, file: calls.update(record=record["digest"], file=file),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    set_lineage_tracker(MlflowTracker("toy", "sqlite:///x.db"))
    metrics = {"bpb": 1.5, "steps": 3, "passed": True, "families": {"math": 1}}
    saved = Results(path=out, metrics=metrics).save("results")
    assert calls == {
        "uri": "sqlite:///x.db",
        "experiment": "toy",
        "run": "results:1",
        "tags": {"artifact": saved.version.pinned, "type": "Results"},
        "metrics": {"bpb": 1.5, "steps": 3},
        "record": saved.digest,
        "file": "artifact.json",
    }


@pytest.mark.parametrize("tracker", [WandbTracker("toy"), MlflowTracker("toy")])
def test_a_tracker_whose_library_is_absent_says_how_to_get_it(out, monkeypatch, capsys, tracker):
    for module in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    set_lineage_tracker(tracker)
    Dataset(path=out, num_examples=1).save("data")
    assert "is not installed: pip install -c " in capsys.readouterr().err
