"""What travels to a cluster: the code as it is, the job's config, and nothing else.

A bundle is a folder, the current directory of every process on a node::

    launch.sh launch.json job.yaml train.yaml
    project/                  the code: what git lists, tracked or not, except what .gitignore keeps out
    runspec/nemo_runspec/     only where project/ has no nemo_runspec of its own

`plan_bundle` finds out and writes nothing, `pack_code` copies. The digest is over paths, executable bits and contents
of `project/` as they were packed: the same tree on two machines has the same one, and a file that grows meanwhile (the
log of another command, or of this one through `tee`) travels as far as it was read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import nemo_runspec
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.env import CODE_LIMIT, artifacts_root, find_env_file, output_root
from nemo_runspec.errors import UserError
from nemo_runspec.git import ask_git, git_commit
from nemo_runspec.runspec import Runspec
from nemo_runspec.words import counted, shown

PROJECT, RUNSPEC = "project", "runspec"
_OWN = "nemo_runspec"
# Where no .gitignore says what is not code.
_NO_CODE = ("__pycache__", "node_modules")


@dataclass(frozen=True)
class BundlePlan:
    """What a bundle is to hold. Paths are relative to the bundle, with forward slashes.

    `files`: path of each -> where it is copied from.
    `root` is the folder that becomes project/; `python_path` goes into PYTHONPATH, in this order; `workdir` is the
    script's working directory where its block names one. `commit` ends in `-dirty` where tracked files differ from it;
    `uncommitted` lists these, new files and deleted ones, relative to `root`.
    """

    root: Path
    files: dict[str, Path]
    script: str
    python_path: tuple[str, ...]
    workdir: str | None
    commit: str | None
    uncommitted: tuple[str, ...]


@dataclass(frozen=True)
class PackedCode:
    """The code as it was copied: its digest (64 hex digits) and its size in bytes."""

    digest: str
    size: int


def plan_bundle(spec: Runspec, *, limit: int = CODE_LIMIT, leave_out: Iterable[Path] = ()) -> BundlePlan:
    """Find out what would travel for the script of `spec`. Nothing is written.

    The code is the git repository that the script is in: every file that git lists as tracked or as new, submodules
    and repositories inside it included. Outside git (and where git ignores the script, as in a virtual environment) it
    is the package that the script is in, else the script's folder, without hidden files, caches and virtual
    environments. What runs write (`output`, the roots of runs and artifacts), the files that this command's own output
    is redirected into, and env.toml never travel.

    Args:
        limit: bytes that may travel.
        leave_out: more folders that stay here (the one for jobs, say).

    Raises:
        UserError: more than `limit` would travel; a symbolic link leads out of the tree, nowhere, to what does not
            travel, or in a circle; `run.workdir` lies outside; git refuses to list the repository.
    """
    script = spec.script_path.parent.resolve() / spec.script_path.name
    root, paths, repositories = _listed(script)
    left_out = (*_left_out(root, leave_out), *_written_by_us(root, paths))
    sources = dict(sorted(_followed(root, _without(root, paths, left_out))))
    if script.relative_to(root).as_posix() not in sources:
        raise UserError(f"{script}: lies where runs write, and would not travel", "move it to where the code is")
    python_path = _python_path(root, script, sources)
    project = [(f"{PROJECT}/{path}", source) for path, source in sources.items()]
    own: list[tuple[str, Path]] = []
    if not {f"{folder}/{_OWN}/__init__.py" for folder in python_path} & {path for path, _ in project}:
        package = Path(nemo_runspec.__file__).resolve().parent
        python_path = (*python_path, RUNSPEC)
        own = [(f"{RUNSPEC}/{_OWN}/{path}", package / path) for path in sorted(_walk(package))]
    _check_size([*project, *own], limit, in_git=bool(repositories))
    return BundlePlan(
        root=root,
        files=dict([*project, *own]),
        script=f"{PROJECT}/{script.relative_to(root).as_posix()}",
        python_path=python_path,
        workdir=_workdir(root, spec),
        commit=git_commit(root) if repositories else None,
        uncommitted=tuple(sorted({path for top in repositories for path in _uncommitted(root, top, left_out)})),
    )


def pack_code(plan: BundlePlan, folder: Path) -> PackedCode:
    """Copy the code of `plan` into `folder`.

    The digest is sha256 over the files under project/, sorted by path: path, executable bit, sha256 of the content.

    Raises:
        UserError: a file cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    for path, source in sorted(plan.files.items(), key=lambda file: file[0].encode()):
        try:
            with source.open("rb") as stream:
                executable = bool(os.fstat(stream.fileno()).st_mode & 0o100)
                content = stream.read()
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}") from None
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if executable else 0o644)
        size += len(content)
        if path.startswith(f"{PROJECT}/"):
            name, sha256 = path.removeprefix(f"{PROJECT}/"), hashlib.sha256(content).hexdigest()
            digest.update(f"{name}\0{'x' if executable else '-'}\0{sha256}\n".encode())
    return PackedCode(digest.hexdigest(), size)


def contents(bundle: Path) -> list[str]:
    """The entries of a written bundle, a folder as its number of files, with their sizes."""
    lines = []
    for entry in sorted(bundle.iterdir()):
        files = [file for file in entry.rglob("*") if file.is_file()] if entry.is_dir() else [entry]
        size = sum(file.stat().st_size for file in files)
        what = f"{entry.name}/  {counted(len(files), 'file')}," if entry.is_dir() else f"{entry.name} "
        lines.append(f"{what} {size:,} bytes")
    return lines


# What there is


def _listed(script: Path) -> tuple[Path, list[str], list[Path]]:
    """The root of the code, the files in it that are code, and the repositories among it (none: git says nothing)."""
    root = _git_root(script.parent)
    if root is not None:
        repositories: list[Path] = []
        paths = sorted(set(_git_files(root, root, repositories)))
        if script.relative_to(root).as_posix() in paths:
            return root, paths, repositories
    package = script.parent
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    if not (package / "__init__.py").is_file():
        return script.parent, list(_walk(script.parent)), []
    # A script in an installed package, and the tools that it was installed with, if they lie beside it.
    root = package.parent
    packages = {package.name} | ({_OWN} if (root / _OWN / "__init__.py").is_file() else set())
    return root, [f"{name}/{path}" for name in sorted(packages) for path in _walk(root / name)], []


def _walk(folder: Path) -> Iterator[str]:
    """The files of a folder that no .gitignore describes, relative to it; links to folders are not entered."""
    for at, folders, names in os.walk(folder):
        kept: list[str] = []
        for name in sorted(folders):
            if name.startswith(".") or name in _NO_CODE or (Path(at) / name / "pyvenv.cfg").is_file():
                continue
            (names if (Path(at) / name).is_symlink() else kept).append(name)
        folders[:] = kept
        for name in sorted(names):
            path = Path(at) / name
            is_read = path.is_symlink() or path.is_file()  # no named pipe or socket
            if is_read and not name.startswith(".") and not name.endswith(".pyc"):
                yield path.relative_to(folder).as_posix()


def _git_root(folder: Path) -> Path | None:
    """The top folder of the working tree (or worktree, or submodule's superproject) that holds `folder`."""
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    top = ask_git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return None
    root = Path(os.fsdecode(top.rstrip(b"\n"))).resolve()
    # A script in a submodule needs what surrounds it, as it does here.
    above = ask_git(folder, "rev-parse", "--show-superproject-working-tree")
    return _git_root(Path(os.fsdecode(above.rstrip(b"\n")))) if above and above.strip() else root


def _git_files(root: Path, repository: Path, repositories: list[Path]) -> Iterator[str]:
    """Files of `repository` that exist, tracked or new, relative to `root`; repositories met are noted."""
    repositories.append(repository)
    for entry in _entries(ask_git(repository, "ls-files", "-z", "-c", "-o", "--exclude-standard")):
        path = repository / entry
        if path.is_symlink() or path.is_file():
            yield path.relative_to(root).as_posix()
        elif path.is_dir() and (path / ".git").exists():
            # A submodule, or a clone that lies about: git gives the folder only.
            yield from _git_files(root, path, repositories)


def _uncommitted(root: Path, repository: Path, left_out: Sequence[str]) -> Iterator[str]:
    """What of a repository differs from its commit: changed and new files, deleted ones with a word that says so."""
    words = ("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=dirty")
    for entry in _entries(ask_git(repository, *words)):
        path = repository / entry[3:]
        name = path.relative_to(root).as_posix()
        if entry.endswith("/") or _is_below(name, left_out):
            continue  # a clone that lies about has a status of its own
        yield name if path.is_symlink() or path.exists() else f"{name} (deleted)"


def _entries(answer: bytes | None) -> list[str]:
    return [os.fsdecode(entry) for entry in (answer or b"").split(b"\0") if entry]


# What of it travels


def _left_out(root: Path, more: Iterable[Path]) -> tuple[str, ...]:
    """Paths below `root` that never travel: what runs write, and the profiles of this machine."""
    paths = ["output", "env.toml"]
    for path in (output_root(), artifacts_root(), find_env_file(), *more):
        if isinstance(path, Path) and (absolute := path.resolve()).is_relative_to(root) and absolute != root:
            paths.append(absolute.relative_to(root).as_posix())
    return tuple(paths)


def _written_by_us(root: Path, paths: Iterable[str]) -> list[str]:
    """Files that this process's output is redirected into: a log is not code."""
    outputs: list[os.stat_result] = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            outputs.append(os.fstat(descriptor))
    written = []
    for path in paths:
        with contextlib.suppress(OSError):  # removed since it was listed
            status = os.lstat(root / path)
            written += [path for output in outputs if os.path.samestat(output, status)]
    return written


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _without(root: Path, paths: Iterable[str], left_out: Sequence[str]) -> list[str]:
    kept = [path for path in paths if not _is_below(path, left_out) and PurePosixPath(path).name != "env.toml"]
    for path in kept:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise UserError(f"{os.fsencode(root / path)!r}: a file name that is no UTF-8 cannot travel") from None
    return kept


def _followed(root: Path, paths: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Path below project/ and source of each file; symbolic links are replaced by what they lead to."""
    travels = set(paths)
    for path in paths:
        yield from _follow(root, path, path, travels, ())


def _follow(
    root: Path, path: str, listed: str, travels: set[str], through: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    """The file that becomes `path`, or the files of the folder that does.

    Args:
        listed: where it lies in the tree: `path` itself, unless a link to a folder led here.
        travels: all that is listed.
        through: the links that led here.
    """
    source = root / listed
    if not source.is_symlink():
        yield path, source
        return
    if listed in through:
        raise UserError(f"{root / through[0]}: a symbolic link that leads back to itself")
    try:
        target = source.resolve(strict=True)
    except (OSError, RuntimeError):
        raise UserError(f"{source}: a symbolic link that leads nowhere: {source.readlink()}") from None
    hint = "remove it, or let .gitignore keep it out"
    if not target.is_relative_to(root):
        raise UserError(f"{source}: a symbolic link that leads out of the code that travels: {target}", hint)
    inside = target.relative_to(root).as_posix()
    if inside in travels:
        yield path, target
        return
    below = [entry for entry in travels if inside == "." or entry.startswith(f"{inside}/")]
    if not below:
        raise UserError(f"{source}: a symbolic link to {target}, which does not travel", hint)
    for entry in sorted(below):
        rest = entry if inside == "." else entry.removeprefix(f"{inside}/")
        yield from _follow(root, f"{path}/{rest}", entry, travels, (*through, listed))


def _python_path(root: Path, script: Path, sources: dict[str, Path]) -> tuple[str, ...]:
    """The folders of the bundle that Python finds the project's modules in.

    `src` of the project that the script is in (the nearest folder upwards that has one, or a pyproject.toml), else
    that project's folder; and the folder of the script's own package.
    """
    folders: list[PurePosixPath] = []
    script_folder = PurePosixPath(script.relative_to(root).as_posix()).parent
    for folder in (script_folder, *script_folder.parents):
        inside = (folder / "src").as_posix() + "/"
        if any(path.startswith(inside) and path.endswith(".py") for path in sources):
            folders.append(folder / "src")
            break
        if (folder / "pyproject.toml").as_posix() in sources or folder == PurePosixPath("."):
            folders.append(folder)
            break
    package = script_folder
    while (package / "__init__.py").as_posix() in sources and package != PurePosixPath("."):
        package = package.parent
    if package != script_folder:
        folders.append(package)
    return tuple(dict.fromkeys((PurePosixPath(PROJECT) / folder).as_posix() for folder in folders))


def _workdir(root: Path, spec: Runspec) -> str | None:
    if spec.run.workdir is None:
        return None
    folder = spec.run.workdir.resolve()
    if not folder.is_relative_to(root):
        raise UserError(f"{shown(spec.script_path)}: run.workdir: {folder} lies outside the code that travels: {root}")
    return (PurePosixPath(PROJECT) / folder.relative_to(root).as_posix()).as_posix()


def _check_size(entries: Sequence[tuple[str, Path]], limit: int, in_git: bool) -> None:
    """Refuse too much, before anything is read; the largest files are named."""
    sizes = sorted(((_stat(source).st_size, path) for path, source in entries), reverse=True)
    total = sum(size for size, _ in sizes)
    if total <= limit:
        return
    largest = ", ".join(f"{path.removeprefix(f'{PROJECT}/')} {human_size(size)}" for size, path in sizes[:3])
    keeps_out = ".gitignore keeps files out" if in_git else "in a git repository, .gitignore keeps files out"
    raise UserError(
        f"{human_size(total)} of code would travel, more than the limit of {human_size(limit)}: {largest}",
        f"{keeps_out}; code_limit in the profile allows more",
    )


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
