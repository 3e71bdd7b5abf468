"""The name of an artifact tells the command that makes it, and an error about the artifact names that command."""

import pytest

from nemo_runspec.errors import ArtifactError, UserError
from nemotron.kit.commands import command_for, command_hint


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nano3-pretrain-data-tiny", "nemotron nano3 data prep pretrain -c tiny"),
        ("nano3-sft-model-tiny", "nemotron nano3 sft -c tiny"),
        ("nano3-sft-results-tiny", "nemotron nano3 sft -c tiny"),
        ("nano3-eval-results-tiny", "nemotron nano3 eval -c tiny"),
        ("super3-rl-rlvr-model-long_context", "nemotron super3 rl rlvr -c long_context"),
        ("nano3-sft-data-my-own", "nemotron nano3 data prep sft -c my-own"),
        ("nemotron_cc-fuzzy_dedup-data-tiny", "nemotron data curate fuzzy_dedup -c tiny"),
        ("nemotron_cc-data-my-own", "nemotron data curate -c my-own"),
        ("pack-data-nano3_sft", "nemotron data pack -c nano3_sft"),
        ("tokenize-data-my-own", "nemotron data tokenize -c my-own"),
        ("my-model", None),
        ("nano3-sft-weights-tiny", None),
    ],
)
def test_the_command_follows_the_naming_rule(name, command):
    assert command_for(name) == command


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ArtifactError("no", None, "nano3-sft-model-tiny"), "make it: nemotron nano3 sft -c tiny"),
        (
            ArtifactError("no", "did you mean x?", "pack-data-own"),
            "did you mean x? if not, make it: nemotron data pack -c own",
        ),
        (
            ArtifactError("bad", "publish it", "nano3-sft-model-tiny", corrupt=True),
            "make it again: nemotron nano3 sft -c tiny --force",
        ),
        (ArtifactError("no", "did you mean x?", "my-model"), None),
        (UserError("nano3-sft-model-tiny"), None),
    ],
)
def test_an_error_about_an_artifact_names_the_command(error, hint):
    assert command_hint(error) == hint
