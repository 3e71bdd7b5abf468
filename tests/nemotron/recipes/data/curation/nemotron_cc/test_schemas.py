"""The steps' configs form a chain, and their knobs say what the modules that do the work have."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from pydantic import ValidationError

from nemo_runspec.config import load_script_config
from nemo_runspec.config.loader import load_config
from nemo_runspec.errors import UserError
from nemotron.data_prep.curation import heuristics, rephrasing
from nemotron.kit.schemas import curation
from nemotron.kit.schemas.limits import LimitConfig
from nemotron.recipes.data.curation.nemotron_cc import crawl, schema

CONFIGS = Path(schema.__file__).parent / "config"
STEPS = (
    "language", "exact_dedup", "fuzzy_dedup", "substring_dedup", "quality", "pii", "heuristics", "decontaminate",
    "rephrase",
)  # fmt: skip


def test_names_are_those_of_the_modules() -> None:
    assert set(curation.FiltersConfig.model_fields) == set(heuristics.MEASURES)
    assert list(curation.StylesConfig.model_fields) == list(rephrasing.STYLES)


def config(step: str, name: str) -> dict[str, typing.Any]:
    return load_config(CONFIGS / step, name).data


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["tiny", "default"])
def test_configs_are_valid_and_steps_read_what_the_step_before_wrote(step: str, name: str, tmp_path: Path) -> None:
    given = config(step, name)
    file = tmp_path / "some.jsonl"
    file.write_text("{}\n")
    if "evaluation" in given:  # files of one's own, or of an artifact
        given["evaluation"] = [str(file)]
    if given.get("training", {}).get("positive"):
        given["training"] |= {"positive": [str(file)], "negative": [str(file)]}
    model = f"{step.title().replace('_', '')}Config"
    checked = getattr(schema, model).model_validate(given)
    # The last step of all names the corpus; without an endpoint that is decontaminate.
    last = {
        "tiny": ["nemotron_cc-data-tiny", "nemotron_cc-rephrase-data-tiny"],
        "default": ["nemotron_cc-decontaminate-data-default", "nemotron_cc-data-default"],
    }
    outputs = [f"nemotron_cc-{before}-data-{name}" for before in ("extract", *STEPS[:-2])] + last[name]
    place = STEPS.index(step)
    assert [checked.run.data, checked.run.output] == outputs[place : place + 2]
    if name == "default":  # as published, and that is what the fields have by themselves
        required = ("run", "training", "evaluation", "endpoint", "styles", "filters")
        assert checked == type(checked).model_validate({key: given[key] for key in required if key in given})


def test_the_limits_are_those_of_the_papers() -> None:
    filters = curation.FiltersConfig.model_validate(config("heuristics", "default")["filters"])
    # Gopher, table A1.
    table = {2: 0.20, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    for n, high in table.items():
        name = f"{'top' if n < 5 else 'duplicate'}_{n}gram_chars"
        assert getattr(filters, name) == LimitConfig(high=high)
    assert filters.lines_with_end_mark is None and filters.short_lines is None  # FineWeb's


def test_one_limit_alone_leaves_the_other_as_it_is() -> None:
    overrides = ["filters.word_count.low=30", "filters.digits=null", "filters.short_lines.high=1"]
    for name in ("default", "tiny"):
        data = load_config(CONFIGS / "heuristics", name, overrides).data
        filters = curation.FiltersConfig.model_validate(data["filters"])
        assert filters.word_count == LimitConfig(low=30, high=100_000)
        assert filters.digits is None and filters.short_lines == LimitConfig(high=1)


def test_limits_that_no_document_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="low 30 exceeds high 3"):
        LimitConfig(low=30, high=3)


def test_misspelt_labels_are_refused() -> None:
    run = {"data": "a", "output": "b"}
    with pytest.raises(ValidationError, match="medium-high"):
        schema.HeuristicsConfig.model_validate({"run": run, "exempt": ["medium_high"], "filters": {}})
    with pytest.raises(ValidationError):
        curation.RuleConfig.model_validate({"labels": ["hihg"], "max_input_words": 100, "max_output_tokens": 100})


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/v1",
        "host:8000/v1",
        "https://key@host/v1",
        "https://user:key@host/v1",
        "https://host/v1?api-key=secret",
        "stand-in",
    ],
)
def test_an_address_with_a_secret_in_it_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        curation.EndpointConfig(base_url=url, model="m")


def test_a_key_pasted_where_its_name_belongs_is_not_repeated() -> None:
    script = Path(schema.__file__).parent / "rephrase.py"
    with pytest.raises(UserError, match=r"endpoint\.api_key_env = \(hidden\): must be") as caught:
        load_script_config(script, ["--config", "tiny", "endpoint.api_key_env=sk-canary"])
    assert "canary" not in str(caught.value)


def test_good_addresses() -> None:
    for url in ("http://localhost:8000/v1", "https://host.org/v1/", "http://[::1]:8000/v1"):
        assert curation.EndpointConfig(base_url=url, model="m").base_url == url


def test_labels_must_cover_all_buckets() -> None:
    config = {"run": {"data": "a", "output": "b"}, "training": {"positive": ["a.jsonl"], "negative": ["b.jsonl"]}}
    schema.QualityConfig.model_validate(config)
    for labels in ({}, {"low": 1}, {"low": 0, "high": 20}, {"low": 0, "high": 0}, {"low": 0, "best": 19}):
        with pytest.raises(ValidationError):
            schema.QualityConfig.model_validate(config | {"labels": labels})


def test_the_crawl_that_comes_with_the_recipe_is_the_one_of_its_config() -> None:
    assert config("crawl", "tiny")["sha256"] == crawl.digest_of(crawl.DEMO_CRAWL)
    assert sum(path.stat().st_size for path in crawl.DEMO_CRAWL.rglob("*") if path.is_file()) < 300_000
