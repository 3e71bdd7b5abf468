"""Configs of pretraining keep the published proportions (arXiv 2604.12374, section 2), one after the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nemo_runspec.config.loader import load_config
from nemotron.recipes.nano3.stage0_pretrain.data_schema import PretrainDataConfig
from nemotron.recipes.nano3.stage0_pretrain.schema import PretrainConfig

from ..scripts import RECIPES

CONFIGS = RECIPES / "super3" / "stage0_pretrain" / "config"
PHASES = ("phase1", "phase2", "long_context_1m", "long_context_mixed")


def values_of(name: str) -> dict[str, Any]:
    values = load_config(CONFIGS, name, ()).data
    del values["run"]["script"], values["run"]["family"]
    return dict(values)


def config(name: str) -> PretrainConfig:
    return PretrainConfig.model_validate(values_of(name))


@pytest.mark.parametrize("size", ["tiny", "smoke"])
def test_each_phase_goes_on_with_the_one_before(size: str) -> None:
    configs = [config(f"{size}-{phase}") for phase in PHASES]
    assert configs[0].checkpoint.pretrained_checkpoint is None
    for before, after in itertools.pairwise(configs):
        assert after.run.model == before.run.output and after.run.data == before.run.data
        assert after.checkpoint.load_optim and before.checkpoint.save_optim
        assert after.model == before.model
        tokens = [each.train.global_batch_size * each.dataset.seq_length for each in (before, after)]
        assert size == "smoke" or tokens[0] == tokens[1]


def test_what_is_published_of_the_two_phases_of_text() -> None:
    first, second = config("tiny-phase1"), config("tiny-phase2")
    assert second.train.train_iters / (first.train.train_iters + second.train.train_iters) == 5 / 25
    assert first.scheduler.lr_wsd_decay_iters == 0 and first.scheduler.lr_warmup_iters > 0
    assert second.scheduler.lr_wsd_decay_iters == second.train.train_iters
    assert second.scheduler.lr_wsd_decay_style == "minus_sqrt" and second.scheduler.lr_warmup_iters == 0
    assert second.optimizer.min_lr == pytest.approx(0.01 * second.optimizer.lr)
    for each in (first, second):
        assert (each.model.mtp_loss_scaling_factor, each.model.mtp_num_layers) == (0.3, 2)
        assert (each.model.moe_router_bias_update_rate, each.model.moe_aux_loss_coeff) == (1e-3, 1e-4)
        model = each.model
        assert model.hidden_size == 2 * (model.moe_latent_size or 0)  # so twice nano3's 16 experts and its 2 a token
        assert (model.n_routed_experts, model.num_experts_per_tok) == (32, 4)


def test_what_is_published_of_long_sequences() -> None:
    long, mixed, ultra = (config(f"tiny-long_context_{name}") for name in ("1m", "mixed", "92_8"))
    assert mixed.train.train_iters / long.train.train_iters == pytest.approx(1014 / 2027, abs=0.01)
    assert long.dataset.short is None
    assert mixed.dataset.short is not None and ultra.dataset.short is not None
    assert (mixed.dataset.short.share, ultra.dataset.short.share) == (0.5, 0.08)
    for each in (long, mixed, ultra):
        assert each.scheduler.lr_decay_style == "constant" and each.dataset.blend == "long"
    data = load_config(CONFIGS / "data_prep", "tiny", ()).data
    del data["run"]["script"], data["run"]["family"]
    blends = PretrainDataConfig.model_validate(data)
    assert [phase.until for phase in blends.blend] == [20 / 25, 1.0]
    assert blends.long_context is not None
    assert (blends.long_context.share, blends.long_context.length) == (0.2, long.dataset.seq_length)
