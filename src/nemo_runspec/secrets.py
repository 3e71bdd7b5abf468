"""Which names are names of secrets, and which part of an address is one: what is in no file, no log and no dry run."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
# `NUM_TOKENS`, `TOKENIZERS_PARALLELISM` and `OLDPWD` are no secrets; `HF_TOKEN`, `API_KEYS`, `AWS_ACCESS_KEY_ID` and
# `DB_PASS` are.
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CONNECTION_STRING|(?:TOKEN|KEYS?|_(?:PASS|PWD|PAT|DSN|SAS))(?:_|$)",
    re.IGNORECASE,
)
# In `art://name:3@digest` stands a version.
_LOGIN = re.compile(r"(?<!\bart)://[^/?#\s'\"]*@")  # up to the last @: a password may hold one
_PASSWORD = re.compile(r"(?<!\bart)://[^/?#\s'\"@:]*:[^/?#\s'\"]+@")
_QUERY = re.compile(r"(https?://[^?#\s]*)\?[^\s'\"]*")


def looks_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, as far as a name can say."""
    return _SECRET.search(name) is not None


def public(name: str, value: object) -> str:
    """The value of the variable `name` as it may be shown: without the logins of addresses, or that it is hidden."""
    return HIDDEN if looks_secret(name) else without_login(str(value))


def has_login(address: str) -> bool:
    """Whether a user, or a user and a password, stands before the host of an address."""
    return "@" in address.partition("://")[2].split("/", 1)[0]


def has_password(text: str) -> bool:
    """Whether a text has an address in which a password stands before the host."""
    return _PASSWORD.search(text) is not None


def without_login(text: str, mark: str = "***@") -> str:
    """A text with `mark` in the place of the user and password of each address in it."""
    return _LOGIN.sub(f"://{mark}", text)


def redact(text: str) -> str:
    """An address, or a text with addresses, without credentials and query strings (where signatures are)."""
    return _QUERY.sub(r"\1", without_login(text, mark=""))
