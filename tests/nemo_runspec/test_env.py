"""env.toml: where it is found, what a profile comes to, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_runspec.env import Env, artifacts_root, find_env_file, output_root, parse_env, wandb_settings
from nemo_runspec.errors import UserError

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("NEMOTRON_ENV_FILE", "RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_OUTPUT_ROOT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_file_everything_is_local(tmp_path: Path) -> None:
    assert find_env_file() is None
    assert parse_env() == parse_env(None) == Env()
    assert parse_env("local") == Env(profile="local")
    assert output_root() == tmp_path / "output"
    assert artifacts_root() == tmp_path / "output" / "artifacts"


def test_the_nearest_file_upwards_counts_and_the_variable_goes_before_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = write("env.toml", '[artifacts]\nroot = "store"')
    write("a/b/.keep", "")
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find_env_file() == outer
    assert artifacts_root() == tmp_path / "store"  # relative to the file, not to the current directory
    inner = write("a/env.toml", "")
    assert find_env_file() == inner
    monkeypatch.setenv("NEMOTRON_ENV_FILE", str(outer))
    assert find_env_file() == outer
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "third"))
    assert artifacts_root() == tmp_path / "third"
    monkeypatch.setenv("NEMOTRON_ENV_FILE", "nowhere.toml")
    with pytest.raises(UserError, match=r"NEMOTRON_ENV_FILE=nowhere\.toml"):
        parse_env()


def test_a_profile_extends_others(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "env.toml",
        """
        [base]
        executor = "local"
        env = { A = "1", B = "1" }
        secrets = ["HF_TOKEN"]
        [mid]
        extends = "base"
        env = { B = "2" }
        [top]
        extends = "mid"
        env = { C = "3" }
        secrets = ["OTHER"]
        [cli]
        color = false
        """,
    )
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    monkeypatch.setenv("OTHER", "s3cret")
    env = parse_env("top")
    assert env.variables == {"A": "1", "B": "2", "C": "3"}
    assert env.secrets == ("HF_TOKEN", "OTHER")
    assert env.color is False
    assert "s3cret" not in repr(env)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('[p]\nexecutr = "local"', "[p] unknown key 'executr'", "did you mean executor?"),
        ('[p]\nexecutor = "slurm"', "executor = 'slurm': this version has no such executor", "executors: local"),
        ("[p]\nexecutor = 1", "executor = 1: must be a string", None),
        ("[p]\nenv = { A = 1 }", "[p] env.A = 1: must be a string", 'in quotes, as in env = { A = "…" }'),
        ('[p]\nenv = "A=1"', "[p] env: must be a table of strings", None),
        ('[p]\nsecrets = "A"', "must be a list of strings", None),
        ('[p]\nextends = "q"', "unknown profile 'q'", None),
        ('[p]\nextends = "q"\n[q]\nextends = "p"', "profiles extend each other: p -> q -> p", None),
        ('[p]\nsecrets = ["HF_TOKEN"]', "does not set HF_TOKEN", "env.toml"),
        ('[artifacts]\nrot = "x"\n[p]', "[artifacts] unknown key 'rot'", "did you mean root?"),
        ("x = 1\n[p]", "x = 1 stands outside a table", None),
        ("[p", "bad TOML", None),
    ],
)
def test_faults_are_named(write: Write, text: str, message: str, hint: str | None) -> None:
    write("env.toml", text)
    with pytest.raises(UserError) as caught:
        parse_env("p")
    assert message in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_an_unknown_profile_is_answered_with_the_nearest(write: Write) -> None:
    write("env.toml", "[quiet]")
    with pytest.raises(UserError, match="unknown profile 'quit'") as caught:
        parse_env("quit")
    assert caught.value.hint == "did you mean quiet?"


@pytest.mark.parametrize(
    "text",
    [
        '[p]\nsecrets = ["hf_abc-123!"]',
        '[p]\nsecrets = "hf_abc"',
        '[p]\nenv = { HF_TOKEN = ["hf_abc"] }',
        '[p]\nenv = "HF_TOKEN=hf_abc"',
        '[p]\nHF_TOKEN = "hf_abc"',
        'HF_TOKEN = "hf_abc"\n[p]',
    ],
)
def test_a_secret_pasted_as_a_value_is_not_repeated(write: Write, text: str) -> None:
    write("env.toml", text)
    with pytest.raises(UserError) as caught:
        parse_env("p")
    assert "hf_abc" not in str(caught.value)


def test_the_table_for_wandb(write: Write) -> None:
    assert wandb_settings() is None
    write("env.toml", '[wandb]\nproject = "toy"\nmode = "offline"\n')
    assert wandb_settings() == {"project": "toy", "mode": "offline"}
