"""What a training would take, for `nemotron plan`, which starts this script: memory of a GPU, time, GPU-hours, money.

The numbers follow from the config in closed form (`stack/planning/`); docs/guides/plan.md has the formulas, what they
were fitted to, and their errors. For this machine's CPU the rate of matrix products is measured at that moment. This is
a tool and no step of a recipe: it publishes nothing and carries no runspec block.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import dataclasses
import json
import math
import re
import sys
from dataclasses import replace
from typing import Any

from nemo_runspec.config.loader import chosen_config, list_configs, load_config
from nemo_runspec.config.resolve import resolve_config
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.runspec import Runspec, find_script, parse
from nemotron.kit.commands import command_for
from nemotron.kit.steps import RECIPES, RecipeStep, read_recipe
from nemotron.kit.tables import aligned
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.models.published.memory import weight_bytes
from nemotron.stack.models.published.parameters import count_parameters
from nemotron.stack.planning.layout import Layout, check
from nemotron.stack.planning.memory import checkpoint_bytes, sequence_bytes, training_memory
from nemotron.stack.planning.reading import Training, group_at, is_published_size, read_training
from nemotron.stack.planning.rl_step import rl_parts, rl_seconds
from nemotron.stack.planning.search import smallest, usable_bytes
from nemotron.stack.planning.speed import (
    Gpu,
    find_gpu,
    fitted_parts,
    gradient_seconds,
    iteration_seconds,
)
from nemotron.stack.training.flops import forward_flops_per_token, training_flops_per_token

Row = tuple[str, str, str]
DAY = 86_400
JOB_HOURS = 4  # `time` of [dgx] in env.example.toml
# Progress lines of `pretrain -c tiny` and `sft -c tiny` on two cores say 0.4 to 0.6 of the measured peak.
CPU_SHARE = 0.5
MOST_STAGES = 20  # of a chain of models, each the base of the next
UNPLANNED = {"data", "eval", "merge", "prune", "quantize"}  # words of commands that train nothing


@dataclasses.dataclass(frozen=True)
class Options:
    """Of `nemotron plan`."""

    family: str
    stage: str
    config: str | None
    overrides: list[str]
    gpu: str | None
    nodes: int | None
    price: float | None
    mean_tokens: int | None
    as_json: bool


# ---- which config


def find_step(family: str, stage: str) -> RecipeStep:
    """The step of a family that is called so, or whose command's last words are.

    Raises:
        UserError: no such family, or no such step; the hint is the nearest one.
    """
    families = sorted(file.parent.name for file in RECIPES.glob("*/steps.toml"))
    if family not in families:
        raise UserError(f"no family {family!r}", did_you_mean(family, families, "families"))
    steps = read_recipe(RECIPES / family).steps
    steps = tuple(step for step in steps if not UNPLANNED & set(re.split("[ -]", step.command)))
    named = {name: step for step in reversed(steps) for name in (step.command.split()[-1], step.name)}
    named |= {step.name: step for step in steps}
    if stage not in named:
        raise UserError(f"{family} has no stage {stage!r}", did_you_mean(stage, named, "stages"))
    return named[stage]


def resolved_config(step: RecipeStep, name: str | None, overrides: list[str]) -> tuple[dict[str, Any], Runspec, str]:
    """The config as its script would read it, all keys checked, but no artifact looked up; its script, its name."""
    spec = parse(step.script, step.configs)
    if name is None and (own := step.config_suffix.removeprefix("-")):  # of steps that share a script: phase2, final
        configs = list_configs(spec.config_dir)
        if own not in configs:  # `default` is that of the first of them
            choices = ", ".join(config for config in configs if config.endswith(step.config_suffix))
            raise UserError(
                f"no config was chosen, and {step.name} has none of the published size",
                f"choose one with -c NAME: {choices}",
            )
        name = own
    loaded = load_config(
        spec.config_dir, chosen_config(spec, name), tuple(overrides), spec.config.format, spec.script_path.name
    )
    spec = parse(find_script(step.configs or step.script.parent, loaded.run.script))
    return resolve_config(loaded, spec, look_up=False, publish=False).data, spec, loaded.name


def config_that_makes(artifact: str | None) -> dict[str, Any]:
    """The config of this package that makes an artifact; empty where none does."""
    command = command_for(artifact.removeprefix("art://").split(":")[0]) if artifact else None
    if command is None:
        return {}
    words = command.split()  # nemotron FAMILY … -c CONFIG
    steps = read_recipe(RECIPES / words[1]).steps
    step = next(step for step in steps if step.command == " ".join(words[: words.index("-c")]))
    return resolved_config(step, words[-1], [])[0]


def with_what_artifacts_say(data: dict[str, Any]) -> dict[str, Any]:
    """`data`, and what the embedded stack reads from artifacts: dimensions of the base model, length of packed rows."""
    merged, base = dict(data), data
    for _ in range(MOST_STAGES):  # the base model may itself have one
        if "hybrid_override_pattern" in (model := group_at(base, "model")):
            merged["model"] = model | group_at(data, "model")
            break
        base = config_that_makes(group_at(base, "run").get("model"))
    packed = config_that_makes(group_at(data, "run").get("data"))
    if length := group_at(packed, "packing").get("seq_length"):
        merged["dataset"] = {"seq_length": length} | group_at(data, "dataset")
    return merged


def iterations_before(data: dict[str, Any]) -> int:
    """Iterations of the schedule that another config has done when this one begins (`checkpoint.load`)."""
    if not group_at(data, "checkpoint").get("load"):
        return 0
    before = config_that_makes(group_at(data, "run").get("model"))
    return int(group_at(before, "train").get("train_iters", 0))


# ---- what it takes


def plan(options: Options) -> dict[str, Any]:
    """All numbers of a plan; what `--json` prints."""
    step = find_step(options.family, options.stage)
    data, spec, name = resolved_config(step, options.config, options.overrides)
    if group_at(data, "peft").get("peft_scheme"):
        raise UserError("no plan for adapters: a plan counts all weights as trained")
    training = read_training(data if is_published_size(data) else with_what_artifacts_say(data), options.family)
    head: dict[str, Any] = {"family": options.family, "stage": options.stage, "config": name}
    if training.iterations is not None:
        before = iterations_before(data)
        if training.iterations <= before:
            raise UserError(
                f"train.train_iters {training.iterations:,} ends before this phase begins, at iteration {before:,}",
                "it counts from the beginning of the schedule",
            )
        training = replace(training, iterations=training.iterations - before)
    gpu_name = options.gpu or ("cpu" if training.embedded else "gb200" if training.gpus_per_node == 4 else "h100")
    if training.embedded or gpu_name == "cpu":
        of_gpus = {"--nodes": options.nodes, "--mean-tokens": options.mean_tokens, "--price": options.price}
        if given := [option for option, value in of_gpus.items() if value is not None]:
            raise UserError(f"{given[0]} is for plans of GPUs, and this one is of this machine's CPU")
        return head | cpu_plan(training, gpu_name)
    return head | gpu_plan(training, gpu_name, spec, options)


def gpu_plan(training: Training, name: str, spec: Runspec, options: Options) -> dict[str, Any]:
    """On GPUs: memory by part, time by part, totals, the smallest layout that fits."""
    gpu = find_gpu(name, training.layout.precision, *(precision for _, precision in training.layout.matchers))
    stated = (training.nodes or spec.resources.nodes) * (training.gpus_per_node or spec.resources.gpus_per_node)
    total = options.nodes * gpu.node if options.nodes else stated
    generating = (training.generation_nodes or 0) * (training.gpus_per_node or gpu.node)
    if generating >= total:
        raise UserError(f"{generating} GPUs generate, and there are {total} in all")
    layout = replace(training.layout, gpus=total - generating)
    training = replace(training, layout=layout)
    if options.mean_tokens and not training.is_rl:
        raise UserError("--mean-tokens is of generation, and this config generates nothing")
    mean = options.mean_tokens or layout.seq_len // 2
    if mean > layout.seq_len:
        raise UserError(f"--mean-tokens {mean:,} exceeds the {layout.seq_len:,} tokens of the longest sequence")
    if training.is_rl:  # sequences are packed into rows of the longest length, and filled up to a number that divides
        each = layout.micro_batch * max(1, layout.data)
        layout = replace(layout, global_batch=each * math.ceil(layout.global_batch * mean / layout.seq_len / each))
    suggestion = smallest(layout, gpu)
    try:
        check(layout)
    except UserError as error:
        hint = f"the smallest that fits: {in_words(suggestion)}" if suggestion else error.hint
        raise UserError(error.message, hint) from None
    memory = training_memory(layout)
    numbers: dict[str, Any] = {
        "gpu": name, "gpus": total, "generation_gpus": generating,
        "judge_gpus": training.judge_nodes * (training.gpus_per_node or gpu.node), "layout": in_words(layout),
        "precision": layout.precision,
        "tokens_an_iteration": layout.tokens, "iterations": training.iterations, "micro_batches": layout.micro_batches,
        "memory_bytes": dataclasses.asdict(memory), "memory_total_bytes": memory.total,
        "memory_usable_bytes": round(usable_bytes(gpu)), "smallest": in_words(suggestion) if suggestion else None,
    }  # fmt: skip
    saves = None if training.iterations is None else math.ceil(training.iterations / training.save_interval)
    held = [number for number in (training.checkpoints, saves) if number is not None]
    numbers |= {
        "checkpoint_bytes": checkpoint_bytes(layout.model), "checkpoints_saved": saves,
        "save_interval": training.save_interval, "checkpoints_kept": min(held) if held else None,
    }  # fmt: skip
    if training.is_rl:
        numbers |= rl_times(training, gpu, mean, generating or total)
    else:
        numbers |= times(layout, gpu)
    return numbers | totals(numbers, options.price)


def times(layout: Layout, gpu: Gpu) -> dict[str, Any]:
    """Seconds of an iteration, by part."""
    each = layout.tokens / layout.gpus
    parts = {part: seconds * each for part, seconds in fitted_parts(layout, gpu).items()}
    flops = flops_per_token(layout) * each
    return {
        "seconds": parts | {"bubble": sum(parts.values()) * layout.bubble},
        "gradient_seconds": gradient_seconds(layout, gpu),
        "iteration_seconds": iteration_seconds(layout, gpu),
        "model_tflops_a_gpu": flops / iteration_seconds(layout, gpu) / 1e12,
    }


def flops_per_token(layout: Layout) -> float:
    """Of a training, and of the forward pass of its teacher."""
    teacher = forward_flops_per_token(layout.teacher, layout.seq_len) if layout.teacher else 0.0
    return training_flops_per_token(layout.model, layout.seq_len) + teacher


def rl_times(training: Training, gpu: Gpu, mean: int, generation_gpus: int) -> dict[str, Any]:
    """Seconds of a step of RL, by part, and what an inference engine holds."""
    step = training.rl_step(mean, generation_gpus)
    parts = rl_parts(step, gpu)
    model, engine = step.training.model, step.engine
    cache, states = sequence_bytes(model, mean)
    weights = weight_bytes(count_parameters(model).total, "bf16")
    room = engine * training.memory_share * 1e9 * gpu.memory_gb - weights
    return {
        "seconds": parts, "iteration_seconds": rl_seconds(parts, step.lag), "mean_tokens": mean, "lag": step.lag,
        "tokens_an_iteration": step.sequences * mean,
        "engine": {
            "gpus": engine, "sequences": step.in_engine, "room_for_sequences": max(0, int(room / (cache + states))),
            "weights_bytes": weights / engine, "kv_cache_bytes": step.in_engine * cache / engine,
            "ssm_state_bytes": step.in_engine * states / engine,
        },
    }  # fmt: skip


def cpu_plan(training: Training, name: str) -> dict[str, Any]:
    """On this machine: memory by part, and time by the rate of matrix products that is measured now."""
    if not training.embedded:
        raise UserError("the published size is for GPUs", "a plan for this machine: -c tiny")
    if name != "cpu":
        raise UserError("this config runs on the embedded stack, whose plan is for the CPU of this machine: --gpu cpu")
    if training.is_rl:
        raise UserError("no plan for RL on a CPU: sampling there is not bound by matrix products")
    import torch

    from nemotron.stack.training.matmul_peak import measure_peak_flops
    from nemotron.stack.training.memory import Needs, activation_bytes, available_bytes, state_bytes

    layout = training.layout
    needs = Needs(layout.model, layout.micro_batch * layout.seq_len, copies=int(layout.teacher is not None))
    peak = measure_peak_flops("cpu", torch.float32, seconds=1.0)
    seconds = layout.tokens * flops_per_token(layout) / (CPU_SHARE * peak)
    numbers = {
        "gpu": "cpu", "gpus": 0, "layout": f"{torch.get_num_threads()} threads", "precision": "fp32",
        "tokens_an_iteration": layout.tokens, "iterations": training.iterations,
        "peak_flops_measured": peak, "share_of_peak_assumed": CPU_SHARE,
        "memory_bytes": {"state": state_bytes(needs, 1, False), "activations": activation_bytes(needs, False)},
        "memory_total_bytes": state_bytes(needs, 1, False) + activation_bytes(needs, False),
        "memory_usable_bytes": available_bytes(), "iteration_seconds": seconds,
    }  # fmt: skip
    return numbers | totals(numbers, None)


def totals(numbers: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Tokens a day; hours, GPU-hours and money of the whole run, where the config says how long it is."""
    seconds, steps, gpus = numbers["iteration_seconds"], numbers["iterations"], numbers["gpus"]
    found: dict[str, Any] = {"tokens_a_day": numbers["tokens_an_iteration"] * DAY / seconds}
    found["iterations_a_day"] = DAY / seconds
    if gpus:
        found["tokens_a_second_and_gpu"] = numbers["tokens_an_iteration"] / seconds / gpus
    if steps is not None:
        found["hours"] = steps * seconds / 3600
        found["gpu_hours"] = found["hours"] * (gpus + numbers.get("judge_gpus", 0))
        if price is not None and gpus:
            found["cost"] = found["gpu_hours"] * price
    return found


def in_words(layout: Layout) -> str:
    """A layout in a line."""
    sizes = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.context, "EP": layout.expert}
    if (size := layout.parallel.expert_tensor_parallel_size) > 1:
        sizes["ETP"] = size
    shown = " ".join(f"{name}{size}" for name, size in sizes.items())
    return f"{layout.gpus} GPUs: {shown} DP{layout.data}" + (" SP" if layout.parallel.sequence_parallel else "")


# ---- what is shown


def page(numbers: dict[str, Any], price: float | None) -> str:
    """The plan as text."""
    steps = numbers["iterations"]
    amount = "iterations" if steps is None else f"{steps:,} iterations"
    title = f"{numbers['family']} {numbers['stage']} -c {numbers['config']}"
    head = [f"{title}: {amount} of {numbers['tokens_an_iteration']:,} tokens",
            f"{numbers['gpu']}, {numbers['layout']}, {numbers['precision']}"]  # fmt: skip
    if numbers.get("generation_gpus"):
        head.append(f"and {numbers['generation_gpus']:,} GPUs that generate")
    if numbers.get("judge_gpus"):
        head.append(f"and {numbers['judge_gpus']:,} GPUs of judges")
    tables = [memory_rows(numbers), time_rows(numbers), total_rows(numbers, price)]
    if numbers["gpus"]:
        tables.append([checkpoint_row(numbers)])
        what = "smallest that fits, of training" if "engine" in numbers else "smallest that fits"
        tables.append([(what, numbers["smallest"] or "none up to 256 nodes", "")])
    return "\n\n".join("\n".join(lines) for lines in [head, *(aligned(rows, "<><") for rows in tables)])


def memory_rows(numbers: dict[str, Any]) -> list[Row]:
    """GB by part, and whether they fit; of an inference engine too, where there is one."""
    rows: list[Row] = [("memory of the fullest GPU" if numbers["gpus"] else "memory", "GB", "")]
    rows += [(f"  {part}", f"{size / 1e9:,.2f}", "") for part, size in numbers["memory_bytes"].items() if size]
    needed, usable = numbers["memory_total_bytes"], numbers["memory_usable_bytes"]
    verdict = "" if usable is None else f"of {usable / 1e9:,.0f}: {'fits' if needed <= usable else 'does not fit'}"
    rows.append(("  all", f"{needed / 1e9:,.2f}", verdict))
    if engine := numbers.get("engine"):
        held = f"{engine['sequences']:,.0f} sequences of {numbers['mean_tokens']:,} tokens"
        rows += [
            (f"inference on {engine['gpus']} GPUs", "GB a GPU", ""),
            ("  weights", f"{engine['weights_bytes'] / 1e9:,.2f}", ""),
            ("  KV cache", f"{engine['kv_cache_bytes'] / 1e9:,.2f}", held),
            ("  SSM states", f"{engine['ssm_state_bytes'] / 1e9:,.2f}", f"room for {engine['room_for_sequences']:,}"),
        ]
    return rows


def time_rows(numbers: dict[str, Any]) -> list[Row]:
    """Seconds by part."""
    rows: list[Row] = [("time of an iteration", "s", "")]
    rows += [(f"  {part}", f"{seconds:,.3f}", "") for part, seconds in numbers.get("seconds", {}).items() if seconds]
    note = "the slower of training and generation, and all else" if numbers.get("lag") else ""
    if "gradient_seconds" in numbers:
        note = f"beside {numbers['gradient_seconds']:,.3f} s in which gradients and weights travel"
    return [*rows, ("  all", f"{numbers['iteration_seconds']:,.3f}", note)]


def total_rows(numbers: dict[str, Any], price: float | None) -> list[Row]:
    """Rates, and what the whole run takes."""
    rows: list[Row] = [("tokens a day", quantity(numbers["tokens_a_day"]), "")]
    if "tokens_a_second_and_gpu" in numbers:
        rate = f"{numbers['model_tflops_a_gpu']:,.0f} TFLOP/s" if "model_tflops_a_gpu" in numbers else ""
        rows.append(("tokens a second and GPU", f"{numbers['tokens_a_second_and_gpu']:,.0f}", rate))
    if peak := numbers.get("peak_flops_measured"):
        share = numbers["share_of_peak_assumed"]
        rows.append(("GFLOP/s", f"{share * peak / 1e9:,.0f}", f"{share:.0%} of {peak / 1e9:,.0f}, measured now"))
    if "hours" not in numbers:
        rows.append(("iterations a day", f"{numbers['iterations_a_day']:,.0f}", "the config leaves open how many"))
        return rows
    hours = numbers["hours"]
    notes = [f"{hours / 24:,.1f} days"] * (hours > 48)
    notes += [f"{math.ceil(hours / JOB_HOURS):,} jobs of {JOB_HOURS} h"] * (numbers["gpus"] > 0 and hours > JOB_HOURS)
    rows.append(("hours", f"{hours:,.2f}", ", ".join(notes)))
    if numbers["gpus"]:
        rows.append(("GPU-hours", f"{numbers['gpu_hours']:,.0f}", ""))
    if "cost" in numbers:
        rows.append(("cost", f"{numbers['cost']:,.0f}", f"at {price:g} for a GPU and hour"))
    return rows


def checkpoint_row(numbers: dict[str, Any]) -> Row:
    """The size of a checkpoint, and of all that lie there at a time."""
    size, kept, saved = numbers["checkpoint_bytes"] / 1e12, numbers["checkpoints_kept"], numbers["checkpoints_saved"]
    if kept is None:
        note = f"one in {numbers['save_interval']:,} iterations, and all are kept"
    else:
        which = f"up to {kept:,}" if saved is None else f"{kept:,} of {saved:,}"
        note = f"{which} are kept: {kept * size:,.2f} TB"
    return "checkpoint", f"{size:,.2f} TB", note


def quantity(number: float) -> str:
    """A number of tokens: 2.5e11 -> '250 B'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def main(options: Options) -> None:
    """Plan, print."""
    numbers = plan(options)
    print(json.dumps(numbers, indent=2) if options.as_json else page(numbers, options.price))


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
