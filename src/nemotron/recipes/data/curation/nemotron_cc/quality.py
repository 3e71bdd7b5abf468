# /// script
# dependencies = ["scikit-learn"]
#
# [tool.runspec]
# docs = "Score documents with an ensemble of quality classifiers, in buckets 0 to 19"
# name = "data/curate/quality"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/quality"
# schema = "schema.py:QualityConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 6: documents -> documents with a quality bucket (0 to 19) and a label (low to high).

    nemotron data curate quality -c tiny
    python quality.py --config tiny min_bucket=5

Two classifiers learn from labelled pages (`training`), on hashed words and on the surface of a page, and are applied to
all documents. Each one's scores are cut into 20 buckets of equal size, the larger bucket wins, and buckets are grouped
into labels. Some of the labelled pages, chosen by the hash of their text, are held out to measure on.

Simplified against the paper: its three classifiers are two regressions on text embeddings, fitted to
language models' grades of educational value, and the fastText model of DCLM; these two learn in seconds on a CPU. What
a label is worth is not tried out here by training a model on each bucket; the borders of the labels are this recipe's.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import heapq
import math
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation import quality
from nemotron.data_prep.curation.step import collect, open_step, plan_step
from nemotron.data_prep.sources.documents import Split, split_of, stable_hash
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import read_piece, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import ClassifierSettings, TrainSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import QualityConfig, TrainingConfig

Page = tuple[int, str, bool]
"""A labelled page: hash of its text, the text, whether it is good."""


def main() -> None:
    """Train the classifiers, score, label and publish the documents."""
    cfg: QualityConfig = load_script_config(__file__, inputs=read_pipe)
    training, labels = cfg.training, {str(label): low for label, low in cfg.labels.items()}
    settings = TrainSettings(**ClassifierSettings.of(training).model_dump(), seed=cfg.seed)

    with open_step(cfg, __file__) as step:
        score_dir, classifier_dir = step.run.dir / "scores", step.run.dir / "classifier"

        # --- Learn from one part of the labelled pages --------------------------------------------------------------
        with step.run.phase("train"):
            learned = _labelled_pages(training, "train", cfg.seed)
            texts, good = [text for _, text, _ in learned], [is_good for *_, is_good in learned]
            ensemble = quality.train(texts, good, settings)
            ensemble.save(classifier_dir)

        # --- Scores of all documents; where the buckets begin follows from them -------------------------------------
        about = {"step": "quality", "classifier": ensemble.digest, **cfg.model_dump(exclude={"run"})}
        plan = plan_step(step.documents(), about)
        with step.run.phase("score"):
            collect(plan, score_dir, quality.score_shard, ensemble, step.engine)
            thresholds = quality.thresholds_of(plan, score_dir)
        with step.run.phase("label"):
            buckets = quality.Buckets(thresholds, labels, cfg.min_bucket, score_dir)
            table = collect(plan, step.work_dir, quality.label_shard, buckets, step.engine)

        # --- Measure on the other part ------------------------------------------------------------------------------
        metrics: dict[str, Any] = {
            "thresholds": dict(zip(quality.CLASSIFIERS, thresholds, strict=True)),
            "trained_on": {"good": sum(good), "other": len(good) - sum(good)},
        }
        held_out = _labelled_pages(training, "valid", cfg.seed)
        if len({is_good for *_, is_good in held_out}) == 2:
            longer_is_better = quality.auc(_log_lengths(texts), np.array(good)) >= 0.5
            metrics["held_out"] = _measure(ensemble, buckets, held_out, longer_is_better)

        # --- Publish ------------------------------------------------------------------------------------------------
        model = {f"classifier/{name}": classifier_dir / name for name in (quality.WEIGHTS, quality.DESCRIPTION)}
        step.publish(table, metrics, model)
        shutil.rmtree(score_dir, ignore_errors=True)


def _labelled_pages(training: TrainingConfig, part: Split, seed: int) -> list[Page]:
    """The pages to learn from ("train") or to measure on ("valid"); of equal texts all are in one part.

    Of many, those whose texts have the smallest hashes: the same ones whatever order they came in.
    """
    pages = (page for page in _read_pages(training) if split_of(page[1], training.held_out_fraction, seed) == part)
    return heapq.nsmallest(training.max_documents, pages)


def _read_pages(training: TrainingConfig) -> Iterator[Page]:
    for patterns, good in ((training.positive, True), (training.negative, False)):
        for file in list_files(patterns):
            for row in read_piece(whole(file), Reading(), ReadReport()):
                yield stable_hash("quality", row.value["text"]), row.value["text"], good


def _measure(
    ensemble: quality.Ensemble, buckets: quality.Buckets, pages: list[Page], longer_is_better: bool
) -> dict[str, Any]:
    """AUC beside that of length alone, calibration, and the share of good pages by label.

    Args:
        longer_is_better: of the pages that the classifiers learned from, which "length alone" learns from as well.
    """
    texts, good = [text for _, text, _ in pages], np.array([is_good for *_, is_good in pages])
    scores = ensemble.scores(texts)
    bucket = quality.ensemble_bucket(quality.to_buckets(scores, buckets.thresholds))
    candidates = {
        "ensemble": bucket.astype(np.float64),
        **{name: scores[:, column] for column, name in enumerate(quality.CLASSIFIERS)},
        "length alone": _log_lengths(texts) * (1 if longer_is_better else -1),
    }
    aucs = {name: quality.auc_interval(values, good) for name, values in candidates.items()}
    by_label = quality.quality_by_label(bucket, good, buckets.labels)
    reliability = {name: quality.reliability(scores[:, i], good) for i, name in enumerate(quality.CLASSIFIERS)}

    print(f"held-out pages: {len(good)}, good ones: {int(good.sum())}", file=sys.stderr)
    for name, (value, low, high) in aucs.items():
        print(f"  AUC {name:<13} {value:.3f}  ({low:.3f} to {high:.3f})", file=sys.stderr)
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
        "auc": {name: interval._asdict() for name, interval in aucs.items()},
        "by_label": by_label,
        "rises_with_label": quality.rises(by_label),
        "reliability": reliability,
        "calibration_error": {name: quality.calibration_error(rows) for name, rows in reliability.items()},
    }


def _log_lengths(texts: list[str]) -> np.ndarray:
    return np.array([math.log(1 + len(text)) for text in texts])


if __name__ == "__main__":
    run_data_script(main)
