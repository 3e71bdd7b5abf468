"""A file or folder of data that is no artifact yet, and how it becomes one."""

from __future__ import annotations

from pathlib import Path

from nemo_runspec.artifacts.manifest import list_files
from nemo_runspec.errors import UserError
from nemo_runspec.user_files import expanded
from nemotron.kit.artifact import Dataset, Source


def add_dataset(place: str, name: str) -> Dataset:
    """Publish a file or folder as it is, as the next version of `name`.

    Raises:
        UserError: there is no such file or folder, nothing in it, or a link in it that leads nowhere.
    """
    path = expanded(place).absolute()
    if not path.exists():
        raise UserError(f"no file or folder {place}")
    files = [path] if path.is_file() else [path / each for each in list_files(path)]
    for file in files:
        if not file.exists():
            raise UserError(f"{file} is a link to {file.readlink()}, which is not there", "delete or mend the link")
    counts = [count_examples(each) for each in files if each.stat().st_size]
    if not any(count is None or count > 0 for count in counts):
        raise UserError(f"{place} holds no data")
    known = [count for count in counts if count is not None]
    examples = sum(known) if len(known) == len(counts) else None
    source = Source(name=str(path), detail="data from elsewhere")
    return Dataset(path=path, num_examples=examples, train_path=path, sources=[source]).save(name)


def count_examples(file: Path) -> int | None:
    """Rows of a Parquet file, objects of a JSONL file that has one a line; None for any other file: it is not parsed.

    Raises:
        UserError: a file called .parquet is none.
    """
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{file}: not a Parquet file: {error}") from error
    if file.suffix != ".jsonl":
        return None
    objects = 0
    with file.open("rb") as lines:
        for line in lines:
            text = line.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text and not text.startswith(b"{"):  # an array, or compressed
                return None
            objects += bool(text)
    return objects
