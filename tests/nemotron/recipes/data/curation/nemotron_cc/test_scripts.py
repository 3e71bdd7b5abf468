"""Scripts of the curation as a user runs them: quality and filters in a pipe; rephrasing against an endpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_server import ChatServer, chat_server, send, text_in

from nemo_runspec.artifacts import Registry, Version
from nemotron.data_prep.curation.step import list_documents, read_documents, write_documents
from nemotron.kit import Dataset
from nemotron.kit.schemas.curation import FiltersConfig, StylesConfig
from nemotron.recipes.data.curation.nemotron_cc import schema

RECIPE = Path(schema.__file__).parent
GOOD = "the function returns the number of items that the list contains and raises an error when it is empty"
OTHER = "buy cheap deals now click here best price free shipping offer limited and more of the same"


def documents(count: int) -> list[dict[str, Any]]:
    """Texts of 20 to 120 words, of which every other one is mostly of the good kind."""
    draw = Random(0)
    made = []
    for i in range(count):
        own, other = (GOOD, OTHER) if i % 2 else (OTHER, GOOD)
        words = draw.choices(own.split(), k=draw.randrange(20, 90))
        words += draw.choices(other.split(), k=draw.randrange(12))
        draw.shuffle(words)
        made.append({"id": f"d{i}", "url": f"https://e.org/{i}", "text": " ".join(words) + "."})
    return made


def publish(root: Path, name: str, rows: list[dict[str, Any]]) -> None:
    payload = root / f"payload-{name}"
    (payload / "documents").mkdir(parents=True)
    for part in range(3):
        write_documents(payload / "documents" / f"part-{part}.jsonl.zst", rows[part::3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(root / "artifacts"))
        Dataset(path=payload, num_examples=len(rows)).save(name=name)


def command(step: str, *words: str) -> list[str]:
    return [sys.executable, str(RECIPE / f"{step}.py"), "--config", "tiny", *words]


def start(root: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=root, env=os.environ | {"RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts")},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(root: Path, words: list[str]) -> tuple[int, str]:
    """(exit code, what was said)."""
    process = start(root, words)
    _, said = process.communicate(timeout=200)
    return process.returncode, said


def documents_of(version: Version) -> dict[str, dict[str, Any]]:
    return {d["id"]: d for path in list_documents(version.path) for d in read_documents(path)}


@pytest.mark.slow
def test_quality_learns_from_a_part_measures_on_the_other_and_high_quality_is_spared(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    rows = documents(400)
    publish(tmp_path, "pages", rows)
    for name, some in (("good", rows[1::2]), ("other", rows[::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    own = "run.data=pages run.crawl=null training.positive=[good.jsonl] training.negative=[other.jsonl]"
    line = " | ".join(map(" ".join, [command("quality", *own.split()), command("heuristics")]))
    code, said = run(tmp_path, ["bash", "-c", f"set -o pipefail; {line}"])
    assert code == 0, said
    registry = Registry(tmp_path / "artifacts")
    quality, heuristics = (registry.resolve(f"nemotron_cc-{step}-data-tiny") for step in ("quality", "heuristics"))
    metrics = quality.record["metrics"]
    held_out, auc = metrics["held_out"], metrics["held_out"]["auc"]
    assert held_out["pages"] + metrics["trained_on"]["good"] + metrics["trained_on"]["other"] == 400
    assert 0.3 < held_out["pages"] / 400 < 0.5  # held_out_fraction is 0.4
    assert auc["ensemble"]["low"] > 0.85 and auc["ensemble"]["low"] > auc["length alone"]["high"]
    assert held_out["rises_with_label"]
    assert all(error < 0.15 for error in held_out["calibration_error"].values())
    labels = schema.QualityConfig.model_fields["labels"].default
    before, after = documents_of(quality), documents_of(heuristics)
    for document in before.values():
        assert labels[document["quality"]] <= document["bucket"] <= 19
        assert set(document["quality_scores"]) == {"words", "surface"}
    names = {path.name for path in (quality.path / "classifier").iterdir()}
    assert names == {"classifier.safetensors", "classifier.json"}
    dropped = heuristics.record["metrics"]["table"]["dropped"]
    assert dropped and set(dropped) <= set(FiltersConfig.model_fields)
    assert all(i in after for i, document in before.items() if document["quality"] == "high")


@pytest.fixture
def endpoint() -> Iterator[ChatServer]:
    with chat_server() as server:
        server.answer = obliging
        yield server


def obliging(body: dict[str, Any]) -> str:
    """An answer in the form that is asked for."""
    instruction, text = body["messages"][1]["content"].partition("<text>")[0], text_in(body)
    half = " ".join(text.split()[: len(text.split()) // 2])
    if "'Question:'" in instruction:
        return f"Question: What does it say?\nAnswer: {half}"
    return f"- {half}" if "'- '" in instruction else f"It says: {half}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry with documents of low, high and middling quality, as the step before has published them."""
    rows = documents(60)
    for row, quality in zip(rows, ("low", "high", "medium") * 20, strict=True):
        row["quality"] = quality
    publish(tmp_path, "nemotron_cc-data-tiny", rows)
    return tmp_path


@pytest.mark.slow
def test_rephrasing_adds_documents_in_the_styles_of_their_quality(root: Path, endpoint: ChatServer) -> None:
    code, said = run(root, command("rephrase", f"endpoint.base_url={endpoint.url}", "endpoint.model=m"))
    assert code == 0, said
    registry = Registry(root / "artifacts")
    version = registry.resolve("nemotron_cc-rephrase-data-tiny")
    before, after = documents_of(registry.resolve("nemotron_cc-data-tiny")), documents_of(version)
    assert {i: d for i, d in after.items() if "rephrased_from" not in d} == before
    made = [d for d in after.values() if "rephrased_from" in d]
    styles = Counter(d["source"].removeprefix("synthetic_") for d in made)
    assert set(styles) == set(StylesConfig.model_fields)
    for document in made:
        wanted = "low" if document["source"] == "synthetic_wikipedia" else "high"
        assert before[document["rephrased_from"]]["quality"] == wanted
    metrics = version.record["metrics"]
    assert metrics["endpoint"] == {"base_url": endpoint.url, "model": "m"}
    for style, usage in metrics["usage"].items():
        assert usage["requests"] == usage["answers"] >= styles[style]
        assert usage["completion_tokens"] > 5 * usage["requests"]
    assert sum(usage["requests"] for usage in metrics["usage"].values()) == len(endpoint.bodies)


def test_a_missing_key_is_refused_before_any_work(root: Path) -> None:
    code, said = run(root, command("rephrase", "endpoint.api_key_env=SURELY_NOT_SET"))
    assert code == 2 and "SURELY_NOT_SET" in said, said


@pytest.mark.slow
def test_with_more_patience_nothing_is_asked_again(root: Path, endpoint: ChatServer) -> None:
    def refuse_every_fifth(number: int, attempt: int, handler: BaseHTTPRequestHandler) -> bool:
        if number % 5 == 0:
            send(handler, 400, b"{}")
        return number % 5 == 0

    endpoint.fault = refuse_every_fifth
    words = ("run.output=patient", "endpoint.concurrency=1", f"endpoint.base_url={endpoint.url}")
    code, said = run(root, command("rephrase", *words, "endpoint.max_failed=0.15"))
    assert code == 1 and "refused with status 400" in said
    assert len(endpoint.asked) > 5
    code, said = run(root, command("rephrase", *words, "endpoint.max_failed=0.9", "endpoint.timeout=50"))
    assert code == 0, said
    assert set(endpoint.asked.values()) == {1}
    assert not list(root.rglob("answers-*"))  # of use until they are published


@pytest.mark.slow
def test_a_signal_ends_it_at_once_while_the_endpoint_is_silent(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        process = start(root, command("rephrase", f"endpoint.base_url={url}", "endpoint.timeout=600"))
        connection, _ = silent.accept()  # so a request is under way; closing it now would be an answer
        with connection:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)  # a tenth of what the request would wait
        assert process.returncode == 143
