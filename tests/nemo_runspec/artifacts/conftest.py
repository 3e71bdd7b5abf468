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


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine("laptop")`: from now on this process has that machine's cache."""

    def become(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNSPEC_ENV_FILE", raising=False)
    become("cluster")
    return become
