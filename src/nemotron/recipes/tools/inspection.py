"""What is in a folder or file of data, whatever it is: documents, conversations, token streams, blends, packed rows.

`inspect` reads what it takes to say so and no more: all of a small thing, of a large one a sample, and then says that.
Counts come from indexes and footers where there are any.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, first_line
from nemo_runspec.user_files import expanded
from nemotron.data_prep.curation.step import StepTable
from nemotron.data_prep.sources.documents import SPLITS
from nemotron.data_prep.tokens.blend import BLEND_FILE
from nemotron.data_prep.tokens.indexed_dataset import IndexedDataset, IndexHeader, read_header
from nemotron.data_prep.tokens.mixture import MIXTURE_FILE
from nemotron.data_prep.work.shards import PLAN_FILE, RECEIPTS, Plan, Shard, restore
from nemotron.kit.metrics import read_metrics
from nemotron.kit.record_fields import REASONING, TURNS
from nemotron.kit.run import PUBLISHED_FILE, STATE_FILE, read_state
from nemotron.kit.runs import is_locked
from nemotron.recipes.tools.data_names import tokenizer_beside
from nemotron.recipes.tools.packed_rows import packed_files, read_rows

READ_ALL_BYTES = 16 * 2**20  # stored bytes below which every record is read
SAMPLE_FILES, SAMPLE_RECORDS = 16, 4096
SAMPLE_ROW_GROUPS = 8
SHOWN_CHARS = 240  # of a sample
_TEXTS = ("text", "html", "content")
_COUNTED = ("documents", "tokens", "bytes")
_MIXTURE = ("source", "documents", "tokens", "requested", "realised", "drawn", "epochs", "repeats")
_NO_TOKENIZER = "samples are token ids: no folder `tokenizer` that can be read lies beside the data or above it"

Table = list[dict[str, Any]]
Opened = TypeVar("Opened")


@dataclass
class Lengths:
    """How long things are. `bins`: (from, to, how many), `to` not included, each twice as wide as the one before."""

    of: str
    unit: str
    count: int
    mean: float
    least: int
    median: int
    most: int
    bins: list[tuple[int, int, int]]


@dataclass
class Report:
    """What was found. `read`: how much of it lengths, fields and samples are from. `tables`: title -> rows."""

    path: str
    kind: str
    counts: dict[str, int | float | str] = field(default_factory=dict)
    read: str = ""
    lengths: Lengths | None = None
    fields: Table = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)


def inspect(location: str, num_samples: int = 3, tokenizer_path: Path | None = None) -> Report:
    """Look at `location`: a file, a folder, a bin/idx prefix, a glob, an address of a store or of the Hub.

    Args:
        num_samples: documents, conversations or rows shown.
        tokenizer_path: decodes tokens; default: the folder `tokenizer` beside or above the data, if there is one.

    Raises:
        UserError: nothing there, or nothing that is read; a file that is damaged.
    """
    if "://" in location:
        return _documents(location, num_samples)
    path = expanded(location)
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    if (path / STATE_FILE).is_file():
        return _run(path, num_samples, tokenizer_path)
    tokenizer = _tokenizer_for(path, tokenizer_path)
    if Path(f"{path}.idx").is_file():
        return _streams(path, [path], num_samples, tokenizer)
    if (path / BLEND_FILE).is_file():
        return _with_plans(path, _blend(path, num_samples, tokenizer))
    if path.is_dir():
        prefixes = sorted(file.with_suffix("") for file in path.rglob("*.idx") if file.with_suffix(".bin").is_file())
        if prefixes:
            return _with_plans(path, _streams(path, prefixes, num_samples, tokenizer))
    packed = packed_files(path)
    if packed:
        return _with_plans(path, _packed(path, packed, num_samples, tokenizer))
    try:
        report = _documents(location, num_samples)
    except UserError:
        report = Report(str(path), "shards")
        if path.is_dir() and _plan_folders(path):  # begun, and nothing in it yet
            return _with_plans(path, report)
        raise
    return _with_plans(path, report)


# --- Token streams ----------------------------------------------------------------------------------------------------


def _open(prefix: Path, reader: Callable[[Path], Opened]) -> Opened:
    try:
        return reader(prefix)
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}: not a readable token stream: {error}") from error


def _sizes(prefix: Path) -> tuple[IndexHeader, int]:
    """What the index's header says, and the bytes of the tokens."""
    return read_header(prefix), prefix.with_name(prefix.name + ".bin").stat().st_size


def _streams(path: Path, prefixes: Sequence[Path], num_samples: int, tokenizer: Tokenizer | None) -> Report:
    """Streams by themselves. Counts are those of all, by the headers of their indexes, lengths of a sample of many."""
    report = Report(str(path), "token stream" if len(prefixes) == 1 else "token streams")
    sample = _spread(prefixes, SAMPLE_FILES)
    report.read = f"{len(sample)} of {len(prefixes)} streams"
    datasets = [_open(prefix, IndexedDataset) for prefix in sample]
    sizes = [_open(prefix, _sizes) for prefix in prefixes]
    report.counts = {
        "streams": len(prefixes),
        "bytes": sum(num_bytes for _, num_bytes in sizes),
        "documents": sum(header.num_documents for header, _ in sizes),
        "tokens": sum(num_bytes // header.dtype.itemsize for header, num_bytes in sizes),
        "token_type": ", ".join(sorted({header.dtype.name for header, _ in sizes})),
    }
    report.lengths = _lengths("documents", "tokens", [dataset.lengths for dataset in datasets])
    report.samples = _decoded(list(zip(sample, datasets, strict=True)), num_samples, tokenizer)
    report.notes += [_NO_TOKENIZER] * (tokenizer is None and bool(report.samples))
    return report


def _decoded(
    streams: Sequence[tuple[Path, IndexedDataset]], num_samples: int, tokenizer: Tokenizer | None
) -> list[dict[str, str]]:
    """Documents from all over the streams, as text; as ids where no tokenizer is at hand."""
    places = [(prefix, dataset, i) for prefix, dataset in streams for i in _spread(range(len(dataset)), num_samples)]
    return [
        {"where": f"{prefix}, document {i}", "text": _text_of(dataset[i], tokenizer)}
        for prefix, dataset, i in _spread(places, num_samples)
    ]


def _text_of(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    ids = ids[:SHOWN_CHARS]  # a token has a character at least
    if tokenizer is None:
        return shown(" ".join(map(str, ids)))
    return shown(tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def _blend(path: Path, num_samples: int, tokenizer: Tokenizer | None) -> Report:
    report = Report(str(path), "blend")
    try:
        blend = json.loads((path / BLEND_FILE).read_text("utf-8"))
        sources, phases = blend["sources"], blend["phases"]
        for name, source in sources.items():
            report.tables.setdefault("sources", []).extend(
                {"source": name, "split": split, **{of: source.get(prefix + of, 0) for of in _COUNTED}}
                for split, prefix in (("train", ""), ("valid", "valid_"), ("test", "test_"))
                if source.get(f"{prefix}documents")
            )
        for phase in phases:
            shares = {name: weight for name, weight in phase["weights"].items() if weight}
            report.tables.setdefault("phases", []).extend(
                {"phase": phase["name"], "until": phase["until"], "source": name, "weight": weight}
                for name, weight in shares.items()
            )
        prefixes = [
            path / name for source in sources.values() for split in SPLITS for name in _as_list(source.get(split))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / BLEND_FILE}: not a blend ({type(error).__name__}: {error})") from error
    if (path / MIXTURE_FILE).is_file():
        mixture = json.loads((path / MIXTURE_FILE).read_text("utf-8"))
        report.tables["mixture"] = [{key: row[key] for key in _MIXTURE} for row in mixture["sources"]]
        report.counts["tokens_of_one_pass" if mixture["one_pass"] else "budget"] = mixture["train_tokens"]
        if mixture["largest_train_tokens"] is not None:
            report.counts["largest_train_tokens"] = mixture["largest_train_tokens"]
    if not prefixes:
        raise UserError(f"{path / BLEND_FILE}: no stream in it")
    streams = _streams(path, prefixes, num_samples, tokenizer)
    total = {key: sum(source.get(key, 0) for source in sources.values()) for key in _COUNTED}
    report.counts = {
        "sources": len(sources),
        "streams": len(prefixes),
        "stored_bytes": streams.counts["bytes"],
        **{f"train_{key}" if key != "bytes" else "train_text_bytes": value for key, value in total.items()},
        **{
            f"{split}_tokens": sum(s.get(f"{split}_tokens", 0) for s in sources.values()) for split in ("valid", "test")
        },
        **report.counts,
        "vocab_size": blend.get("vocab_size", "?"),
        "token_type": streams.counts["token_type"],
    }
    report.read, report.lengths, report.samples = streams.read, streams.lengths, streams.samples
    report.notes += streams.notes
    return report


def _as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []


# --- Packed conversations ---------------------------------------------------------------------------------------------


def _packed(path: Path, files: Sequence[Path], num_samples: int, tokenizer: Tokenizer | None) -> Report:
    import pyarrow.parquet as pq

    report = Report(str(path), "packed rows")
    size = sum(file.stat().st_size for file in files)
    tokens = trained = longest = 0
    lengths: list[np.ndarray] = []  # of the sequences of each row
    samples: list[tuple[str, np.ndarray]] = []
    try:
        metadata = {file: pq.read_metadata(file) for file in files}
        groups = [(file, number) for file, of_file in metadata.items() for number in range(of_file.num_row_groups)]
        for file, number in groups if size <= READ_ALL_BYTES else _spread(groups, SAMPLE_ROW_GROUPS):
            for i, row in enumerate(read_rows(file, [number])):
                lengths.append(np.diff([*row.seq_start_id, len(row.input_ids)]))
                longest = max(longest, len(row.input_ids))
                tokens += len(row.input_ids)
                trained += int(np.count_nonzero(row.loss_mask))
                if i < num_samples:
                    samples.append((f"{file}, row group {number}, row {i}", row.input_ids[: lengths[-1][0]]))
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise UserError(f"{path}: not readable packed rows: {first_line(error)}") from error
    num_rows = sum(of_file.num_rows for of_file in metadata.values())
    report.read = f"{len(lengths):,} of {num_rows:,} rows"
    report.counts = {
        "files": len(files),
        "bytes": size,
        "rows": num_rows,
        "rows_read": len(lengths),
        "longest_row": longest,
        "tokens_read": tokens,
        "sequences_read": sum(map(len, lengths)),
        "share_in_loss": trained / tokens if tokens else 0.0,
        "filled": tokens / (len(lengths) * longest) if tokens else 0.0,
    }
    report.lengths = _lengths("sequences", "tokens", lengths)
    report.samples = [{"where": at, "text": _text_of(ids, tokenizer)} for at, ids in _spread(samples, num_samples)]
    report.notes += [_NO_TOKENIZER] * (tokenizer is None and bool(report.samples))
    return report


# --- Documents and conversations --------------------------------------------------------------------------------------


def _documents(location: str, num_samples: int) -> Report:
    from nemotron.data_prep.sources.locations import list_files
    from nemotron.data_prep.sources.reader import read_piece, row_id, whole
    from nemotron.data_prep.sources.reading import Reading, ReadReport

    passed_over: Counter[str] = Counter()
    files = list_files([location], passed_over=passed_over)
    size = sum(file.size for file in files)
    everything = size <= READ_ALL_BYTES
    sample = files if everything else _spread(files, SAMPLE_FILES)
    most = None if everything else SAMPLE_RECORDS // len(sample)
    account = ReadReport()
    seen = _Records(num_samples)
    complete = len(sample) == len(files)
    for file in sample:
        piece = whole(file)
        rows = read_piece(piece, Reading(on_error="skip", required=()), account)
        count = 0
        for row in islice(rows, most):
            seen.add(row_id(piece, row.index), row.value)
            count += 1
        complete = complete and count != most
    if not account.records and account.errors():
        raise UserError(f"{account.samples[0]['where']}: {account.samples[0]['reason']}")
    report = Report(location, "conversations" if seen.turns else "documents")
    report.counts = {"files": len(files), "bytes": size}
    report.counts["formats"] = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(map(_format, files)).items()))
    known = _rows_in_footers(files)
    if complete or known is not None:
        report.counts["records"] = account.records if complete else known or 0
    report.read = (
        f"all {account.records:,} records"
        if complete
        else f"the first records of {len(sample):,} of {len(files):,} files: {account.records:,} records"
    )
    for role, count in sorted(seen.turns.items()):
        report.counts[f"{role}_turns"] = count
    report.lengths = _lengths("records", seen.unit(), [np.asarray(seen.lengths, dtype=np.int64)])
    report.fields = seen.fields()
    report.samples = seen.samples()
    if account.skipped:
        report.tables["not read"] = [{"reason": k, "records": n} for k, n in sorted(account.skipped.items())]
        report.notes += [f"{sample['where']}: {sample['reason']}" for sample in account.samples[:5]]
    if passed_over:
        report.notes.append("other files: " + ", ".join(f"{n} {kind}" for kind, n in sorted(passed_over.items())))
    return report


def _format(file: Any) -> str:
    return str(file.format) + ("" if file.compression == "none" else f" ({file.compression})")


def _rows_in_footers(files: Sequence[Any]) -> int | None:
    """Rows of Parquet files on this machine, without reading them; None where one of them is something else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not all(file.format == "parquet" and file.is_local for file in files):
        return None
    try:
        return sum(pq.read_metadata(file.uri).num_rows for file in files)
    except (OSError, ValueError, pa.ArrowException):
        return None


class _Records:
    """What was seen of records: lengths, field types, turns, samples. Holds at most 64 records."""

    def __init__(self, num_samples: int) -> None:
        self.count = 0
        self.lengths: list[int] = []
        self.turns: Counter[str] = Counter()
        self.what: Counter[str] = Counter()
        self._types: dict[str, Counter[str]] = {}
        self._num_samples = num_samples
        self._kept: list[tuple[str, str]] = []
        self._stride = 1

    def add(self, at: str, record: Mapping[str, Any]) -> None:
        """Take one record in."""
        for name, value in record.items():
            self._types.setdefault(name, Counter())[_type_of(value)] += 1
        messages = next((record[key] for key in TURNS if _are_messages(record.get(key))), None)
        if messages is not None:
            parts = [(str(m.get("role", m.get("from"))), _said(m)) for m in messages]
            self.turns.update(role for role, _ in parts)
            what, length = "messages", sum(len(content) for _, content in parts)
            text = "  ".join(f"[{role}] {content}" for role, content in parts)
        else:
            key_of_text = next((key for key in _TEXTS if isinstance(record.get(key), str)), None)
            text = record[key_of_text] if key_of_text else json.dumps(record, ensure_ascii=False, default=str)
            what, length = key_of_text or "the whole record as JSON", len(text)
        self.lengths.append(length)
        self.what[what] += 1
        if self.count % self._stride == 0:  # every n-th; n doubles when there are too many
            self._kept.append((at, shown(text)))
            if len(self._kept) >= max(64, 2 * self._num_samples):
                self._kept, self._stride = self._kept[::2], self._stride * 2
        self.count += 1

    def unit(self) -> str:
        """What the lengths count."""
        names = ", ".join(name for name, _ in self.what.most_common())
        return f"characters of {names}" if names else "characters"

    def fields(self) -> Table:
        """Name, types and share of the records that have it, in the order met."""
        return [
            {
                "field": name,
                "types": ", ".join(kind for kind, _ in types.most_common()),
                "in": sum(types.values()) / self.count,
            }
            for name, types in self._types.items()
        ]

    def samples(self) -> list[dict[str, str]]:
        """Some, from all over."""
        return [{"where": at, "text": text} for at, text in _spread(self._kept, self._num_samples)]


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "from"} & set(m) for m in value)
    )


def _said(message: Mapping[str, Any]) -> str:
    """The text of a message: its reasoning, its content, whose parts may be images, as `[image_url]`, and its calls."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), "")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in content]
        content = "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
    calls = message.get("tool_calls") or message.get("function_call") or ""
    calls = calls if isinstance(calls, str) else json.dumps(calls, ensure_ascii=False, default=str)
    return " ".join(str(part) for part in (reasoning, content, calls) if part)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"list of {_type_of(value[0])}" if value else "list"
    if isinstance(value, dict):
        names = ", ".join(list(value)[:6])
        return f"{{{names}{', …' if len(value) > 6 else ''}}}"
    return {str: "text", bool: "true/false", int: "integer", float: "number"}.get(type(value), type(value).__name__)


# --- Runs that are not finished, or were ------------------------------------------------------------------------------


def _run(path: Path, num_samples: int, tokenizer_path: Path | None) -> Report:
    """The folder of a run: its state, and what its work, or else its payload, holds so far."""
    report = Report(str(path), "run")
    for name in ("work", "out-payload"):
        if (path / name).is_dir() and any((path / name).iterdir()):
            report = inspect(str(path / name), num_samples, tokenizer_path)
            break
    published = [f"published: {line['version']}" for line in read_metrics(path / PUBLISHED_FILE)]
    state = read_state(path).get("state", "unknown")
    if state == "running" and not is_locked(path):  # killed or interrupted: nobody has written since
        state = "not finished, and no process works on it; the same command goes on"
    report.notes = [f"run: {state}", *published, *report.notes]
    return report


def _plan_folders(path: Path) -> list[Path]:
    """Folders with a frozen plan: `path` itself, or up to three levels below (a run's folder has them in `work`)."""
    depths = (path.glob(f"{'*/' * depth}{PLAN_FILE}") for depth in range(4))
    return sorted({file.parent for depth in depths for file in depth})


def _with_plans(path: Path, report: Report) -> Report:
    """Add how far the plans in a folder are."""
    rows: Table = []
    for folder in _plan_folders(path) if path.is_dir() else []:
        try:
            raw = json.loads((folder / PLAN_FILE).read_text("utf-8"))
            plan = Plan(
                raw["settings"], raw["inputs"], [Shard(shard["name"], shard["work"]) for shard in raw["shards"]]
            )
        except (OSError, ValueError, KeyError, TypeError):
            report.notes.append(f"{folder / PLAN_FILE}: not a plan")
            continue
        receipts = list(_receipts(folder, plan))
        counts: Counter[str] = Counter()
        for receipt in receipts:
            counts.update({key: value for key, value in receipt["counts"].items() if type(value) is int})
        stored = sum(int(output["bytes"]) for receipt in receipts for output in receipt["outputs"].values())
        name = folder.relative_to(path).as_posix()
        rows.append({"plan": name, "done": len(receipts), "shards": len(plan.shards), "stored_bytes": stored, **counts})
        report.notes.append(f"{name}: {len(receipts)} of {len(plan.shards)} shards done")
        # A task returns its table alone, or beside something else.
        tables = [
            table for receipt in receipts if "kept" in (table := receipt["counts"].get("table", receipt["counts"]))
        ]
        if tables:
            report.tables[f"outcome ({name})"] = outcome(tables)
    if rows:
        report.tables["plans"] = rows
    return report


def _receipts(folder: Path, plan: Plan[Any]) -> Iterator[dict[str, Any]]:
    """Receipts of this plan, as they are on disk, whose files are there in their size; their bytes are not read."""
    digest = plan.digest
    for shard in plan.shards:
        try:
            receipt = json.loads((folder / RECEIPTS / f"{shard.name}.json").read_text("utf-8"))
            outputs = receipt["outputs"].items()
            whole = all((folder / name).stat().st_size == known["bytes"] for name, known in outputs)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if receipt["plan"] == digest and whole:
            yield receipt


def outcome(tables: Iterable[Mapping[str, Any]]) -> Table:
    """Rows for what steps of a curation read, kept and dropped: their tables' JSON, added up."""
    total = StepTable()
    for table in tables:
        total.merge(restore(StepTable, table))
    return [{"outcome": outcome, **vars(tally)} for outcome, tally in total.outcomes()]


# --- Common -----------------------------------------------------------------------------------------------------------


def _tokenizer_for(path: Path, tokenizer_path: Path | None) -> Tokenizer | None:
    """The tokenizer named, else the one beside the data or in a folder above it; None when none can be read."""
    if tokenizer_path is None or not (tokenizer_path / "tokenizer.json").is_file():
        tokenizer_path = tokenizer_beside(path)
    try:
        return Tokenizer.from_file(str(tokenizer_path / "tokenizer.json")) if tokenizer_path else None
    except Exception:  # the library raises nothing narrower; ids are shown then
        return None


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly from the first to the last."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)] if count else []


def _lengths(of: str, unit: str, lengths: Sequence[np.ndarray]) -> Lengths | None:
    values = np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)
    if not len(values):
        return None
    # Bin 0 holds the empty, bin k those from 2^(k-1) to before 2^k.
    counts = np.bincount(np.frexp(values.astype(np.float64))[1])
    bins = [(2 ** (k - 1) if k else 0, 2**k, int(n)) for k, n in enumerate(counts)]
    first = next(i for i, each in enumerate(bins) if each[2])
    middle = int(np.partition(values, len(values) // 2)[len(values) // 2])
    return Lengths(
        of, unit, len(values), float(values.mean()), int(values.min()), middle, int(values.max()), bins[first:]
    )


def shown(text: str) -> str:
    """The beginning of a text on one line, without what a terminal would obey."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * SHOWN_CHARS]).split())
    return words if len(words) <= SHOWN_CHARS and len(text) <= 2 * SHOWN_CHARS else words[:SHOWN_CHARS].rstrip() + " …"
