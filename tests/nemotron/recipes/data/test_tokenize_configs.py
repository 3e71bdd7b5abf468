"""The configs of recipes/data/tokenize, and what its schema accepts, refuses and fills in. Offline."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import nemotron.recipes
from nemo_runspec.artifacts import Registry
from nemo_runspec.config.loader import list_configs, load_config
from nemo_runspec.config.resolve import ResolvedConfig, resolve_config
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import Runspec, parse
from nemotron.recipes.data.tokenize.schema import TokenizeConfig, read_blend

RECIPE = Path(nemotron.recipes.__file__).parent / "data" / "tokenize"
CONFIGS = list_configs(RECIPE / "config")


@pytest.fixture
def spec() -> Runspec:
    return parse(RECIPE / "tokenize_documents.py")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("validation looked at the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def resolve(spec: Runspec, config: str, *overrides: str) -> ResolvedConfig:
    return resolve_config(load_config(spec.config_dir, config, overrides), spec, look_up=False)


def own(spec: Runspec, tokenizer: Path, *overrides: str) -> TokenizeConfig:
    model = resolve(spec, "own", f"tokenizer={tokenizer}", *overrides).model
    assert model is not None
    return TokenizeConfig.model_validate(model.model_dump(exclude={"run"}) | {"run": {"output": "x"}})


# --- The configs that ship --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_validates_and_states_its_tokens(
    config: str, spec: Runspec, tokenizer: Path, tmp_path: Path
) -> None:
    given = {"own": [f"sources=[{tmp_path}]", f"tokenizer={tokenizer}"]}.get(config, [])
    resolved = resolve(spec, config, *given)
    # A value of an artifact that is not made yet leaves nothing else to complain about.
    assert resolved.model is not None
    assert resolved.outputs == (f"tokenize-data-{config}",)
    assert "# Tokens: " in (RECIPE / "config" / f"{config}.yaml").read_text()


# Sums of weights, tokens: numbers that the papers and the public recipe state.
@pytest.mark.parametrize(
    ("config", "total", "tokens"),
    [("nano3_pretrain", 24, 25e12), ("super3_phase1", 80.4, 20e12), ("super3_phase2", 82.9, 5e12)],
)
def test_published_blends(config: str, total: float, tokens: float, spec: Runspec) -> None:
    data = resolve(spec, config).data
    assert sum(source["weight"] for source in data["sources"]) == pytest.approx(total)
    assert data["train_tokens"] == tokens
    assert (data["num_shards"], data["add_eos"], data["add_bos"]) == (128, True, False)
    assert data["splits"] == {"valid": 1 / 128, "test": 1 / 128}
    locations = [location for source in data["sources"] for location in source["paths"]]
    assert len(set(locations)) == len(locations)
    assert all(location.startswith("hf://") and location.endswith("/train") for location in locations)


def test_the_nano3_blend_takes_the_collections_of_the_public_recipe(spec: Runspec) -> None:
    sources = resolve(spec, "nano3_pretrain").data["sources"]
    count: dict[str, int] = {}
    for source in sources:
        assert source["weight"] == 1.0
        name = source["paths"][0].removeprefix("hf://").partition(":")[0]
        count[name] = count.get(name, 0) + 1
    assert count == {
        "nvidia/Nemotron-CC-v2": 6,
        "nvidia/Nemotron-CC-v2.1": 9,
        "nvidia/Nemotron-CC-Math-v1": 3,
        "nvidia/Nemotron-Pretraining-Specialized-v1": 6,
    }


# --- Sources ----------------------------------------------------------------------------------------------------------


def test_a_plain_string_is_a_source(spec: Runspec, tokenizer: Path, tmp_path: Path) -> None:
    for name in ("notes", "data/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}") if "." in name else (tmp_path / name).mkdir()
    words = [tmp_path / "notes", f'"{tmp_path}/data/*.jsonl"', tmp_path / "data/x.jsonl", tmp_path / "notes"]
    words += ['"hf://nvidia/Nemotron-CC-v2:High-Quality/train@main"', "s3://bucket/web/part.jsonl.zst"]
    cfg = own(spec, tokenizer, f"sources=[{', '.join(map(str, words))}]")
    assert [source.name for source in cfg.sources] == [
        "notes",
        "data",
        "x",
        "notes-2",
        "Nemotron-CC-v2-High-Quality-train",
        "part",
    ]
    assert cfg.requested_phases() is None


def test_a_validated_config_validates_again_as_itself(spec: Runspec, tokenizer: Path, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text("- {name: a, path: tok, weight: 1}\n")
    first = resolve(spec, "own", f"tokenizer={tokenizer}", f"blend={blend}")
    assert first.data["blend"] is None
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(first.data))
    assert resolve(spec, str(file)).data == first.data


def test_fractions_and_error_rules_of_a_source_replace_the_common_ones(
    spec: Runspec, tokenizer: Path, tmp_path: Path
) -> None:
    cfg = own(
        spec,
        tokenizer,
        f"sources=[{{name: a, paths: [{tmp_path}], on_error: stop, max_record_bytes: 99, test_fraction: 0.5}}, "
        f"{{name: b, paths: [{tmp_path}], valid_fraction: 1}}]",
        "splits.test=0.25",
    )
    a, b = cfg.sources
    assert (cfg.on_error(a), cfg.on_error(b)) == ("stop", "skip")
    assert (cfg.max_record_bytes(a), cfg.max_record_bytes(b)) == (99, 32 * 2**20)
    assert (cfg.valid_fraction(a), cfg.test_fraction(a), cfg.held_out(a)) == (0.01, 0.5, False)
    assert (cfg.valid_fraction(b), cfg.test_fraction(b), cfg.held_out(b)) == (1, 0, True)


def test_a_weight_of_0_of_what_is_held_out_is_no_part_of_the_blend(
    spec: Runspec, tokenizer: Path, tmp_path: Path
) -> None:
    """The mixture, which is planned behind all work, knows the sources that are trained on."""
    a, b = (f"name: {name}, paths: [{tmp_path}]" for name in "ab")
    for overrides in (
        [f"sources=[{{{a}, weight: 2}}, {{{b}, weight: 0, valid_fraction: 1}}]"],
        [f"sources=[{{{a}}}, {{{b}, valid_fraction: 1}}]", "phases=[{name: all, until: 1, weights: {a: 2, b: 0}}]"],
    ):
        phases = own(spec, tokenizer, *overrides).requested_phases()
        assert phases == [{"name": "all", "until": 1.0, "weights": {"a": 2.0}}]


HERE = "{name: a, paths: [.], weight: 1}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sources=['notes/*.jsnl']"], r"no file matches notes/\*.jsnl"),
        (["sources=[]"], "no source: give sources"),
        (["sources=[{name: a, paths: [notes], wieght: 2}]"], "unknown key sources.0.wieght"),
        (["sources=[{name: a, paths: [notes]}, {name: a, paths: [notes]}]"], "two of the name 'a'"),
        (["sources=[{name: a, paths: []}]"], "sources.0.paths = "),
        (["sources=[{name: a, paths: [notes], weight: .inf}]"], "sources.0.weight"),
        ([f"sources=[{HERE}, {{name: b, paths: [notes]}}]"], "no weight for 'b', while others have one"),
        (["sources=[{name: a, paths: [notes], weight: 0}]"], "weights of all sources are 0"),
        (["sources=[{name: a, paths: [notes], weight: 1, valid_fraction: 1}]"], "every source is held out"),
        (["sources=[{name: a, paths: [notes], valid_fraction: 0.6, test_fraction: 0.6}]"], "more than all of it"),
        (["sources=[{name: a, paths: [notes], columns: {body: text}}]"], "the wanted field comes first: {text: body}"),
        (["sources=[notes]", "phases=[{name: p, until: 1, weights: {note: 1}}]"], "'note', did you mean 'notes'"),
        (["sources=[notes, docs]", "phases=[{name: p, until: 1, weights: {docs: 1}}]"], "'notes' has no weight in any"),
        (["sources=[notes]", "phases=[{name: p, until: 1, weights: {notes: 0}}]"], "phase 'p': no weight above 0"),
        (
            [f"sources=[{HERE}]", "phases=[{name: p, until: 1, weights: {a: 1}}]"],
            "has a weight, and so have the phases",
        ),
        (["sources=[notes]", "tokenizer=docs"], "docs: no tokenizer.json in it$"),
        (["sources=[notes]", "tokenizer=s3://bucket/tok"], "or hf://ORG/MODEL"),
        (
            ["sources=[notes]", "tokenizer=nvidia/Nemotron"],
            "for a model of the Hugging Face Hub write hf://nvidia/Nemotron$",
        ),
        (["sources=[notes]", "tokenizer=tokk"], r"command line: tokenizer: no such file: tokk\ndid you mean .*/tok\?"),
        (["sources=[notes]", "blend=tok/tokenizer.json"], "blend and sources are both given"),
        (["blend=blnd.json"], "no such file: blnd.json"),
    ],
)
def test_what_is_refused_says_why(
    overrides: list[str], message: str, spec: Runspec, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes", "docs"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=message) as error:
        resolve(spec, "own", f"tokenizer={tokenizer}", *overrides)
    assert "\n" not in error.value.message


def test_an_artifact_names_the_tokenizer_and_becomes_an_input(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = Registry(tmp_path / "registry")
    published = registry.publish("words", tokenizer, {"fields": {"tokenizer_path": "art://."}})
    (tmp_path / "a.jsonl").write_text("{}\n")
    for script, words in (
        ("data/tokenize/tokenize_documents.py", ("own", "sources=[a.jsonl]")),
        ("data/pack/pack.py", ("own", "sources=[a.jsonl]")),
        ("nano3/stage1_sft/data_prep.py", ("tiny",)),
    ):
        spec = parse(RECIPE.parents[1] / script)

        def resolved(tokenizer: str, spec: Runspec = spec, words: tuple[str, ...] = words) -> ResolvedConfig:
            loaded = load_config(spec.config_dir, words[0], [*words[1:], f"tokenizer={tokenizer}"])
            return resolve_config(loaded, spec, registry=registry)

        for name in ("words", "words:1", "art://words"):
            config = resolved(name)
            assert config.data["tokenizer"] == str(published.path)
            assert config.inputs["tokenizer"] == published and config.run["tokenizer"] == "words:1"
        with pytest.raises(UserError, match="word:2"):
            resolved("word:2")
        (tmp_path / "words").mkdir(exist_ok=True)  # a folder of that name is what it was before
        with pytest.raises(UserError, match=r"words: no tokenizer\.json in it"):
            resolved("words")
        (tmp_path / "words").rmdir()


# --- Blend files ------------------------------------------------------------------------------------------------------


def test_the_three_shapes_of_a_blend_file_mean_the_same(spec: Runspec, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    published = [
        {"name": "web", "path": "hf://nvidia/X", "subset": "HQ", "split": "train", "weight": 1.5, "text_field": "body"},
        {"name": "notes", "path": "w", "weight": 0.5, "repeats": 3},
    ]
    written_out = {
        "sources": [
            {"name": "web", "paths": ["hf://nvidia/X:HQ/train"], "weight": 1.5, "columns": {"text": "body"}},
            {"name": "notes", "paths": ["w"], "weight": 0.5, "repeats": 3},
        ]
    }
    seen = []
    for name, content in [("list", published), ("datasets", {"datasets": published}), ("sources", written_out)]:
        for suffix, text in [(".json", json.dumps(content)), (".yaml", yaml.safe_dump(content))]:
            file = tmp_path / f"{name}{suffix}"
            file.write_text(text)
            seen.append(own(spec, tokenizer, f"blend={file}").model_dump(exclude={"run"}))
    assert all(cfg == seen[0] for cfg in seen[1:])
    assert seen[0]["sources"][1]["paths"] == [str(tmp_path / "w")]
    assert seen[0]["sources"][0]["columns"] == {"text": "body"}


def test_a_blend_a_split_holds_the_others_out(spec: Runspec, tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "blend.json"
    entry = {"name": "web", "path": "tok", "weight": 2.0}
    file.write_text(json.dumps({"train": [entry], "valid": [entry], "test": [entry]}))
    cfg = own(spec, tokenizer, f"blend={file}")
    assert [(s.name, cfg.valid_fraction(s), cfg.test_fraction(s), cfg.held_out(s)) for s in cfg.sources] == [
        ("web", 0, 0, False),
        ("web-valid", 1, 0, True),
        ("web-test", 0, 1, True),
    ]
    assert cfg.requested_phases() == [{"name": "all", "until": 1.0, "weights": {"web": 2.0}}]


def test_sources_of_a_blend_file_without_names_get_one_each(spec: Runspec, tokenizer: Path, tmp_path: Path) -> None:
    for split in ("train", "valid"):
        (tmp_path / split / "wiki").mkdir(parents=True)
    for content, expected in (
        ({"sources": ["train/wiki", "valid/wiki"]}, ["wiki", "wiki-2"]),
        ({"train": [{"path": "train/wiki"}], "valid": [{"path": "valid/wiki"}]}, ["wiki", "wiki-valid"]),
    ):
        (tmp_path / "blend.json").write_text(json.dumps(content))
        cfg = own(spec, tokenizer, f"blend={tmp_path / 'blend.json'}")
        assert [source.name for source in cfg.sources] == expected


def test_phases_of_a_blend_file(spec: Runspec, tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "blend.yaml"
    file.write_text("sources: [tok]\nphases:\n  - {name: p, until: 1, weights: {tok: 1e0}}\n")
    assert own(spec, tokenizer, f"blend={file}").requested_phases() == [
        {"name": "p", "until": 1.0, "weights": {"tok": 1.0}}
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- {name: a, path: tok, wieght: 1}", r"datasets\[0\]: unknown key 'wieght', did you mean 'weight'"),
        ("- {name: a, weight: 1}", r"datasets\[0\]: `path` must be a string"),
        ("- {name: a, path: tok, subset: x}", "`subset` is for hf:// paths"),
        ("- {name: a, path: tok, split: validation}", "`split` is for hf:// paths, not for tok"),
        ("- {name: a, path: tok, weight: two}", r"source 0 \(a\): weight: "),
        ("sources: [tok]\nphase: []", "unknown key 'phase', did you mean 'phases'"),
        ("data: []", "none of the keys sources, datasets, train"),
        ("sources: tok", "sources must be a list"),
        ("tok", "neither a mapping nor a list"),
        ("- {name: a, name: b}", r"blend.yaml:1: .*name"),
    ],
)
def test_a_wrong_blend_file_is_named(
    content: str, message: str, spec: Runspec, tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "blend.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        resolve(spec, "own", f"tokenizer={tokenizer}", f"blend={file}")
    assert "blend.yaml" in error.value.message
    file.write_text("- {name: a, path: tk, weight: 1}")
    with pytest.raises(UserError, match=r"sources\.0\.paths\.0: no such file: .*/tk\ndid you mean .*/tok\?"):
        resolve(spec, "own", f"tokenizer={tokenizer}", f"blend={file}")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["sources", "train", "name", "path", "weight", "paths", "x"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_blend_or_one_clear_error(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    file = tmp_path_factory.mktemp("blend") / "blend.json"
    file.write_text(json.dumps(content))
    try:
        blend = read_blend(file)
    except ValueError as error:
        assert "blend" in str(error)
    else:
        assert set(blend) == {"sources", "phases"}


# --- With the mixture -------------------------------------------------------------------------------------------------


def test_a_tokenizer_in_a_folder_replaces_the_artifact_of_the_config_as_an_input(
    spec: Runspec, tokenizer: Path
) -> None:
    assert "tokenizer" in resolve(spec, "tiny").inputs
    resolved = resolve(spec, "tiny", f"tokenizer={tokenizer}")
    assert "tokenizer" not in resolved.inputs and resolved.run.get("tokenizer") is None
    assert resolved.data["tokenizer"] == str(tokenizer)
