"""Stage 2 of Nano 2: its prompts, what it prefers, and that its loops learn what they are rewarded for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Checkpoint, Dataset, Model, pipes
from nemotron.kit.chat import render
from nemotron.recipes.nano2.stage0_pretrain.training import ARCHITECTURE
from nemotron.recipes.nano2.stage2_rl import (
    data_curation,
    evaluation,
    sampling,
    training,
    training_dpo,
    training_ifeval,
    training_reward,
    training_rlhf,
)
from nemotron.recipes.nano2.stage2_rl.judging import better_first
from nemotron.recipes.nano2.stage2_rl.sampling import Policy, batches, load_policy, read_prompts, sample
from nemotron.stack.environments import FAMILIES, generate_tasks, prompt_tools, split_of, to_messages
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.calls import Drawn, draw_call
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.rl.shaping import Message

SMALL = replace(
    ARCHITECTURE, hybrid_override_pattern="M-*-", hidden_size=32, intermediate_size=64, mamba_head_dim=8,
    ssm_state_size=8, head_dim=8,
)  # fmt: skip


@pytest.fixture
def sft(tmp_path: Path) -> Checkpoint:
    """A model of random weights, as stage 1 publishes one."""
    tasks = [task for family in FAMILIES for task in generate_tasks(family, "train", 40)]
    texts = (render(to_messages(task), tools=prompt_tools(task), template="nano2") for task in tasks)
    tokenizer, folder = train_tokenizer(texts, 512, template="nano2"), tmp_path / "sft"
    torch.manual_seed(0)
    NemotronH(replace(SMALL, vocab_size=tokenizer.get_vocab_size())).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model_max_length=1024, template="nano2")
    return Model(path=folder, num_steps=0, tokenizer_path=folder, chat_template="nano2", reasoning=True).save(
        "nano2-sft-model"
    )


def curate(**counts: int) -> Dataset:
    names = ("num_instructions", "num_tools", "num_preferences", "num_contexts", "num_held_out")
    return data_curation.main(data_curation.Config(scale="full", **{**dict.fromkeys(names, 100), **counts}))


def test_no_prompt_is_one_of_sft_or_of_evaluation(sft: Checkpoint) -> None:
    dataset = curate()
    assert dataset.ref == "nano2-rl-data:1" and dataset.inputs == {"model": sft.version.pinned}
    for name, families in {
        "instructions": data_curation.INSTRUCTIONS,
        "tools": data_curation.TOOLS,
        "preferences": data_curation.CONTEXTS,
        "contexts": data_curation.CONTEXTS,
        "held_out": data_curation.CONTEXTS,
    }.items():
        prompts = read_prompts(dataset, name)
        assert len(prompts) == len({task.canonical for task, _ in prompts}) == 100
        # SFT draws of `train`, evaluation of `eval`.
        assert {split_of(task.canonical) for task, _ in prompts} == {"eval" if name == "held_out" else "valid"}
        assert {task.family for task, _ in prompts} == set(families)
        assert sum(thinking for _, thinking in prompts) == (100 if name == "tools" else 50)
    asked = [{task.canonical for task, _ in read_prompts(dataset, name)} for name in ("preferences", "contexts")]
    assert len(asked[0] & asked[1]) < 10  # drawn apart
    steps = batches(read_prompts(dataset, "contexts"), 8)
    assert [step[0][1] for step in steps] == [True, False] * 6 and all(len({t for _, t in step}) == 1 for step in steps)
    assert [len(step) for step in batches(read_prompts(dataset, "contexts"), 32)] == [32, 32]
    kept = batches(read_prompts(dataset, "contexts"), 32, keep_rest=True)
    assert [(len(step), step[0][1]) for step in kept] == [(32, True), (32, False), (18, True), (18, False)]
    contexts = read_prompts(dataset, "contexts")
    assert read_prompts(dataset, "contexts", "full") == contexts
    assert read_prompts(dataset, "contexts", "small") == contexts[:10]
    with pytest.raises(UserError, match="not one batch of 51"):
        batches(read_prompts(dataset, "contexts"), 51)
    assert curate().digest == dataset.digest
    with pytest.raises(UserError, match="has no nothing"):
        read_prompts(dataset, "nothing")


def answer_of(policy: Policy, text: str, reward: float | None, thinking: bool = True) -> Rollout:
    task = generate_tasks("math", "train", 1)[0]
    ids = policy.tokenizer.encode(f"{text}\n<SPECIAL_12>", add_special_tokens=False).ids
    prompt = policy.encode(task, thinking)
    return Rollout(0, prompt, ids, [0.0] * len(ids), 0.0, False, reward, [Message(len(ids), True)])


def test_right_is_better_than_wrong_and_then_brief_than_long(sft: Checkpoint) -> None:
    policy = load_policy(sft)
    texts = {
        "long": "1 2 3 4\n</think>\n\n12",
        "short": "1\n</think>\n\n12",
        "wrong": "1\n</think>\n\n1",
        "none": "1 2 3",
    }
    long, short, wrong = (answer_of(policy, texts[name], float(name != "wrong")) for name in ("long", "short", "wrong"))
    unfinished = replace(answer_of(policy, texts["none"], 0.0), truncated=True)
    failed = answer_of(policy, texts["short"], None)
    assert better_first([long, short, wrong], policy) == [(1, 0), (0, 2), (1, 2)]
    assert better_first([wrong, unfinished, long], policy) == [(2, 0), (2, 1)]  # of two wrong ones nothing is said
    assert better_first([failed, wrong], policy) == []
    quick, slow = (answer_of(policy, text, 1.0, thinking=False) for text in ("12", "12 12"))
    assert better_first([slow, quick], policy) == [(1, 0)]


def test_what_makes_an_answer_better_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(reward: float, truncated: bool) -> Rollout:
        return Rollout(0, [3], [4], [0.0], 0.0, truncated, reward, [Message(1, True)])

    answers = [answer(1.0, False), answer(1.0, False), answer(0.0, False), answer(1.0, True), answer(0.0, True)]
    pairs = [(0, 1), (0, 2), (1, 2), (0, 3), (0, 4), (1, 4)]
    monkeypatch.setattr(training_reward, "rewards_of", lambda judge, groups: torch.tensor([2.0, 4.0, 3.0, 1.0, 5.0]))
    assert training_reward.measure(cast(Policy, None), [(answers, pairs)]) == {
        "short over long": [0.0, 1], "right over wrong": [0.5, 2], "ended over cut off": [1 / 3, 3],
    }  # fmt: skip


def test_a_reward_model_that_learned_from_nothing_says_so(
    sft: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_reward, "preferences", lambda *_: [])
    training_reward.main(training_reward.Config(checkpoint_path=sft.path, dataset_path=curate().path, threads=1))
    assert "0 of 100 prompts have two answers" in capsys.readouterr().err


def test_a_pair_begins_where_two_attempts_part(sft: Checkpoint) -> None:
    policy = load_policy(sft)
    task = next(t for t in generate_tasks("workplace_assistant", "train", 40) if len(to_messages(t)) == 6)
    first, last = [7, 8], [9]

    def attempt(second: list[int], reward: float) -> Rollout:
        told, end = [20, 21, 22], [23, 24]
        ids = [*first, *told, *second, *end, *last]
        parts = [
            Message(len(first), True), Message(len(told), False, takes_back=len(first) + 1),
            Message(len(second), True), Message(len(end), False, takes_back=len(second)), Message(1, True),
        ]  # fmt: skip
        return Rollout(0, [3, 4, 5], ids, [0.0] * (3 + len(second)), 0.0, False, reward, parts)

    assert len(policy.encode(task, True)) > 100  # a prompt with tools
    attempts = [attempt([30, 31], 1.0), attempt([40], 0.0), attempt([41], 0.0), attempt([30, 31], 1.0)]
    (pair, other) = training_dpo.make_pairs(attempts, most=5)  # of four, two are those of the same words
    context = [3, 4, 20, 21, 22]  # the first response is told anew, in the place of itself and of one token before it
    assert pair.chosen.ids == other.chosen.ids == [*context, 30, 31]
    assert (pair.rejected.ids, other.rejected.ids) == ([*context, 40], [*context, 41])
    assert pair.chosen.predicts == [False] * 4 + [True] * 2 + [False]
    assert len(training_dpo.make_pairs(attempts, most=1)) == 1
    assert training_dpo.make_pairs([attempts[0], attempt([30, 31], 0.0)], most=2) == []  # nothing tells them apart


def test_answers_are_the_same_on_one_thread_and_on_two(sft: Checkpoint) -> None:
    tasks = [task for family in ("math", "workplace_assistant") for task in generate_tasks(family, "train", 5)]
    prompts = [(task, True) for task in tasks]
    one, two = (sample(load_policy(sft, threads), prompts, samples=3, max_turns=3, seed=[7]) for threads in (1, 2))
    assert one == two and len(one) == 30 and [answer.prompt_index for answer in one[::3]] == list(range(10))
    assert len({tuple(answer.completion_ids) for answer in one}) > 20
    first, again, other = (evaluation.answers_of(load_policy(sft), prompts, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("script", [training_dpo, training_reward])
def test_model_and_prompts_are_those_of_the_pipe(sft: Checkpoint, monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    """Behind the curation of prompts the model is SFT's, which knows no prompts; behind all of RL there are several."""

    def read(dataset: Dataset, name: str, scale: str | None) -> None:
        raise UserError(f"reads {dataset.ref}")

    monkeypatch.setattr(script, "read_prompts", read)
    prompts, second = curate(), sft.model_copy().save("another-model")
    pipes._read = {"data": prompts.uri, "model": sft.uri, "another-model": second.uri}
    with pytest.raises(UserError, match="reads nano2-rl-data:1"):
        script.main(script.Config(threads=1))
    with pytest.raises(UserError, match="no 'data'"):  # nor has the named one prompts of its own
        pipes._read = {"model": sft.uri}
        script.main(script.Config(checkpoint_path=sft.path, threads=1))


@pytest.mark.slow
def test_grpo_learns_what_it_is_rewarded_for(sft: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward for tokens of one half of the vocabulary: from a half of them to most."""

    def rewarded(policy: Policy, *args: Any, **named: Any) -> list[Rollout]:
        rollouts = sample(policy, *args, **named)
        return [replace(r, reward=sum(t < 256 for t in r.completion_ids) / len(r.completion_ids)) for r in rollouts]

    monkeypatch.setattr(training_ifeval, "sample", rewarded)
    dataset = curate(num_instructions=128)
    checkpoint = training_ifeval.main(
        training_ifeval.Config(dataset_path=dataset.path, samples=8, lr=3e-2, kl_penalty=1e-3, threads=1)
    )
    rewards = checkpoint.metrics["reward"]
    assert len(rewards) == checkpoint.num_steps == 8
    assert 0.35 < rewards[0] < 0.65 and rewards[-1] > 0.75
    assert checkpoint.inputs == {"data": dataset.version.pinned, "model": sft.version.pinned}


@pytest.mark.slow
def test_the_four_trainings_follow_each_other_and_the_last_two_are_merged(
    sft: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(*args: Any) -> Drawn:  # a model of random weights is never right
        drawn = draw_call(*args)
        return replace(drawn, rollouts=[replace(r, reward=float(sum(r.completion_ids) % 2)) for r in drawn.rollouts])

    monkeypatch.setattr(sampling, "draw_call", judged)
    dataset = curate()
    config = training.Config(
        dataset_path=dataset.path,
        ifeval=training_ifeval.Config(prompts_per_step=50, samples=2, lr=1e-2, threads=1),
        dpo=training_dpo.Config(rounds=1, samples=2, threads=1),
        reward=training_reward.Config(samples=2, threads=1),
        rlhf=training_rlhf.Config(prompts_per_step=50, samples=2, lr=1e-2, threads=1),
        merge_share=0.25,
    )
    merged = training.main(config)
    assert merged.ref == "nano2-rl-model:1"
    first, second = Checkpoint.from_uri("art://nano2-rl-dpo-model"), Checkpoint.from_uri("art://nano2-rl-rlhf-model")
    weights = [load_file(each.path / "model.safetensors") for each in (merged, first, second)]
    assert any((b != c).any() for b, c in zip(weights[1].values(), weights[2].values(), strict=True))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, 0.75 * weights[1][name] + 0.25 * weights[2][name])
    # What comes through a pipe: the inputs of what was made, and that itself.
    through_pipe = {role: f"art://{pinned.partition('@')[0]}" for role, pinned in merged.inputs.items()}
    monkeypatch.setattr(pipes, "_read", {**through_pipe, "model": merged.uri})
    results = evaluation.main(evaluation.Config(num_tasks=200, samples=1, threads=1))
    assert set(results.metrics["tasks"]) == {"before", "after"}
    assert 0 <= results.metrics["preferences"]["reward_model_win_rate"] <= 1
    assert Checkpoint.input_of(results).ref == merged.ref  # what stage 3 goes on from
    json.dumps(results.metrics)
