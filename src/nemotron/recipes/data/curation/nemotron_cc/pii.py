# /// script
# [tool.runspec]
# schema = "1"
# docs = "Replace personal data by placeholders"
# name = "data/curate/pii"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/pii"
# default = "default"
# schema = "quality_schema.py:PiiConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 7: documents -> documents in which placeholders stand for personal data.

    nemotron data curate pii -c tiny
    python pii.py --config tiny 'kinds=[email, phone]'

E-mail addresses, telephone numbers, IP addresses, card numbers, IBAN, US social security numbers, keys and tokens,
private keys: found by patterns, decided by check digits and by what stands around. What stays on purpose is listed in
data_prep/curation/pii.py. How well the patterns do is measured on made-up cases before any document is read, and on the
crawl's planted ones afterwards.

Simplified against what NeMo Curator offers: no names and no street addresses, which take a model.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import RunFailed, run_main
from nemotron.data_prep.curation import pii, pii_cases
from nemotron.data_prep.curation.step import (
    Score,
    filter_shards,
    list_documents,
    plan_step,
    publish_step,
    read_documents,
    read_truth,
)
from nemotron.data_prep.work.engines import open_engine
from nemotron.kit import Dataset, open_run, print_complete, read_pipe
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.quality_schema import PiiConfig

SAMPLES, REACH = 3, 40  # samples of each placeholder, and characters around it
LOOKED_AT = 10_000  # documents that samples are taken from


def main() -> None:
    """Replace personal data and publish the documents."""
    cfg: PiiConfig = load_script_config(__file__, inputs=read_pipe)
    settings = pii.PiiSettings(tuple(kind for kind in pii.KINDS if kind in cfg.kinds), cfg.keep_reserved)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        files = list_documents(Dataset.load(cfg.run.data).path)
        work_dir = run.dir / "work"

        # --- Are the patterns good enough? --------------------------------------------------------------------------
        with run.phase("check"):
            cases = {
                kind: Score(*score) for kind, score in pii_cases.measure(pii_cases.cases(cfg.cases_per_kind)).items()
            }
        for kind, score in cases.items():
            print(f"  made-up {kind:<12} {score}", file=sys.stderr)
            for name, value, least in (
                ("recall", score.recall, cfg.least_recall),
                ("precision", score.precision, cfg.least_precision),
            ):
                if kind in cfg.kinds and value is not None and value < least:
                    raise RunFailed(f"{kind}: {name} {value:.3f} on made-up cases, below least_{name}={least}")

        # --- Replace ------------------------------------------------------------------------------------------------
        plan = plan_step(files, {"step": "pii", **cfg.model_dump(exclude={"run"})})
        with run.phase("replace"):
            table = filter_shards(plan, work_dir, pii.judge, settings, engine)
        print(table, file=sys.stderr)
        metrics: dict[str, Any] = {
            "made_up": {kind: score.to_json() for kind, score in cases.items()},
            "replaced_samples": _samples(list_documents(work_dir)),
        }

        # --- Measure: what was planted is known ---------------------------------------------------------------------
        if cfg.run.truth:
            planted = _measure(files, Dataset.load(cfg.run.truth).path, settings)
            metrics["planted"] = {kind: score.to_json() for kind, score in planted.items()}
            for kind, score in planted.items():
                print(f"  planted {kind:<12} {score}", file=sys.stderr)

        # --- Publish ------------------------------------------------------------------------------------------------
        dataset = publish_step(table, work_dir, run.output_dir, metrics)
        print(f"{dataset.ref}: {dataset.num_examples} documents", file=sys.stderr)
        print_complete({"data": dataset})


def _samples(files: list[Path]) -> dict[str, list[str]]:
    """Some places where something was replaced, without what stood there."""
    found: dict[str, list[str]] = {placeholder: [] for placeholder in pii.PLACEHOLDERS.values()}
    for document in islice(chain.from_iterable(map(read_documents, files)), LOOKED_AT):
        for placeholder, samples in found.items():
            place = document["text"].find(placeholder)
            if place >= 0 and len(samples) < SAMPLES:
                around = document["text"][max(0, place - REACH) : place + len(placeholder) + REACH]
                samples.append(" ".join(around.split()))
    return {placeholder: samples for placeholder, samples in found.items() if samples}


def _measure(files: list[Path], truth_dir: Path, settings: pii.PiiSettings) -> dict[str, Score]:
    """Score by planted type. A value counts as found if it was taken whole; what was not planted counts as false."""
    truth = read_truth(truth_dir)
    counts: dict[str, Counter[str]] = {}
    for path in files:
        for document in read_documents(path):
            cases = [case for case in truth.get(str(document.get("url", "")), []) if case["kind"] == "pii"]
            right = {(case["type"], case["value"]) for case in cases if not case["hard_negative"]}
            right = {(kind, value) for kind, value in right if value in document["text"]}
            for kind, _ in right:
                counts.setdefault(kind, Counter())["planted"] += 1
            for item in pii.find(document["text"], settings.kinds, settings.keep_reserved):
                kind = "ip" if item.kind.startswith("ip") else item.kind
                is_planted = (kind, document["text"][item.begin : item.end]) in right
                counts.setdefault(kind, Counter())["reported"] += 1
                counts[kind]["found" if is_planted else "false"] += 1
    return {
        kind: Score(count["planted"], count["found"], count["reported"], count["false"])
        for kind, count in sorted(counts.items())
    }


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main))
