"""Options and overrides, told apart at any position of the line."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemo_runspec.job import FLAGS, VALUED
from nemo_runspec.options import Options, parse_words

EXPECTED = Options(
    {"config": "tiny", "run": "slurm"}, frozenset({"dry_run", "force"}), ("train.train_iters=5", "optimizer.lr=1e-3")
)


def read(*words: str) -> Options:
    return parse_words(words, valued=VALUED, flags=FLAGS, known=["--from"])


@given(st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_words_does_not_matter(rng: random.Random, equals: bool) -> None:
    config = ["--config=tiny"] if equals else ["-c", "tiny"]
    profile = ["--run=slurm"] if equals else ["--run", "slurm"]
    groups = [config, profile, ["--dry-run"], ["--force"], ["train.train_iters=5"], ["optimizer.lr=1e-3"]]
    rng.shuffle(groups)
    options = read(*(word for group in groups for word in group))
    assert options.values == EXPECTED.values
    assert options.flags == EXPECTED.flags
    assert sorted(options.overrides) == sorted(EXPECTED.overrides)


def test_overrides_keep_their_order_and_their_equals_signs() -> None:
    assert read("a=1", "--dry-run", "a=2", "b=x=y", "c=-1", "d=").overrides == ("a=1", "a=2", "b=x=y", "c=-1", "d=")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["-c"], "option -c needs a value", "-c tiny"),
        (["-c", "--dry-run"], "option -c needs a value", "-c tiny"),
        (["--config="], "option --config needs a value", "--config tiny"),
        (["-c", "lr=1"], "option -c needs a value", "as in -c tiny"),
        (["-c", "runs/lr=1/a.yaml"], "option -c needs a value", "a value that has = in it: -c=runs/lr=1/a.yaml"),
        (["--dry-run=yes"], "option --dry-run takes no value", None),
        (["-c", "tiny", "--config", "small"], "option --config is given twice", None),
        (["--dryrun"], "unknown option --dryrun", "did you mean --dry-run?"),
        (["--dryrun=1"], "unknown option --dryrun", "did you mean --dry-run?"),
        (["--form", "sft"], "unknown option --form", "did you mean --from?"),
        (["tiny"], "unexpected word 'tiny'", "--config tiny"),
        (["optimizer.lr", "=", "1e-3"], "unexpected word 'optimizer.lr'", "no blanks around =: optimizer.lr=1e-3"),
        (["optimizer.lr", "=1e-3"], "unexpected word 'optimizer.lr'", "no blanks around =: optimizer.lr=1e-3"),
        (["optimizer.lr=", "1e-3"], "unexpected word '1e-3'", "no blanks around =: optimizer.lr=1e-3"),
        (["sources=[{name:", "mine,", "paths:"], "unexpected word 'mine,'", "quotes: 'sources=[{name: mine, …'"),
        (["--optimizer.lr=1e-3"], "unknown option --optimizer.lr", "without dashes: optimizer.lr=1e-3"),
        (["--optimizer.lr", "1e-3"], "unknown option --optimizer.lr", "without dashes: optimizer.lr=VALUE"),
    ],
)
def test_nothing_is_skipped_or_guessed(words: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(UserError) as caught:
        read(*words)
    assert caught.value.message.startswith(message)
    if hint is not None:
        assert hint in (caught.value.hint or "")
