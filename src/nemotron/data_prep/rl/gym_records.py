"""Records of reinforcement learning as NeMo Gym reads them: which environment they are for, and what they must have.

    {"responses_create_params": {"input": [{"role": "user", "content": "What is 2+2?"}]},
     "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
     "question": "What is 2+2?", "expected_answer": "4"}

`responses_create_params` is a request of the OpenAI Responses API, `agent_ref.name` the agent that gets it, and what
else there is goes to the resources server that gives the reward. Of six servers it is known what they ask for; records
for others are checked as far as the first two fields.

Source: NeMo Gym's pages on data (docs.nvidia.com/nemo/gym, "Prepare Data") and the request classes of its resources
servers (`resources_servers/*/app.py`, commit 07d6b0d).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from nemo_runspec.errors import nearest

NO_PROMPT = "no prompt in responses_create_params"
NO_AGENT = "no agent in agent_ref"
NOT_FOR_SERVER = "not what its environment asks for"
_ROLES = ("user", "assistant", "system", "developer")


def agent_of(record: Mapping[str, Any]) -> str | None:
    """The agent that a record is for, which names its environment; None if it says none."""
    agent = record.get("agent_ref")
    name = agent.get("name") if isinstance(agent, Mapping) else None
    return name if isinstance(name, str) and name.strip() else None


def server_of(agent: str) -> str | None:
    """The resources server whose fields are checked: `mcqa` of `mcqa_simple_agent`. None: one that is not known."""
    return next((server for server in _ASKED if agent == server or agent.startswith(f"{server}_")), None)


def problem_of(record: Mapping[str, Any], *, check_fields: bool = True) -> tuple[str, str] | None:
    """What keeps a record from being used, as reason (one of the constants above) and detail; None if nothing does.

    `check_fields`: look at what its resources server asks for, too.
    """
    problem = _prompt_problem(record)
    if problem is not None:
        return NO_PROMPT, problem
    agent = agent_of(record)
    if agent is None:
        guess = nearest("agent_ref", [name for name in record if name != "agent_ref"])
        return NO_AGENT, "agent_ref.name is missing" + (f", did you mean {guess!r}?" if guess else "")
    server = server_of(agent) if check_fields else None
    problem = _ASKED[server](record) if server else None
    return None if problem is None else (NOT_FOR_SERVER, f"{server}: {problem}")


def prompt_key(record: Mapping[str, Any]) -> str:
    """The same for two records whose `input` reads the same but for case and spacing: 16 hex digits."""
    asked = record["responses_create_params"]["input"]
    return _key(_read([{"role": "user", "content": asked}] if isinstance(asked, str) else asked))


def question_key(record: Mapping[str, Any]) -> str | None:
    """As `prompt_key`, of the bare `question`, which may stand in prompts of several kinds; None without one."""
    question = record.get("question")
    return _key(question) if isinstance(question, str) and question.strip() else None


def _key(text: str) -> str:
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=8).hexdigest()


def _read(value: Any) -> str:
    """What a model reads of an input's items, one after another."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_read(item) for item in value)
    if isinstance(value, Mapping) and "role" in value:
        return f"{value['role']}: {_read(value.get('content', ''))}"
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return str(value["text"])
    return json.dumps(value, sort_keys=True)


def _prompt_problem(record: Mapping[str, Any]) -> str | None:
    params = record.get("responses_create_params")
    if not isinstance(params, Mapping):
        return "responses_create_params is missing" if params is None else "responses_create_params is not an object"
    asked = params.get("input")
    if isinstance(asked, str):
        return None if asked.strip() else "input is empty"
    if not isinstance(asked, list) or not asked:
        return "input is neither text nor a list of messages" if asked else "input is missing or empty"
    for number, item in enumerate(asked):
        if not isinstance(item, Mapping):
            return f"input[{number}] is not an object"
        if "role" in item and item["role"] not in _ROLES:
            return f"input[{number}].role is {item['role']!r}, not one of {', '.join(_ROLES)}"
        if "role" in item and not isinstance(item.get("content"), str | list):
            return f"input[{number}].content is neither text nor a list"
        if "role" not in item and not isinstance(item.get("type"), str):
            return f"input[{number}] has neither role nor type"
    return None


# --- What the servers ask for -----------------------------------------------------------------------------------------


def _math_with_judge(record: Mapping[str, Any]) -> str | None:
    return _not_text(record, "question") or _not_text(record, "expected_answer")


def _mcqa(record: Mapping[str, Any]) -> str | None:
    options = record.get("options")
    if options is not None and not isinstance(options, list):
        return "options is not a list"
    return _not_text(record, "expected_answer")


def _code_gen(record: Mapping[str, Any]) -> str | None:
    metadata = record.get("verifier_metadata")
    tests = metadata.get("unit_tests") if isinstance(metadata, Mapping) else None
    if not isinstance(tests, Mapping):
        return "verifier_metadata.unit_tests is missing"
    for name in ("inputs", "outputs"):
        values = tests.get(name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return f"verifier_metadata.unit_tests.{name} is not a list of texts"
    return None


def _instruction_following(record: Mapping[str, Any]) -> str | None:
    metadata = record.get("verifier_metadata")
    # The published blends have these fields at the top level.
    given = {**record, **metadata} if isinstance(metadata, Mapping) else record
    missing = [name for name in ("instruction_id_list", "prompt", "kwargs") if name not in given]
    return f"{missing[0]} is missing" if missing else _not_a_number(record, "id")


def _structured_outputs(record: Mapping[str, Any]) -> str | None:
    return _not_text(record, "schema_str")


def _workplace_assistant(record: Mapping[str, Any]) -> str | None:
    if not isinstance(record.get("ground_truth"), str | list):
        return "ground_truth is neither text nor a list"
    return _not_a_number(record, "id") or _not_text(record, "category") or _not_text(record, "environment_name")


def _not_text(record: Mapping[str, Any], name: str) -> str | None:
    if isinstance(record.get(name), str):
        return None
    return f"{name} is {'missing' if record.get(name) is None else 'not text'}"


def _not_a_number(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and value.isdecimal()):
        return None
    return f"{name} is {'missing' if value is None else 'not a whole number'}"


_ASKED: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "math_with_judge": _math_with_judge,
    "mcqa": _mcqa,
    "code_gen": _code_gen,
    "instruction_following": _instruction_following,
    "structured_outputs": _structured_outputs,
    "workplace_assistant": _workplace_assistant,
}
