"""The line that installs an extra: in a clone, elsewhere, and beside an installed wheel."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from nemo_runspec import installation
from nemo_runspec.errors import UserError
from nemo_runspec.installation import check_dependencies, check_imports, imported_from_extras, install_line
from nemo_runspec.runspec import Runspec, parse


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my clone"
    (folder / "src" / "points").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "lines-of-points"\n')
    for name in ("constraints.txt", "constraints-cluster.txt"):
        (folder / "src" / "points" / name).touch()
    monkeypatch.setattr(installation, "_PACKAGES", folder / "src")
    return folder


def test_in_the_folder_of_a_clone(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    assert install_line("curation") == "pip install -c src/points/constraints.txt -e '.[curation]'"
    assert install_line("ray") == "pip install -c src/points/constraints-cluster.txt -e '.[ray]'"


def test_a_clone_from_another_folder(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(install_line("hf"))
    assert words == ["pip", "install", "-c", f"{clone}/src/points/constraints.txt", "-e", f"{clone}[hf]"]


def test_in_a_job_the_line_is_for_a_clone(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNSPEC_CODE_DIGEST", "c0de")
    assert install_line("curation") == "pip install -c src/points/constraints.txt -e '.[curation]'"


def test_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    for name, files in (("other", "points/constraints.txt"), ("lines-of-points", "nemo_runspec/__init__.py")):
        folder = packages / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text(f"{files},,\n")
    monkeypatch.setattr(installation, "_PACKAGES", packages)
    assert install_line("train") == "pip install 'lines-of-points[train]'"  # whose wheel has no constraints
    installation._distribution_of.cache_clear()
    with (packages / "lines_of_points-1.0.dist-info" / "RECORD").open("a") as record:
        record.write("points/constraints.txt,,\n")
    assert install_line("train") == f"pip install -c {packages}/points/constraints.txt 'lines-of-points[train]'"


def test_where_the_package_lies_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_PACKAGES", tmp_path)
    assert install_line("train") == "the Python that runs this needs what the extra `train` brings"


def test_in_the_src_of_a_project_that_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    monkeypatch.setattr(installation, "_PACKAGES", tmp_path / "src")
    assert installation.own_distribution() is None


def test_this_checkout_has_the_constraints() -> None:
    for extra in ("train", "launch"):
        words = shlex.split(install_line(extra))
        assert Path(words[words.index("-c") + 1]).is_file()


@pytest.mark.parametrize("line", ["import torch", "import math, torch.nn as nn", "from torch.utils import data"])
def test_a_script_whose_imports_are_not_installed_is_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'"""Docs.\n\nimport torch\n"""\n{line}\n')
    check_imports(script)  # this environment has torch
    without_torch(monkeypatch)
    with pytest.raises(UserError) as refused:
        check_imports(script)
    assert refused.value.message == "train.py needs torch, which is not installed"
    assert refused.value.hint == install_line("train")
    script.write_text('"""Docs.\n\nimport torch\n"""\n\ndef late():\n    import torch\n')
    check_imports(script)  # only one of its ways needs it


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name))


def test_a_script_whose_dependencies_are_not_installed_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "clean.py"

    def listing(dependencies: str) -> Runspec:
        script.write_text(
            f'# /// script\n# dependencies = {dependencies}\n# [tool.runspec]\n# name = "mine/clean"\n# ///\n'
        )
        return parse(script)

    check_dependencies(
        listing('["pydantic>=2", "nemotron-cookbook[curation]", "no-such-thing; python_version < \'3\'"]')
    )
    with pytest.raises(UserError) as refused:
        check_dependencies(listing('["pydantic", "no-such.thing[all]>=3"]'))
    assert refused.value.message == "clean.py needs no-such.thing, which is not installed"
    assert refused.value.hint == "pip install no-such.thing"


def test_the_hint_names_the_image_and_other_configs(tmp_path: Path) -> None:
    script = tmp_path / "train_large.py"
    script.write_text(
        '# /// script\n# dependencies = ["no-such-thing"]\n# [tool.runspec]\n# name = "mine/train"\n'
        '# image = "registry/large:1"\n# ///\n'
    )
    for others, more in (([], ""), (["small", "tiny"], "; or another config, -c small, tiny")):
        with pytest.raises(UserError) as refused:
            check_dependencies(parse(script), others=others.copy)
        assert refused.value.hint == f"the image registry/large:1 has it: --run PROFILE{more}"


def test_a_script_that_is_no_python_is_refused_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n\ndef f(:\n")
    with pytest.raises(UserError, match=r"train\.py:3: invalid syntax"):
        imported_from_extras(script)
