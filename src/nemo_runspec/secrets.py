"""Which names are names of secrets. A value under such a name is in no file, no log and no dry run."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
# `NUM_TOKENS`, `TOKENIZERS_PARALLELISM` and `OLDPWD` are no secrets; `HF_TOKEN`, `API_KEYS`, `AWS_ACCESS_KEY_ID` and
# `DB_PASS` are.
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CONNECTION_STRING|(?:TOKEN|KEYS?|_(?:PASS|PWD|PAT|DSN|SAS))(?:_|$)",
    re.IGNORECASE,
)

_LOGIN = re.compile(r"://[^/@\s]*@")


def looks_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, as far as a name can say."""
    return _SECRET.search(name) is not None


def public(name: str, value: object) -> str:
    """The value of the variable `name` as it may be shown: the value itself, or that it is hidden."""
    return HIDDEN if looks_secret(name) else str(value)


def without_login(text: str) -> str:
    """A text with `***` in the place of the user and password of each address in it."""
    return _LOGIN.sub("://***@", text)
