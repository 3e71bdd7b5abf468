"""A taskset of verifiers 0.4 (`pip install verifiers`, and the package of the taskset): its prompts and its rewards."""

import asyncio
import os
from inspect import signature

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset


class Taskset:
    def __init__(self):
        config = vf.TasksetConfig(id=os.environ["VERIFIERS_TASKSET"])
        self.loaded = list(load_taskset(config))
        if any("runtime" in signature(reward).parameters for task in self.loaded for reward in task.hooks("reward")):
            raise ValueError("a reward of this taskset needs a machine of the rollout's own")

    def tasks(self):
        for index, task in enumerate(self.loaded):
            system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
            user = {"role": "user", "content": task.data.prompt_text}
            yield {"messages": [*system, user], "spec": {"index": index}}

    def verify_answer(self, spec, answer):
        task = self.loaded[spec["index"]]
        node = vf.MessageNode(message=vf.AssistantMessage(content=answer), sampled=True)
        about = {"type": type(task).__name__, "data": task.data}
        trace = vf.Trace(task=about, agent={"config": vf.AgentConfig()}, nodes=[node])
        asyncio.run(task.score(trace))
        return trace.reward
