"""The quality classifier against scikit-learn, which trained it, and against closed forms; buckets; what is on disk."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation import quality
from nemotron.data_prep.curation.quality import Ensemble, train
from nemotron.kit.schemas.curation import TrainSettings

GOOD = "The function returns the number of items that the list contains, and raises an error when the list is empty."
BAD = "BUY cheap deals now!!! click here >>> best price $$$ free shipping offer limited click click"


def pages(count: int, seed: int) -> tuple[list[str], list[bool]]:
    """Sentences of shuffled words of either kind, some of the other kind among them."""
    draw = random.Random(seed)
    texts, good = [], []
    for i in range(count):
        own, other = (GOOD, BAD) if i % 2 else (BAD, GOOD)
        words = draw.choices(own.split(), k=draw.randrange(20, 60)) + draw.choices(other.split(), k=draw.randrange(25))
        draw.shuffle(words)
        texts.append(" ".join(words) + (".\n" if draw.random() < 0.7 else "\n") * draw.randrange(1, 3))
        good.append(bool(i % 2))
    return texts, good


@pytest.fixture(scope="module")
def trained() -> Ensemble:
    return train(*pages(120, 1), TrainSettings(hash_bits=12, num_trees=20))


def test_numpy_gives_what_scikit_learn_gives(trained: Ensemble) -> None:
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    texts, good = pages(120, 1)
    others = pages(50, 2)[0]

    def dense(some: list[str]) -> np.ndarray:
        table = np.zeros((len(some), 2**12))
        for row, text in zip(table, some, strict=True):
            indices, values = quality.hashed_words(text, 12, 2000)
            row[indices] = values
        return table

    linear = LogisticRegression(C=10.0, max_iter=1000).fit(dense(texts), good)
    features = np.stack([quality.surface_features(text) for text in texts])
    boosted = GradientBoostingClassifier(
        n_estimators=20, max_depth=3, learning_rate=0.1, min_samples_leaf=5, random_state=0
    )
    boosted.fit(features, good)
    scores = trained.scores(others)
    np.testing.assert_allclose(scores[:, 0], linear.predict_proba(dense(others))[:, 1], atol=2e-3)
    expected = boosted.predict_proba(np.stack([quality.surface_features(text) for text in others]))[:, 1]
    np.testing.assert_allclose(scores[:, 1], expected, atol=1e-12)


def test_training_is_deterministic_and_disk_changes_nothing(trained: Ensemble, tmp_path: Path) -> None:
    again = train(*pages(120, 1), TrainSettings(hash_bits=12, num_trees=20))
    assert again.digest == trained.digest
    trained.save(tmp_path / "a")
    loaded = Ensemble.load(tmp_path / "a")
    assert loaded.digest == trained.digest and loaded.settings == trained.settings
    loaded.save(tmp_path / "b")
    for name in (quality.WEIGHTS, quality.DESCRIPTION):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    texts = pages(5, 4)[0]
    assert (loaded.scores(texts) == trained.scores(texts)).all()
    other = train(*pages(120, 2), TrainSettings(hash_bits=12, num_trees=20))
    assert other.digest != trained.digest


def test_what_is_no_classifier_is_refused(trained: Ensemble, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no quality classifier"):
        Ensemble.load(tmp_path)
    trained.save(tmp_path)
    (tmp_path / quality.WEIGHTS).write_bytes(b"pickle?")
    with pytest.raises(UserError, match="no quality classifier"):
        Ensemble.load(tmp_path)
    with pytest.raises(UserError, match="both classes"):
        train(["a", "b"], [True, True])


def test_hashed_words_are_words_and_pairs_of_length_one() -> None:
    indices, values = quality.hashed_words("One two one two THREE", 40, 100)
    assert len(indices) == 3 + 3  # one two three; (one two) twice, (two one), (two three)
    assert math.isclose(float(values @ values), 1.0)
    a, b = 1.0, 1.0 + math.log(2)
    length = math.sqrt(3 * b * b + 3 * a * a)
    np.testing.assert_allclose(sorted(values), [a / length] * 3 + [b / length] * 3)
    assert len(quality.hashed_words("", 18, 100)[0]) == 0
    assert len(quality.hashed_words("a b c d", 40, 2)[0]) == 3


def test_no_feature_grows_with_length() -> None:
    text = (GOOD + "\n") * 3
    assert np.allclose(quality.surface_features(text * 10)[:11], quality.surface_features(text)[:11], atol=0.02)


# --- Buckets ---


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10_000)), min_size=1, max_size=200))
def test_thresholds_are_the_weighted_percentiles_of_numpy(rows: list[tuple[float, int]]) -> None:
    scores, sizes = np.array([s for s, _ in rows]), np.array([b for _, b in rows])
    expected = np.quantile(scores, np.arange(1, 20) / 20, weights=sizes, method="inverted_cdf")
    np.testing.assert_array_equal(quality.bucket_thresholds(scores, sizes), expected)


def test_twenty_buckets_of_equal_size() -> None:
    scores = np.random.default_rng(0).random((10_000, 2))
    thresholds = [quality.bucket_thresholds(scores[:, i], np.ones(10_000)) for i in range(2)]
    buckets = quality.to_buckets(scores, thresholds)
    for column in buckets.T:
        counts = np.bincount(column, minlength=20)
        assert len(counts) == 20 and counts.min() >= 499 and counts.max() <= 501
    top = quality.ensemble_bucket(buckets)
    assert (top == np.maximum(buckets[:, 0], buckets[:, 1])).all()
    # Of two independent classifiers, the larger bucket is below 19 with probability (19/20)**2.
    assert abs((top == 19).mean() - (1 - 0.95**2)) < 0.01


def test_equal_scores_are_in_the_middle_of_what_they_would_fill() -> None:
    def buckets(scores: list[float]) -> list[int]:
        column = np.array(scores)
        found = quality.to_buckets(column[:, None], [quality.bucket_thresholds(column, np.ones(len(scores)))])
        return [int(bucket) for bucket in found[:, 0]]

    assert buckets([i / 20 for i in range(20)]) == list(range(20))
    assert buckets([0.5] * 20) == [9] * 20
    assert buckets([0.1] * 8 + [i / 20 for i in range(8, 20)]) == [4] * 8 + list(range(8, 20))
    assert buckets([i / 20 for i in range(12)] + [0.9] * 8) == list(range(12)) + [15] * 8


def test_labels_of_buckets() -> None:
    labels = {"low": 0, "medium-low": 7, "medium": 12, "medium-high": 18, "high": 19}
    found = [quality.label_of(bucket, labels) for bucket in range(20)]
    assert found == ["low"] * 7 + ["medium-low"] * 5 + ["medium"] * 6 + ["medium-high", "high"]


# --- How good it is ---


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.booleans()), min_size=2, max_size=30))
def test_the_area_is_that_of_scikit_learn(rows: list[tuple[float, bool]]) -> None:
    from sklearn.metrics import roc_auc_score

    scores, good = np.array([score for score, _ in rows]), np.array([is_good for _, is_good in rows])
    assume(0 < good.sum() < len(good))
    assert quality.auc(scores, good) == pytest.approx(roc_auc_score(good, scores), abs=1e-12)


def test_the_interval_of_the_auc_covers_and_is_as_wide_as_hanley_and_mcneil_say() -> None:
    draw = np.random.default_rng(1)
    good = np.arange(600) < 200
    scores = draw.normal(size=600) + good * 1.0
    interval = quality.auc_interval(scores, good)
    a = interval.value
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    error = math.sqrt((a * (1 - a) + 199 * (q1 - a * a) + 399 * (q2 - a * a)) / (200 * 400))
    assert a == quality.auc(scores, good)
    assert interval.low < a < interval.high
    assert 0.75 < (interval.high - interval.low) / (2 * 1.96 * error) < 1.3
    assert interval.low < 0.7602 < interval.high  # the normal distribution's, Phi(1 / sqrt 2)


def test_reliability_of_a_calibrated_and_of_an_overconfident_classifier() -> None:
    draw = np.random.default_rng(2)
    truth = draw.random(20_000)
    good = draw.random(20_000) < truth
    assert quality.calibration_error(quality.reliability(truth, good)) < 0.02
    sure = np.where(truth > 0.5, 0.99, 0.01)
    assert quality.calibration_error(quality.reliability(sure, good)) > 0.2


def test_quality_by_label_sees_a_label_that_is_out_of_order() -> None:
    labels = {"low": 0, "medium": 7, "high": 19}
    good = np.array([False, False, True, False, True, True])
    rows = quality.quality_by_label(np.array([0, 3, 8, 9, 19, 19]), good, labels)
    assert [(row["label"], row["pages"], row["good"]) for row in rows] == [
        ("low", 2, 0.0),
        ("medium", 2, 0.5),
        ("high", 2, 1.0),
    ]
    assert quality.rises(rows)
    assert not quality.rises(quality.quality_by_label(np.array([19, 19, 8, 9, 0, 3]), good, labels))
