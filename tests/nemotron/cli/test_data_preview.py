"""`data preview`: what it shows of conversations and of packed rows, with and without colours, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.chat.encoding import PACKED_SCHEMA, encode_conversations
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import SFTPack
from nemotron.recipes.tools import data_preview

ROOT = Path(__file__).resolve().parents[3]
Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[[str], str]
SAID = {"role": "assistant", "content": "It is 4, é.", "reasoning_content": "two and two"}
MESSAGES = [{"role": "user", "content": "2+2?"}, SAID, {"role": "user", "content": "Sure?"}, SAID]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([json.dumps(MESSAGES)] * 5, 300), folder, model_max_length=512, template="nano3")
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    bad = {"messages": [{"role": "user", "content": "no answer"}]}
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in ({"messages": MESSAGES}, bad, {"talk": MESSAGES[:2]}))
    )
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    return path


def test_trained_text_is_marked(here: Nemotron, tokenizer: Path, chats: Path) -> None:
    done = here(f"data preview {chats} --tokenizer {tokenizer} -n 2")
    assert done.returncode == 0, done.stderr
    titles = re.findall(r"^=== (.*) ===$", done.stdout, re.MULTILINE)
    assert [title.removeprefix(str(chats)).partition(": ")[0] for title in titles] == [
        ":1, sequence 1 of 2",
        ":1, sequence 2 of 2",
    ]
    shown = done.stdout.split(" ===\n")[1:]
    asked = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert shown[0].startswith(f"{asked}<think>\n{{+two and two\n</think>\nIt is 4, é.<|im_end|>+}}\n\n\n")
    assert shown[1].startswith(f"{asked}<think></think>\nIt is 4, é.<|im_end|>\n<|im_start|>user\nSure?")
    assert "\x1b" not in done.stdout


def test_a_record_that_cannot_be_trained_on_says_why(here: Nemotron, tokenizer: Path, chats: Path) -> None:
    done = here(f"data preview {chats} --tokenizer {tokenizer} -n 9")
    assert "chats.jsonl:2: no assistant turn" in done.stderr and "chats.jsonl:3: " in done.stderr
    with chats.open("a") as file:
        said = {**SAID, "content": "<|im_end|>"}
        file.writelines(json.dumps({"messages": [MESSAGES[0], turn]}) + "\n" for turn in (said, *[SAID] * 9))
    done = here(f"data preview {chats} --tokenizer {tokenizer} -n 3")  # and before it is asked for more
    assert "chats.jsonl:3: " in done.stderr and "chats.jsonl:5, " not in done.stdout
    assert "chats.jsonl:4: control token in a message: <|im_end|>, of nano3\n" in done.stderr
    documents = chats.with_name("documents.jsonl")
    documents.write_text('{"text": "x"}\n' * 30)
    done = here(f"data preview {documents} --tokenizer {tokenizer}")
    assert done.returncode == 2 and done.stderr.count("no conversation in it: its fields are 'text'") == 5
    assert "documents.jsonl: 0 records read; not read: 30 no conversation in it\n" in done.stderr
    renamed = here(f"data preview {chats} --tokenizer {tokenizer} -n 1 --columns=messages=talk")
    assert renamed.stdout.startswith(f"=== {chats}:3: ")
    own = chats.with_name("own.jinja")  # refuses what a family's takes; the next record is shown
    own.write_text(
        "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    records = ({"messages": [*MESSAGES[:1] * number, SAID]} for number in (2, 1))
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = here(f"data preview {chats} --tokenizer {tokenizer} --template {own}")
    assert done.returncode == 0 and done.stdout.startswith(f"=== {chats}:2: ")
    assert re.search(r"chats.jsonl:1: .*roles must alternate", done.stderr)


def write_rows(conversations: list[Conversation], tokenizer: Path, a_row: int, path: Path) -> int:
    """Pack so many conversations a row; returns the tokens of the first one."""
    encoded = encode_conversations(conversations, Tokenizer.from_file(str(tokenizer / "tokenizer.json")), "nano3")
    rows = []
    for first in range(0, len(encoded), a_row):
        ids, masks = zip(*encoded[first : first + a_row], strict=True)
        starts = np.cumsum([0, *map(len, ids[:-1])])
        arrays = (np.concatenate(ids), np.concatenate(masks), starts)
        rows.append(dict(zip(PACKED_SCHEMA.names, (array.tolist() for array in arrays), strict=True)))
    pq.write_table(pa.Table.from_pylist(rows, schema=PACKED_SCHEMA), path)
    return len(encoded[0][0])


def test_packed_rows_and_their_artifact(
    here: Nemotron, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = tmp_path / "payload"
    payload.mkdir()
    conversations = [Conversation("x", [{"role": "user", "content": str(i)}, SAID], "train") for i in range(6)]
    length = write_rows(conversations, tokenizer, 2, payload / "train.parquet")
    by_file = here(f"data preview {payload / 'train.parquet'} --tokenizer {tokenizer} --skip 1 -n 1")
    assert by_file.stdout.startswith("=== train.parquet row 1: 2 sequences: "), by_file.stderr
    assert by_file.stdout.count("{+two and two") == 2
    border = re.search(r"\n--- sequence at (\d+) ---\n<\|im_start\|>system", by_file.stdout)
    assert border and int(border[1]) == length
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "registry"))
    SFTPack(
        path=payload,
        num_examples=6,
        train_path=payload / "train.parquet",
        tokenizer_path=tokenizer,
        seq_len=999,
        chat_template="nano3",
    ).save("my-pack")
    by_name = here("data preview my-pack -n 9", RUNSPEC_ARTIFACTS_ROOT=str(tmp_path / "registry"))
    assert by_name.returncode == 0, by_name.stderr
    assert by_name.stdout.count("{+two and two") == 6
    # Another tokenizer would show another text.
    other = tmp_path / "other.json"
    other.write_text((tokenizer / "tokenizer.json").read_text().replace('"<pad>"', '"<nil>"'))
    refused = here(f"data preview my-pack --tokenizer {other}", RUNSPEC_ARTIFACTS_ROOT=str(tmp_path / "registry"))
    assert refused.returncode == 2 and "my-pack:1 was packed with another tokenizer than" in refused.stderr
    # The tokenizer of an artifact, for what has none; of a row not more than was asked for.
    line = f"data preview {payload / 'train.parquet'} --tokenizer my-pack --sequences 1"
    some = here(line, RUNSPEC_ARTIFACTS_ROOT=str(tmp_path / "registry"))
    assert some.returncode == 0, some.stderr
    assert some.stdout.count("{+two and two") == 3 == some.stdout.count(": 2 sequences: ")
    assert some.stdout.count("\n… 1 more sequences in this row; --sequences=2 shows all\n") == 3


def test_the_weight_of_a_sequence_is_shown_where_one_is_not_1(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def title(masks: list[list[float]]) -> str:
        rows = {"input_ids": [[5] * 9], "loss_mask": [[*masks[0], *masks[1]]], "seq_start_id": [[0, 4]]}
        kinds = (pa.int32(), pa.float32(), pa.int32())
        schema = pa.schema([(name, pa.list_(kind)) for name, kind in zip(rows, kinds, strict=True)])
        pq.write_table(pa.table(rows, schema=schema), tmp_path / "rows.parquet")
        data_preview.main(
            data_preview.Options(str(tmp_path / "rows.parquet"), 1, 0, 3, "nano3", str(tokenizer), None, False)
        )
        return capsys.readouterr().out.splitlines()[0]

    plain = "=== rows.parquet row 0: 2 sequences: 9 tokens, 3 of them trained"
    assert title([[0, 0, 2, 0], [0, 0, 0.5, 0.5, 0]]) == f"{plain}, loss weight 2, 0.5 ==="
    assert title([[0, 0, 1, 0], [0, 0, 1, 1, 0]]) == f"{plain} ==="


def test_ids(here: Nemotron, tokenizer: Path, chats: Path) -> None:
    done = here(f"data preview {chats} --tokenizer {tokenizer} -n 1 --ids")
    ids = [int(number) for number in re.findall(r"\[(\d+)\]", done.stdout)]
    text = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    assert "<|im_start|>user\n2+2?<|im_end|>" in text and "é" in text


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_only_on_a_terminal_that_wants_them(no_color: bool, tokenizer: Path, chats: Path) -> None:
    code = "from nemotron.cli.main import main; main()"
    words = [sys.executable, "-c", code, "data", "preview", str(chats), f"--tokenizer={tokenizer}", "-n1"]
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), **({"NO_COLOR": "1"} if no_color else {})}
    ours, theirs = pty.openpty()
    with subprocess.Popen(words, stdout=theirs, stdin=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the end, on Linux
                break
            if not part:
                break
            written += part
    os.close(ours)
    assert process.returncode == 0
    text = written.decode().replace("\r\n", "\n")
    if no_color:
        assert "\x1b" not in text and "{+two and two" in text
        return
    assert "{+" not in text
    green = "".join(re.findall(r"\x1b\[30;(?:42|102)m([^\x1b]*)", text))
    assert green == "two and two\\n\n</think>\\nIt is 4, é.<|im_end|>".replace("\\n\n", "\\n")
    assert re.sub(r"\x1b\[[\d;]*m", "", text).startswith(f"=== {chats}:1, sequence 1 of 2: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "preview of what?"),
        ("chats.jsonl", "which tokenizer? give --tokenizer=FOLDER"),
        ("chats.jsonl --tokenizer nano3-pretrain-data-tiny", "make it: nemotron nano3 data prep pretrain -c tiny"),
        ("chats.json --tokenizer {tokenizer}", "no file, folder or artifact 'chats.json'\ndid you mean chats.jsonl?"),
        ("chats.jsonl --template supr3", "unknown chat template 'supr3', did you mean 'super3'?"),
        (
            "chats.jsonl --template nano2 --tokenizer {tokenizer}",
            "has no token <SPECIAL_10>, which chat_template nano2 needs",
        ),
        ("chats.jsonl --tokenizer {tokenizer} --skip 50", "nothing to show after the first 50"),
        ("chats.jsonl --tokenizer {tokenizer} --columns=message=x", "write FIELD=COLUMN, as messages=talk"),
        ("gone.jsonl --tokenizer {tokenizer}", "gone.jsonl is a link to nowhere, and nothing is there"),
        ("nano3-sft-data-tiny", "no artifact 'nano3-sft-data-tiny'"),
    ],
)
def test_a_mistake_is_refused(words: str, message: str, refused: Refused, tokenizer: Path, chats: Path) -> None:
    said = refused(f"data preview {words.format(tokenizer=tokenizer)}")
    assert message in said and "Traceback" not in said
