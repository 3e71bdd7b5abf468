"""Our RL arithmetic gives what NeMo-RL's own code gave, forward and gradient, wherever an option is ours.

UNUSED says, for every option that is not, why no recipe here has it; the configs refuse these by name. UNUSED_KINDS are
whole functions of which the same holds. NOT_OURS names single cases that differ on purpose.
"""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from nemotron.kit.schemas.rl import ClippedPGLossConfig, DPOLossConfig, EffortConfig
from nemotron.stack.rl.advantages import clip_advantages, group_advantages
from nemotron.stack.rl.loss_metrics import LossRecord, sequence_errors, sequences_within, token_metrics
from nemotron.stack.rl.losses import grpo_loss, kl_to_reference
from nemotron.stack.rl.preferences import dpo_loss
from nemotron.stack.rl.shaping import Message, check_form, count_forms, effort_reward, message_advantages
from nemotron.stack.training.distributed import ALONE
from nemotron.stack.training.losses import selected_loss_sum

from .recorded_cases import FOLDER, Case, cases, differs, is_finite, kinds_of, padded_groups, tensor

UNUSED = {
    "token_level_loss": "false, a mean over sequences: every Nemotron recipe takes the mean over tokens",
    "sequence_level_importance_ratios": "GSPO: no Nemotron recipe",
    "use_cispo": "CISPO: no Nemotron recipe",
    "ratio_clip_c": "dual clip: null in every Nemotron recipe",
    "disable_ppo_ratio": "REINFORCE: distillation of Nemotron 3 Ultra only, another algorithm",
    "positive_example_nll_weight": "0 in every Nemotron recipe, and its denominator does not add up over micro-batches",
    "use_kl_in_reward": "no Nemotron recipe",
    "truncated_importance_sampling_type": "seq-mask-tis: no Nemotron recipe",
    "preference_average_log_probs": "means over tokens in DPO: the recipe takes sums",
    "sft_average_log_probs": "likewise",
    "low_weight": "0, no bonus: null for the whole group says that here",
    "low_string": "empty: likewise",
}
UNUSED_KINDS = {
    "gdpo_advantage": "GDPO: no Nemotron recipe",
    "reinforce_plus_plus_advantage": "no Nemotron recipe",
    "gae": "needs a value model: no Nemotron recipe",
    "overlong_or_stop": "DAPO's length penalty: the recipes leave truncated responses out of the loss instead",
    "overlong_or_stop_refusal": "likewise",
    "reward_zeroing": "off in every Nemotron recipe",
    "scale_rewards": "off in every Nemotron recipe",
    "trl_rloo_loss": "one ratio for a whole sequence, as in GSPO",
}
TRL_UNUSED = {  # of TRL's options, since ours have other names
    "loss_type": "grpo, bnpo, dr_grpo: other denominators; cispo, vespo, sapo, luspo: other losses; no Nemotron recipe",
    "delta": "dual clip: null in every Nemotron recipe",
    "off_policy_mask_threshold": "no Nemotron recipe",
    "importance_sampling_level": "GSPO: no Nemotron recipe",
    "beta": "its KL without use_bias_correction_kl has no score-function gradient",
    "scale_rewards": "it adds 1e-4 to the deviation of a group, NeMo-RL 1e-6, or takes that of the batch",
    "normalize_advantages": "the deviation of the batch",
    "reward_weights": "a sum of several rewards: no Nemotron recipe",
    "multi_objective_aggregation": "GDPO: no Nemotron recipe",
    "loss_types": "ipo, hinge, robust, sigmoid_norm: no Nemotron recipe",
}
TRL_OURS = {
    "loss_type": ["dapo"],
    "delta": [None],
    "off_policy_mask_threshold": [None],
    "importance_sampling_level": ["token"],
    "scale_rewards": ["none"],
    "normalize_advantages": [False],
    "reward_weights": [[1.0]],
    "multi_objective_aggregation": ["sum_then_normalize"],
    "loss_types": [["sigmoid"], ["sigmoid", "sft"]],
}
NOT_OURS = {
    "rl_clipped_pg/0077": "they multiply by the mask, so -inf at a token outside the loss makes the gradient NaN",
    "rl_clipped_pg/0079": "the same with the advantage NaN: their loss is NaN; such tokens never get into ours",
    "rl_clipped_pg/0101": "log-probabilities before top-k or top-p: our generator draws from all tokens",
    "rl_clipped_pg/0102": "as 0101",
    "rl_clipped_pg/0103": "as 0101",
    "rl_clipped_pg/0134": "-inf at a token of the prompt makes their error NaN: such tokens never get into ours",
    "rl_preference_distillation/0006": "half of a pair masked: a pair counts wholly or not at all",
    "rl_preference_distillation/0007": "likewise",
    "rl_clipped_pg/0104": "a sample of weight 0.5: ours count wholly or not at all",
}
OVERFLOW = "an infinite weight is out of bounds for us, and is not counted by them"
NOT_OUR_METRIC = {("rl_clipped_pg/0071", "is_oob_ratio"): OVERFLOW}


def loss_config(case: Case) -> ClippedPGLossConfig | None:
    """The options as our config, or None where it refuses some; those must be in UNUSED."""
    try:
        return ClippedPGLossConfig(**case["options"])
    except ValidationError as refused:
        assert {str(error["loc"][0]) for error in refused.errors()} <= set(UNUSED), case["id"]
        return None


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_advantages(dtype: str) -> None:
    """In float32 theirs is noise at 1e-4 even where it does not blow up, so the formula counts there."""
    wrong, compared = [], 0
    for case in cases("rl_advantages", "grpo_advantage"):
        if "std_rewards" in case["inputs"] or not is_finite(case):  # dynamic sampling; rewards that are no numbers
            continue
        recorded, formula = case["outputs"][dtype], case["formula"]
        valid = padded_groups(case, case["inputs"]["valid"], 0, dtype).bool()
        rewards = padded_groups(case, case["inputs"]["rewards"], 99.0, dtype)
        if dtype == "float32" and "near_equal" in case["tag"]:
            # Rewards such as 2.190001 and 2.190002 are others in float32: the formula of what they become there, which
            # test_advantages.py compares with a loop.
            theirs = group_advantages(rewards.double(), valid, leave_one_out=case["options"]["leave_one_out"])
            expected = theirs.tolist()
        else:
            use_formula = dtype == "float32" or dtype in case["differs_from_formula"]
            advantages = formula["advantage"] if use_formula else recorded.get("advantage_normalized")
            expected = padded_groups(case, advantages or formula["advantage"], 0.0, "float64").tolist()
        baselines = padded_groups(case, formula["baseline"], 0.0, "float64")
        raw = padded_groups(case, case["inputs"]["rewards"], 0.0, "float64") - baselines
        for normalize, wanted in ((True, torch.tensor(expected)), (False, raw)):
            ours = group_advantages(rewards, valid, leave_one_out=case["options"]["leave_one_out"], normalize=normalize)
            counts = valid.sum(-1, keepdim=True) > 1  # of one completion theirs is the reward less itself
            compared += 1
            if differs(ours, torch.where(valid & counts, wanted, 0.0).tolist(), dtype):
                wrong.append((case["id"], case["tag"], normalize))
    assert not wrong
    assert compared == 2 * (183 - 6 - 4)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_advantage_clip(dtype: str) -> None:
    recorded = cases("rl_advantages", "advantage_clip")
    assert len(recorded) == 6
    for case in recorded:
        low, high = case["options"]["advantage_clip_low"], case["options"]["advantage_clip_high"]
        before, after = case["outputs"][dtype]["before"], case["outputs"][dtype]["after"]
        assert not differs(clip_advantages(tensor(before, dtype), low, high), after, dtype), case["id"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_clipped_policy_gradient(dtype: str) -> None:
    wrong, compared = [], 0
    for case in cases("rl_clipped_pg", "clipped_pg"):
        cfg = loss_config(case)
        if cfg is None or case["id"] in NOT_OURS:
            continue
        compared += 1
        given, recorded = case["inputs"], case["outputs"][dtype]
        logp = tensor(given["curr"], dtype).requires_grad_()
        mask = tensor(given["token_mask"], dtype)[:, 1:] * tensor(given["sample_mask"], dtype)[:, None] > 0
        columns = {
            name: tensor(given[name], dtype)[:, 1:][mask]
            for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
            if name in given
        }
        old, generator = columns["prev_logprobs"], columns["generation_logprobs"]
        reference = columns.get("reference_policy_logprobs")
        ours = grpo_loss(
            logp[mask], columns["advantages"], cfg,
            logp_old_T=old, logp_generator_T=generator, logp_reference_T=reference,
        )  # fmt: skip
        denominator = max(given["global_valid_toks"], 1)
        (gradient,) = torch.autograd.grad(ours.loss / denominator, logp)
        if differs(ours.loss / denominator, recorded["loss"], dtype) or differs(gradient, recorded["grad"], dtype):
            wrong.append((case["id"], case["tag"]))

        record = LossRecord(int(sum(given["sample_mask"])))
        prev = logp[mask].detach() if cfg.force_on_policy_ratio else old
        values = token_metrics(ours, logp[mask], cfg, logp_old_T=prev, logp_generator_T=generator)
        record.add_tokens(values)
        metrics = record.metrics(ALONE)
        local = max(int(mask.sum()), 1)  # theirs is a share of the global batch
        for name, expected in recorded["metrics"].items():
            if name in ("loss", "positive_nll_loss") or (case["id"], name) in NOT_OUR_METRIC:
                continue
            if name.endswith(("_min", "_max")):
                if not mask.any():
                    assert name not in metrics
                    continue
                if "nan" in str(expected):
                    continue  # a NaN ratio stops our run by the gradient norm
                scale = 1.0
            else:
                scale = 1.0 if name == "num_valid_samples" else local / denominator
            if differs(metrics[name] * scale, expected, dtype):
                wrong.append((case["id"], case["tag"], name, metrics[name] * scale, expected))
    assert not wrong
    assert compared == 48


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_kl(dtype: str) -> None:
    """Theirs takes any weights; ours are exp(logp - logp_generator), whose gradient in logp is the weight."""
    wrong, all_cases = [], cases("rl_clipped_pg", "calculate_kl")
    assert len(all_cases) == 18
    for case in all_cases:
        options, given, recorded = case["options"], case["inputs"], case["outputs"][dtype]
        weights = given.get("importance_sampling_weights")
        cfg = ClippedPGLossConfig(
            reference_policy_kl_type=options["kl_type"],
            kl_input_clamp_value=options["input_clamp_value"],
            kl_output_clamp_value=options["output_clamp_value"],
            use_on_policy_kl_approximation=weights is not None,
        )
        logp = tensor(given["logprobs"], dtype).requires_grad_()
        generator, through_weight = logp.detach(), 0.0
        expected = tensor(recorded["grad"], dtype)
        if weights is not None:
            generator = logp.detach() - tensor(weights, dtype).log()
            expected = expected + tensor(recorded["grad_weights"], dtype) * tensor(weights, dtype)
        else:  # with weight exp(logp - logp), 1: the score-function term is the KL itself, where no clamp acts
            input_clamped = (tensor(given["logprobs_reference"], dtype) - logp).abs() > (
                options["input_clamp_value"] or torch.inf
            )
            output_clamped = tensor(recorded["kl"], dtype).abs() >= (options["output_clamp_value"] or torch.inf)
            through_weight = tensor(recorded["kl"], dtype).masked_fill(input_clamped | output_clamped, 0.0)
            expected = expected + through_weight
        ours = kl_to_reference(logp, generator, tensor(given["logprobs_reference"], dtype), cfg)
        (gradient,) = torch.autograd.grad(ours.sum(), logp)
        if differs(ours, recorded["kl"], dtype) or differs(gradient, expected.tolist(), dtype):
            wrong.append(case["id"])
    assert not wrong


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sequences_on_which_trainer_and_generator_disagree(dtype: str) -> None:
    wrong, compared = [], 0
    for case in cases("rl_clipped_pg", "seq_logprob_error_mask"):
        given, recorded = case["inputs"], case["outputs"][dtype]
        mask = tensor(given["token_mask"], dtype)[:, 1:].bool()
        samples = tensor(given["sample_mask"], dtype).bool() & mask.any(-1)  # the packer takes none without tokens
        if case["id"] in NOT_OURS or not samples.any():
            continue
        prev, generator = (tensor(given[name], dtype)[:, 1:] for name in ("prev_logprobs", "generation_logprobs"))
        lengths = mask.sum(-1)[samples].tolist()
        mask = mask & samples[:, None]
        errors = sequence_errors(prev[mask], generator[mask], lengths)
        kept = sequences_within(errors, case["options"]["seq_logprob_error_threshold"])
        everywhere = tensor(given["sample_mask"], dtype)
        everywhere[samples] = kept.to(everywhere.dtype)
        if differs(everywhere, recorded["sample_mask"], dtype):
            wrong.append((case["id"], "mask"))
        record = LossRecord(len(errors))
        record.add_sequences(errors, kept, tensor(given["rewards"], dtype)[samples], 0)
        metrics = record.metrics(ALONE)
        for name, expected in recorded["metrics"].items():
            if name in metrics and str(expected) != "nan":
                compared += 1
                if differs(metrics[name], expected, dtype):
                    wrong.append((case["id"], name, metrics[name], expected))
    assert not wrong
    assert compared == 57


def test_configs_that_mean_nothing_are_refused() -> None:
    """Theirs lets three pass: a bound without a type, a dual clip of 1, and any key that it does not know."""
    recorded = cases("rl_clipped_pg", "clipped_pg_config")
    assert [case["outputs"]["raises"] for case in recorded].count(None) == 3
    for case in recorded:
        with pytest.raises(ValidationError):
            ClippedPGLossConfig(**case["options"])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_dpo(dtype: str) -> None:
    wrong, compared = [], 0
    for case in cases("rl_preference_distillation", "dpo"):
        cfg = dpo_config(case)
        if cfg is None or case["id"] in NOT_OURS:
            continue
        given, recorded = case["inputs"], case["outputs"][dtype]
        mask = tensor(given["token_mask"], dtype)[:, 1:] * tensor(given["sample_mask"], dtype)[:, None] > 0
        samples = tensor(given["sample_mask"], dtype).bool()
        if not samples.any():
            continue
        compared += 1
        logp = tensor(given["curr"], dtype).requires_grad_()
        reference = tensor(given["reference_policy_logprobs"], dtype)[:, :-1]
        ours = dpo_loss(logp[mask], reference[mask], mask.sum(-1)[samples].tolist(), cfg)
        num_pairs = given["global_valid_seqs"] / 2
        (gradient,) = torch.autograd.grad(ours.loss / num_pairs, logp)
        metrics = {
            "loss": ours.loss,
            "preference_loss": ours.preference_P.sum(),
            "sft_loss": ours.sft_P.sum() if cfg.sft_loss_weight else torch.zeros(()),
            "accuracy": (ours.chosen_P > ours.rejected_P).sum(),
            "rewards_chosen_mean": ours.chosen_P.sum(),
            "rewards_rejected_mean": ours.rejected_P.sum(),
        }
        if differs(gradient, recorded["grad"], dtype):
            wrong.append((case["id"], "gradient"))
        for name, value in metrics.items():
            if differs(value / num_pairs, recorded["metrics"][name], dtype):
                wrong.append((case["id"], name))
    assert not wrong
    assert compared == 14


def dpo_config(case: Case) -> DPOLossConfig | None:
    """The options as our config, without what is not averaged anyway; None where it refuses some."""
    options = {name: value for name, value in case["options"].items() if value or "average" not in name}
    try:
        return DPOLossConfig(**options)
    except ValidationError as refused:
        assert {str(error["loc"][0]) for error in refused.errors()} <= set(UNUSED), case["id"]
        return None


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_next_token_loss_of_sft(dtype: str) -> None:
    """With two tokens of log-probability x and log(1 - e^x) as logits, the cross entropy of the first is -x."""
    compared = 0
    for case in cases("rl_preference_distillation", "nll"):
        given, recorded = case["inputs"], case["outputs"][dtype]
        if case["options"]["dpo_loss"]:  # by sequence, for DPO: `test_dpo` has it
            continue
        mask = tensor(given["token_mask"], dtype)[:, 1:] * tensor(given["sample_mask"], dtype)[:, None] > 0
        logp = tensor(given["curr"], dtype).requires_grad_()
        selected = logp[mask]
        if not selected.isfinite().all() or not logp.isfinite().all():  # the gradient of a logit of -inf is NaN
            continue
        compared += 1
        logits = torch.stack([selected, torch.log(-torch.expm1(selected))], dim=-1)
        labels = torch.zeros(len(selected), dtype=torch.int64)
        loss = selected_loss_sum(logits, labels) / max(given["global_valid_toks"], 1)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert not differs(loss, recorded["loss"], dtype), case["id"]
        assert not differs(gradient, recorded["grad"], dtype), case["id"]
    assert compared == 6


def test_effort() -> None:
    wrong, compared = [], 0
    for case in cases("rl_reward_shaping", "effort_shaping"):
        rewards = [item["reward"] for item in case["inputs"]["items"]]
        try:
            effort = EffortConfig(**case["options"])
        except ValidationError as refused:
            assert {str(error["loc"][0]) for error in refused.errors()} <= set(UNUSED), case["id"]
            assert rewards == case["outputs"]["rewards"]  # theirs changes nothing, either
            continue
        compared += 1
        for item, reward, expected in zip(case["inputs"]["items"], rewards, case["outputs"]["rewards"], strict=True):
            users = [message.get("content") for message in item["input"] if message.get("role") == "user"]
            # Of a conversation that does not end with the assistant theirs takes length 0.
            length = item["length"] if item["last_role"] == "assistant" else 0
            asked = users and isinstance(users[-1], str) and effort.low_string in users[-1]
            if abs((effort_reward(reward, length, effort) if asked else reward) - expected) > 1e-9:
                wrong.append(case["id"])
    assert not wrong
    assert compared == 19


def test_malformed_responses() -> None:
    wrong, compared = [], 0
    for case in cases("rl_reward_shaping", "detect_message_flags"):
        item, expected = case["inputs"]["item"], case["outputs"]
        if item["type"] == "function_call":  # parsed: nothing of it is in the text any more
            assert not any(expected.values())
            continue
        compared += 1
        text = item["content"][0]["text"] if item["type"] == "message" else item["summary"][0]["text"]
        ours = check_form(None, text) if item["type"] == "message" else check_form(text, "")
        if ours != (expected["is_invalid_tool_call"], expected["has_malformed_thinking"]):
            wrong.append((case["id"], text))
    assert not wrong
    assert compared == 36


def test_advantages_of_malformed_messages() -> None:
    compared = 0
    for case in cases("rl_reward_shaping", "message_advantage_penalty"):
        invalid = case["options"]["invalid_tool_call_advantage"]
        malformed = case["options"]["malformed_thinking_advantage"]
        given, recorded = case["inputs"], case["outputs"]["float64"]
        everything = []
        for advantage, log, expected in zip(
            given["advantages_per_sample"], given["message_logs"], recorded["advantages"], strict=True
        ):
            messages = [
                Message(
                    message["length"],
                    message["role"] == "assistant" and message["generated"],
                    message.get("is_invalid_tool_call", False),
                    message.get("has_malformed_thinking", False),
                )
                for message in log
            ]
            ours = message_advantages(advantage, messages, invalid, malformed)
            assert ours == expected[: len(ours)], case["id"]
            everything += messages
        if invalid is not None and malformed is not None:  # theirs counts those only that it overwrites
            compared += 1
            counts = count_forms(everything)
            assert counts["invalid_tool_calls"] == recorded["metrics"]["num_invalid_tool_calls"], case["id"]
            assert counts["malformed_thinking"] == recorded["metrics"]["num_malformed_thinking"], case["id"]
    assert compared == 13


def trl_unused(case: Case) -> set[str]:
    """The options of a case that keep it from being ours."""
    options = case["options"]
    unused = {name for name, ours in TRL_OURS.items() if name in options and options[name] not in ours}
    if case["case"] == "trl_grpo_loss" and options["beta"] and not options["use_bias_correction_kl"]:
        unused.add("beta")
    return unused


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_trl_policy_gradient(dtype: str) -> None:
    wrong, compared = [], 0
    for case in cases("trl_losses", "trl_grpo_loss"):
        options, given, recorded = case["options"], case["inputs"], case["outputs"][dtype]
        if trl_unused(case):
            continue
        compared += 1
        cfg = ClippedPGLossConfig(
            ratio_clip_min=options["epsilon_low"],
            ratio_clip_max=options["epsilon_high"],
            reference_policy_kl_penalty=options["beta"],
            use_on_policy_kl_approximation=True,  # its KL is weighted by the ratio to the old policy
            use_importance_sampling_correction=options["vllm_importance_sampling_correction"],
        )
        mask = tensor(given.get("tool_mask", given["completion_mask"]), dtype).bool()
        mask &= tensor(given["completion_mask"], dtype).bool()
        logp = tensor(given["per_token_logps"], dtype).requires_grad_()
        old = tensor(given["old_per_token_logps"], dtype) if given["old_per_token_logps"] else logp.detach()
        advantages = tensor(given["advantages"], dtype)
        advantages = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(logp)
        generator = old
        if cfg.use_importance_sampling_correction:
            generator = old - tensor(given["importance_sampling_ratio"], dtype).log()
        reference = tensor(given["ref_per_token_logps"], dtype)[mask] if "ref_per_token_logps" in given else None
        ours = grpo_loss(
            logp[mask], advantages[mask], cfg,
            logp_old_T=old[mask], logp_generator_T=generator[mask], logp_reference_T=reference,
        )  # fmt: skip
        loss = ours.loss / given["num_items_in_batch"]
        (gradient,) = torch.autograd.grad(loss, logp)
        if differs(loss, recorded["loss"], dtype) or differs(gradient, recorded["grad"], dtype):
            wrong.append((case["id"], case["tag"]))
    assert not wrong
    assert compared == 15


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_trl_advantages(dtype: str) -> None:
    compared = 0
    for kind, leave_one_out in (("trl_grpo_advantages", False), ("trl_rloo_advantages", True)):
        for case in cases("trl_losses", kind):
            options, given = case["options"], case["inputs"]
            if trl_unused(case):
                continue
            rewards = tensor(given.get("rewards", given.get("rewards_per_func")), dtype)
            rewards = rewards.view(-1, options["num_generations"])
            ours = group_advantages(rewards, ~rewards.isnan(), leave_one_out=leave_one_out, normalize=False)
            compared += 1
            assert not differs(ours.flatten(), case["outputs"][dtype]["advantages"], dtype), case["id"]
    assert compared == 11


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_trl_dpo(dtype: str) -> None:
    compared = 0
    for case in cases("trl_losses", "trl_dpo"):
        options, given, recorded = case["options"], case["inputs"], case["outputs"][dtype]
        if trl_unused(case):
            continue
        compared += 1
        weights = dict(zip(options["loss_types"], options["loss_weights"], strict=True))
        logits = tensor(given["logits"], dtype).requires_grad_()
        ids = torch.tensor(given["input_ids"])[:, 1:]
        logp = logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        mask = torch.tensor(given["completion_mask"])[:, 1:].bool()
        num_pairs = len(ids) // 2  # chosen answers first, then the rejected ones
        order = torch.arange(len(ids)).view(2, -1).t().flatten()
        lengths = mask.sum(-1)[order].tolist()
        reference = torch.cat([tensor(given[f"ref_{name}_logps"], dtype) for name in ("chosen", "rejected")])[order]
        # Only sums of the reference are recorded: all of it at the first token of each answer.
        reference_T = torch.cat(
            [torch.cat([total[None], total.new_zeros(n - 1)]) for total, n in zip(reference, lengths, strict=True)]
        )
        cfg = DPOLossConfig(
            reference_policy_kl_penalty=options["beta"],
            preference_loss_weight=weights["sigmoid"],
            sft_loss_weight=0.0,
        )
        ours = dpo_loss(logp[order][mask[order]], reference_T, lengths, cfg)
        loss = ours.loss / num_pairs
        if "sft" in weights:  # its second term is the mean over the tokens of all chosen answers
            loss = loss - weights["sft"] * logp[:num_pairs][mask[:num_pairs]].mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not differs(loss, recorded["loss"], dtype), case["id"]
        assert not differs(gradient, recorded["grad_logits"], dtype), case["id"]
    assert compared == 6


def test_what_is_unused_of_trl_occurs_there() -> None:
    kinds = ("trl_grpo_loss", "trl_grpo_advantages", "trl_rloo_advantages", "trl_dpo")
    assert set().union(*(trl_unused(case) for kind in kinds for case in cases("trl_losses", kind))) == set(TRL_UNUSED)


def test_what_no_recipe_uses_is_refused_by_name() -> None:
    """Each line of UNUSED has a recorded case, and each case left out has a line in one of the tables."""
    refused = set()
    for file, kind, schema in (
        ("rl_clipped_pg", "clipped_pg", ClippedPGLossConfig),
        ("rl_preference_distillation", "dpo", DPOLossConfig),
        ("rl_reward_shaping", "effort_shaping", EffortConfig),
    ):
        for case in cases(file, kind):
            options = {name: value for name, value in case["options"].items() if value or "average" not in name}
            try:
                schema(**options)
            except ValidationError as error:
                refused |= {str(problem["loc"][0]) for problem in error.errors()}
    assert refused == set(UNUSED)


def test_every_recorded_kind_is_compared_or_listed() -> None:
    compared = {
        "grpo_advantage", "advantage_clip", "clipped_pg", "calculate_kl", "seq_logprob_error_mask", "clipped_pg_config",
        "dpo", "nll", "effort_shaping", "detect_message_flags", "message_advantage_penalty", "trl_grpo_loss",
        "trl_grpo_advantages", "trl_rloo_advantages", "trl_dpo",
    }  # fmt: skip
    compared |= {"genrm_aggregate", "genrm_pairs", "genrm_parse", "genrm_style"}  # in test_genrm.py
    assert set().union(*map(kinds_of, FOLDER.glob("*.xz"))) == compared | set(UNUSED_KINDS)
