"""Names of the fields in which records of conversations come; `kit/chat_records.py` reads them."""

from __future__ import annotations

TURNS = ("messages", "conversations", "conversation")
"""A list of turns."""
QUESTION_AND_ANSWER = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "chosen"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("question", "chosen"),
    ("query", "response"),
)
REASONING = ("reasoning_content", "reasoning", "thinking")
CONVERSATION = tuple(dict.fromkeys((*TURNS, *(name for pair in QUESTION_AND_ANSWER for name in pair))))
"""All that say where the conversation is."""
TEXT = "text"
"""In the place of a conversation: plain text, every token of which is trained. Only where `columns` names it."""
ABOUT_IT = ("input", "history", "system", "system_prompt", *REASONING, "tools", "loss_weight", "category")
"""What is read beside it."""
