"""Every command that the docs, the help pages and the scripts' docstrings show is accepted, as a dry run.

The artifacts and files that the commands read are stand-ins; `env.example.toml` is the env.toml. Which commands take
`--dry-run` is asked of the command line itself, whatever families it has: no documented command may start work here.
What else stands in a page's shell blocks is tried by another test, or listed in NOT_TRIED_HERE with the reason.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from quick_commands import make_command_line_once, pack_nothing

from nemo_runspec.artifacts import Registry
from nemo_runspec.cli import app as nemo_runspec
from nemo_runspec.cli import run_app
from nemo_runspec.config.script import load_script_config
from nemo_runspec.errors import UserError
from nemotron.cli.commands.chat import chat_help
from nemotron.cli.commands.data.curate import STEPS
from nemotron.cli.commands.nano2 import app as nano2
from nemotron.cli.commands.nano3 import app as nano3
from nemotron.cli.commands.super3 import app as super3
from nemotron.cli.main import _run, app
from nemotron.kit.commands import makers_by_artifact
from nemotron.kit.dataclass_script import read_config

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/nemotron"
# Families whose artifacts are called after a config; Nano 2's are called as its scripts alone would call them.
FAMILIES = sorted({file.parent.name for file in (SOURCE / "recipes").glob("*/steps.toml")} - {"data", "nano2"})
# The first of those that have scripts of their own.
OWN = next(family for family in FAMILIES if (SOURCE / "recipes" / family / "stage0_pretrain/train.py").is_file())
PRETRAIN = SOURCE / "recipes" / OWN / "stage0_pretrain/train.py"
BESIDE_THE_PIPE = (
    "dpo-data-own", "dpo-data-tiny", "dpo-model-tiny", "sft-data-calculator", "sft-model-calculator",
    "rl-data-curriculum",
    "long-data-tiny", "sft-data-lora", "sft-model-lora", "pretrain-model-default", "pretrain-data-phase2",
    "sft-model-default", "rl-data-published", "rl-model-default", "rlhf-model-default", "rlhf-data-default",
    "dpo-data-default", "rl-data-rlvr1", "rl-data-rlhf", "rl-model-swe2",
    "final-model-default", "qad-data-default",
    "pretrain-model-long_context", "pretrain-model-long_context_mixed",
)  # fmt: skip
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "env.example.toml",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES += [ROOT / "examples/research/program.md", *sorted(SOURCE.rglob("*.md"))]
# Their commands are of forks: which test does them.
OF_FORKS = {
    ROOT / "docs/guides/fork.md": "tests/test_fork_guide.py",
    ROOT / "examples/forks/skypilot/README.md": "tests/examples/test_skypilot_command.py",
}
PAGES = [page for page in PAGES if page not in OF_FORKS]
SCRIPTS = sorted(SOURCE.rglob("*.py"))
# A command stands on a line of its own (a fenced block, a docstring), or between backticks.
COMMAND = re.compile(r"^ *((?:nemotron|python \S*\.py) [^`\n]+)$|`((?:nemotron|python \S*\.py) [^`]+)`", re.MULTILINE)
# Placeholders (CONFIG, […], …), pipes, and words after a command that are prose.
SCHEMATIC = re.compile(r"\b[A-Z]{3,}\b|[…|]|\[-|&&")


def commands_in(text: str) -> list[str]:
    """The command lines of a page or a script, one that goes on after a backslash joined."""
    text = re.sub(r" *\\\n\s*", " ", text)
    lines = [re.split(r"  +#| {3,}", (whole or inline).strip())[0] for whole, inline in COMMAND.findall(text)]
    return [" ".join(line.split()) for line in lines if not SCHEMATIC.search(line)]


SHELL_BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("nemotron", "nemo-runspec")
# Programs of shell blocks that the tests here do not try, and which other test does, or why none can.
NOT_TRIED_HERE = {
    "cd": "the shell's own",
    "echo": "the shell's own",
    "export": "the shell's own",
    "source": "the shell's own",
    "pip install": "tests/test_installation_lines.py",
    "pip wheel": "tests/test_wheel.py",
    "python -m pytest": "the suite runs that file",
    "python -m nemotron.recipes.nano2": "tests/nemotron/recipes/nano2/test_whole.py",
    "python -m nemotron.recipes.nano2.stage0_pretrain": "tests/nemotron/recipes/nano2/test_stage0.py",
    "nemotron nano3 model export nano3-sft-model-default": "tests/nemotron/cli/test_model_export.py",
    "lm-eval": "tests/nemotron/recipes/tools/test_serve.py",
    "gym": "tests/ecosystem/test_served.py",
    "vf-eval": "tests/ecosystem/test_served.py",
    "nemo-evaluator": "tests/ecosystem/test_served.py",
    "nemo-evaluator-launcher": "tests/ecosystem/test_served.py",
    "data-designer": "tests/ecosystem/test_programs.py",
    "automodel": "needs a GPU",
    "enroot": "needs NVIDIA's registry and enroot",
    "srun": "needs a cluster with pyxis",
}


def simple_commands(text: str) -> list[tuple[str, ...]]:
    """The words of every command in shell lines: pipes and `&&` taken apart; comments, redirections and variables set
    before a command left out."""
    commands = []
    for line in re.sub(r" *\\\n\s*", " ", text).splitlines():
        if re.match(r"[A-Z_]+=\$\(.*\)$", line):  # what a variable is set to
            continue
        lexer = shlex.shlex(re.split(r"(?:^|\s)# ", line, maxsplit=1)[0], posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        words, redirects = [], False
        for token in [*lexer, ";"]:
            if token in ("|", "&&", ";"):
                commands += [tuple(words)] if words else []
                words = []
            elif token in ("<", ">", ">>") or redirects:
                redirects = not redirects
            elif words or not re.match(r"[A-Z_]+=", token):
                words.append(token)
    return commands


def tried_as_python(words: Sequence[str]) -> list[str]:
    """`torchrun … train.py key=value` as `python train.py key=value`, which checks the same; others as they are."""
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    return ["python", *words[scripts[0] :]] if words[0] == "torchrun" else list(words)


def tried_elsewhere(words: Sequence[str]) -> bool:
    """Whether NOT_TRIED_HERE has this command."""
    programs = [program.split() for program in NOT_TRIED_HERE]
    return any(list(words[: len(program)]) == program for program in programs)


def commands_in_blocks(text: str) -> list[str]:
    """The commands of a page's shell blocks that are to be tried here."""
    lines = [words for block in SHELL_BLOCK.findall(text) for words in simple_commands(block)]
    own = [tried_as_python(words) for words in lines if not tried_elsewhere(words)]
    return [shlex.join(words) for words in own if words[0] in PROGRAMS or (words[1:2] and words[1].endswith(".py"))]


# `place: command` -> file and command, of all files above. One of `nemotron` means the same wherever it stands, and so
# counts where it stands first; which script `python` finds depends on the place.
COMMANDS: dict[str, tuple[Path, str]] = {}
_tried: set[tuple[str, ...]] = set()
for _path in [*PAGES, *SCRIPTS]:
    _text = _path.read_text(encoding="utf-8")
    _blocks = commands_in_blocks(_text) if _path.suffix == ".md" else []
    _here: set[tuple[str, ...]] = set()
    for _command in [*commands_in(_text), *_blocks]:
        _words = simple_commands(_command)[0]
        if _words not in (_here if _words[0] == "python" else _tried):
            COMMANDS[f"{_path.relative_to(ROOT)}: {_command}"] = _path, _command
        _tried.add(_words)
        _here.add(_words)
# The help of `chat` is put together for each family.
for _models in (nano2.MODELS, nano3.MODELS, super3.MODELS):
    COMMANDS |= {f"chat --help: {command}": (SOURCE / "cli", command) for command in commands_in(chat_help(_models))}


def runs_steps(words: list[str]) -> bool:
    """Whether a command runs steps of a recipe: these take all their words themselves, `--dry-run` among them."""
    command = typer.main.get_command(app)
    for word in words[1:]:
        sub_commands = getattr(command, "commands", {})
        if word not in sub_commands:
            break
        command = sub_commands[word]
    takes_any = bool(command.context_settings.get("ignore_unknown_options"))
    return takes_any and words[1] != "lm-eval"  # whose words are those of the harness


def accepts(script: Path, words: list[str]) -> bool:
    """Whether a script of Nano 2 takes these flags."""
    module = ".".join(script.relative_to(SOURCE.parent).with_suffix("").parts)
    try:
        read_config(importlib.import_module(module).Config, words)
    except SystemExit:
        return False
    return True


class Started(BaseException):
    """Raised where a script would start."""


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry that has what the commands read; they only look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)  # of hundreds of versions it would take twenty seconds
        return published_stand_ins(tmp_path_factory)


def published_stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The registry, filled."""
    root = tmp_path_factory.mktemp("artifacts")
    payload = tmp_path_factory.mktemp("payload")
    (payload / "evaluation").mkdir()
    (payload / "evaluation" / "set.jsonl").touch()
    for name in ("tokenizer.json", "model.safetensors"):
        (payload / name).touch()
    (payload / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    registry = Registry(root)
    record = {
        "type": "Model",
        # whatever a command reads under the name
        "types": ["Checkpoint", "PretrainBlend", "SFTPack", "RLPrompts", "Preferences"],
        "fields": {"train_path": "art://.", "valid_path": "art://.", "tokenizer_path": "art://."},
        "producer": {"name": "nano3/sft"},
        "metrics": {},
        "inputs": {},
        "sources": [{"name": "x"}],
    }
    kinds = [
        f"{family}-{stage}-{kind}"
        for family in FAMILIES
        for stage in ("pretrain", "sft", "rl", "genrm", "rlhf", "final")
        for kind in ("data", "model", "results")
    ]
    of_steps = [f"{kind}-{config}" for kind in kinds for config in ("smoke", "tiny", "small")]
    for name in of_steps:
        (payload / "content").write_text(name)
        for _ in range(2):  # examples name versions 1 and 2
            registry.publish(name, payload, record, run_files={"config.yaml": b"{}"})
    for name in (
        "my-model",
        *(
            f"nano2-{stage}-{kind}"
            for stage in ("pretrain", "sft", "rl", "compressed")
            for kind in ("data", "model", "results")
        ),
        "nano2-long-model",
        "super3-pretrain-model-tiny-phase1_retained",
        *(f"tokenize-data-{family}_pretrain" for family in FAMILIES),
        "tokenize-data-own",
        "my-phase-2-blend",
        "without-mine",
        "without-mine-model",
        "my-blend",
        "nano2-rl-model-12b",
        "nano2-compressed-data-9b",
        "nano2-pruned-model-9b",
        "nano2-distil-data-9b",
        *(f"pack-data-{family}_sft_256k" for family in FAMILIES),
        "nano2-pruned-model",
        "my-chats",
        "my-tuned-model",
        "tools-sft",
        "tools-rl",
        "tools-sft-model",
        "other-judge",
        *(f"{family}-{name}" for family in FAMILIES for name in BESIDE_THE_PIPE),
        *(name for name in makers_by_artifact() if "-tiny" in name and name not in of_steps),
    ):
        registry.publish(name, payload, record)
    for step in ("", *(f"{step}-" for step in STEPS)):
        for config in ("tiny", "default"):
            registry.publish(f"nemotron_cc-{step}data-{config}", payload, record)
    return root


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a user's own files to run in."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "notes/note.md",
        "notes/note.jsonl",
        "chats.json",
        "chats.jsonl",
        "halves.py",
        "quiz.jsonl",
        "passages.jsonl",
        "judges.yaml",
        "pairs.jsonl",
        "comparisons.jsonl",
        "tasks.jsonl",
        "train.jsonl",
        "my-folder/note.md",
        "benchmarks/a.jsonl",
        "my-crawl/a.warc.gz",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("a note\n" if name.endswith(".md") else "")
    Path("examples").symlink_to(ROOT / "examples")
    Path("checkpoints").mkdir()
    Path("my-tokenizer").mkdir()
    Path("my-tokenizer/tokenizer.json").touch()
    for folder in ("my-export", "my-model"):
        Path(folder).mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
            Path(folder, name).write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "my-model"))
    origin = {"artifact": f"x:1@{'0' * 64}", "is_base": True, "num_steps": 1, "tokens": None, "reasoning": None}
    Path("my-export", "nemotron.json").write_text(json.dumps({**origin, "sources": []}))
    monkeypatch.setenv("MY_KEY", "x")
    for run in [f"{family}/{stage}/tiny-0123456789" for family in FAMILIES for stage in ("pretrain", "sft", "rl")]:
        (tmp_path / "output" / run).mkdir(parents=True)
        (tmp_path / "output" / run / "run.json").write_text('{"state": "finished"}')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(artifacts))
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(ROOT / "env.example.toml"))

    def replace_process(*_: object) -> None:
        raise Started

    monkeypatch.setattr("os.execve", replace_process)
    make_command_line_once(monkeypatch)
    pack_nothing(monkeypatch)
    monkeypatch.setattr("nemo_runspec.fingerprint.code_of", lambda *_: {})  # of runs that never start

    class Popen(subprocess.Popen[str]):
        def __init__(self, words: Sequence[str], **options: Any) -> None:
            if words[0] == sys.executable:
                raise Started
            super().__init__(words, **options)

    monkeypatch.setattr("subprocess.Popen", Popen)
    # `watch` looks again and again.
    monkeypatch.setattr("nemotron.cli.commands.artifacts.time", SimpleNamespace(sleep=replace_process))
    monkeypatch.setattr("nemotron.cli.commands.model._check_megatron_bridge", lambda: None)
    # Up to there a submission is checked and put together; NeMo-Run is an extra, and tests/cluster has the rest.
    monkeypatch.setattr("nemo_runspec.execution.slurm.load_nemo_run", replace_process)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 30
    assert len([place for place in COMMANDS if place.startswith("README.md")]) > 8


def test_a_command_goes_on_after_a_backslash() -> None:
    page = "```bash\nnemotron nano3 pretrain -c tiny \\\n    optimizer.lr=1e-3 \\\n    --dry-run   # try\n```\n"
    assert commands_in(page) == ["nemotron nano3 pretrain -c tiny optimizer.lr=1e-3 --dry-run"]


def test_a_shell_line_is_taken_apart() -> None:
    text = "A=b nemotron x 'y=[1, 2]' | head -1 > out.txt && nemotron z < in.txt  # why\nA=$(pwd; ls)\n"
    text += "nemotron w \\\n  'k=\"#\"'\n"
    assert simple_commands(text) == [
        ("nemotron", "x", "y=[1, 2]"), ("head", "-1"), ("nemotron", "z"), ("nemotron", "w", 'k="#"'),
    ]  # fmt: skip


SHELL_WORDS = {
    page.relative_to(ROOT): [
        words for block in SHELL_BLOCK.findall(page.read_text()) for words in simple_commands(block)
    ]
    for page in PAGES
    if page.suffix == ".md"
}


def test_no_page_is_left_out() -> None:
    folders = ("docs", "src", "examples", "benchmarks")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    with_commands = {page for page in pages if SHELL_BLOCK.search(page.read_text(encoding="utf-8"))}
    assert with_commands - set(PAGES) == set(OF_FORKS)
    assert all((ROOT / test).is_file() for test in OF_FORKS.values())


@pytest.mark.parametrize("page", SHELL_WORDS, ids=str)
def test_nothing_in_a_shell_block_is_left_untried(page: Path) -> None:
    untried = [
        words
        for words in SHELL_WORDS[page]
        if words not in _tried and tuple(tried_as_python(words)) not in _tried
        if words[0] != "make" and not tried_elsewhere(words)
    ]
    assert untried == [], "try it here, or say in NOT_TRIED_HERE who does, or why nobody can"


def test_the_list_of_what_is_not_tried_here_is_true() -> None:
    shown = [words for lines in SHELL_WORDS.values() for words in lines]
    for program, reason in NOT_TRIED_HERE.items():
        start = tuple(program.split())
        assert any(words[: len(start)] == start for words in shown), f"no page shows {program}"
        assert not re.match(r"tests/", reason) or (ROOT / reason.partition(" ")[0]).is_file(), reason


def test_the_targets_and_tests_that_a_page_names_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in [words for lines in SHELL_WORDS.values() for words in lines]:
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        if words[:3] == ("python", "-m", "pytest"):
            assert all((ROOT / name).exists() for name in words[3:]), words


def test_a_wrong_option_in_a_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "nemotron nano3 pretrain -c tiny optimizer.lr=fast | tail\nnemotron artifacts list --no-such-option"
    planted = commands_in_blocks(f"# A page\n\n```bash\n{wrong}\n```\n")
    assert len(planted) == 2
    for command in planted:
        with pytest.raises(UserError):
            accept(ROOT / "docs/planted.md", command, monkeypatch)
    with pytest.raises(AssertionError):
        SHELL_WORDS[Path("planted")] = [("nemotronn", "nano3", "pipe")]
        test_nothing_in_a_shell_block_is_left_untried(Path("planted"))
    del SHELL_WORDS[Path("planted")]


def test_what_runs_steps_is_asked_of_the_command_line() -> None:
    steps = ("nano3 pipe", "nano3 data prep sft -c tiny", "nano3 rl", "nano3 rl rlvr", "data curate", "data curate pii")
    assert all(runs_steps(f"nemotron {command}".split()) for command in steps)
    others = ("nano3 chat", "nano3 model export x", "models show", "artifacts list", "data inspect x", "lm-eval x")
    assert not any(runs_steps(f"nemotron {command}".split()) for command in others)


def test_a_command_without_dry_run_does_not_start_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["nemotron", "nano3", "pretrain", "-c", "tiny"])
    with pytest.raises(Started):
        _run()


def marks(place: str) -> list[pytest.MarkDecorator]:
    """A pipe that is submitted makes a bundle for each of its steps."""
    is_submitted = any(f" --{mode} " in place for mode in ("run", "batch")) and "--dry-run" not in place
    return [pytest.mark.slow] if " pipe " in place and is_submitted else []


@pytest.mark.parametrize("place", [pytest.param(place, marks=marks(place), id=place) for place in COMMANDS])
def test_a_documented_command_is_accepted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(*COMMANDS[place], monkeypatch)


def accept(path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless the command line, or the script, takes what the page at `path` shows."""
    words = shlex.split(command)
    if words[0] == "nemo-runspec":
        name = next(word for word in words if word.endswith(".py"))  # from the clone, or as Nano 2's, from its stage
        places = [ROOT / name, *(SOURCE / "recipes/nano2").rglob(name)]
        script = next((place for place in places if place.is_file()), None)
        config = [] if script else ["-c", "tiny"]
        words = [str(script or PRETRAIN) if word == name else word for word in words]
        with suppress(Started):  # what submits
            assert (
                run_app(nemo_runspec, words[0], [*words[1:], *config, *(["--dry-run"] if words[1] == "run" else [])])
                == 0
            )
        return
    if words[0] == "python":
        if "nano2" in path.relative_to(ROOT).parts and not (ROOT / words[1]).is_file():
            end = next((i for i, word in enumerate(words) if word in "<>"), len(words))
            folder = path.parent if path.suffix == ".py" else SOURCE / "recipes/nano2"
            assert any(accepts(script, words[2:end]) for script in folder.rglob(words[1]))  # a page is of all stages
            return
        beside = path.parent / words[1] if path.suffix == ".py" else ROOT / words[1]
        script = beside if beside.is_file() else PRETRAIN
        assert words[1] == "train.py" or beside.is_file()
        if "# /// script" in script.read_text(encoding="utf-8"):  # else a tool with a command line of its own
            load_script_config(script, words[2:])
        return
    # `nemotron nano3 sft` is its name, not a command line; an option of `nemotron` itself may change the user's shell.
    if words[1].startswith("-") or all(re.fullmatch("[A-Za-z][A-Za-z_-]*", word) or word in FAMILIES for word in words):
        words.append("--help")
    elif runs_steps(words):
        words.append("--dry-run")
    monkeypatch.setattr("sys.argv", words)
    try:
        assert _run() == 0
    except Started:
        submits = any(word in ("--run", "--batch") for word in words)
        assert submits or not runs_steps(words)  # a tool takes this process's place
