"""The workplace: five small databases in memory, and the 27 tools that read and change them.

Email, calendar, analytics, project management and customer relationship manager, with tools of the names and arguments
of NeMo Gym's `workplace_assistant`. The tables are not Gym's: each workplace has its own, drawn from a seed, so that no
record can be learnt by heart. Every value is text, an id with its zeros.

A tool is a method of `Workplace`: its first line of documentation and its signature are what the model is shown.
"""

from __future__ import annotations

import inspect
import json
import random
from copy import deepcopy
from functools import cache
from typing import Any

from nemotron.stack.environments.words import word_list

Row = dict[str, str]
Tables = dict[str, list[Row]]

NAMES = ("ada", "ben", "cleo", "dan", "eva", "finn", "gus", "ida")
DOMAIN = "work.example"
LISTS = ("Backlog", "In Progress", "In Review", "Completed")
BOARDS = ("Back end", "Front end", "Design")
STATUSES = ("Lead", "Qualified", "Proposal", "Won", "Lost")
PRODUCTS = ("Hardware", "Software", "Services", "Training", "Consulting")
TRAFFIC_SOURCES = ("direct", "referral", "search engine", "social media")
PLOT_VALUES = ("total_visits", "session_duration_seconds", "user_engaged", *(f"visits_{s}" for s in TRAFFIC_SOURCES))
PLOT_TYPES = ("bar", "line", "scatter", "histogram")
NOW = "2023-11-30 00:00:00"
MAX_RESULTS = 5
MAX_TABLE_SEED = 2**31
NUM_IDS = 1_000
WORDS_PER_CATEGORY = 8  # so many words are names of rows
# A column whose values are compared with their case: they are names of states, not text.
WITH_CASE = ("status", "list_name", "board")
_CHOICES = {"status": STATUSES, "list_name": LISTS, "board": BOARDS, "product_interest": PRODUCTS}


class ToolError(Exception):
    """A call that the tool refuses; the message is for the model."""


def draw_tables(seed: int, rows: int) -> Tables:
    """The five tables with `rows` rows each, the same ones for the same arguments; within a table, names differ."""
    rng = random.Random(f"workplace/{seed}")

    def ids() -> list[str]:
        return [f"{number:03d}" for number in rng.sample(range(NUM_IDS), rows)]

    def names() -> list[str]:
        return rng.sample(word_list(WORDS_PER_CATEGORY), rows)

    def person() -> str:
        return f"{rng.choice(NAMES)}@{DOMAIN}"

    def day() -> str:
        return f"2023-11-{rng.randint(1, 29):02d}"

    return {
        "emails": [
            {
                "email_id": email_id, "inbox/outbox": "inbox", "sender/recipient": person(), "subject": name,
                "sent_datetime": f"{day()} {rng.randint(8, 17):02d}:00:00", "body": f"about the {name}",
            }
            for email_id, name in zip(ids(), names(), strict=True)
        ],
        "events": [
            {
                "event_id": event_id, "event_name": name, "participant_email": person(),
                "event_start": f"2023-12-{rng.randint(1, 29):02d} {rng.randint(9, 17):02d}:00:00",
                "duration": rng.choice(("30", "60", "90")),
            }
            for event_id, name in zip(ids(), names(), strict=True)
        ],
        "visits": [
            {
                "visitor_id": visitor_id, "date_of_visit": day(), "page_views": str(rng.randint(1, 20)),
                "session_duration_seconds": str(rng.randint(5, 60)), "traffic_source": rng.choice(TRAFFIC_SOURCES),
                "user_engaged": str(rng.random() < 0.5),
            }
            for visitor_id in ids()
        ],
        "plots": [],
        "tasks": [
            {
                "task_id": task_id, "task_name": name, "assigned_to_email": person(), "list_name": rng.choice(LISTS),
                "due_date": f"2023-12-{rng.randint(1, 29):02d}", "board": rng.choice(BOARDS),
            }
            for task_id, name in zip(ids(), names(), strict=True)
        ],
        "customers": [
            {
                "customer_id": customer_id, "assigned_to_email": person(), "customer_name": name,
                "customer_email": f"{name}@shop.example", "customer_phone": f"555-{rng.randint(0, 9999):04d}",
                "last_contact_date": day(), "product_interest": rng.choice(PRODUCTS), "status": rng.choice(STATUSES),
                "notes": "", "follow_up_by": f"2023-12-{rng.randint(1, 29):02d}",
            }
            for customer_id, name in zip(ids(), names(), strict=True)
        ],
    }  # fmt: skip


class Workplace:
    """The databases in one state. `call` runs a tool; other methods that do not begin with `_` are the tools."""

    def __init__(self, tables: Tables) -> None:
        self.tables = deepcopy(tables)

    def call(self, name: str, arguments: dict[str, Any], offered: tuple[str, ...] | None = None) -> str:
        """The result of a tool as text; JSON where it is records. A refused call changes nothing and says why.

        Args:
            offered: the tools that may be called; None: all.
        """
        try:
            if name not in tool_names() or (offered is not None and name not in offered):
                raise ToolError(f"no tool is called {name}")
            parameters = inspect.signature(getattr(self, name)).parameters
            if unknown := [key for key in arguments if key not in parameters]:
                raise ToolError(f"{name} has no parameter {unknown[0]}")
            texts = {key: _as_text(key, value) for key, value in arguments.items()}
            for key, parameter in parameters.items():
                if parameter.default is parameter.empty and not texts.get(key):
                    raise ToolError(f"{name} needs {key}")
            result = getattr(self, name)(**texts)
        except ToolError as refusal:
            return f"Error: {refusal}."
        return result if isinstance(result, str) else json.dumps(result)

    def state(self) -> dict[str, list[tuple[str, ...]]]:
        """What two workplaces are compared by: all rows in order, without case but for the columns `WITH_CASE`."""
        return {
            table: [tuple(v if column in WITH_CASE else v.lower() for column, v in row.items()) for row in rows]
            for table, rows in self.tables.items()
        }

    # ---- company directory

    def company_directory_find_email_address(self, name: str) -> list[str]:
        """Find the email addresses of employees by name."""
        found = [f"{each}@{DOMAIN}" for each in NAMES if name.lower() in each]
        if not found:
            raise ToolError(f"no employee is called {name}")
        return found

    # ---- email

    def email_get_email_information_by_id(self, email_id: str, field: str) -> str:
        """Read a field of an email."""
        return self._field("emails", "email_id", email_id, field)

    def email_search_emails(self, query: str, date_min: str = "", date_max: str = "") -> list[Row]:
        """Find emails by words in subject, body or address."""
        found = [
            row
            for row in self.tables["emails"]
            if all(
                word in f"{row['subject']} {row['body']} {row['sender/recipient']}".lower()
                for word in query.lower().split()
            )
            and _between(row["sent_datetime"], date_min, date_max)
        ]
        found.sort(key=lambda row: row["sent_datetime"], reverse=True)
        return _short(found, "email_id", "subject")

    def email_send_email(self, recipient: str, subject: str, body: str) -> str:
        """Send an email."""
        _check_address(recipient)
        email_id = self._next_id("emails", "email_id")
        self.tables["emails"].append({
            "email_id": email_id, "inbox/outbox": "outbox", "sender/recipient": recipient.lower(), "subject": subject,
            "sent_datetime": NOW, "body": body,
        })  # fmt: skip
        return "Email sent."

    def email_delete_email(self, email_id: str) -> str:
        """Delete an email."""
        self.tables["emails"].remove(self._row("emails", "email_id", email_id))
        return "Email deleted."

    def email_forward_email(self, email_id: str, recipient: str) -> str:
        """Forward an email to somebody else."""
        email = self._row("emails", "email_id", email_id)
        self.email_send_email(recipient, f"FW: {email['subject']}", email["body"])
        return "Email forwarded."

    def email_reply_email(self, email_id: str, body: str) -> str:
        """Reply to an email."""
        email = self._row("emails", "email_id", email_id)
        self.email_send_email(email["sender/recipient"], email["subject"], body)
        return "Email replied to."

    # ---- calendar

    def calendar_get_event_information_by_id(self, event_id: str, field: str) -> str:
        """Read a field of an event."""
        return self._field("events", "event_id", event_id, field)

    def calendar_search_events(self, query: str = "", time_min: str = "", time_max: str = "") -> list[Row]:
        """Find events by words in the name or in the participant's address."""
        found = [
            row
            for row in self.tables["events"]
            if query.lower() in f"{row['event_name']} {row['participant_email']}".lower()
            and _between(row["event_start"], time_min, time_max)
        ]
        return _short(found, "event_id", "event_name")

    def calendar_create_event(self, event_name: str, participant_email: str, event_start: str, duration: str) -> str:
        """Create an event; duration in minutes."""
        _check_address(participant_email)
        _check_duration(duration)
        event_id = self._next_id("events", "event_id")
        self.tables["events"].append({
            "event_id": event_id, "event_name": event_name, "participant_email": participant_email.lower(),
            "event_start": event_start, "duration": duration,
        })  # fmt: skip
        return event_id

    def calendar_delete_event(self, event_id: str) -> str:
        """Delete an event."""
        self.tables["events"].remove(self._row("events", "event_id", event_id))
        return "Event deleted."

    def calendar_update_event(self, event_id: str, field: str, new_value: str) -> str:
        """Change a field of an event."""
        if field == "duration":
            _check_duration(new_value)
        self._update("events", "event_id", event_id, field, new_value)
        return "Event updated."

    # ---- analytics

    def analytics_get_visitor_information_by_id(self, visitor_id: str) -> list[Row]:
        """Read the visits of a visitor."""
        return [self._row("visits", "visitor_id", visitor_id)]

    def analytics_create_plot(self, time_min: str, time_max: str, value_to_plot: str, plot_type: str) -> str:
        """Plot a value over days."""
        _check_choice("value_to_plot", value_to_plot, PLOT_VALUES)
        _check_choice("plot_type", plot_type, PLOT_TYPES)
        path = f"plots/{time_min}_{time_max}_{value_to_plot}_{plot_type}.png"
        self.tables["plots"].append({"file_path": path})
        return path

    def analytics_total_visits_count(self, time_min: str = "", time_max: str = "") -> dict[str, int]:
        """Count visits by day."""
        return _by_day(self._visits(time_min, time_max))

    def analytics_engaged_users_count(self, time_min: str = "", time_max: str = "") -> dict[str, int]:
        """Count engaged visitors by day."""
        return _by_day([row for row in self._visits(time_min, time_max) if row["user_engaged"] == "True"])

    def analytics_traffic_source_count(
        self, time_min: str = "", time_max: str = "", traffic_source: str = ""
    ) -> dict[str, int]:
        """Count visits of a traffic source by day."""
        rows = self._visits(time_min, time_max)
        return _by_day([row for row in rows if traffic_source in ("", row["traffic_source"])])

    def analytics_get_average_session_duration(self, time_min: str = "", time_max: str = "") -> dict[str, float]:
        """Mean session duration in seconds by day."""
        rows = self._visits(time_min, time_max)
        days: dict[str, list[int]] = {row["date_of_visit"]: [] for row in rows}
        for row in rows:
            days[row["date_of_visit"]].append(int(row["session_duration_seconds"]))
        return {day: sum(seconds) / len(seconds) for day, seconds in days.items()}

    # ---- project management

    def project_management_get_task_information_by_id(self, task_id: str, field: str) -> str:
        """Read a field of a task."""
        return self._field("tasks", "task_id", task_id, field)

    def project_management_search_tasks(
        self, task_name: str = "", assigned_to_email: str = "", list_name: str = "", due_date: str = "", board: str = ""
    ) -> list[Row]:
        """Find tasks."""
        found = self._matching("tasks", {
            "task_name": task_name, "assigned_to_email": assigned_to_email, "list_name": list_name,
            "due_date": due_date, "board": board,
        })  # fmt: skip
        return _short(found, "task_id", "task_name")

    def project_management_create_task(
        self, task_name: str, assigned_to_email: str, list_name: str, due_date: str, board: str
    ) -> str:
        """Create a task."""
        _check_address(assigned_to_email)
        _check_choice("list_name", list_name, LISTS)
        _check_choice("board", board, BOARDS)
        task_id = self._next_id("tasks", "task_id")
        self.tables["tasks"].append({
            "task_id": task_id, "task_name": task_name, "assigned_to_email": assigned_to_email.lower(),
            "list_name": list_name, "due_date": due_date, "board": board,
        })  # fmt: skip
        return task_id

    def project_management_delete_task(self, task_id: str) -> str:
        """Delete a task."""
        self.tables["tasks"].remove(self._row("tasks", "task_id", task_id))
        return "Task deleted."

    def project_management_update_task(self, task_id: str, field: str, new_value: str) -> str:
        """Change a field of a task."""
        self._update("tasks", "task_id", task_id, field, new_value)
        return "Task updated."

    # ---- customer relationship manager

    def customer_relationship_manager_search_customers(
        self, customer_name: str = "", customer_email: str = "", product_interest: str = "", status: str = "",
        assigned_to_email: str = "", last_contact_date_min: str = "", last_contact_date_max: str = "",
        follow_up_by_min: str = "", follow_up_by_max: str = "",
    ) -> list[Row]:  # fmt: skip
        """Find customers."""
        found = self._matching("customers", {
            "customer_name": customer_name, "customer_email": customer_email, "product_interest": product_interest,
            "status": status, "assigned_to_email": assigned_to_email,
        })  # fmt: skip
        found = [
            row
            for row in found
            if _between(row["last_contact_date"], last_contact_date_min, last_contact_date_max)
            and _between(row["follow_up_by"], follow_up_by_min, follow_up_by_max)
        ]
        return _short(found, "customer_id", "customer_name", "status")

    def customer_relationship_manager_update_customer(self, customer_id: str, field: str, new_value: str) -> str:
        """Change a field of a customer."""
        self._update("customers", "customer_id", customer_id, field, new_value)
        return "Customer updated."

    def customer_relationship_manager_add_customer(
        self, customer_name: str, assigned_to_email: str, status: str, customer_email: str = "",
        customer_phone: str = "", last_contact_date: str = "", product_interest: str = "", notes: str = "",
        follow_up_by: str = "",
    ) -> str:  # fmt: skip
        """Add a customer."""
        _check_address(assigned_to_email)
        _check_choice("status", status, STATUSES)
        if product_interest:
            _check_choice("product_interest", product_interest, PRODUCTS)
        customer_id = self._next_id("customers", "customer_id")
        self.tables["customers"].append({
            "customer_id": customer_id, "assigned_to_email": assigned_to_email.lower(), "customer_name": customer_name,
            "customer_email": customer_email, "customer_phone": customer_phone, "last_contact_date": last_contact_date,
            "product_interest": product_interest, "status": status, "notes": notes, "follow_up_by": follow_up_by,
        })  # fmt: skip
        return customer_id

    def customer_relationship_manager_delete_customer(self, customer_id: str) -> str:
        """Delete a customer."""
        self.tables["customers"].remove(self._row("customers", "customer_id", customer_id))
        return "Customer deleted."

    # ---- what the tools share

    def _row(self, table: str, key: str, value: str) -> Row:
        """The row with an id; ToolError if there is none."""
        for row in self.tables[table]:
            if row[key] == value:
                return row
        raise ToolError(f"there is no {key} {value}")

    def _field(self, table: str, key: str, value: str, field: str) -> str:
        row = self._row(table, key, value)
        if field not in row:
            raise ToolError(f"there is no field {field}; fields: {', '.join(row)}")
        return row[field]

    def _update(self, table: str, key: str, value: str, field: str, new_value: str) -> None:
        row = self._row(table, key, value)
        if field not in row or field == key:
            raise ToolError(f"{field} cannot be changed; fields: {', '.join(name for name in row if name != key)}")
        if field in _CHOICES:
            _check_choice(field, new_value, _CHOICES[field])
        if field in ("assigned_to_email", "participant_email"):
            _check_address(new_value)
            new_value = new_value.lower()
        row[field] = new_value

    def _next_id(self, table: str, key: str) -> str:
        return f"{max((int(row[key]) for row in self.tables[table]), default=0) + 1:03d}"

    def _matching(self, table: str, parts: Row) -> list[Row]:
        """Rows that hold all of `parts` in their columns, without case; an empty part fits every row."""
        return [
            row
            for row in self.tables[table]
            if all(part.lower() in row[column].lower() for column, part in parts.items())
        ]

    def _visits(self, time_min: str, time_max: str) -> list[Row]:
        return [row for row in self.tables["visits"] if _between(row["date_of_visit"], time_min, time_max)]


@cache
def tool_names() -> tuple[str, ...]:
    """The 27 tools."""
    return tuple(name for name in vars(Workplace) if not name.startswith("_") and name not in ("call", "state"))


@cache
def tool_definition(name: str, optional: bool = True) -> dict[str, Any]:
    """A tool as chat templates list it: name, description, and its parameters as a JSON schema.

    Without `optional`, which makes prompts short, parameters that a call may leave out are not listed, nor is what is
    required; of a tool that needs none the first is.
    """
    method = getattr(Workplace, name)
    _, *parameters = inspect.signature(method).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    listed = [parameter.name for parameter in parameters] if optional else required or [parameters[0].name]
    schema: dict[str, Any] = {"type": "object", "properties": {key: {"type": "string"} for key in listed}}
    if optional and required:
        schema["required"] = required
    return {"name": name, "description": inspect.getdoc(method), "parameters": schema}


def _as_text(key: str, value: Any) -> str:
    """An argument as text. A number is its digits, so that an id written as one has lost its zeros."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ToolError(f"{key} must be text")
    return str(value)


def _between(value: str, low: str, high: str) -> bool:
    """Whether a day or time is within bounds, which are days, times or empty; a day as upper bound is included."""
    return (not low or value >= low) and (not high or value[: len(high)] <= high)


def _short(rows: list[Row], *columns: str) -> list[Row]:
    """What a search shows: some columns of the first rows. ToolError where there are none."""
    if not rows:
        raise ToolError("nothing was found")
    return [{column: row[column] for column in columns} for row in rows[:MAX_RESULTS]]


def _by_day(rows: list[Row]) -> dict[str, int]:
    days = dict.fromkeys((row["date_of_visit"] for row in rows), 0)
    for row in rows:
        days[row["date_of_visit"]] += 1
    return days


def _check_address(address: str) -> None:
    if "@" not in address or "." not in address:
        raise ToolError(f"{address} is not an email address")


def _check_duration(duration: str) -> None:
    if not (duration.isascii() and duration.isdigit() and duration.strip("0") and len(duration) <= 6):
        raise ToolError("duration must be a number of minutes above 0")


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ToolError(f"{key} must be one of {', '.join(choices)}")
