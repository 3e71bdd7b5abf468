"""docs/guides/fork.md, done in a copy of the project and in one of its own: as many files as it says, and its commands
run.

The page is the test: code blocks become files or are put where the line before them says, `bash` blocks are run.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemotron.recipes.tools.fork import Options
from nemotron.recipes.tools.fork import main as make_fork

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/guides/fork.md"
BLOCK = re.compile(r"(?P<before>[^\n]*)\n?\n```(?P<language>\w+)\n(?P<text>.*?)```\n", re.DOTALL)
NEW = re.compile(r"`(?P<path>[^`]+)`, (?:new|in the folder that you work in):$")
EDIT = re.compile(r"In `(?P<path>[^`]+)`, (?P<how>above|in place of) `(?P<line>[^`]+)`:$")

# SkyPilot with one machine, the folder `machine` beside this program: `launch` copies the bundle there and runs the
# task in it, `logs` prints what the task printed and ends as SkyPilot's own does, `down` takes the machine away.
SKY = f"""#!{sys.executable}
import os, shutil, subprocess, sys, yaml
from pathlib import Path
machine = Path(__file__).with_name("machine")
if sys.argv[1] == "launch":
    task = yaml.safe_load(Path(sys.argv[-1]).read_text())
    workdir = shutil.copytree(task["workdir"], machine / "sky_workdir")
    place = {{"NODE_RANK": "0", "NUM_NODES": "1", "TASK_ID": "sky-1", "NODE_IPS": "127.0.0.1"}}
    variables = {{"PATH": "/usr/bin:/bin", "HOME": str(machine), "OMP_NUM_THREADS": "1"}}
    variables |= {{f"SKYPILOT_{{name}}": value for name, value in place.items()}}
    with (machine / "log").open("w") as log:
        job = subprocess.run(["bash", "-c", task["run"]], cwd=workdir, env=variables, stdout=log, stderr=log)
    (machine / "code").write_text("100" if job.returncode else "0")
elif sys.argv[1] == "logs":
    print((machine / "log").read_text())
    sys.exit(int((machine / "code").read_text()))
elif sys.argv[1] == "down":
    shutil.rmtree(machine)
"""


class Fork:
    """A copy of the project, a folder to work in, and what a section of the page has done so far."""

    not_here = "In a fork"  # what stands above commands that are for the other kind

    def __init__(self, root: Path) -> None:
        self.project, self.work = root / "project", root / "work"
        self.make_project()
        (self.work / "my-folder").mkdir(parents=True)
        long = (
            "In plot {} of the garden they planted {} rows of beans, of which most came up before the rain in May did."
        )
        documents = ["A short one.", *(long.format(number, number * 7) for number in range(40))]
        lines = [json.dumps({"text": document}) for document in documents]
        (self.work / "my-folder" / "a.jsonl").write_text("\n".join(lines))
        dialogs = [["Which plot?", f"Plot {number}.", "How many rows?", f"{7 * number} rows."] for number in range(40)]
        (self.work / "dialogs.jsonl").write_text("\n".join(json.dumps({"dialog": dialog}) for dialog in dialogs))
        self.registry = Registry(self.work / "output" / "artifacts")
        self.shared = root / "shared"  # the folder that is called /shared on the page
        self.before = self.files()

    def make_project(self) -> None:
        for name in ("src", "examples"):
            shutil.copytree(ROOT / name, self.project / name, ignore=shutil.ignore_patterns("__pycache__"))

    def in_its_names(self, text: str) -> str:
        """A section of the page as it reads for this project."""
        return text

    def files(self) -> dict[str, bytes]:
        """Every file of the project."""
        paths = (path for path in self.project.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(self.project).as_posix(): path.read_bytes() for path in paths}

    def changed(self) -> set[str]:
        """The files that are new or other than in the project."""
        return {name for name, content in self.files().items() if self.before.get(name) != content}

    def run(self, command: str, cwd: Path | None = None) -> str:
        """Run a command line of the page with the code of the copy; what it printed."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RUNSPEC_")}
        sources = f"{self.project / 'src'}:{ROOT / 'src'}"
        environment |= {"PYTHONPATH": sources, "NO_COLOR": "1", "COLUMNS": "200", "RUFF_NO_CACHE": "true"}
        modules = {"nemotron": "nemotron", "mymodel": "mymodel", "ruff": "ruff"}
        program = rf"^({'|'.join(modules)}) "
        line = re.sub(program, lambda name: f"{sys.executable} -m {modules[name[1]]} ", command, flags=re.MULTILINE)
        done = subprocess.run(
            ["bash", "-ec", line], cwd=cwd or self.work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def do(self, title: str, *, files_alone: bool = False) -> dict[str, str]:
        """Do a section of the page, or what it does to files alone; command -> what it printed."""
        section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
        section = self.in_its_names(re.sub(r"(?<=[\" ])/shared\b", str(self.shared), section))
        printed: dict[str, str] = {}
        for block in BLOCK.finditer(section):
            before, text = block["before"], block["text"]
            if before.startswith(self.not_here):
                continue
            if match := NEW.search(before):
                path = (self.project if match["path"].startswith("src/") else self.work) / match["path"]
                assert not path.exists()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            elif match := EDIT.search(before):
                path = self.project / match["path"]
                lines = path.read_text().splitlines(keepends=True)
                assert lines.count(f"{match['line']}\n") == 1, match["line"]
                at = lines.index(f"{match['line']}\n")
                lines[at : at + (match["how"] == "in place of")] = [text]
                path.write_text("".join(lines))
            elif block["language"] == "bash" and text.startswith(("nemotron ", "mymodel ")):
                for command in () if files_alone else text.splitlines():
                    printed[command] = self.run(command)
            elif block["language"] == "bash":
                self.run(text, self.project)
            else:
                assert block["language"] == "json", f"what is to be done with this? {before}"
        return printed


class ForkOfItsOwn(Fork):
    """The same for a project that `nemotron fork` made, in the names that the page gives for one."""

    not_here = "In a clone"

    def make_project(self) -> None:
        self.project.mkdir(parents=True)
        make_fork(Options("nano3", "mymodel", str(self.project)))

    def in_its_names(self, text: str) -> str:
        for ours, theirs in (
            ("src/nemotron/recipes/nano3", "src/mymodel/recipes/mymodel"),
            ("src/nemotron/cli/commands/nano3", "src/mymodel/commands"),
            ("nemotron nano3", "mymodel"),
            (r"(?<!'s/)nano3", "mymodel"),  # but in `sed`, which does the same
            ("CLONE", str(ROOT)),
        ):
            text = re.sub(ours, theirs, text)
        return text


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    return Fork(tmp_path)


@pytest.fixture
def fork_of_its_own(tmp_path: Path) -> ForkOfItsOwn:
    return ForkOfItsOwn(tmp_path)


def lint(fork: Fork, *, after_format: bool = False) -> None:
    """What `make lint` says of a fork: ruff on the files that it changed, and the comparison of all command files.

    `after_format`: after `make format`, where the page asks for it.
    """
    environment = os.environ | {"PYTHONPATH": str(fork.project / "src")}
    files = [str(fork.project / name) for name in sorted(fork.changed()) if name.endswith(".py")]
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--no-cache", "--config", str(ROOT / "pyproject.toml")]
    make_format = [[*ruff, "check", "--fix", *options, *files], [*ruff, "format", *options, *files]]
    for command in (
        *(make_format if after_format else ()),
        [*ruff, "check", *options, *files],
        [*ruff, "format", "--check", *options, *files],
        [sys.executable, str(ROOT / "tests/lint_commands.py")],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_format_for_sft(fork: Fork) -> None:
    printed = fork.do("A format of your own for SFT")
    assert fork.changed() == {"src/nemotron/kit/chat_records.py"}
    assert len(fork.changed()) <= 4
    prepared = printed["nemotron nano3 data prep sft -c smoke 'sources=[dialogs.jsonl]'"]
    assert re.search(r"^ *dialogs +read +40$", prepared, re.MULTILINE), prepared
    lint(fork)


@pytest.mark.slow
def test_a_data_stage(fork: Fork) -> None:
    printed = fork.do("A data stage of your own")
    assert len(fork.changed()) == 5
    plan = printed["nemotron nano3 pipe -c smoke --dry-run"]
    assert re.findall(r"^\[\d+/11\] ([\w-]+)", plan, re.MULTILINE)[:3] == ["select", "data-pretrain", "pretrain"]
    selected = fork.registry.resolve("nano3-select-data-smoke").record["metrics"]["table"]
    assert [selected["read"]["documents"], selected["kept"]["documents"]] == [41, 40]
    assert [sample["text"] for sample in selected["samples"]["too few words"]] == ["A short one."]
    beside_others, alone = (fork.registry.resolve(f"nano3-pretrain-data-smoke:{number}") for number in (1, 2))
    blends = [version.record["metrics"]["blend"] for version in (beside_others, alone)]
    assert [phase["weights"]["selected"] for blend in blends for phase in blend] == [0.3, 0.3, 1.0, 1.0]
    assert [set(phase["weights"]) for phase in blends[1]] == [{"selected"}, {"selected"}]
    record = alone.record
    assert record["inputs"]["data"].startswith("nano3-select-data-smoke:1@")
    assert record["sources"] == []  # what it read is that artifact's, which has the raw source
    lineage = printed["nemotron artifacts lineage nano3-pretrain-data-smoke"]
    assert "nano3-select-data-smoke:1" in lineage and "my-folder/a.jsonl" in lineage
    # Another size, as the page says.
    configs = fork.project / "src/nemotron/recipes/nano3/stage0_pretrain/config"
    (configs / "select/tiny.yaml").write_text((configs / "select/smoke.yaml").read_text().replace("-smoke", "-tiny"))
    data_line, sources_line = re.findall(
        r"^(?:  data|sources):.*\n", (configs / "data_prep/smoke.yaml").read_text(), re.M
    )
    tiny = (configs / "data_prep/tiny.yaml").read_text()
    tiny = re.sub(r"^sources: \[\].*\n", lambda _: sources_line, tiny, flags=re.MULTILINE)
    tiny = tiny.replace("run:\n", "run:\n" + data_line.replace("-smoke", "-tiny"), 1)
    (configs / "data_prep/tiny.yaml").write_text(tiny)
    plan = fork.run("nemotron nano3 pipe -c tiny --dry-run")
    assert "writes    nano3-select-data-tiny" in plan and "reads     data = nano3-select-data-tiny" in plan
    # A function that keeps nothing is told so, and nothing is published.
    with pytest.raises(AssertionError, match=r"none of 41 documents is left\s+most frequent reason: too few words"):
        fork.run("nemotron nano3 data select -c smoke min_words=1000")
    assert fork.registry.versions("nano3-select-data-smoke") == [1]
    # Its sources have the keys of every other data preparation, and records that cannot be read are counted.
    renamed = [{"body": "six words of a long document"}, {"text": "no body here"}] * 3
    (fork.work / "bodies.jsonl").write_text("\n".join(map(json.dumps, renamed)))
    source = "{name: mine, paths: [bodies.jsonl], columns: {text: body}, on_error: skip}"
    fork.run(f"nemotron nano3 data select -c smoke 'sources=[{source}]'")
    table = fork.registry.resolve("nano3-select-data-smoke").record["metrics"]["table"]
    assert table["kept"]["documents"] == table["dropped"]["not read: field is missing"]["documents"] == 3
    assert "Keep the documents that a function accepts" in fork.run("nemotron nano3 data --help")
    assert "Steps: select, data-pretrain" in fork.run("nemotron nano3 pipe --help")
    shutil.rmtree(fork.work / "output")
    with pytest.raises(AssertionError, match="make it: nemotron nano3 data select -c smoke"):
        fork.run("nemotron nano3 data prep pretrain -c smoke")
    lint(fork)


@pytest.mark.slow
def test_a_project(fork: Fork) -> None:
    printed = fork.do("A project of your own")["nemotron fork nano3 mymodel"]
    assert all(f"`{command}`" in PAGE.read_text() for command in printed.splitlines()[:3])
    assert fork.changed() == set() and (fork.work / "mymodel/src/mymodel/commands/sft.py").is_file()


@pytest.mark.slow
def test_an_environment_and_a_reward(fork: Fork) -> None:
    shown = fork.do("An environment and a reward of your own")["nemotron runs show nano3/rl"]
    assert fork.changed() == set()  # one file, which is the user's
    assert "reward_sorting" in shown and "reward_math" in shown and "reward_code_generation" not in shown
    environment = runpy.run_path(str(fork.work / "sorting.py"))["Sorting"]()
    spec = {"right": ["1", "20", "33", "40"]}
    rewards = [environment.verify_answer(spec, text) for text in ("1 20 33 40", "1, 20, 40, 33", "40 33 1 20", "1 20")]
    assert rewards == [1.0, 0.5, 0.0, False]
    # The other section in the same folder: its model is there.
    before = set(fork.work.glob("output/nano3/rl/*"))
    printed = fork.do("A reward for all environments")
    assert {Path(name).name for name in fork.changed()} == {"schema.py", "rlvr.py"}
    runs = [run / "metrics.jsonl" for run in set(fork.work.glob("output/nano3/rl/*")) - before]
    first = sorted(json.loads(run.read_text().splitlines()[1])["reward"] for run in runs)
    shown = "\n".join(printed.values())
    # Both runs draw the same answers in their first step. The longest of them lose half.
    assert len(first) == 2 and first[1] / 2 <= first[0] < first[1], shown
    lint(fork)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH with the stand-in for `sky`, whose machine has torch."""
    bin_folder, activate = tmp_path / "bin", tmp_path / "shared" / "venv" / "bin" / "activate"
    bin_folder.mkdir()
    (bin_folder / "sky").write_text(SKY)
    (bin_folder / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder), prepend=os.pathsep)
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    return bin_folder


@pytest.mark.slow
def test_another_launcher_for_one_command(fork: Fork, bin_folder: Path) -> None:
    """The submission goes to `sky`, and what that starts on a machine trains and publishes where this one looks."""
    printed = fork.do("Another launcher for one command")
    assert fork.changed() == {"src/nemotron/cli/commands/nano3/pretrain.py"}
    assert "sky launch" in printed["nemotron nano3 pretrain -c smoke --run sky --dry-run"]
    assert "art://nano3-pretrain-model-smoke:1" in printed["nemotron nano3 pretrain -c smoke --run sky"]
    assert not (bin_folder / "machine").exists()
    registry = Registry(fork.shared / "artifacts")
    model = registry.resolve("nano3-pretrain-model-smoke").record
    assert model["inputs"]["data"].startswith("nano3-pretrain-data-smoke:1@")
    assert fork.registry.names() == []


@pytest.mark.slow
def test_a_family(fork: Fork) -> None:
    printed = fork.do("A family of your own")
    changed = fork.changed()
    copies = ("src/nemotron/recipes/mine/", "src/nemotron/cli/commands/mine/")
    assert {name for name in changed if not name.startswith(copies)} == {"src/nemotron/cli/main.py"}
    before = fork.before["src/nemotron/cli/main.py"].decode().splitlines()
    after = (fork.project / "src/nemotron/cli/main.py").read_text().splitlines()
    assert len(before) == len(after) and sum(a != b for a, b in zip(before, after, strict=True)) == 1
    plan = printed["nemotron mine pipe -c smoke --dry-run"]
    assert "writes    mine-rl-model-smoke" in plan and "nano3" not in plan
    assert fork.registry.names() == ["mine-pretrain-data-smoke"]
    lint(fork, after_format=True)


@pytest.mark.slow
def test_a_family_of_configs_alone(fork: Fork) -> None:
    printed = fork.do("A family of configs alone")
    copies = ("src/nemotron/recipes/mine/", "src/nemotron/cli/commands/mine/")
    assert {name for name in fork.changed() if not name.startswith(copies)} == {"src/nemotron/cli/main.py"}
    plan = printed["nemotron mine pipe -c smoke --dry-run"]
    assert "writes    mine-qad-model-smoke" in plan and "lightning35" not in plan
    lint(fork, after_format=True)


@pytest.mark.slow
def test_what_the_copied_docs_show_starts_nothing(fork: Fork) -> None:
    """The test of documented commands takes those of a renamed copy as it takes ours: each is a dry run."""
    fork.do("A family of your own")
    for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "env.example.toml", "pyproject.toml"):
        shutil.copyfile(ROOT / name, fork.project / name)
    for name in ("docs", "tests"):
        shutil.copytree(ROOT / name, fork.project / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider tests/test_commands_in_docs.py -k mine"
    printed = fork.run(command, fork.project)
    assert re.search(r"^(\d+) passed", printed, re.MULTILINE), printed
    assert not list(fork.project.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_project_of_its_own_gets_a_data_stage(fork_of_its_own: ForkOfItsOwn) -> None:
    printed = fork_of_its_own.do("A data stage of your own")
    assert len(fork_of_its_own.changed()) == 5
    assert "mymodel-select-data-smoke:1" in printed["nemotron artifacts lineage mymodel-pretrain-data-smoke"]
    assert {name.partition("-")[0] for name in fork_of_its_own.registry.names()} == {"mymodel"}


def test_a_project_of_its_own_has_the_places_for_a_reward(fork_of_its_own: ForkOfItsOwn) -> None:
    fork_of_its_own.do("A reward for all environments", files_alone=True)
    assert {Path(name).name for name in fork_of_its_own.changed()} == {"schema.py", "rlvr.py"}


@pytest.mark.slow
def test_a_project_of_its_own_gets_another_launcher(fork_of_its_own: ForkOfItsOwn, bin_folder: Path) -> None:
    """What is submitted is the fork's recipe, not the cookbook's."""
    printed = fork_of_its_own.do("Another launcher for one command")
    assert fork_of_its_own.changed() == {"src/mymodel/commands/pretrain.py"}
    assert "mymodel/pretrain" in printed["mymodel pretrain -c smoke --run sky --dry-run"]
    assert "art://mymodel-pretrain-model-smoke:1" in printed["mymodel pretrain -c smoke --run sky"]
    assert "nano3" not in (fork_of_its_own.project / "src/mymodel/commands/pretrain.py").read_text()
    assert not (bin_folder / "machine").exists()
