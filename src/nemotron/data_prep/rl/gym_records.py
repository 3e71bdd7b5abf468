"""Records of reinforcement learning as NeMo Gym reads them: which environment they are for, and what they must have.

    {"responses_create_params": {"input": [{"role": "user", "content": "What is 2+2?"}]},
     "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
     "question": "What is 2+2?", "expected_answer": "4"}

`responses_create_params` is a request of the OpenAI Responses API, `agent_ref.name` the agent that gets it. The other
fields go to the resources server that gives the reward. The fields of seven servers are checked; of records for other
servers, the first two fields are.

Source: NeMo Gym's pages on data (docs.nvidia.com/nemo/gym, "Prepare Data") and the request classes of its resources
servers (`resources_servers/*/app.py`, commit 07d6b0d).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
    return next((server for server in _FIELDS if agent == server or agent.startswith(f"{server}_")), None)


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
    problem = _field_problem(record, server) if server else None
    return None if problem is None else (NOT_FOR_SERVER, f"{server}: {problem}")


def prompt_key(record: Mapping[str, Any]) -> str:
    """The same for two records whose `input` reads the same but for case and spacing: 16 hex digits."""
    items = record["responses_create_params"]["input"]
    return _key(_text_of([{"role": "user", "content": items}] if isinstance(items, str) else items))


def question_key(record: Mapping[str, Any]) -> str | None:
    """As `prompt_key`, of the bare `question`, which may stand in prompts of several kinds; None without one."""
    question = record.get("question")
    return _key(question) if isinstance(question, str) and question.strip() else None


def _key(text: str) -> str:
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=8).hexdigest()


def _text_of(value: Any) -> str:
    """What a model reads of an input's items, one after another."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_text_of(item) for item in value)
    if isinstance(value, Mapping) and "role" in value:
        return f"{value['role']}: {_text_of(value.get('content', ''))}"
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return str(value["text"])
    return json.dumps(value, sort_keys=True)


def _prompt_problem(record: Mapping[str, Any]) -> str | None:
    params = record.get("responses_create_params")
    if not isinstance(params, Mapping):
        return "responses_create_params is missing" if params is None else "responses_create_params is not an object"
    items = params.get("input")
    if isinstance(items, str):
        return None if items.strip() else "input is empty"
    if not isinstance(items, list) or not items:
        return "input is neither text nor a list of messages" if items else "input is missing or empty"
    for number, item in enumerate(items):
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

_FIELDS: Mapping[str, Mapping[str, str]] = {
    "math_with_judge": {"question": "text", "expected_answer": "text"},
    "mcqa": {"expected_answer": "text", "options": "a list, if anything"},
    "code_gen": {
        "verifier_metadata.unit_tests.inputs": "a list of texts",
        "verifier_metadata.unit_tests.outputs": "a list of texts",
    },
    "instruction_following": {"instruction_id_list": "there", "prompt": "there", "kwargs": "there", "id": "a number"},
    "structured_outputs": {"schema_str": "text"},
    "workplace_assistant": {
        "ground_truth": "text or a list",
        "id": "a number",
        "category": "text",
        "environment_name": "text",
    },
    "single_step_tool_use_with_argument_comparison": {"expected_action": "there"},
    "swe_pivot": {},
}
"""Server -> field, with dots for nested ones -> what it has to be."""


def _field_problem(record: Mapping[str, Any], server: str) -> str | None:
    metadata = record.get("verifier_metadata")
    if server == "instruction_following" and isinstance(metadata, Mapping):
        record = {**record, **metadata}  # the published blends have its fields at the top level, others here
    for path, kind in _FIELDS[server].items():
        value: Any = record
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None and kind != "a list, if anything":
            return f"{path} is missing"
        if not _is(value, kind):
            return f"{path} is not {kind}"
    return None


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "text":
            return isinstance(value, str)
        case "text or a list":
            return isinstance(value, str | list)
        case "a list, if anything":
            return value is None or isinstance(value, list)
        case "a list of texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "a number":  # a whole one, or its digits
            return (isinstance(value, int) and not isinstance(value, bool)) or (
                isinstance(value, str) and value.isdecimal()
            )
    return True  # it is there
