"""What may name a registry, and that no password in it is ever shown."""

import sys
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.env.roots import is_url, parse_root
from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line


def test_paths_and_urls(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert parse_root("shared/a") == tmp_path / "shared" / "a" and parse_root(Path("/x")) == Path("/x")
    assert parse_root("file:///data/a") == Path("/data/a") and not is_url("file:///data/a")
    assert parse_root("s3://bucket/a/b//") == "s3://bucket/a/b" and parse_root("S3://bucket") == "s3://bucket"
    assert parse_root("abfs://box@account.dfs.core.windows.net/a") == "abfs://box@account.dfs.core.windows.net/a"
    assert is_url("gs://bucket/a") and not is_url("a/b") and not is_url(Path("s3:/x"))


@pytest.mark.parametrize(
    "url", ["s3://AKIA1:can/ary+1@bucket/a", "s3://me:canary@bucket", "sftp://me:canary@host:22/a"]
)
def test_a_password_is_refused_and_not_repeated(url):
    with pytest.raises(UserError) as refused:
        Registry(url)
    said = str(refused.value)
    assert "can" not in said.replace("cannot", "").replace("credentials", "") and "AKIA1" not in said
    assert "***@" in said


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///",
        "s3://bucket/a?versionId=canary",
        "simplecache::s3://me:canary@bucket/a",
        "s3://me:canary@bucket/a::b",
        "file:///data::s3://me:canary@bucket/a",
        "file:///data/s3://me:canary@bucket/a",
        "3s://me:canary@bucket/a",
        "folder/s3://me:canary@bucket/a",
        "zip::/data/a.zip",
    ],
)
def test_what_is_no_folder_is_refused(url, tmp_path, monkeypatch):
    """It would else be a folder on this machine that is called so."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="not the URL of a folder") as refused:
        Registry(url)
    assert "canary" not in str(refused.value) and "\n" not in refused.value.message
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", url)
    if "://" in url:
        with pytest.raises(UserError, match="not the URL of a folder"):
            Registry.default()
        assert is_url(url) or url.startswith("file:")


def test_an_unknown_kind_and_a_missing_client_are_one_line(monkeypatch):
    with pytest.raises(UserError, match="s4://bucket/a: Protocol not known: s4") as refused:
        Registry("s4://bucket/a")
    assert "\n" not in refused.value.message
    known = sys.modules["fsspec.registry"]._registry
    if "s3" in known:
        monkeypatch.delitem(known, "s3")
    for name in [name for name in sys.modules if name == "s3fs" or name.startswith("s3fs.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match="Install s3fs") as refused:
        Registry("s3://bucket/a")
    assert refused.value.hint == install_line("s3")
