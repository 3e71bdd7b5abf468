"""A file or folder of data that is no artifact yet, and how it becomes one."""

from __future__ import annotations

from pathlib import Path

from nemo_runspec.artifacts.manifest import list_files
from nemo_runspec.errors import UserError
from nemotron.kit.artifact import Dataset, Source


def add_dataset(place: str, name: str) -> Dataset:
    """Publish a file or folder as it is, as the next version of `name`.

    Raises:
        UserError: there is no such file or folder, or nothing in it.
    """
    path = Path(place).expanduser().absolute()
    if not path.exists():
        raise UserError(f"no file or folder {place}")
    files = [path] if path.is_file() else [path / each for each in list_files(path)]
    examples = sum(map(count_examples, files))
    if not examples:
        raise UserError(f"{place} holds no data")
    source = Source(name=str(path), detail="data from elsewhere")
    return Dataset(path=path, num_examples=examples, train_path=path, sources=[source]).save(name)


def count_examples(file: Path) -> int:
    """Rows of a Parquet file, lines of a JSONL file that are not blank; any other file is one, unless it is empty."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{file}: not a Parquet file: {error}") from error
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            return sum(bool(line.strip()) for line in lines)
    return int(file.stat().st_size > 0)
