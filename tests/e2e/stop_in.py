"""`python stop_in.py PHASE CALL SIGNAL SCRIPT …` runs a script of RL and sends itself a signal in the midst of a phase.

generation: in the CALLth batch of completions that takes more than one token (greedy validation may end at the first,
at a moment of its own); reward: before the verdicts on the CALLth prompt; judge: in the CALLth batch of a judge's
answers; update: before the CALLth micro-batch's loss.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import nemotron.stack.models.decoding.turns as generation
import nemotron.stack.rl.dialogue as reward
import nemotron.stack.rl.grpo as training
import nemotron.stack.rl.judging as judging

phase, call, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv = sys.argv[4:]
calls = 0


def stop_at_call(function: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return stopping


def stop_at_token(generate: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, poll: Callable[[], None], **kwargs: Any) -> Any:
        is_first = True

        def stopping_poll() -> None:
            global calls
            nonlocal is_first
            if is_first:
                is_first = False
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), number)
            poll()

        return generate(*args, poll=stopping_poll, **kwargs)

    return stopping


if phase == "generation":
    generation.generate = stop_at_token(generation.generate)
elif phase == "reward":
    reward.episode_verdicts = stop_at_call(reward.episode_verdicts)
elif phase == "judge":
    judging.generate = stop_at_token(judging.generate)
elif phase == "update":
    training.grpo_loss = stop_at_call(training.grpo_loss)
else:
    raise SystemExit(f"no such phase: {phase}")
runpy.run_path(sys.argv[0], run_name="__main__")
