"""The `nemo-runspec` command as a user calls it, in a process of its own, on a script of another project."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import typer
from forked import OF_RUNSPEC, run_forked

from nemo_runspec.artifacts import Registry
from nemo_runspec.cli import run_app
from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.errors import run_main


def runspec(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERMINAL_WIDTH": "120"}
    return run_forked(OF_RUNSPEC, ["-m", "nemo_runspec", *words], folder, environment)


def test_show(project: Path) -> None:
    shown = runspec(project, "show", "train.py", "--json")
    assert shown.returncode == 0, shown.stderr
    spec = json.loads(shown.stdout)
    assert spec["name"] == "demo/train"
    assert spec["script_path"] == str(project / "train.py")
    assert spec["config_dir"] == str(project / "config")
    assert spec["run"] == {"launch": "torchrun", "cmd": "python {script} --config {config}", "workdir": None}
    assert spec["config"]["schema"] == "schema.py:Cfg"
    assert spec["resources"] == {"nodes": 1, "gpus_per_node": 8}
    plain = runspec(project / "config", "show", "../train.py").stdout
    assert "run.launch               torchrun\n" in plain
    assert "configs                  tiny\n" in plain


def test_validate_checks_block_schema_and_configs_without_artifacts(project: Path) -> None:
    (project / "config" / "more.yaml").write_text("run: {data: not-made-yet}\n", encoding="utf-8")
    (project / "config" / "other.yaml").write_text("run: {script: other.py}\nodd: 1\n", encoding="utf-8")
    done = runspec(project, "validate", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ok  config/more.yaml\nok  config/tiny.yaml\nok  train.py: demo/train\n"
    (project / "config" / "more.yaml").write_text("style: wsd\n", encoding="utf-8")
    done = runspec(project, "validate", "train.py")
    assert done.returncode == 2
    assert done.stderr == "error: config/more.yaml:1: style = 'wsd': must be one of 'WSD', 'cosine'\n"
    assert runspec(project, "validate", "-c", "tiny", "train.py", "style=cosine").returncode == 0
    (project / "config" / "more.yaml").write_text("run: {script: 5}\n", encoding="utf-8")
    done = runspec(project, "validate", "train.py")
    assert (done.returncode, done.stderr) == (2, "error: config/more.yaml:1: run.script = 5: must be text\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "trian.py"], "error: no such script: trian.py\ndid you mean train.py?\n"),
        (["run"], "error: which script? PATH is missing\nas in nemo-runspec run train.py\n"),
        (
            ["run", "train.py"],
            "error: no config was chosen, and there is no config 'default'",
        ),
        (["run", "train.py", "-c", "tniy.yaml"], "error: no file tniy.yaml here, nor in config\ndid you mean tiny?\n"),
        (
            ["run", "train.py", "-c", "config/tniy.yaml"],
            "error: no such config file: config/tniy.yaml\ndid you mean config/tiny.yaml?\n",
        ),
        (
            ["run", "train.py", "-c", "config/tiny.json"],
            "error: config/tiny.json: a config of this script ends in .yaml or .yml\n",
        ),
        (
            ["run", "train.py", "-c", "tiny", "run.model=base"],
            "error: command line: unknown key run.model = 'base'\ninput artifacts: run.data\n",
        ),
        (["run", "train.py", "-c", "tniy"], "error: no config 'tniy' in config\ndid you mean tiny?\n"),
        (["shwo", "train.py"], "error: No such command 'shwo'."),
        (["show"], "error: Missing argument"),
        (["show", "config/tiny.yaml"], "error: config/tiny.yaml: no runspec"),
    ],
)
def test_bad_input_is_one_or_two_lines_and_exit_2(project: Path, words: list[str], message: str) -> None:
    done = runspec(project, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert 1 <= done.stderr.count("\n") <= 2


def test_what_the_config_names_is_published_or_the_run_has_failed(project: Path) -> None:
    done = runspec(project, "run", "train.py", "-c", "tiny")
    assert done.returncode == 0, done.stderr
    record = json.loads((project / "output/artifacts/demo-train-model-tiny/1/artifact.json").read_text())
    (run_dir,) = (project / "output/demo/train").iterdir()
    assert record["producer"]["name"] == "demo/train" and run_dir.name == f"tiny-{record['producer']['fingerprint']}"
    published = Registry(project / "output/artifacts").resolve("demo-train-model-tiny:1")
    config, _ = read_yaml(published.run_file("config.yaml") or "", "config.yaml")
    assert config["optimizer"]["lr"] == 1e-4 and config["run"]["output"] == published.name
    script = project / "train.py"
    text = script.read_text()
    # A run that goes on after it has published need not publish again: the version with its fingerprint is there.
    script.write_text(text.replace("    if cfg.run.output:", "    if cfg.run.output and not Path('done').exists():"))
    script.write_text(script.read_text().replace("import sys\n", "import sys\nfrom pathlib import Path\n"))
    assert runspec(project, "run", "train.py", "-c", "tiny").returncode == 0
    (project / "done").touch()
    assert runspec(project, "run", "train.py", "-c", "tiny").returncode == 0
    script.write_text(text.replace("        publish(", "        print("))
    done = runspec(project, "run", "train.py", "-c", "tiny")
    assert done.returncode == 1
    message = "error: train.py ended well but did not publish demo-train-model-tiny, which its config names\n"
    assert done.stderr.startswith(message)


def test_debug_shows_the_traceback(project: Path) -> None:
    done = runspec(project, "run", "train.py", "-c", "tiny", "lr=1", "--debug")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr


def test_help_keeps_its_brackets(project: Path) -> None:
    done = runspec(project, "--help")
    assert done.returncode == 0
    assert "[tool.runspec]" in done.stdout


@pytest.mark.parametrize(("interrupted", "text"), [(True, "error: interrupted\n"), (False, "")])
def test_ctrl_c_in_a_command_is_one_line_and_a_script_that_has_ended_by_it_says_its_own(
    interrupted: bool, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def work() -> None:
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        raise typer.Exit(130)

    assert run_main(lambda: run_app(app, "command", [])) == 130
    assert capsys.readouterr().err == text
