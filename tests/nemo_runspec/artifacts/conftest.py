"""A registry in a temporary folder, and a payload to publish."""

from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "train.bin").write_bytes(bytes(range(256)))
    (folder / "tokenizer" / "vocab.json").write_text('{"a": 1}')
    (folder / "empty.txt").write_text("")
    return folder
