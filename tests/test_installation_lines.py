"""Every `pip install` that README, docs and Dockerfile show works: files, extras, and names that are ours.

What the wheel holds: tests/test_wheel.py.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from nemo_runspec.installation import install_line, own_distribution

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile", ROOT / "env.example.toml"]
PAGES += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md"), *(ROOT / "src/nemotron").glob("constraints*")]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# A clone, the wheel's file, or what it is called once it is installed; each with extras.
OURS = re.compile(r"(?:\.|(?:dist/)?nemotron_cookbook-\*-py3-none-any\.whl|nemotron-cookbook)(?:\[([\w,]+)\])?")


def lines() -> list[tuple[str, str]]:
    """Page and words of each `pip install` in PAGES."""
    return [
        (str(page.relative_to(ROOT)), words.strip())
        for page in sorted(PAGES)
        for words in re.findall(r"pip install (.+?)(?: {2,}#.*|`.*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]


@pytest.mark.parametrize(("page", "line"), lines())
def test_an_install_line_works(page: str, line: str) -> None:
    words = [word for word in shlex.split(line.replace("$PIP_FLAGS", "")) if word not in ("-e", "--no-cache-dir")]
    constraints = words[words.index("-c") + 1] if "-c" in words else ""
    requirements = [OURS.fullmatch(word) for word in words if word not in ("-c", constraints)]
    assert requirements, line
    for requirement in requirements:
        assert requirement is not None, f"{line}: not ours"
        extras = requirement[1].split(",") if requirement[1] else []
        assert set(extras) <= PROJECT["optional-dependencies"].keys()
        if constraints.startswith("src/"):
            assert (ROOT / constraints).is_file()
            wanted = {shlex.split(install_line(extra))[3] for extra in extras if extra not in ("dev", "cluster")}
            assert {Path(path).name for path in wanted} <= {Path(constraints).name, "constraints.txt"}


def test_there_are_install_lines() -> None:
    assert sum(page == "README.md" for page, _ in lines()) >= 4
    own = own_distribution()
    assert own is not None and PROJECT["name"] == own.name


def test_the_readme_names_every_extra_for_users() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install\n")[2].partition("\n## ")[0]
    named = {extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" in section or f"[{extra}]" in section}
    assert named == PROJECT["optional-dependencies"].keys() - {"dev", "cluster", "docs"}


def test_the_extras_that_the_code_asks_for_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    asked = {extra for text in texts for extra in re.findall(r"install_line\(['\"](\w+)['\"]\)", text)}
    assert {"hf", "curation", "ray", "launch"} <= asked
    assert asked <= PROJECT["optional-dependencies"].keys()


def test_the_dockerfile_installs_as_the_readme_says() -> None:
    installs = re.findall(r"^RUN pip install --no-cache-dir \$PIP_FLAGS (.+)$", DOCKERFILE, re.MULTILINE)
    assert len(installs) == DOCKERFILE.count("\nRUN ") == 1
    assert f"pip install {installs[0]} " in (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r'^ENTRYPOINT \["(.+)"\]$', DOCKERFILE, re.MULTILINE)
    assert program is not None and program[1] in PROJECT["scripts"]


def test_the_dockerfile_copies_what_the_installation_reads() -> None:
    copied = {word for sources in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in sources.split()}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= copied
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_no_text_says_to_install_or_call_another_project() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    installs = re.compile(r"pip install [^\n`]*?[ '\"](nemotron|runspec)(?=[\s'\"\[=<>]|$)", re.MULTILINE)
    calls = re.compile(r"(?<![-\w])runspec (show|validate|run)\b")
    names = listed.stdout.split("\0")
    if not names[0]:
        pytest.skip("no git repository here")
    assert len(names) > 500
    for name in names:
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml", ".yaml", ".txt", ""} and path.is_file() and name != "CHANGELOG.md":
            text = path.read_text(encoding="utf-8")
            found = installs.search(text) or calls.search(text)
            assert found is None, f"{name}: {found}"


def test_the_licence_of_every_pinned_package_is_listed() -> None:
    licences = runpy.run_path(str(ROOT / "tests/licences.py"))
    listed = licences["listed"]()
    assert listed.keys() == licences["pinned"]()
    assert list(listed) == sorted(listed)
    differing = {}
    for name, licence in listed.items():
        try:
            data = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        stated = licences["stated"](data["License-Expression"], data.get_all("Classifier") or (), data["License"])
        if stated != licence:
            differing[name] = (stated, licence)
    assert differing == {}
