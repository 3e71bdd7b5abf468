"""A model directory as a whole: which files belong to it, their manifest, and how it comes into being in one step.

Which files those are says `kit/model_folder.py`. `manifest.sha256` is in the format of `sha256sum -c` and covers
the small files, the index among them; the index has the sha256 of every tensor. So a flipped bit anywhere is found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.errors import UserError
from nemotron.kit.model_folder import ADAPTER_FOLDER, LISTED_FILES, MANIFEST_FILE, is_model_file
from nemotron.recipes.tools.whole_folder import entries, in_one_step


def write_manifest(folder: Path) -> None:
    """Write `manifest.sha256` over the small files of a complete directory."""
    names = [name for name in sorted(LISTED_FILES) if (folder / name).is_file()]
    lines = [f"{sha256_file(folder / name)}  {name}\n" for name in names]
    (folder / MANIFEST_FILE).write_text("".join(lines), encoding="utf-8")


def check_manifest(folder: Path) -> bool:
    """Compare the small files with `manifest.sha256`; False where there is none.

    Raises:
        UserError: a file is missing or differs, or the manifest cannot be read.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return False
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    for line in lines:
        sha256, _, name = line.partition("  ")
        if name not in LISTED_FILES:
            raise UserError(f"{path}: damaged: {line[:80]!r} is not a sha256 and a file of a model")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: {MANIFEST_FILE} lists it")
        if sha256_file(folder / name) != sha256:
            raise UserError(
                f"{folder / name}: content differs from its sha256 in {MANIFEST_FILE}",
                f"damaged; or, if you have changed it on purpose, delete {MANIFEST_FILE}",
            )
    return True


@contextlib.contextmanager
def whole_directory(output: Path, force: bool) -> Iterator[Path]:
    """A folder to fill, which becomes `output` on the way out; after an error, or Ctrl-C, `output` is as it was before.

    Raises:
        UserError: `output` cannot be made, or is not empty. With `force` only if it holds anything but a model: nothing
            else is deleted.
    """
    output = Path(os.path.realpath(output))  # also where it does not exist, or is a link to nowhere
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file, a directory expected")
    present = entries(output) if output.is_dir() else []
    if present and not force:
        raise UserError(f"{output} is not empty", "give another directory, or --force to replace the model in it")
    if strangers := [name for name in present if not is_model_file(name) and name != ADAPTER_FOLDER]:
        raise UserError(f"{output} holds {strangers[0]}, which is no part of a model: --force does not delete it")
    with in_one_step(output, present, "export") as folder:
        yield folder
