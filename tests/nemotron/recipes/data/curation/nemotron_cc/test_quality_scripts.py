"""From quality to rephrasing: the five scripts in a pipe, as a user would run them, on pages whose faults are known."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry, Version
from nemotron.data_prep.curation.decontamination import words
from nemotron.data_prep.curation.step import list_documents, read_documents, write_documents
from nemotron.kit import Dataset
from nemotron.recipes.data.curation.nemotron_cc import crawl_texts, quality_schema
from nemotron.recipes.data.curation.nemotron_cc.crawl_pages import make_pages

RECIPE = Path(quality_schema.__file__).parent
STEPS = ("quality", "pii", "heuristics", "decontaminate", "rephrase")
pytestmark = pytest.mark.slow  # eight and more processes, one after another
CRAWL = "nemotron_cc-crawl-data-tiny"


def artifact(step: str) -> str:
    return "nemotron_cc-data-tiny" if step == "rephrase" else f"nemotron_cc-{step}-data-tiny"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with the English pages of a small crawl as documents, and what was planted in them."""
    folder = tmp_path_factory.mktemp("quality")
    sets = crawl_texts.evaluation_sets(Random(5))
    pages = [page for page in make_pages(600, 5, sets) if page.language == "en" and not page.broken]
    pages = [page for page in pages if not any("duplicate" in case["kind"] for case in page.planted)]
    pages.sort(key=lambda page: page.url)
    payload = folder / "payload"
    (payload / "documents").mkdir(parents=True)
    (payload / "evaluation").mkdir()
    documents = [{"id": f"page:{i}", "url": page.url, "text": page.text} for i, page in enumerate(pages)]
    for part in range(3):
        write_documents(payload / "documents" / f"part-{part}.jsonl.zst", documents[part::3])
    rows = [json.dumps({"url": page.url, "planted": page.planted}) + "\n" for page in pages]
    (payload / "truth.jsonl").write_text("".join(rows))
    for name, items in sets.items():
        (payload / "evaluation" / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
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


def truth_of(root: Path) -> dict[str, list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (root / "payload" / "truth.jsonl").read_text().splitlines()]
    return {row["url"]: row["planted"] for row in rows}


def test_quality_tells_explanations_from_the_rest_where_length_does_not(done: dict[str, Version]) -> None:
    metrics = done["quality"].record["metrics"]
    held_out, auc = metrics["held_out"], metrics["held_out"]["auc"]
    assert held_out["pages"] > 100 and 20 < held_out["good"] < held_out["pages"]
    assert auc["ensemble"]["low"] > 0.85 and auc["ensemble"]["low"] > auc["length alone"]["high"]
    assert 0.35 < auc["length alone"]["value"] < 0.65
    assert held_out["rises_with_label"]
    shares = {row["label"]: row["good"] for row in held_out["by_label"]}
    assert shares["low"] < 0.2 and shares["high"] > 0.8
    assert all(error < 0.15 for error in held_out["calibration_error"].values())
    assert metrics["trained_on"]["good"] + metrics["trained_on"]["other"] > 100
    for document in documents_of(done["quality"]).values():
        assert 1 <= document["bucket"] <= 19
        lows = [low for label, low in quality_schema.LABELS.items() if label == document["quality"]]
        assert lows[0] <= document["bucket"]
        assert set(document["quality_scores"]) == {"words", "surface"}
    names = {path.name for path in (done["quality"].path / "classifier").iterdir()}
    assert names == {"classifier.safetensors", "classifier.json"}


def test_no_planted_personal_data_is_left_and_lookalikes_are(root: Path, done: dict[str, Version]) -> None:
    truth, after = truth_of(root), documents_of(done["pii"])
    seen: Counter[tuple[str, bool]] = Counter()
    for before in documents_of(done["quality"]).values():
        for case in truth[before["url"]]:
            if case["kind"] == "pii" and case["value"] in before["text"]:
                stays = case["value"] in after[before["id"]]["text"]
                assert stays == case["hard_negative"], case
                seen[case["type"], case["hard_negative"]] += 1
    assert {kind for kind, _ in seen} == set(crawl_texts.PII_TYPES) and min(seen.values()) >= 3
    metrics = done["pii"].record["metrics"]
    for scores in (metrics["planted"], metrics["made_up"]):
        assert all(score["recall"] >= 0.95 and score["precision"] >= 0.98 for score in scores.values())
    assert all(placeholder in text for placeholder, texts in metrics["replaced_samples"].items() for text in texts)


def test_heuristics_name_the_filter_and_spare_high_quality(done: dict[str, Version]) -> None:
    table = done["heuristics"].record["metrics"]["table"]
    assert table["dropped"] and set(table["dropped"]) <= set(quality_schema.FiltersConfig.model_fields)
    types = done["heuristics"].record["metrics"]["planted_types"]
    assert types["spam"]["read"] and types["spam"]["dropped"] == types["spam"]["read"]
    before, after = documents_of(done["pii"]), documents_of(done["heuristics"])
    assert all(i in after for i, document in before.items() if document["quality"] == "high")


def test_planted_leaks_are_gone_and_nothing_else(root: Path, done: dict[str, Version]) -> None:
    metrics = done["decontaminate"].record["metrics"]
    assert metrics["planted"]["planted"] > 5
    assert (metrics["planted"]["recall"], metrics["planted"]["precision"]) == (1.0, 1.0)
    assert (metrics["tried"]["recall"], metrics["tried"]["precision"]) == (1.0, 1.0)
    truth = truth_of(root)
    for document in documents_of(done["decontaminate"]).values():
        for case in truth[document["url"]]:
            assert case["kind"] != "contaminated" or " ".join(words(case["text"])) not in " ".join(
                words(document["text"])
            )


def test_rephrasing_by_the_stand_in_says_that_it_is_no_model(done: dict[str, Version]) -> None:
    metrics = done["rephrase"].record["metrics"]
    assert metrics["endpoint"]["is_a_model"] is False and "not a language model" in metrics["endpoint"]["note"]
    before, after = documents_of(done["decontaminate"]), documents_of(done["rephrase"])
    assert {i: d for i, d in after.items() if "rephrased_from" not in d} == before
    made = [d for d in after.values() if "rephrased_from" in d]
    assert {d["model"] for d in made} == {"stand-in-by-rules"}
    styles = Counter(d["source"].removeprefix("synthetic_") for d in made)
    assert set(styles) == set(quality_schema.StylesConfig.model_fields)
    for document in made:
        wanted = "low" if document["source"] == "synthetic_wikipedia" else "high"
        assert before[document["rephrased_from"]]["quality"] == wanted
    for style, usage in metrics["usage"].items():
        assert usage["requests"] == usage["answers"] >= styles[style] and usage["completion_tokens"] > 0


def test_documents_of_ones_own_teach_the_classifiers_as_well(root: Path, done: dict[str, Version]) -> None:
    truth, pages = truth_of(root), documents_of(Registry(root / "artifacts").resolve(CRAWL))
    files = {name: (root / f"{name}.jsonl").open("w") for name in ("good", "other")}
    for page in pages.values():
        for case in truth[page["url"]]:
            if case["kind"] == "quality":
                files["good" if case["level"] == 2 else "other"].write(json.dumps({"text": page["text"]}) + "\n")
    for file in files.values():
        file.close()
    process = run_alone(
        root, "quality", f"run.data={CRAWL}", "run.truth=null", "run.output=own",
        "training.positive=[good.jsonl]", "training.negative=[other.jsonl]",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    own = Registry(root / "artifacts").resolve("own")
    trained_on = own.record["metrics"]["trained_on"]
    assert trained_on["good"] + trained_on["other"] == len(pages) and "held_out" not in own.record["metrics"]
    good = [d["bucket"] for d in documents_of(own).values() if {"kind": "quality", "level": 2} in truth[d["url"]]]
    poor = [d["bucket"] for d in documents_of(own).values() if {"kind": "quality", "level": 0} in truth[d["url"]]]
    assert sum(good) / len(good) > 5 + sum(poor) / len(poor)


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

    class Choosy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            number, asked[body] = len(asked), asked[body] + 1
            message = {"role": "assistant", "content": json.loads(body)["messages"][1]["content"].split("<text>")[1]}
            reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200 if number % 5 else 400)  # every fifth one is refused by itself
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Choosy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        words_given = (f"run.data={artifact('decontaminate')}", "run.output=patient", "endpoint.concurrency=1",
                       f"endpoint.base_url=http://127.0.0.1:{server.server_address[1]}/v1")  # fmt: skip
        first = run_alone(root, "rephrase", *words_given, "endpoint.max_failed=0.05")
        assert first.returncode == 1 and "refused with status 400" in first.stderr
        assert len(asked) > 5
        second = run_alone(root, "rephrase", *words_given, "endpoint.max_failed=0.9", "endpoint.timeout=50")
        assert second.returncode == 0, second.stderr
    finally:
        server.shutdown()
        server.server_close()
    assert set(asked.values()) == {1}
    assert not list(root.rglob("answers-*"))  # of use until they are published


def test_a_signal_ends_it_at_once_while_the_endpoint_is_silent(root: Path, done: dict[str, Version]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        words_given = command(
            "rephrase", f"run.data={artifact('decontaminate')}", f"endpoint.base_url={url}", "endpoint.timeout=600"
        )
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
