"""A chat template of the user's own, or of a tokenizer's folder: by path, sandboxed, with or without marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.kit.chat import control_tokens, generation_prompt, render, render_with_mask
from nemotron.kit.chat_records import normalize_messages
from nemotron.kit.chat_template import has_template, load_template, stop_tokens
from nemotron.kit.chat_templates import TEMPLATES

RELEASED = json.loads((Path(__file__).parent / "released_templates.json").read_text(encoding="utf-8"))
"""What the released templates of the Nemotron 3 family print, and their assistant mask, by transformers: see `source`.
Of the declaration of tools without the prose around it, which is this project's own."""
NANO2 = json.loads((Path(__file__).parent / "released_template_nano2.json").read_text(encoding="utf-8"))
"""The same of the released template of Nano 2, from its model card. Where ours has another text, `ours` and `why`."""
OWN = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "{% generation %}4"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer's folder with the template `OWN`."""
    config = {"bos_token": {"content": "<s>"}, "chat_template": OWN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def test_template_of_a_tokenizer_with_its_tokens(folder: Path) -> None:
    template = str(folder)
    assert render_with_mask(TALK, template=template) == [
        ("<s><|user|>\n2+2?<|end|><|assistant|>\n", False),
        ("{% generation %}4<|end|>", True),  # what a message says is text
    ]
    assert generation_prompt(template=template) == "<|assistant|>\n"
    assert load_template(template).stop == "<|end|>"
    roles = ("<|assistant|>", "<|end|>", "<|system|>", "<|user|>")
    assert control_tokens(template) == (*roles, "<s>", "</s>", "<pad>")
    (folder / "chat_template.jinja").write_text("{{ messages | length }}", encoding="utf-8")
    load_template.cache_clear()
    assert render(TALK, template=template) == "2"  # the file of its own comes first, as in transformers
    assert load_template(template).source == "{{ messages | length }}"


def test_template_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN, encoding="utf-8")
    assert render(TALK[:1], template=str(file), add_generation_prompt=True) == "<|user|>\n2+2?<|end|><|assistant|>\n"
    with pytest.raises(UserError, match=r"own\.jinja has no switch enable_thinking"):
        render(TALK, template=str(file), enable_thinking=False)


def test_what_a_template_keeps_of_earlier_turns(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN, encoding="utf-8")
    kept = {name: load_template(name) for name in (*TEMPLATES, str(tmp_path / "own.jinja"))}
    own = str(tmp_path / "own.jinja")
    assert [name for name, form in kept.items() if not form.keeps_turns] == ["nano2"]
    assert [name for name, form in kept.items() if form.keeps_reasoning] == [own]
    stops = dict.fromkeys(TEMPLATES, "<|im_end|>") | {"nano2": "<SPECIAL_12>", own: "<|end|>"}
    assert {name: form.stop for name, form in kept.items()} == stops


UNMARKED = OWN.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize(
    ("template", "source", "eos_token", "expected"),
    [
        ("nano3", None, None, ("<|im_end|>", "</s>")),  # a tokenizer that says nothing
        ("nano2", OWN, "<SPECIAL_12>", ("<SPECIAL_12>",)),
        ("own", OWN, {"content": "<eos>"}, ("<|end|>", "<eos>")),
        ("own", UNMARKED, "<eos>", ("<|end|>", "<eos>")),
        ("own", "{{ messages[-1].content }}", "<eos>", ("<eos>",)),  # nothing ends a turn
        (None, OWN, "<eos>", ("<|end|>", "<eos>")),  # plain text: the tokenizer's own template
        (None, "{{ raise_exception('no') }}", "<eos>", ("<eos>",)),
        (None, None, "<eos>", ("<eos>",)),
    ],
)
def test_what_ends_a_response(
    template: str | None, source: str | None, eos_token: Any, expected: tuple[str, ...], tmp_path: Path
) -> None:
    config = {"eos_token": eos_token} if eos_token else {}
    config |= {"chat_template": source} if source else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert stop_tokens(tmp_path, str(tmp_path) if template == "own" else template) == expected


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% if x %}", "own.jinja, line 1: Unexpected end of template"),
        ("{{ raise_exception('no system turn') }}", "own.jinja: no system turn"),
        ("{{ messages.__class__.__mro__ }}", "own.jinja: access to attribute '__class__' of 'list' object is unsafe"),
        ("{{ messages.append(1) }}", "own.jinja: access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 1 + 'x' }}", "own.jinja: unsupported operand"),
        ("{{ 1 // 0 }}", "own.jinja: integer division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "own.jinja: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "own.jinja: maximum recursion depth"),
    ],
)
def test_a_template_that_fails_is_refused(source: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(UserError, match=complaint):
        render(TALK, template=str(tmp_path / "own.jinja"))


def test_a_template_gets_what_an_inference_engine_gives_it(tmp_path: Path) -> None:
    """Tools in their envelope, the ids of calls, and the arguments of `tojson` that transformers has."""
    (tmp_path / "own.jinja").write_text(
        "{{ tools[0].function.name }} {{ messages[1].tool_calls[0].id }} "
        "{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    )
    call = {"id": "abc", "type": "function", "function": {"name": "é", "arguments": {}}}
    talk = normalize_messages([TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}])
    text = render(talk, tools=[{"name": "é", "description": "x"}], template=str(tmp_path / "own.jinja"))
    assert text == 'é abc [{"function":{"description":"x","name":"\\u00e9"},"type":"function"}]'


def test_a_template_that_is_null_is_none(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"chat_template": null}')
    assert not has_template(tmp_path)
    settings.write_text('{"chat_template": "{{ messages }}"}')
    assert has_template(tmp_path)


def test_the_mask_of_a_template_without_marks_follows_from_its_prompts(tmp_path: Path) -> None:
    """As a tokenizer of the Hub has it: {% generation %} is unknown there, the prompt for an answer is not."""
    (tmp_path / "own.jinja").write_text(UNMARKED, encoding="utf-8")
    form = load_template(str(tmp_path / "own.jinja"))
    talk = [*TALK, {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    assert form.segments(talk) == [
        ("<|user|>\n2+2?<|end|><|assistant|>\n", False),
        ("{% generation %}4<|end|>", True),
        ("\n<|user|>\n3+3?<|end|><|assistant|>\n", False),
        ("6<|end|>", True),
        ("\n", False),
    ]
    assert (form.keeps_turns, form.keeps_reasoning, form.stop) == (True, True, "<|end|>")
    assert "".join(text for text, _ in form.segments(talk, add_generation_prompt=True)).endswith("<|assistant|>\n")
    first = [talk[0], {**talk[1], "weight": 0}, *talk[2:]]
    assert [text for text, trained in render_with_mask(first, template=form.name) if trained] == ["6<|end|>"]


def test_a_template_that_is_missing_or_shows_no_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jinja cannot be read"):
        load_template(str(tmp_path / "none.jinja"))
    with pytest.raises(UserError, match="the tokenizer there has none"):
        load_template(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}", encoding="utf-8")
    with pytest.raises(UserError, match="does not show what the model writes") as raised:
        _ = load_template(str(tmp_path)).keeps_turns
    assert raised.value.hint is not None and "{% generation %}" in raised.value.hint


TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>\n"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = "<|{{ m.role }}|>{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
OTHERS = "{% if m.role == 'user' %}" + TURN + "{% else %}" + MARKED + "{% endif %}"
TAIL = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% else %}"
    + TURN
    + "{% endif %}"
)


def over(turn: str) -> str:
    return f"{{% for m in messages %}}{turn}{{% endfor %}}"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ messages }}", "does not show what the model writes"),
        (over("{{ m | tojson }}\n"), "opens an answer by .* but no prompt for an answer does"),
        (over(TURN), "opens an answer by '<|assistant|>', but no prompt for an answer does"),
        ("{% generation %}{{ messages | tojson }}{% endgeneration %}", "also trains what the user says"),
        (over(MARKED) + PROMPT, "also trains what the user says"),
        (over(OTHERS) + PROMPT, "also trains what the system says"),
        (over(OTHERS.replace("== 'user'", "in ['user', 'system']")) + PROMPT, "also trains what the tool says"),
        (over(TAIL) + PROMPT, "nothing that is trained ends an answer"),
        (
            over("{{ m.role }}: {{ m.content }}\n") + "{% if add_generation_prompt %}assistant: {% endif %}",
            "ends an answer",
        ),
        (over("<|{{ m.role }}|>{{ m.text }}<|end|>") + PROMPT, "does not show what the model writes"),
    ],
)
def test_a_template_whose_mask_would_be_wrong_is_refused(source: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(UserError, match=complaint.replace("|", r"\|")) as raised:
        load_template(str(tmp_path / "own.jinja")).check_mask()
    assert raised.value.hint


@pytest.mark.parametrize(
    "source",
    [
        OWN,
        UNMARKED,
        over(TURN) + PROMPT,
        # Neither a system turn nor a prompt for an answer: that of Mistral.
        over(
            "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}"
            "</s>{% else %}{{ raise_exception('roles alternate') }}{% endif %}"
        ),
        # The whole turn is marked, its header as well, as some published ones do.
        over(
            "{% if m.role == 'assistant' %}{% generation %}"
            + TURN
            + "{% endgeneration %}{% else %}"
            + TURN
            + "{% endif %}"
        )
        + PROMPT,
    ],
)
def test_a_template_whose_mask_is_right_is_taken(source: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(source, encoding="utf-8")
    load_template(str(tmp_path / "own.jinja")).check_mask()


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_masks_of_the_families_are_right(template: str) -> None:
    load_template(template).check_mask()


@pytest.mark.parametrize("case", RELEASED["cases"], ids=[case["about"] for case in RELEASED["cases"]])
def test_the_family_is_rendered_as_released_to_the_character(case: dict[str, Any]) -> None:
    messages, template = case["messages"], load_template(case["template"])
    variables = {"tools": case["tools"], "enable_thinking": True, "add_generation_prompt": False} | case["options"]
    assert _without_prose(template.segments(messages, **variables)) == case["text"]
    # The released mask has all of every turn: here without the prompt, the line break behind the turn, earlier turns
    # whose reasoning was dropped, and turns that no prompt opens (one of the two tags alone, in the content).
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if not case["options"].get("truncate_history_thinking", True):
        last_user = -1
    turns = [(i, message) for i, message in enumerate(messages) if message["role"] == "assistant"]
    expected = [
        whole.removeprefix("<think></think>").removeprefix("<think>\n").removesuffix("\n")
        for (i, message), whole in zip(turns, case["assistant"], strict=True)
        if whole.startswith(("<think></think>", "<think>\n"))
        and (i > last_user or not ((message.get("reasoning_content") or "").strip() or "think>" in message["content"]))
    ]
    segments = template.segments(messages, **variables | {"add_generation_prompt": False})
    assert [part for part, trained in segments if trained] == expected


@pytest.mark.parametrize("case", NANO2["cases"], ids=[case["about"] for case in NANO2["cases"]])
def test_nano2_is_rendered_as_released_to_the_character(case: dict[str, Any]) -> None:
    expected = case.get("ours", case["text"])
    assert (expected != case["text"]) == ("why" in case)
    template = load_template("nano2")
    variables = {"tools": case["tools"], "add_generation_prompt": False} | case["options"]
    # As an inference engine gives the messages, reasoning in the text of an answer, and as data preparation reads them.
    for messages in (case["messages"], normalize_messages(case["messages"])):
        segments = template.segments(messages, **variables)
        assert _without_prose_of_nano2("".join(part for part, _ in segments)) == expected
        # What the model writes is all of the last turn behind the prompt for it, to the token that ends it.
        is_answer = messages[-1]["role"] == "assistant" and not variables["add_generation_prompt"]
        turn = expected.rpartition("<SPECIAL_11>Assistant\n")[2].removesuffix("\n")
        written = turn.removeprefix("<think></think>").removeprefix("<think>\n")
        assert [part for part, trained in segments if trained] == ([written] if is_answer else [])


def _without_prose_of_nano2(text: str) -> str:
    """Without the two sentences around the declared tools, each of which the templates word in their own way."""
    before, tag, rest = text.partition("\n<AVAILABLE_TOOLS>")
    declared, end, rest = rest.partition("</AVAILABLE_TOOLS>\n")
    if not tag:
        return text
    system, turns = before.rpartition("\n")[0], rest.partition("\n<SPECIAL_11>")[2]
    return f"{system}{tag}{declared}{end}<SPECIAL_11>{turns}"


def _without_prose(segments: list[tuple[str, bool]]) -> str:
    text = "".join(part for part, _ in segments)
    if "# Tools\n\n" not in text:
        return text
    before, _, rest = text.partition("# Tools\n\n")
    declared, _, rest = rest.partition("<tools>\n")[2].partition("</tools>")
    return f"{before}<tools>\n{declared}</tools><|im_end|>{rest.partition('<|im_end|>')[2]}"
