#!/usr/bin/env python
"""A step of GRPO beside TRL's GRPOTrainer: 64 completions of 32 tokens and one update, same weights, one process.

    pip install trl==1.16.0                                # into an environment of its own, beside this project
    python benchmarks/rl_step_speed.py
    python benchmarks/rl_step_speed.py --models 14M --rounds 15

Four prompts of 24 to 48 tokens, 16 completions each, no stop token, on the CPU; the reward is the share of even tokens.
Both sides generate, decode, score, and take one step of AdamW on the same loss. That it is the same is checked first:
from the completions of TRL's first step, in fp32, our gradient has to be TRL's up to 1e-5 of its norm.

Short trials then find TRL's fastest setting, by processor time: experts, attention, the cache of its generation, how
many completions a forward pass of its update holds, bf16, and transformers' continuous batching where that runs. With
the fastest, both sides take turns, and the median of the rounds' ratios is printed with the lowest and the highest: on
the clock, and in processor time, of which other work on the machine takes less away. vLLM is not among the settings.
Once in fp32 alone, and, where the processor multiplies bf16, once with products in bf16 (`mixed_precision: auto`) on
our side and among TRL's settings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from models import MODELS, build, huggingface_twin, machine
from process import Clock, restart_with_cpu_settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.dialogue import Dialogue
from nemotron.stack.rl.grpo import token_advantages, update
from nemotron.stack.rl.rollouts import Rollout, collect_rollouts
from nemotron.stack.rl.shaping import Message
from nemotron.stack.training.distributed import ALONE
from nemotron.stack.training.optim import build_optimizer
from nemotron.stack.training.precision import multiplies_bf16

PROMPT_TOKENS, SAMPLES, NEW_TOKENS = (24, 32, 40, 48), 16, 32
COMPLETIONS = len(PROMPT_TOKENS) * SAMPLES
TOLERANCE = 1e-5
TRIAL_STEPS = 3  # the first one is not counted


@dataclass(frozen=True)
class Setting:
    """How TRL runs: of its model, its generation and the completions a forward pass of its update."""

    experts: str = "grouped_mm"
    attention: str = "sdpa"
    cache: str | None = None
    rows: int = COMPLETIONS
    continuous_batching: bool = False
    bf16: bool = False

    def __str__(self) -> str:
        generation = "continuous batching" if self.continuous_batching else f"cache {self.cache or 'dynamic'}"
        precision = "bf16" if self.bf16 else "fp32"
        modules = f"experts {self.experts}, attention {self.attention}"
        return f"{precision}, {modules}, {generation}, {self.rows} completions a pass"


# One thing at a time: what is fastest of the first ones is the start of the next.
EXPERTS = {
    "1.9M": [Setting(experts=experts) for experts in ("eager", "grouped_mm", "batched_mm")],
    # batched_mm copies the weights of its experts for every token: here more than 20 GB.
    "14M": [Setting(experts=experts) for experts in ("eager", "grouped_mm")],
}
OTHERS: list[dict[str, Any]] = [
    {"attention": "eager"}, {"cache": "static"}, {"rows": 32}, {"rows": 16}, {"rows": 8}, {"continuous_batching": True},
]  # fmt: skip


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """One word a token: "t0", "t1" and so on."""
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Random tokens, the same on every call."""
    source = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=source).tolist() for length in PROMPT_TOKENS]


def reward(ids: list[int]) -> float:
    """Share of even tokens."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


class Ours:
    """This project's side."""

    def __init__(self, model: NemotronH, bf16: bool = False) -> None:
        # All completions of a prompt fit a row, which then has the prompt once.
        policy: dict[str, Any] = {
            "model_name": "model", "max_total_sequence_length": 576, "train_micro_batch_size": 4,
            "freeze_moe_router": False, "moe_router_bias_update_rate": 0.0,
            "generation": {"max_new_tokens": NEW_TOKENS},
        }  # fmt: skip
        self.cfg = RLConfig.model_validate(
            {
                "run": {"model": "model", "data": "data"},
                "data": {"path": "data"},
                "env": {"families": {"math": 1}},
                "policy": policy,
                "grpo": {
                    "num_prompts_per_step": len(PROMPT_TOKENS), "num_generations_per_prompt": SAMPLES,
                    "use_leave_one_out_baseline": False, "normalize_rewards": False, "overlong_filtering": False,
                    "seq_logprob_error_threshold": None,
                },
                "loss_fn": {"use_importance_sampling_correction": False, "truncated_importance_sampling_type": None,
                    "truncated_importance_sampling_ratio": None, "truncated_importance_sampling_ratio_min": None},
            }
        )  # fmt: skip
        self.model, self.tokenizer = model, make_tokenizer(model.config.vocab_size)
        self.prompts, self.generator = make_prompts(model.config.vocab_size), torch.Generator().manual_seed(0)
        optimizer = build_optimizer(model, AdamWConfig(lr=1e-6, adam_beta2=0.999, weight_decay=0.0))
        self.session: Any = SimpleNamespace(
            model=model, optimizer=optimizer, ranks=ALONE, autocast=torch.autocast("cpu", torch.bfloat16, enabled=bf16)
        )

    def step(self) -> None:
        """Completions, rewards, update."""
        with self.session.autocast:
            rollouts = collect_rollouts(
                self.model,
                self.prompts,
                lambda index: Dialogue(None, self.tokenizer, "nano3", thinking=False),
                lambda index, dialogues: [reward(self.tokenizer.encode(d.response).ids) for d in dialogues],
                samples_per_prompt=SAMPLES,
                max_new_tokens=NEW_TOKENS,
                stop_token_ids=(),
                prompts_per_call=len(self.prompts),
                generator=self.generator,
            )
        self.train(rollouts)

    def train(self, rollouts: list[Rollout]) -> None:
        """One update on completions that have their rewards."""
        advantages, _ = token_advantages(rollouts, self.cfg.grpo)
        update(self.cfg, self.session, None, rollouts, advantages)

    def gradients_from(self, completions: list[list[int]]) -> dict[str, torch.Tensor]:
        """Of one update on these completions, whose prompts are in order; the weights stay as they are."""
        gradients: dict[str, torch.Tensor] = {}

        def keep() -> None:
            gradients.update({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})

        optimizer = self.session.optimizer
        self.session.optimizer = SimpleNamespace(step=keep, zero_grad=self.model.zero_grad)
        rollouts = []
        for row, ids in enumerate(completions):
            index = row // SAMPLES
            message = [Message(len(ids), generated=True)]
            # No part of this loss: what the generator's log-probabilities were.
            rollouts.append(
                Rollout(index, self.prompts[index], ids, [0.0] * len(ids), 0.0, False, reward(ids), message)
            )
        self.train(rollouts)
        self.session.optimizer = optimizer
        return gradients


class Turns(transformers.TrainerCallback):
    """What happens between the steps of TRL: its clock stops, and `others` take their turn."""

    def __init__(self, others: Callable[[], None] = lambda: None) -> None:
        self.others = others
        self.spent: list[Any] = []
        self.gradients: dict[str, Any] = {}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock = Clock()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if not self.spent:
            self.gradients = {
                name: p.grad.clone() for name, p in kwargs["model"].named_parameters() if p.grad is not None
            }

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.spent.append(self.clock.read())
        self.others()


def run_theirs(name: str, setting: Setting, steps: int, turns: Turns) -> list[list[int]]:
    """Train `steps` steps with TRL from the weights of `build(name)`. Returns the completions of the first."""
    vocab_size = MODELS[name].vocab_size
    drawn: list[Any] = []

    def even_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        drawn.extend(completion_ids if not drawn else [])
        return [reward(ids) for ids in completion_ids]

    twin: Any = huggingface_twin(
        build(name), experts_implementation=setting.experts, attn_implementation=setting.attention
    )
    twin.generation_config.eos_token_id = None
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(vocab_size), pad_token="t0", eos_token="end"
    )
    prompts = [" ".join(f"t{token}" for token in prompt) for prompt in make_prompts(vocab_size)]
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=setting.rows,
            gradient_accumulation_steps=COMPLETIONS // setting.rows, num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS, shuffle_dataset=False, cache_implementation=setting.cache,
            generation_kwargs={"eos_token_id": None}, use_transformers_continuous_batching=setting.continuous_batching,
            loss_type="dapo", scale_rewards="none", beta=0.0, learning_rate=1e-6, lr_scheduler_type="constant",
            bf16=setting.bf16, gradient_checkpointing=False, use_cpu=True, save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            twin, even_tokens, config, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
            callbacks=[turns],
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):  # its records
            trainer.train()
    return drawn


def check_gradients(ours: Ours, theirs: dict[str, torch.Tensor], completions: list[list[int]]) -> float:
    """Norm of the difference of both gradients over that of ours; AssertionError above TOLERANCE."""
    gradients = ours.gradients_from(completions)
    assert {name.replace("model.", "backbone.", 1) for name in theirs} == set(gradients)
    names = {name: name.replace("model.", "backbone.", 1) for name in theirs}
    squares = [
        ((value - gradients[names[name]]).square().sum(), gradients[names[name]].square().sum())
        for name, value in theirs.items()
    ]
    difference, norm = (torch.stack(parts).sum().sqrt() for parts in zip(*squares, strict=True))
    error = (difference / norm).item()
    assert error < TOLERANCE, f"the gradients differ by {error:.1e} of their norm"
    return error


def try_setting(name: str, setting: Setting) -> float:
    """The least processor time of a step of TRL, after the first; prints it, or why it does not run."""
    turns = Turns()
    try:
        run_theirs(name, setting, TRIAL_STEPS, turns)
    except Exception as failure:
        print(f"  does not run: {setting} ({type(failure).__name__}: {str(failure).splitlines()[0]})")
        return float("inf")
    wall, processor = (min(values) for values in zip(*turns.spent[1:], strict=True))
    print(f"  {processor:6.2f} s of processor time, {wall:.2f} s on the clock: {setting}")
    return processor


def compare(name: str, rounds: int) -> None:
    """Print the tables of one model."""
    print(f"\n{name}: {COMPLETIONS} completions of {NEW_TOKENS} tokens; settings of TRL, the faster of two steps")
    turns = Turns()
    completions = run_theirs(name, Setting(), 1, turns)
    error = check_gradients(Ours(build(name)), turns.gradients, completions)
    print(f"the gradients of both differ by {error:.0e} of their norm")
    seconds = {setting: try_setting(name, setting) for setting in EXPERTS[name]}
    for change in OTHERS:
        setting = replace(min(seconds, key=seconds.__getitem__), **change)
        seconds[setting] = try_setting(name, setting)
    take_turns(name, min(seconds, key=seconds.__getitem__), False, rounds)
    if not multiplies_bf16(torch.device("cpu")):
        return
    best = min(seconds, key=seconds.__getitem__)
    for setting in dict.fromkeys(replace(setting, bf16=True) for setting in (best, *EXPERTS[name])):
        seconds[setting] = try_setting(name, setting)
    take_turns(name, min(seconds, key=seconds.__getitem__), True, rounds)


def take_turns(name: str, best: Setting, bf16: bool, rounds: int) -> None:
    """Print a table: ours beside TRL's at its `best`."""
    print(f"ours in {'bf16' if bf16 else 'fp32'}, TRL's fastest: {best}")
    ours, spent = Ours(build(name), bf16), []

    def our_turn() -> None:
        clock = Clock()
        ours.step()
        spent.append(clock.read())

    turns = Turns(our_turn)
    run_theirs(name, best, rounds + 1, turns)
    for unit, mine, theirs in zip(
        ("s on the clock", "s of processor time"),
        zip(*spent[1:], strict=True),
        zip(*turns.spent[1:], strict=True),
        strict=True,
    ):
        ratios = [their / our for our, their in zip(mine, theirs, strict=True)]
        print(
            f"{unit:20s}ours {statistics.median(mine):6.2f} ({min(mine):.2f}-{max(mine):.2f}), "
            f"TRL {statistics.median(theirs):6.2f} ({min(theirs):.2f}-{max(theirs):.2f}), "
            f"ratio {statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
        )


def main() -> None:
    """Measure the models that were asked for."""
    restart_with_cpu_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=EXPERTS, default=list(EXPERTS))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    print(f"{machine()}, TRL {trl.__version__}; load {os.getloadavg()[0]:.1f}")
    for name in args.models:
        compare(name, args.rounds)


if __name__ == "__main__":
    main()
