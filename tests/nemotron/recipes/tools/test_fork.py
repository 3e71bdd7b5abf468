"""`nemotron fork`: a project that has all that it runs, under its own name, and whose own checks pass."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from forked import OF_COMMANDS, run_forked

import nemotron
from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.kit.commands import command_for, makers_by_artifact
from nemotron.recipes.tools.fork import Options, check_name, families, main, project_files, sorted_imports

SOURCE = Path(nemotron.__file__).parents[1]
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("RUNSPEC_", "NEMOTRON_"))}


def test_every_family_can_be_forked() -> None:
    assert {"lightning35", "nano2", "nano3", "super3"} <= set(families())


@pytest.mark.parametrize("family", families())
def test_a_fork_has_every_module_and_script_that_it_names(family: str) -> None:
    files = project_files(family, "zebra")
    modules = {
        path.removeprefix("src/").removesuffix(".py").replace("/", ".") for path in files if path.endswith(".py")
    }
    modules |= {module.removesuffix(".__init__") for module in modules}
    for path, text in files.items():
        if path.startswith("src/") and path.endswith(".py"):
            assert "nemotron.recipes." not in text and f"nemotron.cli.commands.{family}" not in text, path
            for module, name in re.findall(r"^ *from (zebra[\w.]*) import (\w+)", text, re.MULTILINE):
                assert module in modules or f"{module}.{name}" in modules, f"{path}: {module}"
        for folder in re.findall(r'^# dir = "(.*)"', text, re.MULTILINE) if path.endswith(".py") else ():
            configs = posixpath.normpath(posixpath.join(posixpath.dirname(path), folder))
            assert any(other.startswith(f"{configs}/") and other.endswith(".yaml") for other in files), path
        for script in re.findall(r"^  script: (\w+/\S+)", text, re.MULTILINE) if path.endswith(".yaml") else ():
            assert f"src/zebra/recipes/{script}" in files, path
    commands = re.findall(r'command = "([^"]+)"', files["src/zebra/recipes/zebra/steps.toml"])
    assert commands and all(command.split()[0] == "zebra" for command in commands)


def test_what_is_renamed_and_what_is_a_fact() -> None:
    files = project_files("nano3", "zebra")
    page = files["src/zebra/recipes/zebra/README.md"]
    assert page.startswith("# zebra, a fork of Nemotron 3 Nano\n")
    assert "| blocks | 52: 23 Mamba-2, 23 MoE, 6 attention |" in page
    assert "zebra sft -c tiny                  #         -> zebra-sft-model-tiny" in page
    assert "](../" not in page and "(`docs/guides/rl-metrics.md` of the cookbook)" in page
    # A chat template and what the cookbook's own tools made keep their names.
    assert 'chat_template: PackTemplate = "nano3"' in files["src/zebra/recipes/zebra/stage1_sft/data_schema.py"]
    published = files["src/zebra/recipes/zebra/stage0_pretrain/config/default.yaml"]
    assert "tokenize-data-nano3_pretrain" in published and "zebra-pretrain-model-default" in published
    assert "nano3" not in files["src/zebra/commands/pipe.py"] + files["src/zebra/commands/app.py"]


def test_a_borrowed_script_names_the_configs_that_are_there(tmp_path: Path) -> None:
    main(Options("nano3", "zebra", str(tmp_path / "zoo")))
    recipes = tmp_path / "zoo/src/zebra/recipes"
    spec = parse(recipes / "super3/stage3_quantize/quantize.py")
    assert spec.config_dir == recipes / "zebra/stage4_quantize/config"


def test_an_error_names_the_command_of_the_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(Options("nano2", "zebra", str(tmp_path / "zoo")))
    recipes = tmp_path / "zoo/src/zebra/recipes"
    monkeypatch.setattr("nemotron.kit.steps.RECIPES", tmp_path / "none")  # reading them all takes seconds
    # By its command, which says where its recipes are, and by a script that is started by hand.
    for variable, program in ((str(recipes), "zebra"), ("", str(recipes / "zebra/stage1_sft/training.py"))):
        monkeypatch.setenv("NEMOTRON_RECIPES", variable)
        monkeypatch.setattr("sys.argv", [program])
        makers_by_artifact.cache_clear()
        assert command_for("zebra-sft-model") == "zebra sft -c tiny"
    makers_by_artifact.cache_clear()


def test_imports_are_in_order_as_ruff_has_them() -> None:
    for path in SOURCE.rglob("*.py"):  # which `make lint` has seen
        text = path.read_text(encoding="utf-8")
        assert sorted_imports(text) == text, path
    wide = "from zebra.a import " + ", ".join(f"name_{number}" for number in range(20)) + "\nfrom nemotron.a import b\n"
    lines = sorted_imports(wide).splitlines()
    assert lines[:3] == ["from nemotron.a import b", "from zebra.a import (", "    name_0,"] and lines[-1] == ")"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-model", "cannot be the name of a package"),
        ("MyModel", "cannot be the name of a package"),
        ("_mine", "cannot be the name of a package"),
        ("class", "is a word of Python"),
        ("super3", "is a family of this cookbook"),
        ("json", "would hide a module of that name: Python's own"),
        ("torch", "would hide a module of that name: .*torch"),
        ("nemotron", "would hide a module of that name"),
        ("bands", "a module beside the scripts of nano3 is called bands"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_name(name)


def test_folders_that_are_refused_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, message in (("full", "not an empty"), ("full/note", "not an empty"), ("link", "not an empty"),
                            ("none/zebra", "there is no folder")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            main(Options("nano2", "zebra", str(tmp_path / target)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "link", "note"]
    with pytest.raises(UserError, match="no family 'nano4'") as refused:
        main(Options("nano4", "zebra", str(tmp_path / "new")))
    assert refused.value.hint == "did you mean nano3?"


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_text, list[Path]()

    def interrupted(path: Path, text: str, **options: str) -> int:
        written.append(path)
        if len(written) == 50:
            raise KeyboardInterrupt
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(Options("nano2", "zebra", str(tmp_path / "new")))
    assert len(written) == 50 and list(tmp_path.iterdir()) == []


def test_what_comes_next_leads_into_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    main(Options("nano2", "zebra", "~/of mine"))
    first = capsys.readouterr().out.splitlines()[0]
    subprocess.run(["sh", "-ec", f"{first}; test -f pyproject.toml"], check=True)


def test_the_folder_where_the_shell_stands_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(tmp_path / "link")
    main(Options("nano2", "zebra", "."))
    assert Path("pyproject.toml").is_file() and here.samefile(".") and (tmp_path / "link").is_symlink()
    assert not [path.name for path in here.iterdir() if path.name.startswith((".partial", ".old"))]


def make(folder: Path, family: str) -> Path:
    """A fork called zebra in a folder that is empty already."""
    (folder / "zebra").mkdir()
    main(Options(family, "zebra", str(folder / "zebra")))
    return folder / "zebra"


def test_python_m_starts_a_fork(tmp_path: Path) -> None:
    project = make(tmp_path, "nano2")
    environment = ENVIRONMENT | {"PYTHONPATH": str(SOURCE)}
    done = run_forked(OF_COMMANDS, ["-m", "zebra", "--help"], project / "src", environment)
    assert done.returncode == 0 and "Usage: zebra " in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_the_checks_of_a_fork_pass(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = make(tmp_path, family)
    assert capfd.readouterr().out.splitlines()[-1] == "zebra pipe -c smoke"
    environment = ENVIRONMENT | {"PYTHONPATH": str(SOURCE)}
    for command in (
        ["-m", "ruff", "check", "--no-cache", "."],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def commands_in(page: str) -> list[str]:
    """The commands of the shell blocks of a page and between its backticks; those with placeholders are left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [re.split(r"  +#| \| | < ", line)[0].strip() for block in blocks for line in block.splitlines()]
    shown = [*lines, *re.findall(r"`((?:zebra|nemotron|python) [^`]+)`", page)]
    return sorted({line for line in shown if line and not re.search(r"\b[A-Z]{3,}\b|[…#]|\[-", line)})


@pytest.mark.parametrize("family", families())
def test_the_page_of_a_fork_shows_a_config_that_is_there(family: str) -> None:
    files = project_files(family, "zebra")
    configs = re.findall(r"`zebra [\w -]* -c ([\w-]+)`", files["README.md"])
    assert configs
    for config in configs:
        assert any(re.search(rf"/config/(\w+/)?{config}\.yaml$", path) for path in files), config


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "family",
    [  # those with the longest pages take minutes
        pytest.param(name, marks=pytest.mark.whole if name in ("nano3", "super3") else pytest.mark.slow)
        for name in families()
    ],
)
def test_every_command_on_the_pages_of_a_fork_is_one(family: str, tmp_path: Path) -> None:
    project = make(tmp_path, family)
    work = project / "src"  # a forked program finds its modules in the folder that it runs in
    pages = [project / "README.md", project / "AGENTS.md", *project.glob("src/zebra/recipes/zebra/**/*.md")]
    shown = {command: page for page in pages for command in commands_in(page.read_text(encoding="utf-8"))}
    for name in ("my-folder/a.md", "my-model/tokenizer.json", "halves.py", "examples/x"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("a note\n")
    for command in shown:
        for name in re.findall(r"[\w-]+\.jsonl?\b", command):
            (work / name).touch()
    environment = ENVIRONMENT | {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1"}
    environment["RUNSPEC_ENV_FILE"] = str(SOURCE.parent / "env.example.toml")  # some are for a cluster
    wrong = []
    for command, page in shown.items():
        program, *words = shlex.split(command)
        if program not in ("zebra", "nemotron"):
            continue
        if words[-1] != "--dry-run":
            words.append("--dry-run" if program == "zebra" and words[0] not in ("chat", "model") else "--help")
        done = run_forked(OF_COMMANDS, ["-m", program, *words], work, environment)
        is_made = "no artifact 'zebra-" not in done.stderr or "make it: zebra " in done.stderr
        if done.returncode and not ("no artifact " in done.stderr and is_made):
            wrong.append(f"{page.relative_to(project)}: {command}\n{done.stderr}")
    assert len(shown) > 8 and wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("smoke", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param("tiny", marks=[pytest.mark.whole, pytest.mark.timeout(2 * 3600)]),
    ],
)
def test_an_installed_fork_runs_its_pipe(config: str, tmp_path: Path) -> None:
    """As a user does it: a virtual environment, the project in it and in git, the pipe; without a network."""
    project, home = make(tmp_path, "nano3"), tmp_path / "venv"
    venv.create(home, symlinks=True)
    site = next(home.glob("lib/*/site-packages"))
    (site / "cookbook.pth").write_text(
        "\n".join([str(SOURCE), *(path for path in sys.path if "site-packages" in path)])
    )
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    environment |= {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1"}

    def run(*words: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("git", "init", "-q", cwd=project)
    install = ("install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(project))
    run(str(home / "bin/python"), "-m", "pip", *install)
    assert "zebra, a fork of Nemotron 3 Nano" in run("zebra", "--help")
    printed = run("zebra", "pipe", "-c", config)  # tiny ends with 1 where a band is missed
    assert "report: " in printed and (tmp_path / f"output/zebra/report-{config}.html").is_file()
    registry = Registry(tmp_path / "output/artifacts")
    producers = [registry.resolve(name).record["producer"] for name in registry.names()]
    assert len(producers) > 8
    assert {producer["name"].partition("/")[0] for producer in producers} == {"zebra"}
    assert all(producer["script"].startswith("src/zebra/recipes/zebra/stage") for producer in producers), producers
    assert "zebra/pretrain" in run(
        str(home / "bin/python"), "-m", "nemotron", "artifacts", "lineage", f"zebra-final-model-{config}"
    )
