"""Tool comparison: rewards as recorded but for the flaws, generated steps, published records, what must not pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.schemas.difficulty import ToolComparisonDifficulty
from nemotron.stack.environments import (
    Task,
    from_gym,
    generate_tasks,
    open_episode,
    prompt_messages,
    prompt_tools,
    split_of,
    task_space_size,
    to_messages,
    verify,
)
from nemotron.stack.environments.call_comparison import equal_calls, equal_step
from nemotron.stack.environments.gym import conversation_of, input_of
from nemotron.stack.environments.tool_comparison import verify_calls
from nemotron.stack.environments.workplace_assistant import call_text
from nemotron.stack.rl.dialogue import Dialogue

from .recorded_cases import Case, cases

# What the servers score otherwise, as they and as we do, and which flaw it shows. Every case of `FLAWS` by its number.
UPPER = "the case of words is free where there are several, and counts where there is one; here it counts"
ORDER = "words may stand in any order; here what is equal has to be so in order"
NUMBER = "33 is not 33.0; here one number"
TRUE = "true is 1; here a truth value is no number"
HALF = "equal texts have a similarity of 0.5, so that a threshold above it fails everything; here 1"
SURPLUS = "calls too many cost nothing; here they are wrong"
NAME = "another tool of its kind is taken for the expected one, whatever is declared; here it is another call"
PATTERN = "the pattern of a search is not compared; here it is"
UNKNOWN = "a tool that the server does not know passes with any arguments; here they are compared"
BROKEN = "arguments that are no JSON pass for any; here they are no call"
FLAWS = {
    2: (1.0, 0.0, UPPER), 9: (0.0, 1.0, NUMBER), 25: (1.0, 0.0, "an empty message is one; here it is none"),
    30: (0.0, 1.0, NUMBER), 31: (0.0, 1.0, NUMBER), 40: (1.0, 0.0, TRUE), 47: (0.0, 1.0, HALF),
    63: (1.0, 0.0, SURPLUS), 88: (1.0, 0.0, SURPLUS), 90: (1.0, 0.0, ORDER), 94: (0.0, 1.0, NUMBER),
    111: (0.0, 1.0, NUMBER), 112: (0.0, 1.0, NUMBER), 121: (1.0, 0.0, TRUE), 128: (0.0, 1.0, HALF),
    149: (1.0, 0.0, SURPLUS), 153: (1.0, 0.0, NAME), 155: (1.0, 0.0, NAME), 175: (1.0, 0.0, NAME),
    179: (1.0, 0.0, PATTERN), 183: (1.0, 0.0, UNKNOWN), 185: (1.0, 0.0, BROKEN),
}  # fmt: skip
# Records that the servers score 0 whatever the answer is, and that are refused here.
REFUSED = {32: "NaN is expected, which is no JSON", 113: "NaN is expected", 194: "the expected step is no call"}


def number_of(case: Case) -> int:
    return int(case["id"].rpartition("/")[2])


def record_of(case: Case, tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A record with what the case expects, and a conversation that does not matter."""
    params = {"input": [{"role": "user", "content": "Go on."}], "tools": tools or []}
    return {"responses_create_params": params, "expected_action": case["inputs"]["expected_action"]}


def answered(case: Case) -> tuple[str, list[dict[str, Any]]]:
    """Text and calls of the answer, as who parses a model's answer finds them: what is no JSON object is no call."""
    response = case["inputs"].get("response", case["inputs"])
    calls = []
    for call in response["tool_calls"]:
        try:
            arguments = json.loads(call["arguments"])
        except ValueError:
            continue
        if isinstance(arguments, dict):
            calls.append({"name": call["name"], "arguments": arguments})
    return response.get("text") or "", calls


def is_default(case: Case) -> bool:
    """Whether its options are the servers' defaults, but for the threshold of texts; no recipe sets the others."""
    options = case["options"]
    return not (options.keys() & {"allow_subset", "allow_superset"}) and options.get("reward_mode") != "continuous"


def test_recorded_rewards_but_for_the_flaws() -> None:
    recorded = [case for case in cases("gym_tool_calls") if is_default(case)]
    assert len(recorded) == 140
    differing, refused = {}, []
    for case in recorded:
        try:
            task = from_gym(
                "swe_pivot" if case["case"] == "swe_pivot" else "single_step_tool_use_with_argument_comparison",
                record_of(case),
            )
        except UserError:
            assert case["outputs"]["reward"] == 0
            refused.append(number_of(case))
            continue
        spec = task.spec | {"threshold": case["options"].get("word_count_similarity_threshold")}
        score, reward = verify_calls(spec, *answered(case)).score, case["outputs"]["reward"]
        if score != reward:
            differing[number_of(case)] = (reward, score)
    assert differing == {number: (theirs, ours) for number, (theirs, ours, _) in FLAWS.items()}
    assert refused == list(REFUSED)


def test_as_many_calls_are_matched_as_can_be() -> None:
    """A call that fits two expected ones takes the one that no other fits."""

    def call(text: str) -> dict[str, Any]:
        return {"name": "say", "arguments": {"text": text}}

    expected = [call("a b c d e f g h"), call("a b c d e f g x")]
    for calls in (
        [call("a b c d e f g h"), call("a b c d e f y h")],
        [call("a b c d e f y h"), call("a b c d e f g h")],
    ):
        assert equal_calls(expected, calls)
    assert equal_calls(expected, [call("a b c d e f g h")] * 2)
    assert not equal_calls(expected, [call("z")] * 2)


# --- Generated steps --------------------------------------------------------------------------------------------------

TASKS = generate_tasks("tool_comparison", "train", 200, seed=3)


def respond(task: Task, response: str, thinking: bool = False) -> str:
    episode = open_episode(task, thinking)
    assert episode is not None and episode.respond(response) is None
    return episode.verdict().status


@pytest.mark.parametrize("template", ["nano3", "super3"])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_demonstration_is_right_as_the_chat_template_renders_it(thinking: bool, template: str) -> None:
    for task in TASKS:
        segments = chat.render_with_mask(
            to_messages(task, thinking), tools=prompt_tools(task), enable_thinking=thinking, template=template
        )
        response = chat.response_of([text for text, trained in segments if trained][-1], template)
        assert respond(task, response, thinking) == "score"
        assert verify(task, task.solution.answer).status == "score"
        chat.check_conversation(to_messages(task, thinking), prompt_tools(task))
        assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_every_step_occurs_and_follows_from_the_conversation() -> None:
    """What is to be called can be read in it: the file, the line with the bug, and what the function should be."""
    names = {"view": 0, "grep": 0, "edit": 0, "run": 0, "": 0}
    for task in TASKS:
        *_, last = prompt_messages(task)
        call = task.spec["expected"][0] if task.spec["expected"] else {"name": "", "arguments": {}}
        names[call["name"]] += 1
        shown = "\n".join(str(message["content"]) for message in prompt_messages(task))
        match call["name"]:
            case "view":
                assert call["arguments"]["path"] in task.prompt
            case "grep":
                assert call["arguments"]["pattern"].removeprefix("def ") == task.prompt.split()[1]
            case "edit":
                assert call["arguments"]["old_str"] in last["content"] and call["arguments"]["path"] in shown
            case "run":
                assert last["content"] == "edited"
            case _:
                assert last["content"] == "passed"
    assert min(names.values()) > 5, names


@pytest.mark.slow
def test_a_function_is_held_out_in_all_three_families_or_in_none() -> None:
    for split in ("train", "valid", "eval"):
        for task in generate_tasks("tool_comparison", split, 100, seed=1):  # type: ignore[arg-type]
            repair = task.canonical.split("|", 1)[1].rsplit("|", 2)[0]
            function = "code_generation|" + repair.split("|", 1)[1].rsplit("|", 1)[0]
            assert split_of(task.canonical) == split == split_of(repair) == split_of(function)
    held_out = {task.prompt for task in generate_tasks("repository_repair", "eval", 300)}
    assert not held_out & {task.prompt for task in generate_tasks("tool_comparison", "train", 3000)}


def test_the_size_of_the_task_space_is_that_of_the_repairs_times_the_steps() -> None:
    assert task_space_size("tool_comparison") == 4 * task_space_size("repository_repair")
    settings = ToolComparisonDifficulty(steps=("edit",))
    assert task_space_size("tool_comparison", settings) == task_space_size("repository_repair")


def test_no_wrong_answer_passes() -> None:
    """1,000 of them: another tool, a changed argument, one too many, none, markup, a message in place of a call."""
    wrong: list[tuple[Task, str]] = []
    for task, other in zip(TASKS, [*TASKS[1:], TASKS[0]], strict=True):
        if not task.spec["expected"]:
            wrong += [(task, answer) for answer in ("", " ", call_text({"name": "run", "arguments": {}}))]
            continue
        (call,) = task.spec["expected"]
        right = call_text(call)
        wrong += [
            (task, answer)
            for answer in (
                "", "Done.", right + right, right.replace("function=", "function=x"), right.replace("</function>", ""),
                f"{right}{call_text({'name': 'run', 'arguments': {'path': 'x'}})}",
                call_text({**call, "arguments": {**call["arguments"], "more": "1"}}),
            )
        ]  # fmt: skip
        for key, value in call["arguments"].items():
            for changed in (f"{value}x", value[:-1], value.upper(), value.replace("x", "y", 1), ""):
                if changed != value:
                    wrong.append((task, call_text({**call, "arguments": {**call["arguments"], key: changed}})))
        if other.spec["expected"] and other.spec["expected"] != task.spec["expected"]:
            wrong.append((task, other.solution.answer))
    assert len(wrong) > 1000
    assert [answer for task, answer in wrong if verify(task, answer).status != "wrong"] == []
    assert {respond(task, f"<think>{task.solution.answer}", thinking=True) for task in TASKS} == {"wrong"}


def test_a_call_that_the_prompt_declares_is_no_fault_of_form() -> None:
    """Else `invalid_tool_call_advantage` would punish the right answer."""
    task = next(task for task in TASKS if task.spec["expected"])

    class Letters:
        """A tokenizer whose tokens are characters."""

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    dialogue = Dialogue(open_episode(task, False), Letters(), "nano3", False)  # type: ignore[arg-type]
    assert dialogue.reply([ord(letter) for letter in task.solution.answer]) is None
    assert not dialogue.messages[0].invalid_tool_call
    verdict = dialogue.verdict()
    assert verdict is not None and verdict.status == "score"


def test_a_text_of_many_equal_words_is_compared_at_once() -> None:
    wanted = {"name": "say", "arguments": {"text": "the and cat " * 400}}
    call = {"name": "say", "arguments": {"text": "cat and the " * 100_000}}
    assert not equal_calls([wanted], [call])


# --- Published records ------------------------------------------------------------------------------------------------


def test_a_published_record_is_a_task_with_its_conversation_and_its_tools() -> None:
    function = {
        "name": "view",
        "description": "Read a file.",
        "parameters": {"properties": {"path": {"type": "string"}}},
    }
    items = [
        {"role": "developer", "content": "You repair programs."},
        {"role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Where?"}]},
        {"type": "function_call", "call_id": "1", "name": "view", "arguments": '{"path": "a.py"}'},
        {"type": "function_call_output", "call_id": "1", "output": "x = 1"},
    ]
    record = {
        "responses_create_params": {"input": items, "tools": [{"type": "function", "strict": False, **function}]},
        "expected_action": {"type": "function_call", "name": "view", "arguments": '{"path": "/b/c.py"}'},
    }
    task = from_gym("swe_pivot", record)
    assert task.messages == [
        {"role": "system", "content": "You repair programs."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "", "reasoning_content": "Where?",
         "tool_calls": [{"name": "view", "arguments": {"path": "a.py"}}]},
        {"role": "tool", "content": "x = 1"},
    ]  # fmt: skip
    assert prompt_tools(task) == [function]
    assert verify(task, call_text({"name": "view", "arguments": {"path": "/srv/b/c.py"}})).status == "score"
    assert verify(task, task.solution.answer).status == "score"
    again = {"responses_create_params": {"input": input_of(task.messages or []), "tools": [function]}}
    assert conversation_of(again) == (task.messages, [function])


@pytest.mark.parametrize(
    ("wanted", "given", "reward"),
    [
        ([10, -1], [10, -1], 1.0),  # -1: the last line of the file
        ([10, -1], [1, -1], 1.0),
        ([10, -1], None, 1.0),
        ([10, -1], [11, -1], 0.0),
        ([10, -1], [10, 400], 0.0),
        ([10, 20], [12, -1], 1.0),
        ([10, 20], [13, -1], 0.0),
        ([10, 20], ["10", 20], 0.0),
        ("[10, 20]", "[10, 20]", 1.0),  # as agents write it whose arguments are texts
        ("[10, 20]", [10, 20], 0.0),
    ],
)
def test_a_view_may_go_to_the_end_of_a_file(wanted: Any, given: Any, reward: float) -> None:
    expected = {"name": "edit", "arguments": {"command": "view", "path": "/a/b.py", "view_range": wanted}}
    ranged = {} if given is None else {"view_range": given}
    call = {"name": "edit", "arguments": {"command": "view", "path": "/a/b.py", **ranged}}
    assert equal_step(expected, [call]) == bool(reward)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expected_action": None}, "neither a message nor calls"),
        ({"expected_action": {"type": "function_call_batch", "calls": []}}, "neither a message nor calls"),
        (
            {"expected_action": {"type": "function_call", "name": "x", "arguments": "[]"}},
            "without a name and an object",
        ),
        ({"expected_action": {"type": "function_call", "arguments": "{}"}}, "without a name and an object"),
        ({"responses_create_params": {"input": [{"type": "image"}]}}, "holds image"),
        ({"responses_create_params": {"input": "x", "tools": ["x"]}}, "no list of functions"),
    ],
)
def test_a_broken_record_is_refused(change: dict[str, Any], message: str) -> None:
    record = {
        "responses_create_params": {"input": "Go on."}, "expected_action": {"type": "message", "content": "Yes."}
    }  # fmt: skip
    assert from_gym("single_step_tool_use_with_argument_comparison", record).prompt == "Go on."
    with pytest.raises(UserError, match=message):
        from_gym("single_step_tool_use_with_argument_comparison", {**record, **change})
