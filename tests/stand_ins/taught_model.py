"""A model that answers as it was taught: for programs that ask it through a server, and for our own evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit.chat import render_with_mask
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.stack.environments import Task, answer_of, generate_tasks, prompt_messages, prompt_tools, to_messages
from nemotron.stack.environments.gym_server import record_of
from nemotron.stack.evaluation.model import evaluate_model
from nemotron.stack.models import NemotronH, NemotronHConfig

TEMPLATE = "nano3"
LIMIT = 64  # tokens of a response, reasoning included
# Of four tasks of a family: right, wrong, right, and a reasoning that fills the limit.
TAUGHT = [1.0, 0.0, 1.0, 0.0]
FAMILIES = ("math", "multiple_choice", "workplace_assistant")


def lesson(task: Task, number: int) -> list[dict[str, Any]]:
    """The conversation that is learnt of a task; its number decides how it ends."""
    if number == 1:
        return [*prompt_messages(task), {"role": "assistant", "reasoning_content": "is it", "content": "Nothing."}]
    if number == 3:
        reasoning = " and ".join(str(i) for i in range(60))
        return [*prompt_messages(task), {"role": "assistant", "reasoning_content": reasoning, "content": "Nothing."}]
    messages = to_messages(task)
    for message in messages:
        if message["role"] == "tool":  # as Gym's agent shows what a resources server answers
            message["content"] = json.dumps({"output": message["content"]})
    return messages


@dataclass
class Taught:
    """The model's folder, and the tasks of each family."""

    folder: Path
    tasks: dict[str, list[Task]]

    def write_records(self, family: str, path: Path) -> None:
        """As `nemotron env records` does."""
        path.write_text("".join(json.dumps(record_of(task)) + "\n" for task in self.tasks[family]), encoding="utf-8")

    def own_evaluation(self, tasks: list[Task]) -> tuple[list[float], list[str]]:
        """Of each task the greedy verdict and answer."""
        model = NemotronH.from_pretrained(self.folder)
        settings = ResponsesConfig(samples=0, max_new_tokens=LIMIT)
        known = evaluate_model(model, self.folder, tasks, settings, template=TEMPLATE)
        return known.greedy_T.tolist(), [answer_of(c.text, thinking=True) for c in known.greedy_completions]


def teach(folder: Path, others: Sequence[list[dict[str, Any]]] = ()) -> Taught:
    """Twelve conversations and `others` are learnt by heart, in ten seconds of a core; `folder` has the model."""
    tasks = {family: generate_tasks(family, "eval", len(TAUGHT)) for family in FAMILIES}
    lessons = [
        render_with_mask(lesson(task, number), tools=prompt_tools(task) or None, template=TEMPLATE)
        for family in FAMILIES
        for number, task in enumerate(tasks[family])
    ] + [render_with_mask(messages, template=TEMPLATE) for messages in others]
    tokenizer = train_tokenizer(["".join(text for text, _ in segments) for segments in lessons] * 5, 500)
    save_tokenizer(tokenizer, folder, model_max_length=1024, template=TEMPLATE)
    rows = [
        [
            (token, trained)
            for text, trained in segments
            for token in tokenizer.encode(text, add_special_tokens=False).ids
        ]
        for segments in lessons
    ]
    length = max(map(len, rows))
    tokens_BT = torch.tensor([[token for token, _ in row] + [0] * (length - len(row)) for row in rows])
    labels_BT = torch.tensor(
        [[token if trained else -100 for token, trained in row] + [-100] * (length - len(row)) for row in rows]
    )
    torch.manual_seed(0)
    model = NemotronH(
        NemotronHConfig(
            "M*", vocab_size=tokenizer.get_vocab_size(), hidden_size=64, mamba_num_heads=8, mamba_head_dim=16,
            ssm_state_size=16, n_groups=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(300):
        logits_BTV = model(tokens_BT).logits
        loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())  # mean over trained tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.01:
            break
    model.eval().save_pretrained(folder)
    return Taught(folder, tasks)
