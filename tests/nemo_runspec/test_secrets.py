"""Names that are names of secrets."""

from __future__ import annotations

import pytest

from nemo_runspec.secrets import has_login, has_password, looks_secret, public, without_login

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@head:8265", "http://***@head:8265"),
        (
            "no answer from https://me:p@ss@host/v1, nor s3://key@bucket/a",
            "no answer from https://***@host/v1, nor s3://***@bucket/a",
        ),
        ("['https://host/a', 'you@there']", "['https://host/a', 'you@there']"),
        ("hf://me/data@main", "hf://me/data@main"),
    ],
)
def test_the_login_of_an_address_is_hidden_to_its_end(text: str, shown: str) -> None:
    assert without_login(text) == shown
    assert public("PROXY", text) == shown


@pytest.mark.parametrize(
    ("address", "expected"), [("https://a:b@host/x", True), ("https://host/@x", False), ("a@b", False)]
)
def test_an_address_with_a_login(address: str, expected: bool) -> None:
    assert has_login(address) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x http://me:p@ss@host", True),
        ("http://:pw@[::1]:80", True),
        ("ssh://git@host:22/a", False),
        ("http://host:80/a@b", False),
        ("http://[::1]:80 me@host", False),
        ("art://corpus:3@0123456789ab", False),
    ],
)
def test_an_address_with_a_password(text: str, expected: bool) -> None:
    assert has_password(text) is expected
