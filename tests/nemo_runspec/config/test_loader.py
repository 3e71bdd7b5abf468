"""Files, defaults and overrides become one tree that knows where each value was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.config import list_configs, load_config
from nemo_runspec.config.loader import merge
from nemo_runspec.errors import UserError

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def configs(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("config/_base.yaml", "a: {x: 1, y: 2}\nitems: [1, 2]\n")
    write("config/tiny.yaml", "# tiny\ndefaults: [_base]\na:\n  y: 3\nrun:\n  data: d-${run.config}\n")
    return tmp_path / "config"


def test_defaults_lie_below_and_overrides_above(configs: Path) -> None:
    loaded = load_config(configs, "tiny", ["a.x=5", "items.1=7", "new.key=[a]", "a.z={k: 1}", "a.z.l=2"])
    assert loaded.data == {
        "a": {"x": 5, "y": 3, "z": {"k": 1, "l": 2}},
        "items": [1, 7],
        "run": {"data": "d-${run.config}", "config": "tiny"},
        "new": {"key": ["a"]},
    }
    assert loaded.run.data == "d-tiny"
    assert loaded.origin(("a", "y")) == "config/tiny.yaml:4"
    assert loaded.origin(("a", "x")) == "command line"
    assert loaded.origin(("a", "z", "k")) == "command line"
    assert loaded.origin(("items", 0)) == "config/_base.yaml:2"
    assert loaded.origin(("items", 1)) == "command line"
    assert loaded.origin(("absent",)) == "config/tiny.yaml"


@pytest.mark.parametrize("defaults", ["", "defaults: [_base]\n"])
def test_an_override_of_an_alias_leaves_its_anchor_alone(write: Write, configs: Path, defaults: str) -> None:
    write("config/two.yaml", f"{defaults}t: &t {{opt: {{lr: 1}}}}\nm:\n  u: *t\n  v:\n    <<: *t\nl: [*t, *t]\n")
    data = load_config(configs, "two", ["m.u.opt.lr=2", "m.v.opt.lr=3", "l.1.opt.lr=4"]).data
    assert data["t"] == data["l"][0] == {"opt": {"lr": 1}}
    assert data["m"] == {"u": {"opt": {"lr": 2}}, "v": {"opt": {"lr": 3}}}
    assert data["l"][1] == {"opt": {"lr": 4}}


def test_self_says_where_the_file_stands(write: Write, configs: Path) -> None:
    write("config/last.yaml", "defaults: [_self_, _base]\na: {x: 9}\n")
    assert load_config(configs, "last").data["a"] == {"x": 1, "y": 2}
    write("config/between.yaml", "defaults: [_base, _self_, tiny]\na: {x: 9, y: 9}\n")
    assert load_config(configs, "between").data["a"] == {"x": 1, "y": 3}


def test_a_config_is_a_name_or_a_path_from_anywhere(write: Write, configs: Path, tmp_path: Path) -> None:
    for name in ("tiny", "tiny.yaml", "config/tiny.yaml", str(configs / "tiny.yaml")):
        assert load_config(configs, name).path == configs / "tiny.yaml"
    other = write("elsewhere/mine.yml", "defaults: [_base]\n")  # defaults are also looked for in the config folder
    loaded = load_config(configs, str(other))
    assert loaded.name == "mine"
    assert loaded.data["items"] == [1, 2]
    assert list_configs(configs) == ["tiny"]


def test_plain_formats_keep_every_text_as_it_stands(write: Write, configs: Path) -> None:
    write("config/p.yaml", "defaults: [x]\nt: ${a}\n")
    loaded = load_config(configs, "p", (), "yaml")
    assert loaded.data["defaults"] == ["x"]
    assert loaded.data["t"] == r"\${a}"
    write("config/j.json", '{"t": 1}')
    assert load_config(configs, "j", ["u=2"], "json").data == {"t": 1, "u": 2, "run": {"config": "j"}}
    write("config/bad.json", '{"t": 1,\n oops}')
    with pytest.raises(UserError, match=r"config/bad\.json:2: malformed JSON"):
        load_config(configs, "bad", (), "json")
    write("config/bad.json", f'{{"t": {"1" * 5000}}}')
    with pytest.raises(UserError, match=r"config/bad\.json: malformed JSON: Exceeds the limit"):
        load_config(configs, "bad", (), "json")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("a: [", "config/bad.yaml:", None),
        ("- a", "config/bad.yaml:1: a config is a mapping", None),
        ("defaults: tiny", "config/bad.yaml:1: defaults must be a list", None),
        ("a: 1\ndefaults: [tny]", "config/bad.yaml: defaults: no config 'tny'", "did you mean tiny?"),
        ("defaults: [bad]", "config/bad.yaml: defaults include each other", None),
        ("run: 3", "config/bad.yaml:1: run = 3: must be a group of keys", None),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    write: Write, configs: Path, text: str, message: str, hint: str | None
) -> None:
    write("config/bad.yaml", text)
    with pytest.raises(UserError) as caught:
        load_config(configs, "bad")
    assert caught.value.message.startswith(message)
    assert caught.value.hint == hint or hint is None


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("tniy", "no config 'tniy' in config", "did you mean tiny?"),
        ("zzz", "no config 'zzz' in config", "configs: tiny"),
        ("x/y.yaml", "no such config file: x/y.yaml", None),
        ("~nouser/y.yaml", "~nouser/y.yaml: there is no user 'nouser'", "~/ is your own home folder"),
        ("", "no config '' in config", "configs: tiny"),
        ("own/mine", "no config 'own/mine' in config", "for the file write own/mine.yaml"),
    ],
)
def test_an_unknown_config_is_answered_with_what_there_is(
    write: Write, configs: Path, name: str, message: str, hint: str | None
) -> None:
    write("own/mine.yaml", "a: 1")
    with pytest.raises(UserError) as caught:
        load_config(configs, name)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a..x=1", "'a..x=1' is not an override"),
        ("+a=1", "'+a=1' is not an override"),
        ("=1", "'=1' is not an override"),
        ("items.2=1", "items is a list of 2 items"),
        ("items.x=1", "items is a list of 2 items"),
        ("a.x={", "'{' is not a value"),
    ],
)
def test_a_bad_override_is_refused(configs: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(configs, "tiny", [override])
    assert message in caught.value.message
    assert caught.value.message.startswith("command line")


TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def flat(tree: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    if isinstance(tree, dict) and tree:
        return {key: leaf for name, item in tree.items() for key, leaf in flat(item, (*path, name)).items()}
    return {path: tree}


@given(TREES, TREES)
def test_after_a_merge_every_leaf_is_of_the_upper_tree_or_untouched(below: dict, above: dict) -> None:  # type: ignore[type-arg]
    merged: dict[str, object] = {}
    merge(merged, {}, below, {})
    merge(merged, {}, above, {})
    upper = {path: leaf for path, leaf in flat(above).items() if leaf != {}}
    leaves = flat(merged)
    assert upper.items() <= leaves.items()
    for path, leaf in leaves.items():
        assert path in upper or leaf == {} or flat(below)[path] == leaf
