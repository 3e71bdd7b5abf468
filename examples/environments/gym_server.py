"""Any resources server of NeMo Gym: records from the file GYM_RECORDS; tools and rewards from the address GYM_URL."""

import json
import os
from pathlib import Path

from nemotron.stack.environments.gym import conversation_of
from nemotron.stack.environments.gym_client import GymRollout


class GymServer:
    def tasks(self):
        with Path(os.environ["GYM_RECORDS"]).open(encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                messages, tools = conversation_of(record)
                yield {"messages": messages, "tools": tools, "spec": {"record": record}}

    def open_episode(self, spec):
        return GymRollout(os.environ["GYM_URL"], spec["record"]) if "tools" in spec else None

    def verify_answer(self, spec, answer):
        rollout = GymRollout(os.environ["GYM_URL"], spec["record"])
        rollout.respond(answer)
        return rollout.verdict()
