"""Documents from the standard library of the running interpreter: real, messy text that every machine has.

Two kinds: sources as code, and docstrings (with the language reference that `help()` prints) as prose. Only modules of
an allow-list are read: they exist in Python 3.11, 3.12 and 3.13, are pure Python, come with every distribution's basic
package, and hold no tests. The split into train and held-out goes by top-level module and is made *before* anything is
extracted, so that no function, docstring or licence header of a held-out module is ever trained on through a neighbour.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from nemotron.data_prep.sources.documents import Split

_MODULES = """
__future__ _collections_abc _compat_pickle _compression _markupbase _py_abc _pydecimal _pyio _sitebuiltins
_strptime _threading_local _weakrefset abc argparse ast asyncio base64 bdb bisect bz2 cProfile calendar cmd code
codecs codeop collections colorsys compileall concurrent configparser contextlib contextvars copy copyreg csv
ctypes curses dataclasses datetime dbm decimal difflib dis doctest email encodings enum filecmp fileinput fnmatch
fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http
imaplib importlib inspect io ipaddress json keyword linecache locale logging lzma mailbox mimetypes modulefinder
multiprocessing netrc ntpath nturl2path numbers opcode operator optparse os pathlib pdb pickle pickletools pkgutil
platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc pydoc_data queue quopri
random re reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil signal site smtplib socket
socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable sysconfig tabnanny tarfile
tempfile textwrap threading timeit token tokenize tomllib trace traceback tracemalloc tty types typing unittest
urllib uuid warnings wave weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
"""
MODULES: tuple[str, ...] = tuple(_MODULES.split())

# Held out as a fixed list, not by a hash: it covers the library's styles (parsing, numerics, networking, text, tools)
# and about 7 % of its bytes, and a hash over 160 modules of very unequal size would make that share a lottery.
_HELD_OUT = """
bisect calendar codeop configparser difflib fractions ftplib graphlib heapq imaplib mailbox optparse plistlib
queue sched shlex statistics textwrap wave zipapp
"""
HELD_OUT: frozenset[str] = frozenset(_HELD_OUT.split())

TOPICS = "pydoc_data.topics"  # the language reference, as one dictionary of texts

# Directories below an allowed module that hold tests or generated tables rather than written text.
SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """One source file of an allowed module: dotted `name`, `top` (its top-level module) and the split of the latter."""

    name: str
    top: str
    path: Path
    split: Split


def module_files(modules: tuple[str, ...] = MODULES, held_out: frozenset[str] = HELD_OUT) -> list[ModuleFile]:
    """Source files of the allow-list in the running interpreter, sorted by dotted name.

    A module that this installation lacks is left out; `digest` then differs, which is how a reader notices.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for top in sorted(modules):
        split: Split = "valid" if top in held_out else "train"
        if (single := root / f"{top}.py").is_file():
            files.append(ModuleFile(top, top, single, split))
        for path in sorted((root / top).rglob("*.py")):
            relative = path.relative_to(root)
            if SKIPPED_DIRECTORIES.isdisjoint(relative.parts):
                name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
                files.append(ModuleFile(name, top, path, split))
    return sorted(files, key=lambda file: file.name)


def digest(files: list[ModuleFile]) -> str:
    """sha256 over names, splits and contents: two interpreters with the same digest yield the same documents."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\x00{file.split}\x00".encode())
        total.update(hashlib.sha256(file.path.read_bytes()).digest())
    return total.hexdigest()


def code_documents(
    files: list[ModuleFile], max_chars: int = 8000, source: str = "stdlib_code"
) -> Iterator[dict[str, str]]:
    """Sources as code, cut between top-level statements so that a document has at most about `max_chars` characters.

    A single statement longer than that (a big class) stays whole: a cut inside would leave a meaningless indentation.
    """
    for file in files:
        if file.name != TOPICS:  # prose in a Python literal
            chunks = _cut_at_statements(file.path.read_text(encoding="utf-8"), max_chars)
            yield from _documents(file, chunks, source, "code")


def prose_documents(
    files: list[ModuleFile], max_chars: int = 4000, source: str = "stdlib_docs"
) -> Iterator[dict[str, str]]:
    """Docstrings as prose, and the language reference of `pydoc_data.topics`, in documents of about `max_chars`."""
    for file in files:
        tree = ast.parse(file.path.read_text(encoding="utf-8"))
        if file.name == TOPICS:
            chunks = _topic_sections(tree)
        else:
            chunks = _join_entries(_docstrings(tree, file.name), max_chars)
        yield from _documents(file, chunks, source, "prose")


def passages(documents: Iterable[Mapping[str, str]], max_chars: int = 4000) -> Iterator[tuple[str, str]]:
    """Text and split of what follows each blank line, in whole lines of up to `max_chars` characters together.

    Neighbours overlap: of few passages drawn at random hardly any do, so that 1 % of them is text enough to train on.
    """
    for document in documents:
        text = document["text"].removesuffix("\n") + "\n"
        for blank in re.finditer(r"\A|\n\n+", text):
            passage = text[blank.end() : blank.end() + max_chars + 1]
            yield passage.rpartition("\n")[0] or passage[:max_chars], document["split"]


def _documents(file: ModuleFile, texts: Iterator[str], source: str, kind: str) -> Iterator[dict[str, str]]:
    for number, text in enumerate(texts):
        name = f"{source}:{file.name}:{number}"
        yield {"id": name, "text": text, "source": source, "kind": kind, "split": file.split}


def _cut_at_statements(text: str, max_chars: int) -> Iterator[str]:
    lines = [line + "\n" for line in text.split("\n")]  # not splitlines(): it also cuts at form feeds, ast does not
    starts: list[int] = []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))]) - 1
        while first > 0 and lines[first - 1].lstrip().startswith("#"):  # a comment belongs to what follows it
            first -= 1
        starts.append(first)
    begin = 0
    for start, following in pairwise([*starts, len(lines)]):
        if start > begin and sum(map(len, lines[begin:following])) > max_chars:
            yield "".join(lines[begin:start])
            begin = start
    if begin < len(lines):
        yield "".join(lines[begin:])


def _docstrings(tree: ast.Module, module: str) -> Iterator[str]:
    """Module docstring, then every class, method and function that has one, in source order, under its signature."""
    if doc := ast.get_docstring(tree):
        yield f"{module}\n\n{doc}"

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = ast.get_docstring(node)
            if isinstance(node, ast.ClassDef):
                if doc:
                    yield f"class {prefix}{node.name}\n\n{doc}"
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif doc:
                yield f"{prefix}{node.name}({ast.unparse(node.args)})\n\n{doc}"

    yield from walk(tree.body, f"{module}.")


def _topic_sections(tree: ast.Module) -> Iterator[str]:
    """Sections of the language reference. Topics quote each other; as whole sections that is visible to curation."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for value in node.value.values:
                topic = inspect.cleandoc(ast.literal_eval(value))
                # A heading is a line underlined by a row of one of these characters.
                yield from re.split(r"\n(?=[^\n]+\n(?:\*{4,}|={4,}|-{4,}|\^{4,})\n)", topic)


def _join_entries(entries: Iterator[str], max_chars: int) -> Iterator[str]:
    pending: list[str] = []
    size = 0
    for entry in entries:
        if pending and size + len(entry) > max_chars:
            yield "\n\n".join(pending)
            pending, size = [], 0
        pending.append(entry.strip())
        size += len(entry)
    if pending:
        yield "\n\n".join(pending)
