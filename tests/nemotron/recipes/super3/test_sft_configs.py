"""Super's SFT is configs of nano3's scripts: the published shares and weights, and one stage after another."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_runspec.config.loader import load_config
from nemotron.recipes.nano3.stage1_sft.data_schema import SFTDataConfig
from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig

from ..scripts import RECIPES

CONFIGS = RECIPES / "super3" / "stage1_sft" / "config"


def read(name: str) -> dict[str, Any]:
    """A config under its defaults, without what `run` says to the command line alone."""
    values = dict(load_config(CONFIGS / name.rpartition("/")[0], name.rpartition("/")[2], ()).data)
    values["run"] = {key: value for key, value in values["run"].items() if key not in ("script", "family")}
    return values


@pytest.mark.parametrize(("name", "shares"), [("tiny", (0.03, 0.0, 0.02)), ("tiny-budget", (0.03, 0.12, 0.02))])
def test_reasoning_is_off_low_or_cut_in_the_published_shares(name: str, shares: tuple[float, ...]) -> None:
    cfg = SFTDataConfig.model_validate(read(f"data_prep/{name}"))
    reasoning = cfg.reasoning
    assert (reasoning.off_share, reasoning.truncated_share, reasoning.low_effort_share) == shares
    assert cfg.chat_template == "super3" and cfg.packing.conversation_tokens


@pytest.mark.parametrize("size", ["tiny", "smoke"])
def test_the_loss_has_two_stages_and_each_goes_on_with_the_model_before(size: str) -> None:
    stages = [SFTConfig.model_validate(read(f"{size}{suffix}")) for suffix in ("", "-conversation", "-budget")]
    assert [cfg.train.loss_reduction for cfg in stages] == ["token", "conversation", "conversation"]
    assert [cfg.run.model for cfg in stages[1:]] == [cfg.run.output for cfg in stages[:-1]]
    assert [cfg.model.mtp_loss_scaling_factor for cfg in stages] == [0.3] * 3
    data = [SFTDataConfig.model_validate(read(f"data_prep/{size}{suffix}")).run.output for suffix in ("", "-budget")]
    assert [cfg.run.data for cfg in stages] == [data[0], data[0], data[1]]
