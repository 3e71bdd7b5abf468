"""Conversations to try the packing with: a shop's assistant that adds up prices, with a tool for them or from memory.

One to three turns of the user; each answer has a trace of reasoning, and where the prices come from a tool there are
calls and responses between. Every conversation follows from the seed and its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRICES = {"apple": 2, "bread": 3, "cheese": 6, "egg": 1, "milk": 2, "rice": 4, "soup": 5, "tea": 7}
CITIES = ("Basel", "Cadiz", "Dover", "Essen", "Genoa", "Lyon", "Oslo", "Porto")
PRICE_TOOL = {
    "type": "function",
    "function": {
        "name": "get_price",
        "description": "Price of one piece of a product, in euros.",
        "parameters": {
            "type": "object",
            "properties": {"product": {"type": "string", "enum": sorted(PRICES)}},
            "required": ["product"],
        },
    },
}


def write_example(path: Path, num_conversations: int, seed: int) -> None:
    """Write conversations as JSON Lines, `messages` and `tools`; a file that is there stays as it is.

    It depends on the arguments only, and a run that goes on has to find the file that it began with.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in example_conversations(num_conversations, seed))
    aside.replace(path)


def example_conversations(num_conversations: int, seed: int) -> Iterator[dict[str, Any]]:
    """Records with `messages`, and `tools` in about half of them."""
    for number in range(num_conversations):
        rng = random.Random(f"{seed} {number}")
        with_tool = rng.random() < 0.5
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You add up prices in a shop in {rng.choice(CITIES)}."}
        ]
        total = 0
        for turn in range(rng.randint(1, 3)):
            product, count = rng.choice(sorted(PRICES)), rng.randint(1, 99)
            order = f"{count} {product}" if turn == 0 else f"and {count} {product}"
            messages.append({"role": "user", "content": f"{'What do I pay for ' if turn == 0 else ''}{order}?"})
            if with_tool:
                call = {"name": "get_price", "arguments": {"product": product}}
                thought = f"I need the price of {product}."
                messages += [
                    {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]},
                    {"role": "tool", "content": str(PRICES[product])},
                ]
            price = PRICES[product]
            thought = f"{count} times {price} is {count * price}"
            if turn:
                thought += f", and {total} and {count * price} is {total + count * price}"
            total += count * price
            messages.append({"role": "assistant", "content": f"{total} euros.", "reasoning_content": f"{thought}."})
        yield {"messages": messages, "tools": [PRICE_TOOL] if with_tool else None}
