"""What travels: which files, how it is told apart, and that it runs where the project is not installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import nemo_runspec
from nemo_runspec import packaging
from nemo_runspec.errors import UserError
from nemo_runspec.packaging import BundlePlan, PackedCode, pack_code, plan_bundle
from nemo_runspec.runspec import Runspec, parse

Write = Callable[[str, str], Path]
ROOT = Path(__file__).resolve().parents[2]

BLOCK = """
# /// script
# [tool.runspec]
# schema = "1"
# name = "demo/train"
# ///
"""


@pytest.fixture(autouse=True)
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNSPEC_ENV_FILE", "RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_OUTPUT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.chdir(tmp_path)


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "protocol.file.allow=always")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_all(folder: Path) -> None:
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")


def travelling(plan: BundlePlan) -> list[str]:
    """Paths below project/."""
    return [path.removeprefix("project/") for path in plan.files if path.startswith("project/")]


def packed(script: Path) -> PackedCode:
    with tempfile.TemporaryDirectory() as folder:
        return pack_code(plan_bundle(parse(script)), Path(folder))


@pytest.fixture
def repo(write: Write, tmp_path: Path) -> Path:
    """A repository of somebody else's: a script, a package, and what must stay at home."""
    write("repo/train.py", BLOCK)
    write("repo/src/mine/__init__.py", "")
    write("repo/src/mine/model.py", "x = 1\n")
    write("repo/.gitignore", "*.bin\n/data/\n")
    commit_all(tmp_path / "repo")
    write("repo/weights.bin", "ignored")
    write("repo/data/rows.txt", "ignored")
    write("repo/output/run/log", "what runs write")
    write("repo/env.toml", "")
    return tmp_path / "repo"


COMMITTED = [".gitignore", "src/mine/__init__.py", "src/mine/model.py", "train.py"]


def test_the_code_as_it_is_travels_and_nothing_else(repo: Path, write: Write) -> None:
    plan = plan_bundle(parse(repo / "train.py"))
    assert travelling(plan) == COMMITTED
    assert plan.uncommitted == ()
    assert plan.commit == git(repo, "rev-parse", "HEAD")
    assert plan.script == "project/train.py"
    assert plan.python_path == ("project/src", "runspec")

    write("repo/src/mine/model.py", "x = 2\n")
    write("repo/src/mine/new \N{SNOWMAN}.py", "")
    (repo / ".gitignore").unlink()
    write("repo/.git/info/exclude", "*.bin\n/data/\n")
    plan = plan_bundle(parse(repo / "train.py"))
    assert travelling(plan) == [*COMMITTED[1:3], "src/mine/new \N{SNOWMAN}.py", "train.py"]
    assert plan.uncommitted == (".gitignore (deleted)", "src/mine/model.py", "src/mine/new \N{SNOWMAN}.py")
    assert plan.commit == git(repo, "rev-parse", "HEAD") + "-dirty"
    git(repo, "add", "-A")  # staged, not committed: the same
    assert plan_bundle(parse(repo / "train.py")) == plan
    git(repo, "mv", "train.py", "src/train.py")
    changed = plan_bundle(parse(repo / "src/train.py")).uncommitted
    assert changed == (*plan.uncommitted, "src/train.py", "train.py (deleted)")


def test_folders_for_runs_artifacts_and_jobs_stay_here(
    repo: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/log", "store/a/1/x", "jobs/1/launch.sh", "profiles/p.toml"):
        write(f"repo/{name}", "")
    assert len(travelling(plan_bundle(parse(repo / "train.py")))) == len(COMMITTED) + 4
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(repo / "runs"))
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(repo / "store"))
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(repo / "profiles/p.toml"))
    plan = plan_bundle(parse(repo / "train.py"), leave_out=[repo / "jobs"])
    assert travelling(plan) == COMMITTED
    assert plan.uncommitted == ()
    write("repo/runs/train.py", BLOCK)
    with pytest.raises(UserError, match=r"runs/train\.py: lies where runs write"):
        plan_bundle(parse(repo / "runs/train.py"))


def test_the_digest_is_of_paths_contents_and_executable_bits(repo: Path, tmp_path: Path, write: Write) -> None:
    def digest(folder: Path) -> str:
        return packed(folder / "train.py").digest

    first = digest(repo)
    # As the docstring says, computed here from the tree alone.
    whole = hashlib.sha256()
    for path in COMMITTED:
        content = hashlib.sha256((repo / path).read_bytes()).hexdigest()
        whole.update(f"{path}\0-\0{content}\n".encode())
    assert first == whole.hexdigest()

    # Another machine: cloned elsewhere, other times, another umask, no commit in common, nothing ignored yet there.
    git(tmp_path, "clone", "-q", str(repo), "clone")
    assert digest(tmp_path / "clone") == first
    shutil.rmtree(tmp_path / "clone/.git")
    git(tmp_path / "clone", "init", "-q")
    (tmp_path / "clone/train.py").chmod(0o600)
    assert digest(tmp_path / "clone") == first
    assert plan_bundle(parse(tmp_path / "clone/train.py")).commit is None

    seen = {first}
    (repo / "train.py").chmod(0o755)
    seen.add(digest(repo))
    write("repo/src/mine/model.py", "x = 3\n")
    seen.add(digest(repo))
    (repo / "src/mine/model.py").rename(repo / "src/mine/other.py")
    seen.add(digest(repo))
    assert len(seen) == 4


def test_what_comes_from_nemo_runspec_is_not_in_the_digest(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = packed(repo / "train.py")
    copy = tmp_path / "site/nemo_runspec"
    shutil.copytree(Path(nemo_runspec.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(nemo_runspec, "__file__", str(copy / "__init__.py"))
    (copy / "more.py").write_text("x = 1\n")
    second = packed(repo / "train.py")
    assert (second.digest, second.size) == (first.digest, first.size + len("x = 1\n"))


# Links


def test_a_link_is_replaced_by_what_it_leads_to(repo: Path) -> None:
    (repo / "alias.py").symlink_to("src/mine/model.py")
    (repo / "pkg").symlink_to(repo / "src" / "mine")  # absolute, and to a folder
    (repo / "src/mine/again.py").symlink_to("../../alias.py")
    plan = plan_bundle(parse(repo / "train.py"))
    contents = {path: source.read_text() for path, source in plan.files.items()}
    expected = ["alias.py", "pkg/__init__.py", "pkg/again.py", "pkg/model.py", "src/mine/again.py"]
    assert sorted(set(travelling(plan)) - set(COMMITTED)) == expected
    assert {contents[f"project/{path}"] for path in expected if not path.endswith("__init__.py")} == {"x = 1\n"}
    assert plan.uncommitted == ("alias.py", "pkg", "src/mine/again.py")
    pack_code(plan, repo.parent / "b")
    assert not [path for path in (repo.parent / "b").rglob("*") if path.is_symlink()]


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("out", "../elsewhere.txt", r"repo/out: a symbolic link that leads out of the code that travels: .*elsewhere"),
        ("src/out", "/usr", r"repo/src/out: a symbolic link that leads out of the code that travels: /usr"),
        ("none", "nothing", r"repo/none: a symbolic link that leads nowhere: nothing"),
        ("self", "self", r"repo/self: a symbolic link that leads nowhere"),
        ("src/up", "..", r"a symbolic link that leads back to itself"),
        ("weights", "weights.bin", r"repo/weights: a symbolic link to .*weights\.bin, which does not travel"),
        ("runs", "output", r"repo/runs: a symbolic link to .*output, which does not travel"),
    ],
)
def test_a_link_that_leads_elsewhere_is_refused(repo: Path, write: Write, link: str, target: str, message: str) -> None:
    write("elsewhere.txt", "")
    (repo / link).symlink_to(target)
    with pytest.raises(UserError, match=message):
        plan_bundle(parse(repo / "train.py"))
    write("repo/.git/info/exclude", f"/{link}\n")
    assert travelling(plan_bundle(parse(repo / "train.py"))) == COMMITTED


# Kinds of repositories


def test_submodules_and_clones_inside_travel_too(repo: Path, tmp_path: Path, write: Write) -> None:
    write("lib/__init__.py", "")
    write("lib/.gitignore", "*.log\n")
    commit_all(tmp_path / "lib")
    git(repo, "submodule", "add", "-q", str(tmp_path / "lib"), "vendored/lib")
    commit_all(repo)
    git(repo, "clone", "-q", str(tmp_path / "lib"), "beside")
    write("repo/vendored/lib/changed.py", "")
    write("repo/vendored/lib/noise.log", "")
    write("repo/vendored/lib/train.py", BLOCK)
    for script in ("train.py", "vendored/lib/train.py"):
        plan = plan_bundle(parse(repo / script))
        assert plan.root == repo.resolve()
        inside = [path for path in travelling(plan) if path.startswith(("vendored", "beside"))]
        assert inside == [
            "beside/.gitignore",
            "beside/__init__.py",
            "vendored/lib/.gitignore",
            "vendored/lib/__init__.py",
            "vendored/lib/changed.py",
            "vendored/lib/train.py",
        ]
        assert plan.uncommitted == ("vendored/lib/changed.py", "vendored/lib/train.py")
        assert plan.script == f"project/{script}"
    assert plan.python_path == ("project/src", "project/vendored", "runspec")


def test_a_worktree_is_the_tree_that_is_checked_out_in_it(repo: Path, tmp_path: Path, write: Write) -> None:
    git(repo, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "other")
    write("tree/more.py", "")
    plan = plan_bundle(parse(tmp_path / "tree/train.py"))
    assert plan.root == (tmp_path / "tree").resolve()
    assert travelling(plan) == [*COMMITTED[:1], "more.py", *COMMITTED[1:]]
    assert plan.uncommitted == ("more.py",)


def test_a_hook_of_another_repository_does_not_matter(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "-q")
    commit = git(repo, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other/.git/index"))
    plan = plan_bundle(parse(repo / "train.py"))
    assert (travelling(plan), plan.uncommitted, plan.commit) == (COMMITTED, (), commit)


def test_what_git_refuses_is_not_packed_otherwise(repo: Path, write: Write) -> None:
    write("repo/.git/HEAD", "")
    shutil.move(repo / ".git", repo / "moved")
    write("repo/.git", "gitdir: /nowhere\n")
    with pytest.raises(UserError, match=r"git cannot list .*repo: not a git repository: /nowhere"):
        plan_bundle(parse(repo / "train.py"))


# Without git


def test_without_git_it_is_the_folder_of_the_script(tmp_path: Path, write: Write) -> None:
    write("plain/train.py", BLOCK)
    for name in (
        "lib/a.py",
        "config/x.yaml",
        ".env",
        ".git-credentials",
        "__pycache__/a.pyc",
        "output/log",
        "env.toml",
    ):
        write(f"plain/{name}", "")
    write("plain/venv/pyvenv.cfg", "")
    write("plain/venv/lib/x.py", "")
    plan = plan_bundle(parse(tmp_path / "plain/train.py"))
    assert travelling(plan) == ["config/x.yaml", "lib/a.py", "train.py"]
    assert (plan.commit, plan.uncommitted, plan.python_path) == (None, (), ("project", "runspec"))


def test_without_the_git_program_the_same(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    plan = plan_bundle(parse(repo / "train.py"))
    # What is ignored too: without git nobody knows.
    assert travelling(plan) == ["data/rows.txt", *COMMITTED[1:], "weights.bin"]
    assert plan.commit is None


@pytest.mark.parametrize("in_repository", [False, True])
def test_an_installed_package_travels_with_its_tools(tmp_path: Path, write: Write, in_repository: bool) -> None:
    site = "app/.venv/lib/python3/site-packages"
    write(f"{site}/mine/__init__.py", "")
    write(f"{site}/mine/steps/__init__.py", "")
    write(f"{site}/mine/steps/train.py", BLOCK)
    write(f"{site}/mine/output/__init__.py", "")
    write(f"{site}/nemo_runspec/__init__.py", "")
    write(f"{site}/torch/__init__.py", "")
    if in_repository:  # whose .gitignore has the virtual environment
        write("app/.gitignore", ".venv\n")
        commit_all(tmp_path / "app")
    plan = plan_bundle(parse(tmp_path / site / "mine/steps/train.py"))
    assert travelling(plan) == [
        "mine/__init__.py",
        "mine/output/__init__.py",
        "mine/steps/__init__.py",
        "mine/steps/train.py",
        "nemo_runspec/__init__.py",
    ]
    assert plan.python_path == ("project",)
    assert plan.commit is None


# Limits, and writing


def test_too_much_is_refused(repo: Path) -> None:
    for megabytes, name in enumerate(("a.dat", "b.dat", "src/c.dat", "d.dat")):
        with (repo / name).open("wb") as stream:
            stream.truncate(1_500_000 + megabytes * 1_000_000)
    with pytest.raises(UserError) as caught:
        plan_bundle(parse(repo / "train.py"), limit=5_000_000)
    assert "of code would travel, more than the limit of 5 MB: d.dat 4.5 MB, src/c.dat 3.5 MB, b.dat 2.5 MB" in str(
        caught.value
    )
    assert caught.value.hint == ".gitignore keeps files out; code_limit in the profile allows more"


def test_packing_the_same_plan_twice_gives_the_same_folder(repo: Path, tmp_path: Path) -> None:
    (repo / "src/mine/model.py").chmod(0o775)
    plan = plan_bundle(parse(repo / "train.py"))
    results = []
    for name, mask in (("b1", 0o022), ("b2", 0o077)):
        old = os.umask(mask)
        try:
            code = pack_code(plan, tmp_path / name)
        finally:
            os.umask(old)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        tree = [(str(p.relative_to(tmp_path / name)), p.stat().st_mode & 0o777, p.read_bytes()) for p in files]
        results.append((code, tree))
    assert results[0] == results[1]
    code, tree = results[0]
    assert [path for path, mode, _ in tree if mode == 0o755] == ["project/src/mine/model.py"]
    assert {path for path, _, _ in tree} == set(plan.files)
    assert code.size == sum(len(data) for _, _, data in tree)


@pytest.mark.parametrize("descriptor", [1, 2])
def test_the_log_of_this_command_stays_here(repo: Path, descriptor: int) -> None:
    """As with `nemotron … > run.log`: a log is not code, and would change the digest."""
    before = os.dup(descriptor)
    with (repo / "run.log").open("w") as log:
        os.dup2(log.fileno(), descriptor)
    try:
        plan = plan_bundle(parse(repo / "train.py"))
    finally:
        os.dup2(before, descriptor)
        os.close(before)
    assert (travelling(plan), plan.uncommitted) == (COMMITTED, ())


def test_a_file_that_goes_away_while_files_are_listed(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = packaging._listed

    def then_removed(script: Path) -> tuple[Path, list[str], list[Path]]:
        answer = listed(script)
        (repo / "src/mine/model.py").unlink()
        return answer

    monkeypatch.setattr(packaging, "_listed", then_removed)
    with pytest.raises(UserError, match=r"cannot read .*model\.py: No such file"):
        plan_bundle(parse(repo / "train.py"))


def test_a_log_that_grows_while_it_is_packed(repo: Path, tmp_path: Path) -> None:
    """As with `nemotron … | tee run.log`: the digest is that of the bytes that travel, whatever comes later."""
    log = repo / "run.log"
    log.write_text("a line\n" * 1000)
    plan = plan_bundle(parse(repo / "train.py"))
    stop = threading.Event()

    def grow() -> None:
        with log.open("a") as stream:
            while not stop.is_set():
                stream.write("a line\n")
                stream.flush()

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        codes = [pack_code(plan, tmp_path / str(number)) for number in range(5)]
    finally:
        stop.set()
        writer.join()
    for number, code in enumerate(codes):
        whole = hashlib.sha256()
        for path in sorted([*COMMITTED, "run.log"]):
            content = hashlib.sha256((tmp_path / str(number) / "project" / path).read_bytes()).hexdigest()
            whole.update(f"{path}\0-\0{content}\n".encode())
        assert code.digest == whole.hexdigest()


def test_a_working_directory(write: Write, tmp_path: Path) -> None:
    block = BLOCK.replace("# ///\n", '# [tool.runspec.run]\n# workdir = "{}"\n# ///\n')
    block = "\n# /// script" + block.split("# /// script")[1]
    write("r/steps/train.py", block.format(".."))
    commit_all(tmp_path / "r")
    plan = plan_bundle(parse(tmp_path / "r/steps/train.py"))
    assert plan.workdir == "project"
    write("r/steps/train.py", block.format("../.."))
    with pytest.raises(UserError, match=r"run\.workdir: .* lies outside the code that travels"):
        plan_bundle(parse(tmp_path / "r/steps/train.py"))


# Running what has travelled

# Starts a script the way `python script` does, without the checkout that tests are run from.
ELSEWHERE = """
import runpy, sys
checkout, script = sys.argv[1:3]
sys.path[:] = [path for path in sys.path if path and not path.startswith(checkout)]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.argv[:] = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


def run_elsewhere(plan: BundlePlan, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Write the bundle, move it, and run its script there with nothing set but PYTHONPATH."""
    pack_code(plan, folder / "here")
    there = folder / "there"
    (folder / "here").rename(there)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(str(there / path) for path in plan.python_path),
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-P", "-c", ELSEWHERE, str(ROOT / "src"), str(there / plan.script), *words]
    return subprocess.run(command, env=environment, cwd=there, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_of_another_project_runs_where_nothing_is_installed(write: Write, tmp_path: Path) -> None:
    write(
        "r/steps/train.py",
        BLOCK
        + "import json, sys\nimport mine.model, nemo_runspec\nfrom nemo_runspec.config import load_script_config\n"
        + "cfg = load_script_config(__file__)\n"
        + "print(json.dumps([cfg.lr, mine.model.x, mine.__file__, nemo_runspec.__file__]))\n",
    )
    write("r/steps/config/tiny.yaml", "lr: 0.5\n")
    write("r/src/mine/__init__.py", "")
    write("r/src/mine/model.py", "x = 1\n")
    commit_all(tmp_path / "r")
    plan = plan_bundle(parse(tmp_path / "r/steps/train.py"))
    done = run_elsewhere(plan, tmp_path, "--config", "tiny")
    assert done.returncode == 0, done.stderr
    there = tmp_path / "there"
    assert json.loads(done.stdout) == [
        0.5,
        1,
        str(there / "project/src/mine/__init__.py"),
        str(there / "runspec/nemo_runspec/__init__.py"),
    ]


def recipe() -> Runspec:
    return parse(ROOT / "src/nemotron/recipes/nano3/stage0_pretrain/data_prep.py")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the project is not in a git repository here")
def test_a_recipe_of_this_project_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    plan = plan_bundle(recipe())
    assert plan.python_path == ("project/src",)
    assert not [path for path in plan.files if path.startswith("runspec/")]
    done = run_elsewhere(plan, tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "tokenizer.vocab_size" in done.stdout
