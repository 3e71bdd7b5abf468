"""Steps one after another: order, skipping, pinning, stopping."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import OF_RUNSPEC, forked_steps

from nemo_runspec import pipeline
from nemo_runspec.artifacts import Registry
from nemo_runspec.bundle import Bundle
from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.execution import local
from nemo_runspec.execution.ray.jobs import RayJob
from nemo_runspec.job import RecipeConfig
from nemo_runspec.pipeline import Step, StepResult, run_pipeline, submit_each_to_ray, submit_pipeline
from nemo_runspec.profile import Env

# A step that publishes what its config says, and a note of what it read.
SCRIPT = """
# /// script
# [tool.runspec]
# schema = "1"
# name = "demo/{name}"
# [tool.runspec.config]
# dir = "./{name}"
# ///
import json, os, pathlib, signal, sys
from nemo_runspec.config.yaml_text import dump_yaml
from nemo_runspec.runspec import parse
from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, run_main
from nemo_runspec.fingerprint import inputs_of, plain, run_code, run_dir_for

def main():
    cfg = load_script_config(__file__)
    folder = run_dir_for(cfg, parse(__file__))
    with open("order", "a") as order:
        order.write(f"{{cfg.run.stage}}<{{cfg.run.get('data')}}\\n")
    if cfg.get("fail"):
        raise RunFailed("on purpose")
    if not cfg.get("silent"):
        payload = folder / "payload"
        payload.write_text(f"{{cfg.run.stage}} {{cfg.get('value')}}")
        inputs = {{role: version.pinned for role, version in inputs_of(cfg).items()}}
        record = {{"producer": {{"fingerprint": folder.name.rpartition("-")[2]}}, "inputs": inputs}}
        code = json.dumps(run_code(cfg, parse(__file__)))
        files = {{"config.yaml": dump_yaml(plain(cfg), escape=True), "code.json": code}}
        run_files = {{name: text.encode() for name, text in files.items()}}
        Registry.default().publish(cfg.run.output, payload, record, run_files=run_files)
    if cfg.get("signal"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {{cfg.signal}})
        os.kill(os.getppid(), cfg.signal)
        signal.sigwait([cfg.signal])

sys.exit(run_main(main))
"""


@pytest.fixture
def steps(project: Path, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Three, each of which reads what the one before it publishes; their processes begin with their imports done."""
    monkeypatch.setattr(local, "_wait", forked_steps(OF_RUNSPEC))
    for name, data in (("one", "null"), ("two", "demo-one"), ("three", "demo-two")):
        write(f"{name}.py", SCRIPT.format(name=name))
        place = "" if data == "null" else "place: ${art:data,path}\n"
        write(f"{name}/tiny.yaml", f"run: {{output: demo-{name}, data: {data}}}\nvalue: 1\n{place}")
    return [Step(name, project / f"{name}.py") for name in ("one", "two", "three")]


CFG = RecipeConfig(config_name="tiny")
WAIT = local._wait


def order(project: Path) -> list[str]:
    path = project / "order"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    path.unlink(missing_ok=True)
    return lines


def statuses(results: list[StepResult]) -> list[str]:
    return [result.status for result in results]


def with_overrides(steps: list[Step], number: int, *overrides: str) -> list[Step]:
    step = steps[number]
    changed = Step(step.name, step.script, overrides=overrides)
    return [*steps[:number], changed, *steps[number + 1 :]]


def test_all_steps_run_in_order_and_the_second_time_none(
    project: Path, steps: list[Step], capfd: pytest.CaptureFixture[str]
) -> None:
    results = run_pipeline(steps, CFG)
    assert statuses(results) == ["done"] * 3
    assert order(project) == ["one<None", "two<demo-one:1", "three<demo-two:1"]
    assert [list(result.versions) for result in results] == [["demo-one"], ["demo-two"], ["demo-three"]]
    capfd.readouterr()
    results = run_pipeline(steps, CFG)
    assert statuses(results) == ["skipped"] * 3
    assert order(project) == []
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[2/3] two: skipped")]
    assert lines[0].startswith("[2/3] two: skipped, published already: demo-two:1, fingerprint ")
    assert lines[0].endswith("(--force runs it again)")


@pytest.mark.parametrize("damage", ["a flipped byte", "a file that is gone"])
def test_a_step_whose_payload_is_damaged_is_not_skipped(
    project: Path, steps: list[Step], capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    results = run_pipeline(steps, CFG)
    payload = results[1].versions["demo-two"].path / "payload"
    if damage == "a flipped byte":
        payload.write_bytes(payload.read_bytes().replace(b"two", b"twO"))
        what = f"{payload}: content differs from its sha256"
    else:
        payload.unlink()
        what = f"{payload}: No such file or directory"
        capfd.readouterr()
        run_pipeline(steps, RecipeConfig(config_name="tiny", dry_run=True))
        assert f"[2/3] two: runs again, artifact demo-two:1 is corrupt: {what}" in capfd.readouterr().out
    order(project)
    capfd.readouterr()
    # The same content is published again: the step after it, of the same fingerprint, is still skipped.
    results = run_pipeline(steps, CFG)
    assert statuses(results) == ["skipped", "done", "skipped"]
    assert f"[2/3] two: runs again, artifact demo-two:1 is corrupt: {what}" in capfd.readouterr().out
    assert results[1].versions["demo-two"].ref == "demo-two:2"
    assert statuses(run_pipeline(steps, CFG)) == ["skipped"] * 3


def test_an_input_whose_payload_is_gone_is_refused_before_anything_runs(project: Path, steps: list[Step]) -> None:
    payload = run_pipeline(steps[:1], CFG)[0].versions["demo-one"].path / "payload"
    payload.unlink()
    order(project)
    for dry_run in (True, False):
        with pytest.raises(UserError, match=r"step two: artifact demo-one:1 is corrupt: .*/payload: No such file"):
            run_pipeline(steps[1:], RecipeConfig(config_name="tiny", dry_run=dry_run))
    assert order(project) == []


def test_a_changed_step_reruns_with_all_that_depends_on_it_and_the_way_back_is_remembered(
    project: Path, steps: list[Step], capfd: pytest.CaptureFixture[str]
) -> None:
    run_pipeline(steps, CFG)
    order(project)
    run_pipeline(with_overrides(steps, 1, "value=2"), RecipeConfig(config_name="tiny", dry_run=True))
    assert "[3/3] three: runs again, changed since demo-three:1: run.data (made anew)\n" in capfd.readouterr().out
    assert statuses(run_pipeline(with_overrides(steps, 1, "value=2"), CFG)) == ["skipped", "done", "done"]
    assert order(project) == ["two<demo-one:1", "three<demo-two:2"]
    said = capfd.readouterr().out
    assert "[2/3] two: runs again, changed since demo-two:1: value: 1 -> 2\n" in said
    assert "[3/3] three: runs again, changed since demo-three:1: run.data (demo-two:2)\n" in said
    # Back at the first config: nothing runs, although version 2 is the latest by now, ...
    assert statuses(run_pipeline(steps, CFG)) == ["skipped"] * 3
    # ... and a step that does run reads the version of this config, not the latest.
    assert statuses(run_pipeline(with_overrides(steps, 2, "value=3"), CFG)) == ["skipped", "skipped", "done"]
    assert order(project) == ["three<demo-two:1"]


def test_the_modules_for_which_a_step_runs_again_are_named(
    project: Path, steps: list[Step], write: Callable[[str, str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    script = write("one.py", f"{SCRIPT.format(name='one')}import helper\n")
    write("helper.py", "rate = 1\n")
    assert statuses(run_pipeline(steps[:1], CFG)) == ["done"]
    write("helper.py", "rate = 2\n")
    assert statuses(run_pipeline(steps[:1], CFG)) == ["done"]
    assert "[1/1] one: runs again, changed since demo-one:1: helper\n" in capfd.readouterr().out
    script.write_text(f"{script.read_text()}# another comment\n", encoding="utf-8")
    assert statuses(run_pipeline(steps[:1], CFG)) == ["done"]
    assert "[1/1] one: runs again, changed since demo-one:2: one.py\n" in capfd.readouterr().out


def test_files_inputs_and_stages_that_differ_are_named(
    project: Path, steps: list[Step], capfd: pytest.CaptureFixture[str]
) -> None:
    run_pipeline(steps[:2], CFG)
    run_pipeline(with_overrides(steps[:2], 1, "run.data=null", "place=null"), CFG)
    said = capfd.readouterr().out
    assert re.search(r"\[2/2\] two: runs again, changed since demo-two:1: place: .*, run.data \(no longer\)\n", said)
    run_pipeline(steps[:2], RecipeConfig(config_name="tiny", dry_run=True))
    assert "[2/2] two: skipped" in capfd.readouterr().out
    run_pipeline(with_overrides(steps[:1], 0, "run.stage=uno", "of=[1, 2, 3]"), CFG)
    assert "[1/1] one: runs again, changed since demo-one:1: run.stage: one -> uno, of: null -> [1, 2, 3]\n" in (
        capfd.readouterr().out
    )
    run_pipeline(with_overrides(steps[:1], 0, "run.stage=uno", "of=[1, 5, 3]"), CFG)
    assert "[1/1] one: runs again, changed since demo-one:2: of.1: 2 -> 5\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("code", "config", "producer", "inputs"),
    [
        (b"{", b"a: 1", {}, {}),
        (b"[]", b"a: 1", {}, {}),
        (b"\xff", b"a: 1", {}, {}),
        (b"{}", b"- 1", {}, {}),
        (b"{}", b"a: :", {}, {}),
        (b"{}", b"a: 1", "me", ["data"]),
        (b"{}", b"run: 1", {}, {"data": "demo-two:1"}),
    ],
)
def test_a_version_of_somebody_else_s_stops_nothing(
    project: Path, steps: list[Step], code: bytes, config: bytes, producer: Any, inputs: Any
) -> None:
    payload = project / "payload"
    payload.write_text("x", encoding="utf-8")
    record = {"producer": producer, "inputs": inputs}
    run_files = {"code.json": code, "config.yaml": config}
    Registry.default().publish("demo-one", payload, record, run_files=run_files)
    assert statuses(run_pipeline(steps[:1], CFG)) == ["done"]


def test_force_skips_nothing(project: Path, steps: list[Step]) -> None:
    run_pipeline(steps[:1], CFG)
    assert statuses(run_pipeline(steps[:1], RecipeConfig(config_name="tiny", force=True))) == ["done"]
    assert Registry.default().versions("demo-one") == [1, 2]


def test_a_registry_that_cannot_be_written_to_matters_to_a_step_that_runs(
    project: Path, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pipeline(steps[:1], RecipeConfig(config_name="tiny"))
    monkeypatch.setattr("os.access", lambda path, mode: path != Registry.default().root)
    problem = r"artifacts: artifacts cannot be published there: .* cannot be written to$"
    for dry_run in (False, True):
        run_pipeline(steps[:1], RecipeConfig(config_name="tiny", dry_run=dry_run))
        with pytest.raises(UserError, match=problem):
            run_pipeline(steps[:1], RecipeConfig(config_name="tiny", dry_run=dry_run, force=True))


def test_the_first_failure_stops_the_rest(project: Path, steps: list[Step], capfd: pytest.CaptureFixture[str]) -> None:
    results = run_pipeline(with_overrides(steps, 1, "fail=true"), CFG)
    assert statuses(results) == ["done", "failed"]
    assert results[-1].exit_code == 1
    assert order(project) == ["one<None", "two<demo-one:1"]
    assert "error: on purpose" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_a_step_at_its_end_stops_those_after_it(
    project: Path,
    steps: list[Step],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
) -> None:
    monkeypatch.setattr(local, "_wait", WAIT)  # a forked process is a child of another one
    results = run_pipeline(with_overrides(steps, 1, f"signal={int(number)}"), CFG)
    assert [(result.status, result.exit_code) for result in results] == [("done", 0), ("done", code)]
    assert order(project) == ["one<None", "two<demo-one:1"]
    assert capfd.readouterr().out.rstrip().endswith("; the same command goes on from here")
    results = run_pipeline(with_overrides(steps, 2, f"signal={int(number)}"), CFG)  # nothing is left to stop
    assert [result.exit_code for result in results] == [0, 0, 0]


def test_a_step_that_publishes_nothing_is_not_done(project: Path, steps: list[Step]) -> None:
    with pytest.raises(RunFailed, match=r"step one: one\.py ended well but did not publish demo-one"):
        run_pipeline(with_overrides(steps, 0, "silent=true"), CFG)


def test_a_fault_of_the_last_step_is_found_before_the_first_one_runs(project: Path, steps: list[Step]) -> None:
    with pytest.raises(UserError, match=r"step three: command line: 'x' is not an override"):
        run_pipeline(with_overrides(steps, 2, "x"), CFG)
    with pytest.raises(UserError, match=r"step two: run\.data = nowhere: no artifact 'nowhere'"):
        run_pipeline(with_overrides(steps, 1, "run.data=nowhere"), CFG)
    assert order(project) == []


def test_without_a_config_those_that_every_step_has_are_offered(
    project: Path, steps: list[Step], write: Callable[[str, str], Path]
) -> None:
    for name in ("one/smoke", "one/only-one", "two/smoke", "three/smoke-late", "three/tiny-late"):
        write(f"{name}.yaml", "run: {}\n")
    late = Step("three", project / "three.py", config_suffix="-late")
    with pytest.raises(UserError, match="no config was chosen, and not every step has a default one") as caught:
        run_pipeline([*steps[:2], late], RecipeConfig())
    assert caught.value.hint == "choose one with -c NAME: smoke, tiny"


def test_a_dry_run_shows_the_steps_and_what_is_resolved_only_at_start(
    project: Path, steps: list[Step], capsys: pytest.CaptureFixture[str]
) -> None:
    dry = RecipeConfig(config_name="tiny", dry_run=True)
    assert run_pipeline(steps, dry) == []
    text = capsys.readouterr().out
    assert "[3/3] three" in text
    assert "data = demo-two:latest (resolved at start)" in text
    assert "output/demo/two/tiny-<fingerprint>" in text
    assert not (project / "output").exists()
    run_pipeline(steps[:1], CFG)
    capsys.readouterr()
    run_pipeline(steps, dry)
    text = capsys.readouterr().out
    assert "[1/3] one: skipped, published already" in text
    assert "data = demo-one:1 (" in text


def test_a_launcher_that_the_toolkit_does_not_know_gets_the_bundles_of_all_steps(
    project: Path, steps: list[Step], write: Callable[[str, str], Path]
) -> None:
    launched: list[tuple[str, object, bool]] = []

    def submit(name: str, jobs: Sequence[Bundle], cfg: RecipeConfig) -> int:
        for bundled in jobs:
            script = (bundled.folder / "launch.sh").read_text(encoding="utf-8")
            launch = json.loads((bundled.folder / "launch.json").read_text(encoding="utf-8"))
            assert launch["processes_per_node"] == bundled.job.env.table["processes_per_node"] == 3
            launched.append((bundled.job.run.name, bundled.job.env.table["pot"], "/shared/output/published/" in script))
        return 3

    profile = '[kettle]\nexecutor = "kettle"\npot = 2\nprocesses_per_node = 3\n'
    cfg = RecipeConfig(config_name="tiny", profile="kettle")
    write("env.toml", profile)
    with pytest.raises(UserError, match="profile kettle: the jobs of a pipeline need a folder that all of them see"):
        submit_pipeline("soup", steps, cfg, submit, executor="kettle")
    write("env.toml", f'{profile}env = {{ RUNSPEC_OUTPUT_ROOT = "/shared/output" }}\n')
    assert submit_pipeline("soup", steps, cfg, submit, executor="kettle") == 3
    assert launched == [("demo-one-tiny", 2, True), ("demo-two-tiny", 2, True), ("demo-three-tiny", 2, True)]


@pytest.mark.parametrize(("codes", "submitted"), [([0, 0, 0], 3), ([0, 143, 0], 2), ([1, 0, 0], 1)])
def test_on_a_ray_cluster_each_step_is_submitted_when_the_one_before_has_succeeded(
    project: Path,
    steps: list[Step],
    write: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    codes: list[int],
    submitted: int,
) -> None:
    events: list[tuple[str, str]] = []

    def hand_over(env: Env, job_id: str, runtime_env: Mapping[str, Any]) -> RayJob:
        assert (Path(runtime_env["working_dir"]) / "launch.sh").is_file()
        events.append(("submitted", job_id.rpartition("-")[0]))
        return RayJob(job_id, "http://head:8265")

    def follow(job: RayJob) -> int:
        events.append(("ended", job.id.rpartition("-")[0]))
        return codes[len(events) // 2 - 1]

    monkeypatch.setattr(pipeline.ray, "hand_over", hand_over)
    monkeypatch.setattr(pipeline, "follow_ray_job", follow)
    write("env.toml", '[head]\nexecutor = "ray"\naddress = "http://head:8265"\n')
    cfg = RecipeConfig(config_name="tiny", profile="head")
    failed = next((code for code in codes if code), 0)
    assert submit_pipeline("soup", steps, cfg, submit_each_to_ray, executor="ray") == failed
    names = ["demo-one-tiny", "demo-two-tiny", "demo-three-tiny"]
    assert events == [(what, name) for name in names[:submitted] for what in ("submitted", "ended")]
    rest = f"soup-tiny: {', '.join(names[submitted:])} not submitted"
    assert (rest in capsys.readouterr().out) is (submitted < 3)
    dry = dataclasses.replace(cfg, dry_run=True)
    monkeypatch.setattr(pipeline.ray, "is_installed", lambda: False)
    assert submit_pipeline("soup", steps, dry, submit_each_to_ray, executor="ray") == 0
    text = capsys.readouterr().out
    assert (
        text.count("# Ray is not installed here. Submitting needs it: pip install")
        == text.count("submitted as by")
        == 3
    )
    with pytest.raises(UserError, match="--batch head: a Ray cluster starts every job at once, and these 3 wait"):
        submit_pipeline("soup", steps, dataclasses.replace(cfg, batch=True), submit_each_to_ray, executor="ray")
