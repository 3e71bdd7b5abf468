"""How to install what is missing: one line, right for a clone and for a wheel, with the versions tested together."""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "nemotron-cookbook"
# `src` of a clone, `site-packages` where a wheel was installed.
_PACKAGES = Path(__file__).resolve().parents[1]
# NeMo-Run needs older versions of a few libraries than the other extras are tested with.
_CLUSTER_EXTRAS = ("launch", "ray", "s3", "gs")


def install_line(extra: str) -> str:
    """The `pip install` that brings `extra` of this distribution; in the folder of a clone its paths are relative.

    A clone is installed as an editable package; of an installed wheel pip adds the extra's packages and asks no index
    for the wheel again.
    """
    packages, requirement = _PACKAGES, f"{DISTRIBUTION}[{extra}]"
    words = ["pip", "install"]
    if packages.name == "src" and (packages.parent / "pyproject.toml").is_file():
        clone = Path() if packages.parent == Path.cwd() else packages.parent
        packages, requirement = clone / "src", f"{clone}[{extra}]"
        words += ["-e", requirement]
    else:
        words += [requirement]
    constraints = packages / "nemotron" / f"constraints{'-cluster' if extra in _CLUSTER_EXTRAS else ''}.txt"
    if constraints.is_file():  # nemo_runspec may have travelled to a job alone
        words[2:2] = ["-c", str(constraints)]
    return shlex.join(words)
