"""Bands: which numbers are held against which bound, on metrics written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nemotron.recipes.nano3.stage3_eval.bands import check_bands, text_bits_per_byte
from nemotron.recipes.nano3.stage3_eval.schema import BandsConfig
from nemotron.recipes.nano3.stage3_eval.table import format_table


def difference(mean: float, low: float, worse: list[str]) -> dict[str, Any]:
    entry = {"difference": mean, "difference_95": [low, mean + (mean - low)], "p": 0.01, "p_holm": 0.02}
    return {"mean": entry, "families": {"math": {**entry, "difference": mean + 0.1}, "if": entry}, "worse": worse}


def model(greedy: tuple[float, float], sampled: float) -> dict[str, Any]:
    entry = {"greedy_95": [0.1, 0.9], "sampled_95": [0.1, 0.9], "sampled": sampled, "greedy_tokens": 21.25}
    families = {"math": {**entry, "greedy": greedy[0]}, "if": {**entry, "greedy": greedy[1]}}
    return {"mean": {**entry, "greedy": sum(greedy) / 2}, "families": families}


@pytest.fixture
def metrics() -> dict[str, Any]:
    baseline = {"constant_answer": "1", "task_space": 10, "nearest_neighbour": None, "seen_fraction": 0.001}
    return {
        "models": {"base": "b:1", "sft": "s:1", "rl": "r:1"},
        "tasks": {"base": model((0.0, 0.1), 0.0), "sft": model((0.8, 0.7), 0.6), "rl": model((0.8, 0.8), 0.7)},
        "baselines": {"math": {"constant": 0.05, **baseline}, "if": {"constant": 0.30, **baseline}},
        "reasoning": {"rl": {"8": {"mean": {"greedy": 0.432, "greedy_tokens": 9.5}}}},
        "comparisons": {
            "sft - base": {"greedy": difference(0.6, 0.5, [])},
            "rl - sft": {"greedy": difference(0.05, -0.01, []), "sampled": difference(0.1, 0.06, ["if"])},
        },
        "text": {"base": {"code": 2.0}, "sft": {"code": 2.1}, "rl": {"code": 2.2}},
        "pretrain_text": {
            "code": {"bits_per_byte": 2.0, "trigram_bits_per_byte": 2.4, "bytes": 300},
            "docs": {"bits_per_byte": 1.0, "trigram_bits_per_byte": 1.2, "bytes": 100},
        },
        "acceptance_length": {"greedy": {"before": 2.0, "after": 2.5}, "sampled": {"before": 1.75, "after": 2.0}},
        "quantization": {
            "quantized": {
                "kl": 0.04,
                "accuracy": 0.875,
                "teacher_accuracy": 0.9,
                "bytes": {"full": 6e6, "quantized": 2e6},
            },
            "qad": {"kl": 0.01, "accuracy": 0.89, "teacher_accuracy": 0.9, "bytes": None},
        },
        "bands": [],
        "not_run": [],
    }


def outcome(metrics: dict[str, Any], role: str, **bounds: float) -> dict[str, tuple[float | None, bool]]:
    bands = BandsConfig.model_validate({role: bounds}).model_dump()
    return {check.name: (check.value, check.passed) for check in check_bands(bands, metrics)}


def test_bits_per_byte_of_all_text_is_weighted_by_bytes(metrics: dict[str, Any]) -> None:
    assert text_bits_per_byte(metrics["pretrain_text"], "bits_per_byte") == (2.0 * 300 + 1.0 * 100) / 400
    assert outcome(metrics, "base", below_trigram_min=0.36) == {
        "base.below_trigram": (pytest.approx(2.1 - 1.75), False),
    }


def test_sft_is_held_against_the_weakest_family(metrics: dict[str, Any]) -> None:
    assert outcome(metrics, "sft", greedy_mean_min=0.75, family_above_constant_min=0.39, family_above_base_min=0.6) == {
        "sft.greedy_mean": (0.75, True),
        "sft.family_above_constant": (pytest.approx(0.4), True),
        "sft.family_above_base": (0.6, True),
    }
    assert outcome(metrics, "sft", family_above_constant_min=0.41)["sft.family_above_constant"][1] is False


def test_the_last_model_is_held_against_sft_as_the_first_pass_of_rl_is(metrics: dict[str, Any]) -> None:
    metrics["models"]["final"] = "f:1"
    metrics["comparisons"]["final - sft"] = {"sampled": difference(-0.2, -0.3, ["math", "if"])}
    assert outcome(metrics, "final", sampled_gain_min=0.05, families_worse_max=0, greedy_gain_min=0) == {
        "final.sampled_gain": (-0.2, False), "final.families_worse": (2.0, False), "final.greedy_gain": (None, False)
    }  # fmt: skip
    assert outcome(metrics, "rl", sampled_gain_min=0.05) == {"rl.sampled_gain": (0.1, True)}


def test_what_sft_forgets_is_that_of_the_worst_source(metrics: dict[str, Any]) -> None:
    metrics["text"] = {"base": {"code": 2.0, "docs": 2.5}, "sft": {"code": 2.1, "docs": 2.9}}
    assert outcome(metrics, "sft", bpb_over_base_max=0.3) == {"sft.bpb_over_base": (pytest.approx(0.4), False)}
    metrics["text"] = {"base": {}, "sft": {}}  # no held-out text, so nothing is known
    assert outcome(metrics, "sft", bpb_over_base_max=0.3) == {"sft.bpb_over_base": (None, False)}


def test_rl_is_held_against_sft(metrics: dict[str, Any]) -> None:
    checked = outcome(
        metrics, "rl", sampled_gain_min=0.1, sampled_gain_low_min=0.07, greedy_gain_min=0.0, families_worse_max=0
    )
    assert checked == {
        "rl.sampled_gain": (0.1, True),
        "rl.sampled_gain_low": (0.06, False),
        "rl.greedy_gain": (0.05, True),
        "rl.families_worse": (1.0, False),
    }


def test_a_quantised_model_is_held_against_the_one_it_was_made_of(metrics: dict[str, Any]) -> None:
    metrics["models"] |= {"healed": "h:1", "quantized": "q:1", "qad": "d:1"}
    metrics["comparisons"] |= {
        "quantized - healed": {"sampled": difference(-0.08, -0.1, ["if"])},  # up to -0.06
        "qad - healed": {"sampled": difference(-0.01, -0.03, [])},  # up to +0.01
        "qad - quantized": {"sampled": difference(0.07, 0.05, [])},
    }
    bounds = {"sampled_loss_max": 0.05, "gain_high_min": 0.0}
    assert outcome(metrics, "quantized", **bounds) == {
        "quantized.sampled_loss": (0.08, False),
        "quantized.gain_high": (pytest.approx(-0.06), False),
    }
    assert outcome(metrics, "qad", **bounds) == {
        "qad.sampled_loss": (0.01, True),
        "qad.gain_high": (pytest.approx(0.01), True),
    }


def test_drafts_are_held_against_the_worse_of_two_ways_to_decode(metrics: dict[str, Any]) -> None:
    metrics["models"]["healed"] = "h:1"
    assert outcome(metrics, "healed", acceptance_length_min=2.2, acceptance_gain_min=0.1) == {
        "healed.acceptance_length": (2.0, False), "healed.acceptance_gain": (0.25, True)
    }  # fmt: skip
    metrics["acceptance_length"] = {}
    assert outcome(metrics, "healed", acceptance_length_min=2.2) == {"healed.acceptance_length": (None, False)}


def test_a_missing_model_is_not_judged_but_a_missing_number_fails(metrics: dict[str, Any]) -> None:
    metrics["models"].pop("rl")
    assert outcome(metrics, "rl", sampled_gain_min=0.1) == {}
    metrics["pretrain_text"] = {}
    assert outcome(metrics, "base", below_trigram_min=0.1) == {"base.below_trigram": (None, False)}


def test_the_table_shows_every_number_it_is_given(metrics: dict[str, Any]) -> None:
    bands = BandsConfig.model_validate({"sft": {"greedy_mean_min": 0.9}}).model_dump()
    metrics["bands"] = [check.as_dict() for check in check_bands(bands, metrics)]
    table = format_table(metrics)
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert "greedy 2.000 2.500" in lines and "sampled 1.750 2.000" in lines
    assert "quantized 0.0400 87.5 90.0 2.00 6.00" in lines and "qad 0.0100 89.0 90.0 - -" in lines
    assert "on 80.0 21.2" in lines and "at most 8 tokens 43.2 9.5" in lines
    for text in (
        "80.0 [10.0, 90.0]",
        "30.0",
        "0.1 %",
        "+10.0",
        "[+6.0, +14.0]",
        "2.400",
        "2.200",
        "OUTSIDE",
        ">= 0.9",
        "seen, at most",
    ):
        assert text in table
    assert max(map(len, table.splitlines())) < 140
    assert "does not declare" not in table and "not run" not in table
    metrics["not_run"] = ["code_generation"]
    assert format_table(metrics).splitlines()[-1].split() == ["code_generation", "-", "-", "not", "run"]


def test_the_table_shows_hallucinated_tools_where_there_are_any(metrics: dict[str, Any]) -> None:
    for role, rate in zip(metrics["models"], (0.0, 0.25, 0.125), strict=True):
        scores = metrics["tasks"][role]
        for entry in (scores["mean"], *scores["families"].values()):
            entry |= {"hallucinated_tool": rate, "hallucinated_tool_95": [rate / 2, rate * 2]}
    table = format_table(metrics)
    assert "does not declare" in table and "25.0 [12.5, 50.0]" in table and "12.5 [6.2, 25.0]" in table


def test_the_table_shows_pass_and_majority_of_all_samples(metrics: dict[str, Any]) -> None:
    for role in ("sft", "rl"):
        scores = metrics["tasks"][role]
        scores["samples"] = 4
        for entry in (scores["mean"], *scores["families"].values()):
            entry |= {"pass_at_k": {"2": 0.1, "4": 0.75}, "pass_at_k_95": {"2": [0.0, 0.2], "4": [0.5, 0.875]}}
    metrics["tasks"]["rl"]["families"]["math"] |= {"majority_at_k": {"4": 0.625}, "majority_at_k_95": {"4": [0.5, 0.7]}}
    metrics["tasks"]["sft"]["families"]["math"] |= {"majority_at_k": {"4": 0.25}, "majority_at_k_95": {"4": [0.1, 0.4]}}
    lines = [" ".join(line.split()) for line in format_table(metrics).splitlines()]
    assert lines.count("family sft @4 rl @4") == 2
    assert [line.split()[0] for line in lines if "75.0 [50.0, 87.5] 75.0 [50.0, 87.5]" in line] == [
        "math",
        "if",
        "mean",
    ]
    assert "math 25.0 [10.0, 40.0] 62.5 [50.0, 70.0]" in lines


def test_the_table_shows_recall_in_long_text_beside_chance(metrics: dict[str, Any]) -> None:
    entry = {"recall": 0.75, "recall_95": [0.5, 0.875], "chance": 0.125, "tokens": 250.0}
    metrics["ruler"] = {"sft": {"256": {"qa": entry}}, "rl": {"256": {"qa": {**entry, "recall": 0.8125}}}}
    lines = [" ".join(line.split()) for line in format_table(metrics).splitlines()]
    assert "task tokens chance sft rl" in lines and "qa 256 12.5 75.0 [50.0, 87.5] 81.2 [50.0, 87.5]" in lines
