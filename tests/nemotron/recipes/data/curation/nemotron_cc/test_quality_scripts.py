"""From quality to rephrasing: the scripts as a user runs them, in a pipe, against an endpoint, killed and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry, Version
from nemotron.data_prep.curation.step import list_documents, read_documents, write_documents
from nemotron.kit import Dataset
from nemotron.recipes.data.curation.nemotron_cc import quality_schema

from . import crawl_texts
from .crawl_pages import make_pages
from .make_demo_crawl import write_labelled, write_rows

RECIPE = Path(quality_schema.__file__).parent
STEPS = ("quality", "pii", "heuristics", "decontaminate")
pytestmark = pytest.mark.slow  # eight and more processes, one after another
CRAWL = "nemotron_cc-crawl-data-tiny"


def artifact(step: str) -> str:
    return "nemotron_cc-data-tiny" if step == "decontaminate" else f"nemotron_cc-{step}-data-tiny"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with the English pages of a small crawl as documents, some of them labelled, and evaluation sets."""
    folder = tmp_path_factory.mktemp("quality")
    sets = crawl_texts.evaluation_sets(Random(5))
    pages = [page for page in make_pages(600, 5, sets) if page.language == "en" and not page.broken]
    pages = [page for page in pages if not any("duplicate" in case["kind"] for case in page.planted)]
    pages.sort(key=lambda page: page.url)
    payload = folder / "payload"
    (payload / "documents").mkdir(parents=True)
    documents = [{"id": f"page:{i}", "url": page.url, "text": page.text} for i, page in enumerate(pages)]
    for part in range(3):
        write_documents(payload / "documents" / f"part-{part}.jsonl.zst", documents[part::3])
    write_labelled(payload / "labelled", pages)
    for name, items in sets.items():
        write_rows(payload / "evaluation" / f"{name}.jsonl", items)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(folder / "artifacts"))
        Dataset(path=payload, num_examples=len(documents)).save(name=CRAWL)
    return folder


def command(step: str, *words_more: str) -> list[str]:
    words_given = ["--config", "tiny", *words_more]
    if step == "decontaminate":
        words_given.append("environment_tasks=20")
    return [sys.executable, str(RECIPE / f"{step}.py"), *words_given]


def environment(root: Path) -> dict[str, str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith(("RUNSPEC_", "NEMOTRON_"))}
    return given | {"RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts")}


def run_alone(root: Path, step: str, *words_more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(step, *words_more), cwd=root, env=environment(root), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(root: Path) -> dict[str, Version]:
    """What each step has published, all of them run once in a pipe."""
    first = " ".join(command(STEPS[0], f"run.data={CRAWL}"))
    rest = [" ".join(command(step)) for step in STEPS[1:]]
    process = subprocess.run(
        ["bash", "-c", "set -o pipefail; " + " | ".join([first, *rest])],
        cwd=root, env=environment(root), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == {"data": "art://nemotron_cc-data-tiny:1"}
    registry = Registry(root / "artifacts")
    return {step: registry.resolve(artifact(step)) for step in STEPS}


def documents_of(version: Version) -> dict[str, dict[str, Any]]:
    return {d["id"]: d for path in list_documents(version.path) for d in read_documents(path)}


def test_quality_learns_from_a_part_and_measures_on_the_other(done: dict[str, Version]) -> None:
    metrics = done["quality"].record["metrics"]
    held_out, auc, trained_on = metrics["held_out"], metrics["held_out"]["auc"], metrics["trained_on"]
    labelled = held_out["pages"] + trained_on["good"] + trained_on["other"]
    assert 0.3 < held_out["pages"] / labelled < 0.5  # held_out_fraction is 0.4
    assert auc["ensemble"]["low"] > 0.85 and auc["ensemble"]["low"] > auc["length alone"]["high"]
    assert 0.35 < auc["length alone"]["value"] < 0.65
    assert held_out["rises_with_label"]
    assert all(error < 0.15 for error in held_out["calibration_error"].values())
    for document in documents_of(done["quality"]).values():
        assert 3 <= document["bucket"] <= 19
        lows = [low for label, low in quality_schema.LABELS.items() if label == document["quality"]]
        assert lows[0] <= document["bucket"]
        assert set(document["quality_scores"]) == {"words", "surface"}
    names = {path.name for path in (done["quality"].path / "classifier").iterdir()}
    assert names == {"classifier.safetensors", "classifier.json"}


def test_steps_name_what_they_did_and_spare_high_quality(done: dict[str, Version]) -> None:
    samples = done["pii"].record["metrics"]["replaced_samples"]
    assert all(placeholder in text for placeholder, texts in samples.items() for text in texts)
    dropped = done["heuristics"].record["metrics"]["table"]["dropped"]
    assert dropped and set(dropped) <= set(quality_schema.FiltersConfig.model_fields)
    before, after = documents_of(done["pii"]), documents_of(done["heuristics"])
    assert all(i in after for i, document in before.items() if document["quality"] == "high")
    assert done["decontaminate"].record["metrics"]["table"]["dropped"]["overlaps evaluation text"]["documents"] > 5


@contextlib.contextmanager
def endpoint(answer: Callable[[str, str], str], asked: Counter[bytes], refuse: int = 0) -> Iterator[str]:
    """An endpoint on this machine; gives its address. `answer(instruction, text)`; `asked`: requests, counted.

    `refuse`: every so-manieth request is refused by itself; 0: none.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            number, asked[body] = len(asked), asked[body] + 1
            instruction, _, text = json.loads(body)["messages"][1]["content"].partition("\n\n<text>\n")
            message = {"role": "assistant", "content": answer(instruction, text.removesuffix("\n</text>"))}
            usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.send_response(400 if refuse and number % refuse == 0 else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def obliging(instruction: str, text: str) -> str:
    """An answer in the form that is asked for."""
    half = " ".join(text.split()[: len(text.split()) // 2])
    if "'Question:'" in instruction:
        return f"Question: What does it say?\nAnswer: {half}"
    return f"- {half}" if "'- '" in instruction else f"It says: {half}"


def test_rephrasing_adds_documents_in_the_styles_of_their_quality(root: Path, done: dict[str, Version]) -> None:
    asked: Counter[bytes] = Counter()
    with endpoint(obliging, asked) as url:
        process = run_alone(root, "rephrase", f"endpoint.base_url={url}", "endpoint.model=m")
    assert process.returncode == 0, process.stderr
    version = Registry(root / "artifacts").resolve("nemotron_cc-rephrase-data-tiny")
    before, after = documents_of(done["decontaminate"]), documents_of(version)
    assert {i: d for i, d in after.items() if "rephrased_from" not in d} == before
    made = [d for d in after.values() if "rephrased_from" in d]
    styles = Counter(d["source"].removeprefix("synthetic_") for d in made)
    assert set(styles) == set(quality_schema.StylesConfig.model_fields)
    for document in made:
        wanted = "low" if document["source"] == "synthetic_wikipedia" else "high"
        assert before[document["rephrased_from"]]["quality"] == wanted
    metrics = version.record["metrics"]
    assert metrics["endpoint"] == {"base_url": url, "model": "m"}
    for style, usage in metrics["usage"].items():
        assert usage["requests"] == usage["answers"] >= styles[style]
        assert usage["completion_tokens"] == 5 * usage["requests"]
    assert sum(usage["requests"] for usage in metrics["usage"].values()) == asked.total()


@pytest.mark.parametrize(
    ("step", "before", "line"), [("quality", CRAWL, "label"), ("decontaminate", artifact("heuristics"), "drop")]
)
def test_killed_between_its_passes_a_step_goes_on_to_the_same_bytes(
    root: Path, done: dict[str, Version], step: str, before: str, line: str
) -> None:
    words_given = command(step, f"run.data={before}", f"run.output={step}-again")
    process = subprocess.Popen(
        words_given, cwd=root, env=environment(root), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for said in process.stderr:
        if said.strip().endswith(f": {line}"):
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    after = subprocess.run(
        words_given, cwd=root, env=environment(root), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert after.returncode == 0, after.stderr
    assert Registry(root / "artifacts").resolve(f"{step}-again").digest == done[step].digest


def test_bad_values_are_refused_before_any_work(root: Path, done: dict[str, Version]) -> None:
    for step, word, said in (
        ("quality", "labels={low: 3}", "labels"),
        ("pii", "kinds=[emial]", "kinds"),
        ("heuristics", "filters.word_counts.low=3", "word_count"),
        ("decontaminate", "evaluation=[nowhere/*.jsonl]", "no file matches nowhere"),
        ("rephrase", "endpoint.base_url=https://user:pass@host.org/v1", "endpoint.base_url"),
        ("rephrase", "endpoint.api_key_env=SURELY_NOT_SET", "SURELY_NOT_SET"),
        ("rephrase", "styles.distil=null", "distill"),
    ):
        process = run_alone(root, step, f"run.data={CRAWL}", word)
        assert process.returncode == 2, (step, word, process.stderr)
        assert said in process.stderr, (step, word, process.stderr)


def test_with_more_patience_nothing_is_asked_again(root: Path, done: dict[str, Version]) -> None:
    asked: Counter[bytes] = Counter()
    with endpoint(obliging, asked, refuse=5) as url:
        words_given = ("run.output=patient", "endpoint.concurrency=1", f"endpoint.base_url={url}")
        first = run_alone(root, "rephrase", *words_given, "endpoint.max_failed=0.05")
        assert first.returncode == 1 and "refused with status 400" in first.stderr
        assert len(asked) > 5
        second = run_alone(root, "rephrase", *words_given, "endpoint.max_failed=0.9", "endpoint.timeout=50")
        assert second.returncode == 0, second.stderr
    assert set(asked.values()) == {1}
    assert not list(root.rglob("answers-*"))  # of use until they are published


def test_a_signal_ends_it_at_once_while_the_endpoint_is_silent(root: Path, done: dict[str, Version]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        words_given = command("rephrase", f"endpoint.base_url={url}", "endpoint.timeout=600")
        process = subprocess.Popen(
            words_given, cwd=root, env=environment(root), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for said in process.stderr:
            if said.strip().endswith(": rephrase"):
                break
        silent.accept()[0].close()  # so a request is under way
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)  # a tenth of what the request would wait
        assert process.returncode == 143
