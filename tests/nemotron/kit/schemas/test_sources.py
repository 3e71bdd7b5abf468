"""Sources in configs: every recipe that reads the user's files notices their change, by one rule; names and weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

import nemotron.recipes
from nemo_runspec.config import load_config, resolve_config
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.kit.schemas.sources import OwnSourceConfig, PhaseConfig, SourceConfig, check_phase_ends, named

RECIPES = Path(nemotron.recipes.__file__).parent
CURATION = "data/curation/nemotron_cc"
TOKENIZER = "tokenizer=hf://org/model"
# Script, config, and the keys that name the user's files there.
READERS = [
    ("nano3/stage0_pretrain/data_prep.py", "tiny", ("sources=[{}]",)),
    ("nano3/stage1_sft/data_prep.py", "tiny", ("sources=[{}]",)),
    ("nano3/stage2_rl/data_prep.py", "tiny", ("sources=[{}]",)),
    ("nano3/stage2_rl/data_prep_blend.py", "published", ("paths=[{}]",)),
    ("nano3/stage2_rl/data_prep_blend.py", "published", ("references={{x: {{location: {}}}}}",)),
    ("data/tokenize/tokenize_documents.py", "own", (TOKENIZER, "sources=[{}]")),
    ("data/tokenize/tokenize_documents.py", "own", ("sources=[s3://bucket/x]", "tokenizer={}")),
    ("data/pack/pack.py", "own", (TOKENIZER, "sources=[{}]")),
    ("data/pack/pack.py", "own", ("sources=[s3://bucket/x]", "tokenizer={}")),
    (f"{CURATION}/extract.py", "default", ("warc=[{}]",)),
    (f"{CURATION}/quality.py", "default", ("training.positive=[{}]", "training.negative=[{}]")),
    (f"{CURATION}/decontaminate.py", "default", ("evaluation=[{}]",)),
]


def digest_of(script: str, config: str, overrides: tuple[str, ...], location: Path) -> str | None:
    spec = parse(RECIPES / script)
    loaded = load_config(spec.config_dir, config, [override.format(location) for override in overrides])
    files: str | None = resolve_config(loaded, spec, look_up=False).data["run"]["files"]
    return files


@pytest.mark.parametrize(("script", "config", "overrides"), READERS)
def test_changed_files_are_another_run_of_every_recipe(
    script: str, config: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("tokenizer.json", "a.jsonl", ".hidden.jsonl"):
        (folder / name).write_text("{}\n")
    before = digest_of(script, config, overrides, folder)
    assert before is not None
    (folder / ".hidden.jsonl").write_text("{ }\n")
    (folder / ".git").mkdir()
    (folder / ".git" / "b.jsonl").write_text("{ }\n")
    assert digest_of(script, config, overrides, folder) == before
    (folder / "a.jsonl").write_text("{ }\n")
    assert digest_of(script, config, overrides, folder) != before
    with pytest.raises(UserError, match=r"command line: .*: no such file: .*/mined") as caught:
        digest_of(script, config, overrides, tmp_path / "mined")
    assert caught.value.hint == f"did you mean {folder}?"


@pytest.mark.parametrize("source", [OwnSourceConfig, SourceConfig])
@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("s4://bucket/x", r"unknown kind of location s4://; did you mean s3://\?"),
        ("ftp://host/x", "unknown kind of location ftp://"),
        ("hf://squad", "write hf://ORGANISATION/DATASET"),
        ("https://me:canary@host/x.jsonl", "no user or password in an address"),
        ("s3://key:canary@bucket/x", "no user or password in an address"),
    ],
)
def test_an_address_has_to_look_like_one(
    source: type[OwnSourceConfig] | type[SourceConfig], location: str, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        source.model_validate({"name": "a", "paths": [location]})
    for good in ("s3://b/x", "https://h/x", "hf://org/set:part/train@main", "file:///x", "no/such/file", "s3://b/x@1"):
        source.model_validate({"name": "a", "paths": [good]})


def test_sources_without_a_name_get_one_each() -> None:
    sources = ["data/*.jsonl", "x/notes.jsonl.gz", {"name": "notes-2"}, "y/notes.md", "hf://org/set:part/train", 7]
    assert [source["name"] for source in named(sources[:-1], "documents")] == [
        "data", "notes", "notes-2", "notes-3", "set-part-train",
    ]  # fmt: skip
    assert named(["/*", 7], "documents") == [{"name": "documents", "paths": ["/*"]}, 7]


@pytest.mark.parametrize("ends", [[], [0.5], [0.5, 0.5, 1.0], [1.0, 0.5]])
def test_phases_divide_the_whole_training(ends: list[float]) -> None:
    phases = [PhaseConfig(name="p", until=end, weights={}) for end in ends]
    with pytest.raises(ValueError, match="blend: `until` must rise from phase to phase"):
        check_phase_ends(phases, "blend")
    check_phase_ends([PhaseConfig(name="p", until=end, weights={}) for end in (0.5, 1.0)], "blend")
