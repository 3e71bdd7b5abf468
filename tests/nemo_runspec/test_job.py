"""The pieces of a command file, called in the order in which one calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.display import display_job
from nemo_runspec.errors import UserError
from nemo_runspec.execution.local import execute_local
from nemo_runspec.job import (
    Job,
    RecipeConfig,
    build_env_vars,
    build_job_config,
    parse_config,
    parse_env,
    parse_recipe_config,
    parse_runspec,
    registry_of,
    save_configs,
)
from nemo_runspec.profile import Env


def context(*args: str) -> Any:
    return SimpleNamespace(args=list(args), command=SimpleNamespace(params=[SimpleNamespace(opts=["--from"])]))


def job_of(project: Path, *args: str) -> Job:
    cfg = parse_recipe_config(context(*args))
    train_config = parse_config(cfg, parse_runspec(project / "train.py"))
    spec = parse_runspec(project / train_config.run.script)
    return build_job_config(train_config, spec, parse_env(cfg.profile), dry_run=cfg.dry_run, argv=cfg.argv)


def test_the_command_line(project: Path, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/nemotron", "nano3", "pretrain", "-c", "tiny"])
    write("env.toml", "[quiet]\n")
    cfg = parse_recipe_config(context("a=1", "-c", "tiny", "--run=quiet", "--force", "b=2", "--dry-run", "--debug"))
    assert cfg == RecipeConfig(
        config_name="tiny",
        overrides=("a=1", "b=2"),
        profile="quiet",
        dry_run=True,
        force=True,
        argv=("nemotron", "nano3", "pretrain", "-c", "tiny"),
    )
    assert parse_recipe_config(context("--run", "quiet")).profile == "quiet"
    with pytest.raises(UserError, match="--run and --batch exclude each other"):
        parse_recipe_config(context("--run", "quiet", "--batch", "quiet"))
    with pytest.raises(UserError, match="unknown profile 'quiet2'") as caught:
        parse_recipe_config(context("--run", "quiet2"))
    assert caught.value.hint == "did you mean quiet?"
    with pytest.raises(UserError, match="unknown option --form") as caught:
        parse_recipe_config(context("--form"))
    assert caught.value.hint == "did you mean --from?"


@pytest.mark.parametrize("profile", ["local", "quiet"])
def test_a_local_profile_has_nothing_to_submit_to(
    write: Callable[[str, str], Path], project: Path, profile: str
) -> None:
    write("env.toml", "[quiet]\n")
    with pytest.raises(UserError, match=f"^--batch {profile}: a local profile has nothing to submit to") as caught:
        parse_recipe_config(context("-c", "tiny", f"--batch={profile}"))
    assert (caught.value.hint, caught.value.exit_code) == (f"run it here: --run {profile}", 2)


def test_the_bare_command_lists_the_configs_while_there_is_no_default(project: Path) -> None:
    with pytest.raises(UserError, match="no config was chosen") as caught:
        parse_config(RecipeConfig(), parse_runspec(project / "train.py"))
    assert caught.value.hint == "choose one with -c NAME: tiny"


def test_a_config_says_which_script_runs_it(project: Path) -> None:
    spec = parse_runspec(project / "train.py")
    assert parse_config(RecipeConfig(config_name="tiny"), spec).run.script == "train.py"
    chosen = RecipeConfig(config_name="tiny", overrides=("run.script=trian.py",))
    named = parse_config(chosen, spec).run.script
    with pytest.raises(UserError, match=r"no such script") as caught:
        parse_runspec(project / named)
    assert "train.py" in (caught.value.hint or "")


def test_the_two_files_of_a_job(project: Path) -> None:
    payload = project / "payload"
    payload.write_text("x", encoding="utf-8")
    version = Registry.default().publish("d", payload, {})
    job = job_of(project, "-c", "tiny", "run.data=d", "tags=['${run.config}', '\\${x}', 'yes']", "optimizer.lr=1e-8")
    assert not job.run.dir.exists()
    folder = save_configs(job, job.resolved.spec)
    assert folder == job.run.dir
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "train.yaml"]
    record, _ = read_yaml((folder / "job.yaml").read_text(encoding="utf-8"), "job.yaml")
    assert record["name"] == "demo-train-tiny"
    assert record["fingerprint"] == folder.name.removeprefix("tiny-")
    assert record["config"] == str(project / "config" / "tiny.yaml")
    assert record["dotlist"][0] == "run.data=d"
    assert record["inputs"] == {"data": version.pinned}
    assert record["outputs"] == ["demo-train-model-tiny"]
    assert (record["profile"], record["executor"]) == (None, "local")
    assert record["train"] == job.resolved.data
    # The script reads the same values back, and finds the same folder: nothing is resolved differently the second time.
    again = job_of(project, "-c", str(folder / "train.yaml"))
    assert again.resolved.data == job.resolved.data
    assert again.resolved.data["tags"] == ["tiny", "${x}", "yes"]
    assert again.run == job.run


def test_a_dependency_that_is_missing_is_said_whatever_other_configs_are_like(
    project: Path, write: Callable[[str, str], Path]
) -> None:
    script = project / "train.py"
    text = script.read_text(encoding="utf-8").replace('["pydantic"]', '["no-such-thing"]')
    script.write_text(text.replace('# schema = "1"', '# image = "large:1"'), encoding="utf-8")
    write("config/broken.yaml", "defaults: [nothing]\n")
    write("config/odd.yaml", "run: {script: 5}\n")
    write("config/small.yaml", "run: {script: small.py}\n")
    write("mine/mine.yaml", "defaults: [tiny]\n")
    write("mine/other.yaml", "defaults: [small]\n")
    for config in ("tiny", "mine/mine.yaml"):
        with pytest.raises(UserError) as caught:
            job_of(project, "-c", config)
        assert caught.value.message == "train.py needs no-such-thing, which is not installed"
        assert caught.value.hint == "the image large:1 has it: --run PROFILE; or another config, -c small"


def test_a_place_that_cannot_be_written_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(project / "store"))
    (project / "output").write_text("a file where a folder belongs", encoding="utf-8")
    job = job_of(project, "-c", "tiny")
    with pytest.raises(UserError, match=f"cannot write {job.run.dir}: Not a directory"):
        save_configs(job, job.resolved.spec)


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_registry_that_cannot_be_one_is_refused_before_anything_is_shown(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    file = project / "store"
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(file / "below"))
    job_of(project, "-c", "tiny", *words)
    assert not file.exists()
    file.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=f"^{file}/below: artifacts cannot be published there: {file} is not a folder"):
        job_of(project, "-c", "tiny", *words)
    file.unlink()
    monkeypatch.setattr("os.access", lambda path, mode: path != project)
    with pytest.raises(UserError, match=f"^{file}/below: .* {project} cannot be written to"):
        job_of(project, "-c", "tiny", *words)
    (theirs := file / "below" / "demo-train-model-tiny").mkdir(parents=True)
    monkeypatch.setattr("os.access", lambda path, mode: path != theirs)
    with pytest.raises(UserError, match=f"^{file}/below: .* {theirs} cannot be written to"):
        job_of(project, "-c", "tiny", *words)


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_working_folder_that_does_not_exist_is_refused(project: Path, words: tuple[str, ...]) -> None:
    script = project / "train.py"
    text = script.read_text(encoding="utf-8")
    assert text.count("# [tool.runspec.run]\n") == 1
    script.write_text(text.replace("[tool.runspec.run]\n", '[tool.runspec.run]\n# workdir = "no"\n'), encoding="utf-8")
    with pytest.raises(UserError, match=r"^train\.py: run\.workdir: no such folder: no$"):
        job_of(project, "-c", "tiny", *words)


def test_a_store_is_asked_from_here_as_the_job_asks_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ENDPOINT_URL", "WANDB_BASE_URL", "OTHER"):
        monkeypatch.setenv(name, "of the shell")
    of_profile = dict.fromkeys(("AWS_ENDPOINT_URL", "WANDB_BASE_URL", "OTHER"), "of the profile")
    registry_of(Env(variables=of_profile, artifacts=str(tmp_path)))
    assert {name: os.environ[name] for name in of_profile} == of_profile | {"OTHER": "of the shell"}


def test_debug_reaches_the_script(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nemotron", "--debug"])
    job = job_of(project, "-c", "tiny")
    assert build_env_vars(job, job.env)["RUNSPEC_DEBUG"] == "1"


def test_force_tells_the_script_to_start_afresh(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, fresh in ((["--force"], "1"), ([], None)):
        monkeypatch.setattr(sys, "argv", ["nemotron", *words])
        job = job_of(project, "-c", "tiny", *words)
        assert build_env_vars(job, job.env).get("RUNSPEC_FRESH") == fresh


def test_the_commit_is_recorded(project: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project)]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    job = job_of(project, "-c", "tiny")
    record, _ = read_yaml((save_configs(job, job.resolved.spec) / "job.yaml").read_text(encoding="utf-8"), "")
    assert record["git_commit"] == head


def test_a_json_script_gets_json(
    project: Path, write: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write("json/c.json", '{"text": "${x}", "n": 1e-8}')
    header = '# [tool.runspec.config]\n# dir = "json"\n# default = "c"\n# format = "json"\n'
    write("j.py", f'# /// script\n# [tool.runspec]\n# schema = "1"\n# name = "j"\n{header}# ///\n')
    from nemo_runspec.config import load_config

    spec = parse_runspec("j.py")
    job = build_job_config(load_config(spec.config_dir, "c", (), "json"), spec, parse_env(), dry_run=False)
    written = (save_configs(job, spec) / "train.json").read_text(encoding="utf-8")
    read = json.loads(written)
    assert (read["text"], read["n"]) == ("${x}", 1e-8)
    display_job(job, spec, job.env, show_config=True)
    assert capsys.readouterr().out.endswith(f"\n# train.json\n{written}")


def test_a_dry_run_shows_what_would_run_and_no_secret(
    project: Path,
    write: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("env.toml", '[p]\nsecrets = ["HF_TOKEN"]\nenv = { DEMO = "5" }\n')
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    job = job_of(project, "-c", "tiny", "--run", "p", "style=cosine")
    display_job(job, job.resolved.spec, job.env, show_config=True)
    text = capsys.readouterr().out
    assert f"{sys.executable} {project}/train.py --config {job.run.dir}/train.yaml" in text
    for line in (
        "demo/train -c tiny  (profile p)",
        "  config    config/tiny.yaml style=cosine",
        "  writes    demo-train-model-tiny",
        f"  run dir   output/demo/train/{job.run.dir.name}",
        "  secret    HF_TOKEN (from the environment)",
        "style: cosine",
    ):
        assert line in text.splitlines()
    (variables,) = [line.split()[1:] for line in text.splitlines() if line.startswith("  env  ")]
    assert variables[0] == "OMP_WAIT_POLICY=PASSIVE" and variables[-1] == "DEMO=5"
    save_configs(job, job.resolved.spec)
    written = "".join(path.read_text(encoding="utf-8") for path in job.run.dir.iterdir())
    assert "s3cret" not in text + written + repr(job) + repr(build_env_vars(job, job.env))


def test_values_of_variables_that_look_secret_are_hidden(
    project: Path, write: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = 'P = "http://me:s3cret-c@proxy:3128"'
    write("env.toml", f'[p]\nenv = {{ HF_TOKEN = "s3cret-a", DEMO_API_KEY = "s3cret-b", NUM_TOKENS = "7", {proxy} }}\n')
    job = job_of(project, "-c", "tiny", "--run", "p")
    display_job(job, job.resolved.spec, job.env, show_config=True)
    text = capsys.readouterr().out
    for variable in ("HF_TOKEN='(hidden)'", "DEMO_API_KEY='(hidden)'", "NUM_TOKENS=7", "P='http://***@proxy:3128'"):
        assert f" {variable} " in next(f"{line} " for line in text.splitlines() if line.startswith("  env  "))
    save_configs(job, job.resolved.spec)
    written = "".join(path.read_text(encoding="utf-8") for path in job.run.dir.iterdir())
    assert "s3cret" not in text + written
    # The job itself gets them.
    assert {"s3cret-a", "s3cret-b", "http://me:s3cret-c@proxy:3128"} <= set(build_env_vars(job, job.env).values())


def test_the_script_runs_with_its_job_and_agrees_on_its_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = job_of(project, "-c", "tiny", "train.train_iters=9")
    spec = job.resolved.spec
    job_dir = save_configs(job, spec)
    code = execute_local(spec, job_dir, {**build_env_vars(job, job.env), "DEMO": "1"})
    captured = capfd.readouterr()
    assert code == 0, captured.err
    record = json.loads(captured.out)
    assert record["train_iters"] == 9
    assert record["run_dir"] == str(job_dir)
    assert record["run"]["config"] == "tiny"
    assert (record["omp"], record["stdin_is_null"], record["tokens"]) == ("PASSIVE", True, "1")
