"""A quality classifier for pages: two models of different kinds, their scores as buckets 0 to 19, the larger one wins.

The scheme is that of Nemotron-CC (Su et al. 2024, arXiv 2412.02595): each classifier's scores over the
corpus are cut at its 5th, 10th, ..., 95th percentile, weighted by the size of the documents, which gives 20 buckets of
equal size that are comparable between classifiers; a page has the highest bucket that any classifier gives it, so that
what one of them misses the other can still find. Groups of buckets have a label, from `low` to `high`.

The two models here are a logistic regression on hashed words and pairs of words, and boosted trees on what a page looks
like (shares of letters, marks, lines, repetition; not its length). They are trained with scikit-learn and applied with
NumPy. Words are hashed here, because scikit-learn's HashingVectorizer takes 1.7 times as long; reliability tables are
made here, because its calibration_curve does not say how many pages a bin has. On disk: `classifier.safetensors` and
`classifier.json`.

Where the buckets begin depends on all documents. So the step takes two passes: `score_shard` writes the scores of every
shard (`scores/SHARD.safetensors`: `scores` float64 [document, classifier], `bytes` int64 [document]), `thresholds_of`
cuts them into buckets, and `label_shard` labels and drops.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.curation import heuristics
from nemotron.data_prep.curation.decontamination import word_hashes
from nemotron.data_prep.curation.deduplication.text_hashes import window_polynomials
from nemotron.data_prep.curation.step import (
    DocumentShard,
    DocumentWriter,
    StepTable,
    output_name,
    read_documents,
)
from nemotron.data_prep.work.shards import Plan, ShardOutput
from nemotron.kit.schemas.curation import TrainSettings

NUM_BUCKETS = 20
CLASSIFIERS = ("words", "surface")
WEIGHTS, DESCRIPTION = "classifier.safetensors", "classifier.json"

_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")


# --- What the models look at ----------------------------------------------------------------------------------------

_SURFACE_MEASURES = (
    "mean_word_length",
    "symbol_to_word_ratio",
    "bullet_lines",
    "ellipsis_lines",
    "lines_with_end_mark",
    "short_lines",
    "alphabetic_words",
    "non_alphanumeric",
    "digits",
    "url_chars",
    "parentheses",
    "duplicate_line_chars",
    "top_2gram_chars",
    "duplicate_5gram_chars",
)
SURFACE_FEATURES = (
    *_SURFACE_MEASURES,
    "stop_word_share",
    "capital_share",
    "words_per_sentence",
    "chars_per_line",
    "commas_per_word",
    "different_words",
)
_DIFFERENT_OF = 200  # words from the beginning: over all of a page, the share would tell its length


def surface_features(text: str) -> np.ndarray:
    """float32 [len(SURFACE_FEATURES)]: what a page looks like, as shares and means; its length is none of them."""
    page = heuristics.Page(text)
    num_words = max(1, len(page.words))
    head = [word.lower() for word in page.words[:_DIFFERENT_OF]]
    values = [heuristics.MEASURES[name](page) for name in _SURFACE_MEASURES]
    values += [
        heuristics.stop_words(page) / num_words,
        heuristics.count_characters(text, str.isupper, heuristics.UPPER)
        / max(1, heuristics.count_characters(text, str.isalpha, heuristics.ALPHA)),
        min(100.0, num_words / max(1, len(_SENTENCE_END.findall(text)))),
        min(1000.0, sum(map(len, page.lines)) / max(1, len(page.lines))),
        text.count(",") / num_words,
        len(set(head)) / max(1, len(head)),
    ]
    return np.array(values, dtype=np.float32)


def hashed_words(text: str, hash_bits: int, max_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (int64, sorted, unique) and values (float64, of length 1 together) of a page's words and pairs of words.

    A value is 1 + log(occurrences) before it is scaled.
    """
    words = word_hashes(text[: 40 * max_words])[:max_words]
    hashes = np.concatenate([words, window_polynomials(words, 2)])
    # The highest bits: of a polynomial hash, they depend on all of it.
    indices, counts = np.unique(hashes >> np.uint64(64 - hash_bits), return_counts=True)
    values = 1.0 + np.log(counts)
    length = math.sqrt(float(values @ values)) if len(values) else 1.0
    return indices.astype(np.int64), values / length


# --- The models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ensemble:
    """Both models, trained.

    `words`: float32 [2**hash_bits], weight of each hashed word or pair; `bias` of the same model. Trees, padded to one
    size: `feature` int32 [tree, node] (-1: a leaf), `threshold` float64 (left if the feature is at most this), `left`,
    `right` int32 (nodes), `value` float64 (of a leaf, in log-odds); `prior`: log-odds before any tree.
    """

    settings: TrainSettings
    words: np.ndarray
    bias: float
    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    prior: float

    def scores(self, texts: Sequence[str]) -> np.ndarray:
        """float64 [text, classifier]: the probability of good quality that each model gives, columns as CLASSIFIERS."""
        word_odds = [self._word_odds(text) for text in texts]
        features = (
            np.stack([surface_features(text) for text in texts]) if texts else np.empty((0, len(SURFACE_FEATURES)))
        )
        return _probability(np.stack([np.array(word_odds, dtype=np.float64), self._tree_odds(features)], axis=1))

    def _word_odds(self, text: str) -> float:
        indices, values = hashed_words(text, self.settings.hash_bits, self.settings.max_words)
        return float(self.words[indices].astype(np.float64) @ values) + self.bias

    def _tree_odds(self, features: np.ndarray) -> np.ndarray:
        odds = np.full(len(features), self.prior)
        rows = np.arange(len(features))
        for tree in range(len(self.feature)):
            node = np.zeros(len(features), dtype=np.int64)
            for _ in range(self.settings.tree_depth):
                feature = self.feature[tree, node]
                goes_left = features[rows, np.maximum(feature, 0)] <= self.threshold[tree, node]
                below = np.where(goes_left, self.left[tree, node], self.right[tree, node])
                node = np.where(feature < 0, node, below)
            odds += self.value[tree, node]
        return odds

    def save(self, folder: Path) -> None:
        """Write both files; the same model gives the same bytes."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}, folder / WEIGHTS)
        description = {
            "classifiers": list(CLASSIFIERS),
            "surface_features": list(SURFACE_FEATURES),
            "settings": self.settings.model_dump(),
            "bias": self.bias,
            "prior": self.prior,
        }
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Ensemble:
        """Read what `save` wrote; UserError where that is not there or of other features."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(folder / WEIGHTS)
            description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            if tuple(description["surface_features"]) != SURFACE_FEATURES:
                raise UserError(f"{folder / DESCRIPTION}: a classifier with other surface features", "train it anew")
            return cls(
                TrainSettings(**description["settings"]),
                bias=float(description["bias"]),
                prior=float(description["prior"]),
                **{name: arrays[name] for name in _ARRAYS},
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"{folder}: no quality classifier there: {error}") from error

    @property
    def digest(self) -> str:
        """sha256 (hex) over all numbers."""
        total = hashlib.sha256(json.dumps([self.bias, self.prior, repr(self.settings)]).encode())
        for name in _ARRAYS:
            total.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return total.hexdigest()


_ARRAYS = ("words", "feature", "threshold", "left", "right", "value")


def train(texts: Sequence[str], good: Sequence[bool], settings: TrainSettings | None = None) -> Ensemble:
    """Train both models on pages of which some are good. The same pages in the same order give the same numbers.

    UserError: scikit-learn is not installed, or the pages are all of one class.
    """
    settings = settings or TrainSettings()
    try:
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]  # comes with scikit-learn
        from sklearn.ensemble import GradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise UserError(
            f"training a quality classifier needs scikit-learn ({error})", install_line("curation")
        ) from None
    labels = np.array(good, dtype=np.int64)
    if len(set(labels.tolist())) < 2:
        raise UserError(f"{len(labels)} pages to train a quality classifier on, and not of both classes")

    rows = [hashed_words(text, settings.hash_bits, settings.max_words) for text in texts]
    matrix = csr_matrix(
        (
            np.concatenate([values for _, values in rows]),
            np.concatenate([indices for indices, _ in rows]),
            np.cumsum([0, *(len(indices) for indices, _ in rows)]),
        ),
        shape=(len(rows), 2**settings.hash_bits),
    )
    linear = LogisticRegression(C=settings.regularisation, max_iter=1000).fit(matrix, labels)

    features = np.stack([surface_features(text) for text in texts])
    boosted = GradientBoostingClassifier(
        n_estimators=settings.num_trees,
        max_depth=settings.tree_depth,
        learning_rate=settings.tree_rate,
        min_samples_leaf=max(1, min(5, len(labels) // 20)),
        random_state=settings.seed,
    ).fit(features, labels)
    trees = [tree.tree_ for tree in boosted.estimators_[:, 0]]
    size = max(tree.node_count for tree in trees)

    def padded(name: str, dtype: type) -> np.ndarray:
        table = np.zeros((len(trees), size), dtype=dtype)
        for row, tree in zip(table, trees, strict=True):
            row[: tree.node_count] = getattr(tree, name).reshape(tree.node_count)
        return table

    feature = padded("feature", np.int32)
    leaf = padded("children_left", np.int32) < 0
    share = labels.mean()
    return Ensemble(
        settings,
        words=linear.coef_[0].astype(np.float32),
        bias=float(linear.intercept_[0]),
        feature=np.where(leaf, -1, feature).astype(np.int32),
        threshold=padded("threshold", np.float64),
        left=padded("children_left", np.int32),
        right=padded("children_right", np.int32),
        value=padded("value", np.float64) * settings.tree_rate,
        prior=float(np.log(share / (1.0 - share))),
    )


def _probability(odds: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(odds, -500, 500)))


# --- Buckets --------------------------------------------------------------------------------------------------------


def bucket_thresholds(scores: np.ndarray, sizes: np.ndarray) -> list[float]:
    """19 scores at which a corpus is cut into 20 buckets of equal size.

    Args:
        scores: float [document], of one classifier.
        sizes: [document], bytes (or tokens): a bucket is a twentieth of the text, not of the documents.
    """
    if not len(scores):
        return [0.5] * (NUM_BUCKETS - 1)
    order = np.argsort(scores, kind="stable")
    shares = np.cumsum(sizes[order], dtype=np.float64)
    shares /= shares[-1]
    places = np.searchsorted(shares, np.arange(1, NUM_BUCKETS) / NUM_BUCKETS, side="left")
    return [float(score) for score in scores[order][np.minimum(places, len(scores) - 1)]]


def to_buckets(scores: np.ndarray, thresholds: Sequence[Sequence[float]]) -> np.ndarray:
    """int64 [document, classifier]: 0 to 19; equal scores that would fill several buckets are in the middle one.

    Args:
        scores: float [document, classifier].
        thresholds: of each classifier, from `bucket_thresholds`: the highest score of each bucket but the last.
    """
    columns = []
    for column, highest in zip(scores.T, thresholds, strict=True):
        # Trees give many pages the same score. All of them in the highest of their buckets, with the maximum taken
        # over classifiers afterwards, would leave nothing in the lowest ones.
        first = np.searchsorted(highest, column, side="left")
        last = np.searchsorted(highest, column, side="right")
        columns.append((first + last) // 2)
    return np.stack(columns, axis=1).astype(np.int64)


def ensemble_bucket(buckets: np.ndarray) -> np.ndarray:
    """int64 [document]: the highest bucket that any classifier gives."""
    return buckets.max(axis=1)


def label_of(bucket: int, labels: Mapping[str, int]) -> str:
    """The label of a bucket. `labels`: label -> its lowest bucket; one of them begins at 0."""
    return max((low, label) for label, low in labels.items() if low <= bucket)[1]


# --- The step's two passes --------------------------------------------------------------------------------------------

_BATCH = 256  # documents scored at a time
# Scores that the thresholds are taken from: of more documents, every second one, every third one, ... evenly over the
# corpus. With two million, the standard error of the share below a threshold is at most 0.04 %.
_MAX_SCORES = 4_000_000


@dataclass(frozen=True, slots=True)
class Buckets:
    """How scores become labels. `thresholds`: 19 of each classifier. `labels`: label -> its lowest bucket.

    Documents below `min_bucket` are dropped. `folder`: where the first pass wrote.
    """

    thresholds: Sequence[Sequence[float]]
    labels: Mapping[str, int]
    min_bucket: int
    folder: Path


def score_shard(shard: DocumentShard, ensemble: Ensemble, output: ShardOutput) -> StepTable:
    """A task of the first pass: the scores of a shard's documents, in order."""
    from safetensors.numpy import save_file

    scores, sizes = [], []
    table = StepTable()
    documents = read_documents(shard.work)
    while batch := list(islice(documents, _BATCH)):
        for document in batch:
            table.read.add(document)
            sizes.append(len(document["text"].encode("utf-8", "surrogatepass")))
        scores.append(ensemble.scores([document["text"] for document in batch]))
    table_of_scores = np.concatenate(scores) if scores else np.empty((0, len(CLASSIFIERS)))
    save_file(
        {"scores": table_of_scores, "bytes": np.array(sizes, dtype=np.int64)}, output.path(_scores_name(shard.name))
    )
    return table


def label_shard(shard: DocumentShard, buckets: Buckets, output: ShardOutput) -> StepTable:
    """A task of the second pass: documents with `bucket`, `quality` and `quality_scores`, the worst dropped."""
    scores, _ = read_scores(buckets.folder, shard.name)
    of_classifiers = to_buckets(scores, buckets.thresholds)
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        documents = read_documents(shard.work)
        for document, bucket, score in zip(documents, ensemble_bucket(of_classifiers), scores, strict=True):
            table.read.add(document)
            label = label_of(int(bucket), buckets.labels)
            if bucket < buckets.min_bucket:
                table.drop(document, f"below bucket {buckets.min_bucket}", f"bucket {bucket}")
                continue
            labelled = document | {
                "quality": label,
                "bucket": int(bucket),
                "quality_scores": {
                    name: round(float(value), 4) for name, value in zip(CLASSIFIERS, score, strict=True)
                },
            }
            table.keep(labelled, [f"quality {label}"])
            writer.write(labelled)
    return table


def thresholds_of(plan: Plan[Path], folder: Path, max_scores: int = _MAX_SCORES) -> list[list[float]]:
    """Of each classifier, where its buckets begin, from the scores of all shards.

    Args:
        max_scores: documents whose scores are held in memory at most, 24 bytes each; of more, so many are taken evenly.
    """
    step = max(1, -(-sum(len(read_scores(folder, shard.name)[1]) for shard in plan.shards) // max_scores))
    tables, sizes, before = [], [], 0
    for shard in plan.shards:
        scores, weights = read_scores(folder, shard.name)
        taken = slice(-before % step, None, step)
        tables.append(scores[taken].copy())  # lest the rest of the array stay, too
        sizes.append(weights[taken].copy())
        before += len(weights)
    scores, weights = np.concatenate(tables), np.concatenate(sizes)
    return [bucket_thresholds(scores[:, column], weights) for column in range(len(CLASSIFIERS))]


def read_scores(folder: Path, shard: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores [document, classifier] and bytes [document] that the first pass wrote."""
    from safetensors.numpy import load_file

    arrays = load_file(folder / _scores_name(shard))
    return arrays["scores"], arrays["bytes"]


def _scores_name(shard: str) -> str:
    return f"scores/{shard}.safetensors"


# --- How good it is -------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """An estimate with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def auc(scores: np.ndarray, good: np.ndarray) -> float:
    """Chance that a good page scores higher than another, ties counting half (area under the ROC curve).

    scipy's Mann-Whitney U gives the same number as scikit-learn's roc_auc_score in a third of its time, and a bootstrap
    needs a thousand.
    """
    from scipy.stats import mannwhitneyu  # type: ignore[import-untyped]

    pairs = int(good.sum()) * int((~good).sum())
    return float(mannwhitneyu(scores[good], scores[~good], method="asymptotic").statistic) / pairs


def auc_interval(scores: np.ndarray, good: np.ndarray) -> Interval:
    """`auc` with a bootstrap interval: good pages and others are drawn anew, each class as often as it occurs."""
    draw = np.random.default_rng(0)
    goods, others = scores[good], scores[~good]
    is_good = np.arange(len(scores)) < len(goods)
    # scipy.stats.bootstrap would hold all draws at once.
    areas = [
        auc(np.concatenate([draw.choice(goods, len(goods)), draw.choice(others, len(others))]), is_good)
        for _ in range(1000)
    ]
    low, high = np.quantile(areas, [0.025, 0.975])
    return Interval(auc(scores, good), float(low), float(high))


def wilson(successes: int, trials: int) -> Interval:
    """A share with its 95 % interval (Wilson 1927)."""
    from scipy.stats import binomtest

    if not trials:
        return Interval(math.nan, 0.0, 1.0)
    interval = binomtest(successes, trials).proportion_ci(method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high))


def reliability(scores: np.ndarray, good: np.ndarray) -> list[dict[str, Any]]:
    """Rows of a reliability table: pages in ten bins by predicted probability, their mean prediction and good share."""
    places = np.minimum((scores * 10).astype(np.int64), 9)
    rows = []
    for place in np.unique(places):
        inside = places == place
        pages = int(inside.sum())
        observed, low, high = wilson(int(good[inside].sum()), pages)
        predicted = float(scores[inside].mean())
        rows.append({"pages": pages, "predicted": predicted, "observed": observed, "low": low, "high": high})
    return rows


def calibration_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """Mean distance of prediction and observation, weighted by pages (expected calibration error)."""
    total = sum(row["pages"] for row in rows)
    return sum(row["pages"] * abs(row["predicted"] - row["observed"]) for row in rows) / max(1, total)


def quality_by_label(buckets: np.ndarray, good: np.ndarray, labels: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows from the lowest label to the highest: pages of it and the share of them that is good, with interval."""
    names = np.array([label_of(int(bucket), labels) for bucket in buckets], dtype=object)
    rows = []
    for label in sorted(labels, key=lambda name: labels[name]):
        inside = names == label
        pages = int(inside.sum())
        share, low, high = wilson(int(good[inside].sum()), pages)
        rows.append({"label": label, "pages": pages, "good": share, "low": low, "high": high})
    return rows


def rises(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the share of good pages never falls from one label that has pages to the next."""
    shares = [row["good"] for row in rows if row["pages"]]
    return all(a <= b for a, b in pairwise(shares))
