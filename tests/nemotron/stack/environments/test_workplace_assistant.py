"""The workplace assistant: tools, final states, episodes, demonstrations, and what must not pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemotron.kit import chat
from nemotron.stack.environments import Task, generate_tasks, open_episode, prompt_tools, to_messages, verify
from nemotron.stack.environments.workplace import Tables, Workplace, draw_tables, tool_definition, tool_names
from nemotron.stack.environments.workplace_assistant import call_text, verify_calls

from .recorded_cases import cases

# What Gym scores otherwise, and why ours does not. A number here is read as its digits, so that 30 minutes are "30"
# minutes; an id written as a number is still another id, since it has lost its zeros.
DIFFERENT = {
    "gym_workplace/0033": "30 and '30' are two durations",
    "gym_workplace/0074": "30 and '30' are two durations",
}


def tables_of(seed: int) -> Tables:
    """Our tables with the ids that the recorded calls name, and the status that one of them sets again."""
    ids = {
        561001: {"emails": ["00000358", "00000048"], "customers": ["00000128", "00000162"], "tasks": ["00000206"],
                 "events": ["00000275"]},
        561002: {"emails": ["00000103", "00000252"], "customers": ["00000124", "00000015"], "tasks": ["00000111"],
                 "events": ["00000127"]},
    }[seed]  # fmt: skip
    tables = draw_tables(seed, 4)
    for table, values in ids.items():
        for row, value in zip(tables[table], values, strict=False):
            row[next(iter(row))] = value
    tables["customers"][0]["status"] = {561001: "Lead", 561002: "Proposal"}[seed]
    return tables


def state_after(tables: Tables, calls: list[dict[str, str]]) -> object:
    """Calls as recorded, with their arguments as JSON; what is none is no call."""
    workplace = Workplace(tables)
    for call in calls:
        try:
            arguments = json.loads(call["arguments"])
        except ValueError:
            continue
        workplace.call(call["name"], arguments)
    return workplace.state()


def test_final_states_are_equal_where_gym_holds_them_equal() -> None:
    recorded = cases("gym_workplace")
    assert len(recorded) == 77
    differing = []
    for case in recorded:
        predicted, truth = (
            state_after(tables_of(case["seed"]), case["inputs"][calls]) for calls in ("predicted", "ground_truth")
        )
        if (predicted == truth) != case["outputs"]["correct"]:
            differing.append(case["id"])
    assert differing == list(DIFFERENT)


def test_there_are_27_tools_and_each_can_be_declared() -> None:
    assert len(tool_names()) == 27
    for name in tool_names():
        whole, short = tool_definition(name), tool_definition(name, optional=False)
        chat.check_conversation([{"role": "assistant", "content": ""}], [whole, short])
        assert whole["description"] and short["parameters"]["properties"]
        assert set(whole["parameters"].get("required", [])) <= set(short["parameters"]["properties"])


def test_every_tool_answers_and_only_those_that_write_change_the_state() -> None:
    tables = draw_tables(5, 4)
    first = {table: rows[0] for table, rows in tables.items() if rows}
    email, event, task, customer = (
        first[table][key]
        for table, key in (
            ("emails", "email_id"), ("events", "event_id"), ("tasks", "task_id"), ("customers", "customer_id")
        )
    )  # fmt: skip
    person = "ada@work.example"
    reads: dict[str, dict[str, str]] = {
        "company_directory_find_email_address": {"name": "Ada"},
        "email_get_email_information_by_id": {"email_id": email, "field": "subject"},
        "email_search_emails": {"query": first["emails"]["subject"]},
        "calendar_get_event_information_by_id": {"event_id": event, "field": "event_name"},
        "calendar_search_events": {"query": first["events"]["event_name"], "time_min": "2023-12-01"},
        "analytics_get_visitor_information_by_id": {"visitor_id": first["visits"]["visitor_id"]},
        "analytics_total_visits_count": {"time_min": "2023-11-01", "time_max": "2023-11-30"},
        "analytics_engaged_users_count": {},
        "analytics_traffic_source_count": {"traffic_source": first["visits"]["traffic_source"]},
        "analytics_get_average_session_duration": {},
        "project_management_get_task_information_by_id": {"task_id": task, "field": "board"},
        "project_management_search_tasks": {"task_name": first["tasks"]["task_name"].upper()},
        "customer_relationship_manager_search_customers": {"customer_name": first["customers"]["customer_name"]},
    }
    board = {"task_name": "x", "assigned_to_email": person, "list_name": "Backlog", "due_date": "2024-01-01"}
    writes: dict[str, dict[str, str]] = {
        "email_send_email": {"recipient": person, "subject": "s", "body": "b"},
        "email_delete_email": {"email_id": email},
        "email_forward_email": {"email_id": email, "recipient": person},
        "email_reply_email": {"email_id": email, "body": "b"},
        "calendar_create_event": {
            "event_name": "e", "participant_email": person, "event_start": "2023-12-01 10:00:00", "duration": "30"
        },
        "calendar_delete_event": {"event_id": event},
        "calendar_update_event": {"event_id": event, "field": "duration", "new_value": "45"},
        "analytics_create_plot": {
            "time_min": "2023-11-01", "time_max": "2023-11-30", "value_to_plot": "total_visits", "plot_type": "bar"
        },
        "project_management_create_task": {**board, "board": "Design"},
        "project_management_delete_task": {"task_id": task},
        "project_management_update_task": {"task_id": task, "field": "due_date", "new_value": "2024-01-01"},
        "customer_relationship_manager_update_customer": {"customer_id": customer, "field": "notes", "new_value": "n"},
        "customer_relationship_manager_add_customer": {
            "customer_name": "n", "assigned_to_email": person, "status": "Lead"
        },
        "customer_relationship_manager_delete_customer": {"customer_id": customer},
    }  # fmt: skip
    assert {*reads, *writes} == set(tool_names())
    before = Workplace(tables).state()
    for name, arguments in (reads | writes).items():
        workplace = Workplace(tables)
        result = workplace.call(name, arguments)
        assert result and not result.startswith("Error"), result
        assert (workplace.state() != before) == (name in writes)
        for key in arguments:  # without something that it needs, or with what it does not know, nothing happens
            other = Workplace(tables)
            if key in tool_definition(name)["parameters"].get("required", []):
                assert other.call(name, {k: v for k, v in arguments.items() if k != key}).startswith("Error")
            assert other.call(name, {**arguments, key: None}).startswith("Error")
            assert other.call(name, {**arguments, "cc": "x"}).startswith("Error")
            assert other.state() == before


def tasks(count: int = 150, split: str = "train", **difficulty: Any) -> list[Task]:
    return generate_tasks("workplace_assistant", split, count, difficulty=difficulty)  # type: ignore[arg-type]


def attempt(task: Task, responses: list[str], thinking: bool = False) -> tuple[str, list[Any]]:
    """The verdict on responses, and what each was answered."""
    episode = open_episode(task, thinking)
    answers = [episode.respond(response) for response in responses]
    return episode.verdict().status, answers


@pytest.mark.parametrize("thinking", [True, False])
def test_a_demonstration_is_right_turn_by_turn_and_as_one_answer(thinking: bool) -> None:
    for task in tasks(num_tools=4):
        messages = to_messages(task, thinking)
        segments = chat.render_with_mask(messages, tools=prompt_tools(task), enable_thinking=thinking, template="nano3")
        responses = [chat.response_of(text, "nano3") for text, trained in segments if trained]
        status, answers = attempt(task, responses, thinking)
        assert status == "score" and answers[-1] is None
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert [message["content"] for answer in answers[:-1] for message in answer] == results
        assert not any(result.startswith("Error") for result in results)
        assert verify(task, task.solution.answer).status == "score"
        assert len(task.spec["tools"]) == 4 == len(set(task.spec["tools"]))
        # Until the write nothing is right, not even nothing.
        assert attempt(task, responses[:-2], thinking)[0] == "wrong"


def test_half_of_the_requests_need_a_look_up_whose_result_no_prompt_holds() -> None:
    looked_up = [task for task in tasks(300) if len(task.spec["tools"]) == 2]
    assert 100 < len(looked_up) < 200
    for task in looked_up:
        (write,) = task.spec["calls"]
        wanted = next(value for key, value in write["arguments"].items() if key.endswith("_id"))
        assert wanted not in task.prompt
        assert wanted in to_messages(task)[2]["content"]


def test_errors_go_back_to_the_model_and_change_nothing() -> None:
    task = next(task for task in tasks() if task.spec["calls"][0]["name"] == "email_delete_email")
    wrong_id = call_text({"name": "email_delete_email", "arguments": {"email_id": "none"}})
    hidden = call_text({"name": "email_send_email", "arguments": {"recipient": "a@b.c", "subject": "", "body": "x"}})
    right = call_text(task.spec["calls"][0])
    status, answers = attempt(task, [wrong_id, hidden, right])
    assert status == "score"  # refused calls are free, as in Gym
    assert [answer[0]["content"] for answer in answers] == [
        "Error: there is no email_id none.", "Error: no tool is called email_send_email.", "Email deleted."
    ]  # fmt: skip
    assert attempt(task, [wrong_id])[0] == attempt(task, [])[0] == attempt(task, ["Done."])[0] == "wrong"


def test_no_wrong_attempt_passes() -> None:
    """1,000 attempts: perturbed right calls, those of another task, more than was asked for, markup, look-alikes."""
    drawn = tasks(125, num_tools=3)
    attempts = 0
    for task, other in zip(drawn, [*drawn[1:], drawn[0]], strict=True):
        (call,) = task.spec["calls"]
        right = call_text(call)
        key = next(iter(call["arguments"]))
        value = call["arguments"][key]
        changed = [value[::-1] + "1", f"{value} ", "", value.translate({ord("0") + i: 0xFF10 + i for i in range(10)})]
        answers = [call_text({**call, "arguments": {**call["arguments"], key: each}}) for each in changed]
        answers += [
            f"<think>{right}",  # never left reasoning
            right.replace("</function>", ""),
            call_text(other.spec["calls"][0]) if other.spec["calls"] != task.spec["calls"] else "",
            right.replace("<function=", "<function=<function="),
        ]
        for answer in answers:
            attempts += 1
            assert verify(task, answer).status == "wrong", (answer, task)
            assert attempt(task, [answer])[0] == "wrong"
        assert attempt(task, [f"I will write {right}"], thinking=True)[0] == "wrong"
    assert attempts == 1_000


def test_a_broken_task_is_an_error_and_no_zero() -> None:
    task = tasks(1)[0]
    broken = Task.from_dict({**task.to_dict(), "spec": {**task.spec, "calls": [{"name": "no", "arguments": {}}]}})
    assert verify(broken, task.solution.answer).status == "error"
    with pytest.raises(ValueError, match="a right call fails"):
        verify_calls(broken.spec, [])


def test_a_change_is_a_change_and_tables_differ_between_tasks() -> None:
    drawn = tasks(200)
    assert len({task.spec["seed"] for task in drawn}) == 200
    for task in drawn:
        assert verify(task, "").status == "wrong"
