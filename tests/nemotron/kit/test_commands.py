"""The lists of steps and their configs tell which command makes an artifact, and an error about one names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import ArtifactError, UserError
from nemotron.kit import commands, steps
from nemotron.kit.commands import command_for, command_hint


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nano3-pretrain-data-tiny", "nemotron nano3 data prep pretrain -c tiny"),
        ("nano3-sft-model-tiny", "nemotron nano3 sft -c tiny"),
        ("nano3-sft-results-tiny", "nemotron nano3 sft -c tiny"),
        ("nano3-rl-data-published", "nemotron nano3 data prep rl -c published"),  # by another script than the step's
        ("nano3-rl-model-tiny", "nemotron nano3 rl rlvr -c tiny"),
        ("nano3-final-model-tiny", "nemotron nano3 rl rlvr -c tiny-final"),  # the second run of that script
        ("nano3-eval-results-tiny", "nemotron nano3 eval -c tiny"),
        ("super3-pretrain-model-tiny-phase2", "nemotron super3 pretrain -c tiny-phase2"),  # by a script of nano3
        ("super3-pretrain-model-phase2", "nemotron super3 pretrain -c phase2"),  # no pipe has it
        ("super3-sft-model-tiny", "nemotron super3 sft -c tiny"),
        ("super3-sft-model-tiny-budget", "nemotron super3 sft -c tiny-budget"),
        ("super3-rl-model-tiny-swe2", "nemotron super3 rl rlvr -c tiny-swe2"),
        ("super3-mtp-healing-model-tiny", "nemotron super3 rl mtp-healing -c tiny"),
        ("lightning35-qad-model-smoke", "nemotron lightning35 qad -c smoke"),
        ("nemotron_cc-fuzzy_dedup-data-tiny", "nemotron data curate fuzzy_dedup -c tiny"),
        ("nemotron_cc-data-tiny", "nemotron data curate decontaminate -c tiny"),
        ("nemotron_cc-data-default", "nemotron data curate rephrase -c default"),
        ("pack-data-nano3_sft", "nemotron data pack -c nano3_sft"),
        ("nano3-pretran-data-tiny", None),  # no step of this name,
        ("nano3-pretrain-data-mine", None),  # no config,
        ("super3-rl-rlvr-model-long_context", None),  # and no recipe
        ("my-model", None),
    ],
)
def test_the_command_is_that_of_the_config_which_writes_the_artifact(name: str, command: str | None) -> None:
    assert command_for(name) == command


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            ArtifactError("no", None, "nano3-sft-model-tiny"),
            "make it: nemotron nano3 sft -c tiny (with all before it: nemotron nano3 pipe -c tiny)",
        ),
        (
            ArtifactError("no", None, "nano3-final-model-tiny"),
            "make it: nemotron nano3 rl rlvr -c tiny-final (with all before it: nemotron nano3 pipe -c tiny)",
        ),
        # Nothing comes before the first step, and no other step has the config `published`.
        (ArtifactError("no", None, "nano3-pretrain-data-tiny"), "make it: nemotron nano3 data prep pretrain -c tiny"),
        (ArtifactError("no", None, "nano3-rl-data-published"), "make it: nemotron nano3 data prep rl -c published"),
        # The name of what a command makes is no misspelling of another one's.
        (ArtifactError("no", "did you mean pack-data-on?", "pack-data-own"), "make it: nemotron data pack -c own"),
        (
            ArtifactError("bad", "publish it", "nano3-sft-model-tiny", corrupt=True),
            "make it again: nemotron nano3 sft -c tiny --force",
        ),
        (
            ArtifactError("no", None, "nano3-pretran-model-tiny"),
            "did you mean nano3-pretrain-model-tiny? make it: nemotron nano3 pretrain -c tiny",
        ),
        (ArtifactError("no", "did you mean x?", "my-model"), None),
        (ArtifactError("no", None, "zzzz"), "nemotron artifacts list names those that exist"),
        (UserError("nano3-sft-model-tiny"), None),
    ],
)
def test_an_error_about_an_artifact_names_the_command(error: UserError, hint: str | None) -> None:
    assert command_hint(error) == hint


def test_a_directory_of_the_name_is_in_the_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    hint = command_hint(ArtifactError("no", "did you mean x?", "my-model"))
    assert hint == "the directory of that name is ./my-model; nemotron artifacts list names the artifacts"
    damaged = ArtifactError("no", "remove it", "my-model", corrupt=True)
    assert command_hint(damaged) is None  # its own hint counts


def test_a_pipe_is_in_a_hint_only_where_all_its_steps_have_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that runs twice needs the config with the suffix, too."""
    (tmp_path / "config").mkdir()
    for config in ("mine", "tiny", "tiny-late"):
        (tmp_path / "config" / f"{config}.yaml").write_text("run: {output: 'plants-${run.config}'}\n")
    (tmp_path / "water.py").write_text("# /// script\n# [tool.runspec]\n# name = 'garden/water'\n# ///\n")
    line = '= {command = "nemotron garden water", script = "water.py"'
    steps_of_garden = f'[steps]\nwater {line}}}\nwater-late {line}, config_suffix = "-late"}}\n'
    (tmp_path / "steps.toml").write_text(f'pipe = "nemotron garden pipe"\n{steps_of_garden}')
    monkeypatch.setattr(steps, "RECIPES", tmp_path)
    commands.makers_by_artifact.cache_clear()
    try:
        late = commands.Maker("nemotron garden water -c tiny-late", "nemotron garden pipe -c tiny")
        assert commands.makers_by_artifact()["plants-tiny-late"] == late
        (tmp_path / "config" / "tiny-late.yaml").rename(tmp_path / "config" / "other-late.yaml")
        commands.makers_by_artifact.cache_clear()
        late = commands.Maker("nemotron garden water -c other-late", None)
        assert commands.makers_by_artifact()["plants-other-late"] == late
    finally:
        commands.makers_by_artifact.cache_clear()


def test_a_step_that_is_listed_is_in_the_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the list, the script and the config has to know it."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text("run: {output: 'plants-${run.config}'}\n")
    (tmp_path / "water.py").write_text("# /// script\n# [tool.runspec]\n# name = 'garden/water'\n# ///\n")
    (tmp_path / "steps.toml").write_text('[steps]\nwater = {command = "nemotron garden water", script = "water.py"}\n')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "steps.toml").write_text("[steps\n")  # which is no reason to say nothing of others
    monkeypatch.setattr(steps, "RECIPES", tmp_path)
    commands.makers_by_artifact.cache_clear()
    try:
        with pytest.raises(ArtifactError) as caught:
            Registry(tmp_path / "artifacts").resolve("plants-mine")
        assert command_hint(caught.value) == "make it: nemotron garden water -c mine"
    finally:
        commands.makers_by_artifact.cache_clear()
