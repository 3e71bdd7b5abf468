"""Names that are names of secrets."""

from __future__ import annotations

import pytest

from nemo_runspec.secrets import looks_secret, public

SECRET = [
    "HF_TOKEN",
    "TOKEN",
    "hf_token",
    "GITHUBTOKEN",
    "WANDB_API_KEY",
    "API_KEYS",
    "AWS_ACCESS_KEY_ID",
    "MY_SECRETS",
]
SECRET += ["PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_PASSPHRASE", "SECRET_PATH"]
SECRET += ["DB_PASS", "MYSQL_PWD", "GITHUB_PAT", "SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING"]
PLAIN = [
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "NUM_TOKENS",
    "KEYBOARD",
    "HOME",
    "CUDA_VISIBLE_DEVICES",
    "PATH",
    "PWD",
    "OLDPWD",
]


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_is_hidden(name: str) -> None:
    assert looks_secret(name)
    assert public(name, "s3cret") == "(hidden)"


@pytest.mark.parametrize("name", PLAIN)
def test_a_setting_is_shown(name: str) -> None:
    assert not looks_secret(name)
    assert public(name, 4) == "4"
