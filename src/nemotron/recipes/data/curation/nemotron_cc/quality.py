# /// script
# [tool.runspec]
# schema = "1"
# docs = "Score documents with an ensemble of quality classifiers, in buckets 0 to 19"
# name = "data/curate/quality"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/quality"
# default = "default"
# schema = "quality_schema.py:QualityConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 6: documents -> documents with a quality bucket (0 to 19) and a label (low to high).

    nemotron data curate quality -c tiny
    python quality.py --config tiny min_bucket=5

Two classifiers are trained, on hashed words and on the surface of a page, and applied to all documents. Each one's
scores are cut into 20 buckets of equal size, the larger bucket wins, and buckets are grouped into labels. In the demo
crawl the planted quality of a page says what is good; pages for training and for measuring are told apart by the hash
of their url, and near copies are gone by now.

Simplified against the paper: its three classifiers are two regressions on text embeddings, fitted to
language models' grades of educational value, and the fastText model of DCLM; these two learn in seconds on a CPU. What
a label is worth is not tried out here by training a model on each bucket; the borders of the labels are this recipe's.
"""

from __future__ import annotations

import heapq
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.data_prep.curation import quality
from nemotron.data_prep.curation.step import (
    collect,
    list_documents,
    plan_step,
    publish_step,
    read_documents,
    read_truth,
)
from nemotron.data_prep.sources.documents import split_of, stable_hash
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.pieces import pieces_of
from nemotron.data_prep.sources.reader import read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.work.engines import open_engine
from nemotron.data_prep.work.shards import Plan
from nemotron.kit import Dataset, open_run, print_complete, read_pipe
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.quality_schema import QualityConfig, TrainingConfig


def main() -> None:
    """Train the classifiers, score, label and publish the documents."""
    cfg: QualityConfig = load_script_config(__file__, inputs=read_pipe)
    training, labels = cfg.training, {str(label): low for label, low in cfg.labels.items()}

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        files = list_documents(Dataset.load(cfg.run.data).path)
        score_dir, work_dir = run.dir / "scores", run.dir / "work"

        # --- Labelled pages: planted, or documents of one's own -----------------------------------------------------
        planted = _planted_levels(Dataset.load(cfg.run.truth).path) if cfg.run.truth else {}
        with run.phase("train"):
            own = _own_pages(training) if training.positive else _planted_pages(files, planted, cfg)
            # Of many, those with the smallest hashes: the same ones whatever order they came in.
            chosen = heapq.nsmallest(training.max_documents, own)
            ensemble = quality.train(
                [text for _, text, _ in chosen],
                [good for _, _, good in chosen],
                quality.TrainSettings(
                    training.hash_bits,
                    training.max_words,
                    training.regularisation,
                    training.num_trees,
                    training.tree_depth,
                    training.tree_rate,
                    cfg.seed,
                ),
            )
            ensemble.save(run.dir / "classifier")

        # --- Scores of all documents; where the buckets begin follows from them -------------------------------------
        plan = plan_step(files, {"step": "quality", "classifier": ensemble.digest, **cfg.model_dump(exclude={"run"})})
        with run.phase("score"):
            collect(plan, score_dir, quality.score_shard, ensemble, engine)
            thresholds = quality.thresholds_of(plan, score_dir)
        with run.phase("label"):
            buckets = quality.Buckets(thresholds, labels, cfg.min_bucket, score_dir)
            table = collect(plan, work_dir, quality.label_shard, buckets, engine)
        print(table, file=sys.stderr)

        # --- Measure on pages that were not trained on --------------------------------------------------------------
        metrics: dict[str, Any] = {
            "thresholds": dict(zip(quality.CLASSIFIERS, thresholds, strict=True)),
            "trained_on": {"good": sum(good for *_, good in chosen), "other": sum(not good for *_, good in chosen)},
        }
        if planted:
            metrics["held_out"] = _measure(plan, score_dir, planted, chosen, thresholds, cfg)

        # --- Publish ------------------------------------------------------------------------------------------------
        model = {f"classifier/{name}": run.dir / "classifier" / name for name in (quality.WEIGHTS, quality.DESCRIPTION)}
        dataset = publish_step(table, work_dir, run.output_dir, metrics, model)
        shutil.rmtree(score_dir, ignore_errors=True)
        print(f"{dataset.ref}: {dataset.num_examples} documents", file=sys.stderr)
        print_complete({"data": dataset})


Page = tuple[int, str, bool]
"""Hash of where a page is from, its text, whether it is good."""


def _planted_levels(truth_dir: Path) -> dict[str, int]:
    truth = read_truth(truth_dir)
    return {url: case["level"] for url, cases in truth.items() for case in cases if case["kind"] == "quality"}


def _planted_pages(files: list[Path], planted: dict[str, int], cfg: QualityConfig) -> Iterator[Page]:
    """The pages of the training part whose quality was planted."""
    for path in files:
        for document in read_documents(path):
            url = str(document.get("url", ""))
            if url in planted and split_of(url, cfg.training.held_out_fraction, cfg.seed) == "train":
                yield stable_hash("quality", url), document["text"], planted[url] >= cfg.training.positive_level


def _own_pages(training: TrainingConfig) -> Iterator[Page]:
    """Documents of one's own, good and other ones."""
    for patterns, good in ((training.positive, True), (training.negative, False)):
        for file in list_files(patterns):
            for piece in pieces_of(file, 64 * 2**20):
                for row in read_piece(piece, Reading(), ReadReport()):
                    yield stable_hash("quality", file.uri, str(piece.begin), str(row.index)), row.value["text"], good


def _measure(
    plan: Plan,
    score_dir: Path,
    planted: dict[str, int],
    trained: list[Page],
    thresholds: list[list[float]],
    cfg: QualityConfig,
) -> dict[str, Any]:
    """AUC beside that of length alone, calibration, and the share of good pages by label; all on held-out pages."""
    scores, levels, sizes = [], [], []
    for document, score in quality.scored_documents(plan, score_dir):
        url = str(document.get("url", ""))
        if url in planted and split_of(url, cfg.training.held_out_fraction, cfg.seed) == "valid":
            scores.append(score)
            levels.append(planted[url])
            sizes.append(math.log(1 + len(document["text"])))
    if not scores:
        return {"pages": 0, "good": 0}
    table, good = np.array(scores), np.array(levels) >= cfg.training.positive_level
    buckets = quality.ensemble_bucket(quality.to_buckets(table, thresholds))
    # Length alone: whether longer or shorter is better is learned on the training pages, as the classifiers are.
    lengths = np.array([math.log(1 + len(text)) for _, text, _ in trained])
    longer = quality.auc(lengths, np.array([is_good for *_, is_good in trained])) >= 0.5
    candidates = {
        "ensemble": buckets.astype(np.float64),
        **{name: table[:, column] for column, name in enumerate(quality.CLASSIFIERS)},
        "length alone": np.array(sizes) * (1 if longer else -1),
    }
    aucs = {name: quality.auc_interval(values, good, seed=cfg.seed)._asdict() for name, values in candidates.items()}
    reliability = {name: quality.reliability(table[:, column], good) for column, name in enumerate(quality.CLASSIFIERS)}
    by_label = quality.quality_by_label(buckets, good, {str(label): low for label, low in cfg.labels.items()})

    print(f"held-out pages: {len(good)}, good ones: {int(good.sum())}", file=sys.stderr)
    for name, interval in aucs.items():
        print(
            f"  AUC {name:<13} {interval['value']:.3f}  ({interval['low']:.3f} to {interval['high']:.3f})",
            file=sys.stderr,
        )
    for row in by_label:
        share = "none" if not row["pages"] else f"{row['good']:.2f}  ({row['low']:.2f} to {row['high']:.2f})"
        print(f"  {row['label']:<12} {row['pages']:>5} pages, good: {share}", file=sys.stderr)
    for name, rows in reliability.items():
        print(f"  {name}: predicted -> observed", file=sys.stderr)
        for row in rows:
            print(f"    {row['predicted']:.2f} -> {row['observed']:.2f}  ({row['pages']} pages)", file=sys.stderr)
    return {
        "pages": len(good),
        "good": int(good.sum()),
        "auc": aucs,
        "by_label": by_label,
        "rises_with_label": quality.rises(by_label),
        "reliability": reliability,
        "calibration_error": {name: quality.calibration_error(rows) for name, rows in reliability.items()},
    }


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main))
