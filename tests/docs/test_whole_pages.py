"""The commands of a page, one after another as they stand, trained to the end: what a reader would do, in some hours.

`tests/test_commands_in_docs.py` tries the same commands in seconds, as dry runs. Here a page begins after the demo, in
a folder with what a reader would have there; what it leaves is there for the next page. Only `make test-all` runs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry

ROOT = Path(__file__).resolve().parents[2]
SHELL_BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What is said once for the lines that follow on its page.
SETTING = re.compile(r"(?:export|cd) ")
# What is left out -> why, or which test does it.
NOT_DONE = {
    r"pip |make |source |enroot |srun ": "tests/test_installation_lines.py, or an engine",
    r"python -m pytest": "the suite",
    r"nemotron (serve|env serve|runs watch|artifacts watch)|gym |vf-eval|nemo-eval|lm-eval run|TASKS=": (
        "does not end, or asks what does not: test_serve.py, tests/ecosystem"
    ),
    r".*(\btheirs\b|GYM_URL)": "asks a server: tests/examples",
    r"nemotron data curate rephrase": "asks a server: test_scripts.py of curation",
    r"cd examples/ecosystem/gym|export PYTHONPATH=examples/ecosystem": "for another program, tests/ecosystem",
    r".* (--run|--batch)\b": "submits: tests/cluster",
    r".*(-c|model|data)[ -](small|default|published|base|judged|long_context|phase2|lora)\b": (
        "the published size, or a GPU"
    ),
    r".*(hf://|arc_easy)": "asks the Hub",
    r".*(wandb_project|rollout_workers)": "an extra: tests/nemotron/kit/test_trackers.py, tests/cluster",
    r".*bench research(?!.*--budget 60)": "five minutes a seed, by examples/research/program.md",
    r"automodel|data-designer|docker|ray |nemo-runspec run": "another program's, or a schema",
    r".*(\b(NAME|CONFIG|FAMILY|MODEL|STEP)\b|\.\./my-data)": "a schema",
}
# In the order in which a reader needs them, after one command.
PAGES = {
    "nemotron nano3 pipe -c tiny": [  # make demo; its bands hold
        "README.md",
        *(f"docs/guides/{name}.md" for name in ("own-text", "own-conversations", "environments", "evaluation")),
        "docs/guides/publish.md",
        "src/nemotron/recipes/nano3/README.md",
        "src/nemotron/recipes/super3/README.md",
        "docs/guides/quantization.md",
        "docs/guides/research.md",
        "docs/questions.md",
        "docs/guides/runs-and-artifacts.md",
        "docs/architecture/model.md",
        "docs/guides/ecosystem.md",  # writes other records into chats.jsonl and tasks.jsonl
    ],
    "true": [
        "docs/tutorial.md",
        "src/nemotron/recipes/nano2/README.md",
        "src/nemotron/recipes/lightning35/README.md",
        "src/nemotron/recipes/data/curation/nemotron_cc/README.md",
    ],
}
pytestmark = [pytest.mark.whole, pytest.mark.timeout(3 * 3600)]


class Reader:
    """Somebody with a clone, in a folder with files of their own, who does what a page says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("src", "examples"):  # some pages work in there
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        self._write_files()

    def _write_files(self) -> None:
        plots = range(400)
        told = "In plot {} of the garden they planted {} rows of beans, most of which came up before the rain in May."
        asked = [(f"How many rows of beans are in plot {plot}?", f"{plot % 9 + 1} rows") for plot in plots]
        chats = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            | {"difficulty": "hard" if plot % 5 == 0 else "easy"}
            for plot, (question, answer) in zip(plots, asked, strict=True)
        ]
        records = {
            "my-folder/garden.jsonl": [{"text": told.format(plot, plot % 9 + 1) * 4} for plot in plots],
            "more.jsonl": [{"text": told.format(plot, plot % 9 + 1)} for plot in plots],
            "chats.jsonl": chats,
            "quiz.jsonl": [{"question": question, "answer": answer} for question, answer in asked[:20]],
            "pairs.jsonl": [
                {"prompt": question, "chosen": answer, "rejected": "I do not know."} for question, answer in asked
            ],
            "comparisons.jsonl": [
                {"prompt": question, "response_1": answer, "response_2": "None.", "preference": 1}
                for question, answer in asked
            ],
            "passages.jsonl": [
                {"passage": told.format(plot, plot % 9 + 1), "question": question, "answer": answer}
                for plot, (question, answer) in zip(plots, asked, strict=True)
            ],
            "tasks.jsonl": [{"question": f"What is {plot} + 2?", "answer": str(plot + 2)} for plot in plots],
        }
        for name, lines in records.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (self.root / "chats.json").write_text(json.dumps(chats))
        crawl = ROOT / "src/nemotron/recipes/data/curation/nemotron_cc/demo_crawl/warc"
        shutil.copytree(crawl, self.root / "my-crawl")
        page = (ROOT / "docs/guides/environments.md").read_text(encoding="utf-8")
        (self.root / "halves.py").write_text(page.split("`halves.py`, new:\n\n```python\n")[1].split("```")[0])

    def run(self, command: str) -> str | None:
        """Run a command line; what is wrong, where it fails."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNSPEC_")}
        environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}
        asked = f"{command} <<< 'What is 728+654?'" if re.fullmatch(r".* chat [^\"]*", command) else command
        done = subprocess.run(
            ["bash", "-ceo", "pipefail", asked],
            cwd=self.root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return f"{command}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}" if done.returncode else None

    def read(self, page: str) -> list[str]:
        """Do what a page says, a command that it repeats once; what went wrong."""
        wrong: list[str] = []
        settings: list[str] = []
        done: set[str] = set()
        for block in SHELL_BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            for line in re.sub(r" *\\\n\s*", " ", block).splitlines():
                command = re.split(r"(?:^|\s+)# ", line, maxsplit=1)[0].strip()
                if not command or any(re.match(pattern, command) for pattern in NOT_DONE):
                    continue
                if SETTING.match(command):
                    settings.append(command)
                elif (whole := "\n".join([*settings, command])) not in done:
                    done.add(whole)
                    self.prepare(command)
                    wrong += filter(None, [self.run(whole)])
        return wrong

    def prepare(self, command: str) -> None:
        """What a page expects from an earlier one, or from the reader."""
        if exported := re.search(r" export .* -o (\S+)", command):  # which replaces nothing
            shutil.rmtree(self.root / exported[1], ignore_errors=True)
        made = Registry(self.root / "output" / "artifacts")
        if "my-model" in command and "export" not in command and not (self.root / "my-model").exists():
            assert not self.run("nemotron nano3 model export nano3-rl-model-tiny -o my-model")
        if "./checkpoints/LATEST" in command:  # AutoModel's
            self.prepare("my-model")
            shutil.copytree(self.root / "my-model", self.root / "checkpoints/LATEST/model/consolidated")
        if "answer__reasoning_content" in command:  # Data Designer's
            reasoning = {"answer__reasoning_content": "Two more than that."}
            records = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} | reasoning for n in range(400)]
            (self.root / "chats.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        if "my-tokenizer" in command and not (self.root / "my-tokenizer").exists():
            shutil.copytree(made.resolve("nano3-pretrain-data-tiny").path / "tokenizer", self.root / "my-tokenizer")


@pytest.fixture(scope="module")
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """In a new folder, after the command."""
    reader = Reader(tmp_path_factory.mktemp("reader"))
    assert reader.run(request.param) is None
    return reader


@pytest.mark.parametrize(
    ("reader", "page"), [(first, page) for first, pages in PAGES.items() for page in pages], indirect=["reader"]
)
def test_a_page_done_whole(page: str, reader: Reader) -> None:
    assert reader.read(page) == []
