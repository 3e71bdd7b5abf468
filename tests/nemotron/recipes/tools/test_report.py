"""The report: every number it shows comes from a record, user text is escaped, and nothing is fetched from anywhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.artifacts.build import OWN_KEYS
from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.step import StepTable
from nemotron.recipes.tools import report

FAMILIES = ("math", "multiple_choice")
VOID = {"meta", "br", "line", "circle", "polyline"}


def entry(greedy: float, sampled: float | None) -> dict[str, Any]:
    scores: dict[str, Any] = {"tasks": 128, "greedy": greedy, "greedy_95": [greedy - 0.05, greedy + 0.04]}
    scores["greedy_tokens"] = 10.0
    return scores if sampled is None else {**scores, "sampled": sampled, "sampled_95": [sampled - 0.03, sampled + 0.03]}


def tasks(greedy: float, sampled: float | None) -> dict[str, Any]:
    families = {family: entry(greedy + 0.01 * i, sampled) for i, family in enumerate(FAMILIES)}
    return {"mean": entry(greedy, sampled), "families": families}


def sampled_tasks(greedy: float, sampled: float, pass_at: dict[str, float], **others: Any) -> dict[str, Any]:
    scores = tasks(greedy, sampled)
    scores["families"]["math"] |= {"pass_at_k": pass_at, **others}
    return scores


METRICS: dict[str, Any] = {
    "models": {"base": "nano3-pretrain-model-t", "sft": "nano3-sft-model-t", "rl": "nano3-rl-model-t"},
    "tasks": {
        "base": tasks(0.08, None),
        "sft": sampled_tasks(0.71, 0.6, {"2": 0.512, "16": 0.623}),
        "rl": sampled_tasks(0.83, 0.77, {"2": 0.612, "16": 0.723}, majority_at_k={"2": 0.434, "16": 0.545}),
    },
    "baselines": {
        "math": {"constant": 0.031, "nearest_neighbour": 0.052, "seen_fraction": 0.0123},
        "multiple_choice": {"constant": 0.27, "nearest_neighbour": None, "seen_fraction": None},
    },
    "comparisons": {
        "rl - sft": {
            "sampled": {"mean": {"difference": 0.17, "difference_95": [0.12, 0.22], "p": 0.0002}, "worse": ["math"]}
        }
    },
    "reasoning": {
        "sft": {"off": {"mean": {"greedy": 0.123, "greedy_tokens": 4.5}}},
        "rl": {
            "16": {"mean": {"greedy": 0.234, "greedy_tokens": 9.25}},
            "off": {"mean": {"greedy": 0.345, "greedy_tokens": 3.75}},
        },
    },
    "text": {"base": {"stdlib_code": 2.01}, "sft": {"stdlib_code": 2.3}, "rl": {"stdlib_code": 2.41}},
    "pretrain_text": {"stdlib_code": {"bits_per_byte": 2.044, "trigram_bits_per_byte": 2.613}},
    "ruler": {"rl": {"256": {"niah_multikey_1": {"recall": 0.456, "recall_95": [0.345, 0.567], "chance": 0.25}}}},
    "generations": [
        {
            "family": "math",
            "prompt": "1 < 2 & <b>bold</b>?",
            "demonstration": "yes",
            "base": {"text": "<script>alert(1)</script>", "right": False},
            "sft": {"text": "<think>\nhm\n</think>\nyes", "right": True},
        }
    ],
    "bands": [
        {"name": "sft.greedy_mean", "value": 0.714, "relation": ">=", "bound": 0.7, "passed": True},
        {"name": "rl.families_worse", "value": 1.0, "relation": "<=", "bound": 0, "passed": False},
        {"name": "base.below_trigram", "value": None, "relation": ">=", "bound": 0.0, "passed": False},
    ],
    "in_band": False,
    "not_run": ["code_generation"],
}


def publish(registry: Registry, name: str, runspec: str, fingerprint: str, inputs: dict[str, str], metrics: Any) -> str:
    source = registry.root.parent / "source.txt"
    source.write_text(name)
    record = {
        "type": "Model",
        "types": ["Model"],
        "fields": {"num_parameters": 1_914_000} if "model" in name else {},
        "metrics": metrics,
        "created_at": "2025-01-02T03:04:05+00:00",
        "producer": {"script": "x.py", "name": runspec, "fingerprint": fingerprint, "git_commit": "abcdef0123456789"},
        "inputs": inputs,
        "sources": [{"name": "python-standard-library"}] if not inputs else [],
    }
    return registry.publish(name, source, record).pinned


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Records of a small recipe: data, three models with two run directories left, results, evaluation."""
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path))
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    registry = Registry(tmp_path / "artifacts")
    curation = {
        "curation": [
            {"source": "stdlib_code", "outcome": "read", "documents": 12345, "bytes": 9_870_000},
            {"source": "stdlib_code", "outcome": "near duplicate", "documents": 321, "bytes": 450_000},
        ],
        "dropped_samples": {"near duplicate": [{"source": "stdlib_code", "id": "os.py:3", "text": "def walk(<top>)"}]},
    }
    data = publish(registry, "nano3-pretrain-data-t", "nano3/data/prep/pretrain", "d0", {}, curation)
    base = publish(registry, "nano3-pretrain-model-t", "nano3/pretrain", "aaaa", {"data": data}, {})
    sft = publish(registry, "nano3-sft-model-t", "nano3/sft", "bbbb", {"model": base}, {})
    rl = publish(registry, "nano3-rl-model-t", "nano3/rl", "gone", {"model": sft}, {})
    inputs = {"base": base, "sft": sft, "rl": rl, "pretrain_data": data}
    publish(registry, "nano3-eval-results-t", "nano3/eval", "eeee", inputs, METRICS)
    log(tmp_path / "nano3/pretrain/t-aaaa", [{"step": s, "loss": 7 - s / 50} for s in range(1, 101)])
    log(tmp_path / "nano3/pretrain/t-aaaa", [{"step": 100, "valid_bits_per_byte": {"stdlib_code": 2.0}}])
    log(tmp_path / "nano3/sft/t-bbbb", [{"step": 1, "loss": "nan"}, {"step": 2, "loss": 1.5, "valid_loss": 1.6}])
    phases = [{"phase": "train", "seconds": 90.0}, {"phase": "evaluate", "seconds": 35.2}]
    (tmp_path / "nano3/pretrain/t-aaaa/phases.jsonl").write_text("".join(json.dumps(p) + "\n" for p in phases))
    return registry


def log(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"time": 0.0, **line}) + "\n" for line in lines)


class Reader(HTMLParser):
    """Text of the page, its tags, and a check that every tag that is opened is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(registry: Registry) -> Reader:
    return Reader(report.build_page(report.read_records("nano3-eval-results-t", registry)))


def test_the_page_is_well_formed_and_reaches_for_nothing_outside(registry: Registry) -> None:
    page = read(registry)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe"}
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "href" in attrs]
    tools = Path(report.__file__).parent
    template = (tools / "report.html.jinja").read_text() + (tools / "page.css").read_text()
    assert "url(" not in template and "@import" not in template
    assert "prefers-color-scheme:dark" in template


def test_scores_with_intervals_baselines_and_differences_are_shown(registry: Registry) -> None:
    text = read(registry).text
    assert "71.0 66.0 – 75.0" in text  # SFT, greedy mean
    assert "77.0 74.0 – 80.0" in text  # RL, sampled mean
    assert "math 3.1 5.2 1.2" in text  # constant, look-up, seen
    assert "multiple_choice 27.0 – –" in text
    assert "RLVR over SFT, sampled +17.0 +12.0 to +22.0 0.0002 math" in text
    assert (
        "on off 16 SFT 71.0 10.0 tokens 12.3 4.5 tokens – RLVR 83.0 10.0 tokens 34.5 3.8 tokens 23.4 9.2 tokens" in text
    )
    assert "stdlib_code 2.010 2.300 2.410 2.044 2.613" in text


def test_several_samples_are_shown_by_k(registry: Registry) -> None:
    text = read(registry).text
    assert "math 2 – – 51.2 – 61.2 43.4 math 16 – – 62.3 – 72.3 54.5" in text
    assert "task tokens chance RLVR niah_multikey_1 256 25.0 45.6 34.5 – 56.7" in text


def test_bands_and_the_headline_tell_what_is_outside(registry: Registry) -> None:
    text = read(registry).text
    assert "SFT: greedy mean 0.714 ≥ 0.7 in band" in text
    assert "RLVR: families worse 1.000 ≤ 0 outside" in text
    assert "base: below trigram not measured ≥ 0 outside" in text
    assert "1 / 3 not all in band" in text
    assert "Not run, as no sandbox started: code_generation." in text
    assert "run took 2:05" in text  # 90 + 35.2 seconds


def test_where_no_bands_are_stated_nothing_is_said_to_be_in_them(registry: Registry) -> None:
    inputs = registry.resolve("nano3-eval-results-t").record["inputs"]
    publish(registry, "nano3-eval-results-t", "nano3/eval", "ffff", inputs, METRICS | {"bands": [], "in_band": True})
    text = read(registry).text
    assert "in band" not in text and "0 / 0" not in text


def test_what_models_and_documents_say_is_text_and_never_markup(registry: Registry) -> None:
    page = report.build_page(report.read_records("nano3-eval-results-t", registry))
    assert "<script>" not in page and "<b>bold" not in page and "<top>" not in page
    text = Reader(page).text
    assert "<script>alert(1)</script>" in text
    assert "stdlib_code near duplicate 321 0.45" in text
    assert "near duplicate stdlib_code os.py:3 def walk(<top>)" in text


def test_reasoning_and_answer_are_told_apart() -> None:
    thought = '<span class="thought">1 &lt; 2</span>\n'
    assert report.spoken({"text": "<think>\n1 < 2\n</think>\nyes", "right": True}).endswith(thought + "yes")
    assert report.spoken({"text": "1 < 2\n</think>\nyes", "right": True}).endswith(thought + "yes")
    assert report.spoken({"text": "2+2=5\n7</s>", "right": False}) == '<span class="bad">✗</span> 2+2=5\n7'
    assert "(nothing)" in report.spoken({"text": "</s>", "right": False})
    results = "<|im_start|>user\n<tool_response>\n<b>\n</tool_response>\n<|im_end|>\n"
    turns = (
        f"which?\n</think>\ncall\n<|im_end|>\n{results}<|im_start|>assistant\n<think>\n584\n</think>\nDone.<|im_end|>"
    )
    assert report.spoken({"text": turns, "right": True}) == (
        '<span class="good">✓</span> <span class="thought">which?</span>\ncall\n'
        '<span class="tool">&lt;tool_response&gt;\n&lt;b&gt;\n&lt;/tool_response&gt;\n</span>\n'
        '<span class="thought">584</span>\nDone.'
    )


def test_curves_come_from_the_runs_that_made_the_models_and_a_run_that_is_gone_is_left_out(registry: Registry) -> None:
    page = read(registry)
    titles = {attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"}
    assert {"Pretraining: loss", "Pretraining: held-out text (dashed: a trigram model)", "SFT: loss"} <= titles
    assert not [title for title in titles if title and title.startswith("RL")]
    dashed = [attrs["points"] for tag, attrs in page.tags if tag == "polyline" and attrs["class"] == "dashed"]
    assert len(dashed) == 1


def test_drafts_and_quantised_models_are_shown_where_they_were_measured(registry: Registry) -> None:
    assert not {"Speculative decoding", "Quantisation"} & set(read(registry).words)
    bytes_of_both = {"full": 5.25e6, "quantized": 1.5e6}
    measured = {
        "acceptance_length": {"greedy": {"before": 2.125, "after": 2.375}},
        "quantization": {
            "sft": {"kl": 0.0125, "accuracy": 0.9, "teacher_accuracy": 0.91, "bytes": bytes_of_both},
            "rl": {"kl": 0.005, "accuracy": 0.905, "teacher_accuracy": 0.91, "bytes": None},
        },
    }
    inputs = registry.resolve("nano3-eval-results-t").record["inputs"]
    publish(registry, "nano3-eval-results-t", "nano3/eval", "ffff", inputs, METRICS | measured)
    text = read(registry).text
    assert "greedy 2.125 2.375" in text
    assert "SFT 0.0125 90.0 91.0 1.50 5.25 RLVR 0.0050 90.5 91.0 – –" in text


def test_a_figure_may_be_of_a_model_that_another_was_trained_from(registry: Registry) -> None:
    """As those of the phases of pretraining: an input of an input, and so on; one that is not there leaves it out."""
    records = report.read_records("nano3-eval-results-t", registry)
    found = {place: report.model_of(records, place) for place in ("rl/model/model", "rl/judge", "rl/judge/model", "x")}
    assert {place: model and model.name for place, model in found.items()} == {
        "rl/model/model": "nano3-pretrain-model-t", "rl/judge": None, "rl/judge/model": None, "x": None
    }  # fmt: skip


def test_what_a_version_carries_serves_when_its_run_is_gone(registry: Registry, tmp_path: Path) -> None:
    version = registry.resolve("nano3-rl-model-t")
    lines = "".join(json.dumps({"step": step, "reward": step / 5}) + "\n" for step in range(1, 4))
    files = {"metrics.jsonl": lines.encode(), "phases.jsonl": b'{"phase": "train", "seconds": 75.0}\n'}
    record = {key: value for key, value in version.record.items() if key not in OWN_KEYS}
    again = registry.publish("nano3-rl-model-t", version.path, record, run_files=files)
    evaluation = registry.resolve("nano3-eval-results-t").record
    inputs = {**evaluation["inputs"], "rl": again.pinned}
    publish(registry, "nano3-eval-results-t", "nano3/eval", "ffff", inputs, METRICS)
    page = read(Registry(shutil.move(registry.root, tmp_path / "moved")))
    assert "RL: reward of the rollouts" in {attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"}
    assert "1:15" in page.text


def test_a_figure_of_a_model_that_another_was_made_with(registry: Registry) -> None:
    judge = publish(registry, "nano3-genrm-model-t", "nano3/genrm", "ffff", {}, {})
    inputs = {"judge": judge, "gone": f"no-such:1@{'0' * 64}"}
    rlhf = publish(registry, "nano3-rlhf-model-t", "nano3/rlhf", "eeee", inputs, {})
    evaluation = registry.resolve("nano3-eval-results-t").record
    publish(registry, "nano3-eval-results-t", "nano3/eval", "gggg", {**evaluation["inputs"], "rlhf": rlhf}, METRICS)
    records = report.read_records("nano3-eval-results-t", registry)
    places = ("rlhf", "rlhf/judge", "rlhf/gone", "rlhf/other", "final/judge")
    found = [report.model_of(records, place) for place in places]
    assert [version and version.pinned for version in found] == [rlhf, judge, None, None, None]
    asked = {curve["model"] for curve in records.family["curves"]}
    assert {"base", "sft", "rl", "rlhf", "rlhf/judge", "final"} <= asked


def test_a_figure_takes_single_metrics_dictionaries_and_whole_groups() -> None:
    line = {"step": 3, "reward": 0.5, "reward_math": 0.25, "reward_choice": 0.75, "bits": {"a": 1.0}, "note": "x"}
    assert list(report.labelled(line, {"reward": "all", "reward_*": ""})) == [
        ("all", 0.5),
        ("math", 0.25),
        ("choice", 0.75),
    ]
    assert list(report.labelled(line, {"bits": "", "note": "n", "absent": "y"})) == [("a", 1.0)]


def test_the_lineage_reaches_the_raw_source(registry: Registry) -> None:
    text = read(registry).text
    tree = text[text.index("Lineage") :]
    order = ["nano3-rl-model-t:1", "nano3-sft-model-t:1", "nano3-pretrain-model-t:1", "nano3-pretrain-data-t:1"]
    positions = [tree.rindex(name) for name in [*order, "python-standard-library"]]
    assert positions == sorted(positions)


def test_what_the_steps_before_the_data_dropped_is_shown_first(registry: Registry) -> None:
    steps = {}
    for name, inputs, num_documents in (("clean", {}, 90), ("select", {"data": "clean"}, 70)):
        table = StepTable()
        for _ in range(num_documents):
            table.read.add({"text": "a" * 1000})
        table.drop({"id": f"{name}.jsonl:1", "text": f"too short for {name}"}, "too few words")
        pinned = {role: steps[ref] for role, ref in inputs.items()}
        steps[name] = publish(registry, f"{name}-data", f"nano3/data/{name}", name, pinned, {"table": table.to_json()})
    other = publish(registry, "other", "mine/other", "o", {}, {"table": {"rows": 3}})  # no table of a curation
    metrics = registry.resolve("nano3-pretrain-data-t").record["metrics"]
    inputs = {"data": steps["select"], "other": other}
    data = publish(registry, "nano3-pretrain-data-t", "nano3/data/prep/pretrain", "d1", inputs, metrics)
    evaluation = registry.resolve("nano3-eval-results-t").record
    inputs = {**evaluation["inputs"], "pretrain_data": data}
    publish(registry, "nano3-eval-results-t", "nano3/eval", "ffff", inputs, METRICS)
    text = read(registry).text
    rows = ["nano3/data/clean read 90 0.090", "nano3/data/select read 70 0.070", "stdlib_code read 12,345 9.870"]
    rows += ["too few words nano3/data/clean clean.jsonl:1 too short for clean", "too short for select", "def walk"]
    positions = [text.index(row) for row in rows]
    assert positions == sorted(positions)


def test_only_an_evaluation_can_be_reported(registry: Registry) -> None:
    with pytest.raises(UserError, match="nano3-rl-model-t:1 is not the result of an evaluation"):
        report.read_records("nano3-rl-model-t", registry)
    publish(registry, "other-results", "nano4/eval", "ffff", {}, METRICS)
    with pytest.raises(UserError, match=r"other-results:1 was made by nano4/eval, which has no report\.yaml"):
        report.read_records("other-results", registry)
    family = report.RECIPES / "nano3"  # as the pipe of a fork has it, whose recipes are elsewhere
    assert report.read_records("other-results", registry, family).names["sft"] == "SFT"


def test_what_was_removed_since_is_left_out(registry: Registry) -> None:
    publish(registry, "nano3-sft-model-t", "nano3/sft", "cccc", {}, {})  # another version stays
    for ref in ("nano3-pretrain-data-t:1", "nano3-sft-model-t:1"):
        registry.remove(ref)
    page = read(registry)
    assert "run took 2:05" in page.text and "What curation dropped" not in page.text
    for ref in ("nano3-pretrain-model-t:1", "nano3-rl-model-t:1"):
        registry.remove(ref)
    with pytest.raises(UserError, match=r"nano3-eval-results-t:1: none of its models is left that is one of base, sft"):
        read(registry)


def test_the_script_writes_the_page(registry: Registry, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "page.html"
    command = [sys.executable, report.__file__, "nano3-eval-results-t", "--output", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"<!doctype html>", target.read_text())
    command[2] = "nano3-eval-result-t"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "did you mean nano3-eval-results-t?" in done.stderr and "Traceback" not in done.stderr
