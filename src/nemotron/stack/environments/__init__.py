"""Verifiable tasks: generators with held-out splits, and the checks that score an answer.

Eight families (math, multiple choice, instruction following, structured output, code generation, workplace assistant,
tool comparison, repository repair) feed SFT, RL and evaluation alike; where a config names none, RLVR draws of the
first six and the other stages of the first four. No code is verified where no sandbox starts.
"""

from nemotron.stack.environments.baselines import (
    ConstantAnswer,
    best_constant_answer,
    fraction_of_space_seen,
    nearest_neighbour_lookup,
)
from nemotron.stack.environments.episode import Episode, open_episode
from nemotron.stack.environments.families import (
    FAMILIES,
    evaluation_prompts,
    from_gym,
    generate_tasks,
    iter_tasks,
    make_difficulty,
    plain_answer,
    plain_prompt,
    plain_text,
    prompt_messages,
    prompt_tools,
    read_tasks,
    runs_programs,
    task_space_size,
    to_messages,
    verifiable_families,
    verify,
    verify_all,
)
from nemotron.stack.environments.own import load_environment, load_environments
from nemotron.stack.environments.task import Environment, Solution, Split, Task, Verdict, answer_of, split_of

__all__ = [
    "FAMILIES",
    "ConstantAnswer",
    "Environment",
    "Episode",
    "Solution",
    "Split",
    "Task",
    "Verdict",
    "answer_of",
    "best_constant_answer",
    "evaluation_prompts",
    "fraction_of_space_seen",
    "from_gym",
    "generate_tasks",
    "iter_tasks",
    "load_environment",
    "load_environments",
    "make_difficulty",
    "nearest_neighbour_lookup",
    "open_episode",
    "plain_answer",
    "plain_prompt",
    "plain_text",
    "prompt_messages",
    "prompt_tools",
    "read_tasks",
    "runs_programs",
    "split_of",
    "task_space_size",
    "to_messages",
    "verifiable_families",
    "verify",
    "verify_all",
]
