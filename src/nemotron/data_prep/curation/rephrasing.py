"""Synthetic rephrasing: documents go to a language model behind an OpenAI-compatible endpoint, and come back reworded.

The styles are those of Nemotron-CC (Su et al. 2024, arXiv 2412.02595): prose as in an encyclopedia for
documents of low quality; question and answer pairs, a distilled version, extracted knowledge and a list of facts for
those of high quality. The prompts are this project's own.

A document is cut into segments that the model can take at once, each segment is one request (`chat/completions`), and
what comes back is checked before it counts: empty, cut off, a refusal, out of proportion, a copy of the prompt or of
the text, not in the form asked for. Each of these has its count and its samples.

Answers are appended to a journal as they come, so that a stopped run does not send again what was answered. The
`openai` package sends the requests, repeats them on 408, 409, 429, 5xx, a broken connection and a timeout, and waits
for as long as the endpoint's Retry-After says. Answers are read here, and requested again if they break off, take too
long or cannot be parsed, because the package limits neither the time nor the size of an answer as a whole.

The API key is read from the environment variable that the config names. It goes into the request's header and nowhere
else: not into errors, records or the journal, and to no other host, because redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.curation.step import (
    DOCUMENTS,
    SUFFIX,
    Document,
    DocumentShard,
    DocumentWriter,
    StepTable,
    output_name,
    read_documents,
)
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.work.shards import ShardOutput
from nemotron.kit.schemas.curation import EndpointConfig, RephrasingSettings

if TYPE_CHECKING:
    import openai

_MAX_ANSWER_BYTES = 16 * 2**20
_REFUSED = "refused with status"
_REPORT_SECONDS = 10.0
_LAST_SECONDS = 10.0  # when the run fails, for the answers that are under way
_IN_A_ROW = 3  # times the concurrency: so many failures without an answer between them are an endpoint that is gone


# --- Styles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Style:
    """How a text is to be reworded.

    `form`: of a good answer. `least`, `most`: words of an answer as a multiple of the words of the text.
    """

    name: str
    system: str
    instruction: str
    form: Literal["prose", "pairs", "list"]
    least: float
    most: float


_WRITER = "You rewrite texts for a library of reading material. You add nothing that the text does not say."
_FACTS = "You read texts closely and write down what can be learned from them, and only that."

STYLES = {
    style.name: style
    for style in (
        Style(
            "wikipedia",
            _WRITER,
            "Reword the text below in the sober, well-formed English of an encyclopedia article. Use full sentences, "
            "keep every statement of fact, and leave out navigation, advertising and other remains of a web page. "
            "Answer with the reworded text alone.",
            "prose",
            0.3,
            2.5,
        ),
        Style(
            "diverse_qa",
            _FACTS,
            "Write up to eight questions about the text below, each with its answer. Vary them: yes or no, a choice "
            "between alternatives, who or what or when, how and why, a comparison. Every answer has to follow from "
            "the text. Put each pair on two lines, the first beginning with 'Question:' and the second with 'Answer:'.",
            "pairs",
            0.02,
            4.0,
        ),
        Style(
            "distill",
            _WRITER,
            "Write a shorter version of the text below that keeps its essential statements, terms, numbers and "
            "examples, and drops what is said twice or says nothing. Answer with the shorter version alone.",
            "prose",
            0.1,
            1.2,
        ),
        Style(
            "extract_knowledge",
            _FACTS,
            "From the text below, take what is worth knowing: facts, explanations, methods, reasons. Write it as a "
            "passage of a textbook that a reader understands without the original. Leave out opinions, anecdotes and "
            "anything about the page itself. Answer with the passage alone.",
            "prose",
            0.1,
            2.5,
        ),
        Style(
            "knowledge_list",
            _FACTS,
            "List the pieces of knowledge in the text below: facts, definitions, relations between them. One piece a "
            "line, each line beginning with '- ' and understandable by itself. Answer with the list alone.",
            "list",
            0.05,
            2.5,
        ),
    )
}
BEGIN_TEXT, END_TEXT = "<text>", "</text>"


def messages(style: Style, segment: str) -> list[dict[str, str]]:
    """What the model is told."""
    return [
        {"role": "system", "content": style.system},
        {"role": "user", "content": f"{style.instruction}\n\n{BEGIN_TEXT}\n{segment}\n{END_TEXT}"},
    ]


def segments(text: str, max_words: int) -> list[str]:
    """Cut a text between lines, or in a long line between words, into pieces of at most `max_words` words."""
    pieces: list[str] = []
    pending: list[str] = []
    size = 0
    for line in text.split("\n"):
        words = line.split()
        if pending and size + len(words) > max_words:
            pieces.append("\n".join(pending))
            pending, size = [], 0
        while len(words) > max_words:
            pieces.append(" ".join(words[:max_words]))
            words = words[max_words:]
            line = " ".join(words)
        pending.append(line)
        size += len(words)
    pieces.append("\n".join(pending))
    return [piece.strip() for piece in pieces if piece.strip()]


# --- What comes back ------------------------------------------------------------------------------------------------

_REFUSAL = re.compile(
    r"(?:i['’]?m (?:very )?sorry|i (?:can(?:not|['’]t)|am (?:not able|unable)|['’]m (?:not able|unable)|won['’]t)|"
    r"sorry,|unfortunately,? i |as an ai\b|as a (?:large )?language model|i apologi[sz]e)",
    re.IGNORECASE,
)
_OPENING = re.compile(
    r"(?:sure|certainly|of course|here (?:is|are|['’]s)|okay|below (?:is|are))\b[^\n]{0,120}:[ \t]*\n", re.IGNORECASE
)
_QUESTION = re.compile(
    r"[ \t]*(?:[-*•]|\d{1,2}[.)])?[ \t]*\**(?:question|q)(?:[ \t]?\d{1,2})?\**:\**[ \t]*(.+)", re.IGNORECASE
)
_ANSWER = re.compile(r"[ \t]*(?:[-*•])?[ \t]*\**(?:answer|a)(?:[ \t]?\d{1,2})?\**:\**[ \t]*(.+)", re.IGNORECASE)
_ITEM = re.compile(r"[ \t]*(?:[-*•]|\d{1,3}[.)])[ \t]+(\S.*)")
_WORD = re.compile(r"\w+")
_RUN = 8  # words in a row of the instruction: not there by chance
MAX_PAIRS = 8


def accept(style: Style, segment: str, answer: str, finish_reason: str | None, seed: int = 0) -> tuple[str | None, str]:
    """What of an answer is used, and "", or None and why nothing is.

    Args:
        answer: of the model; reasoning before `</think>` and an opening line ("Here is ...:") are taken off.
        finish_reason: as the endpoint said.
        seed: of the order of question and answer pairs.
    """
    if finish_reason == "length":
        return None, "cut off"
    text = answer.rpartition("</think>")[2].strip()
    if "<think>" in text:
        return None, "cut off"
    if opening := _OPENING.match(text):
        text = text[opening.end() :].strip()
    if text.startswith("```") and text.endswith("```") and text.count("```") == 2:
        text = text.split("\n", 1)[-1].removesuffix("```").strip()
    if not text:
        return None, "empty"
    if _REFUSAL.match(text):
        return None, "refusal"
    prompt, words, before = (_WORD.findall(s.lower()) for s in (style.instruction, text, segment))
    runs = {tuple(prompt[i : i + _RUN]) for i in range(len(prompt) - _RUN + 1)}
    if any(tuple(words[i : i + _RUN]) in runs for i in range(len(words) - _RUN + 1)):
        return None, "copies the prompt"
    if words == before:
        return None, "copies the text"
    if style.form == "pairs":
        pairs = _pairs(text)
        if not pairs:
            return None, "no question with an answer"
        random.Random(seed).shuffle(pairs)
        shown = "\n\n".join(f"Question: {question}\nAnswer: {reply}" for question, reply in pairs[:MAX_PAIRS])
        text, words = f"{segment}\n\n{shown}", _WORD.findall(shown)
    elif style.form == "list":
        items = [match[1].strip() for line in text.split("\n") if (match := _ITEM.match(line))]
        if not items:
            return None, "no list"
        text = "\n".join(f"- {item}" for item in items)
        words = _WORD.findall(text)
    if len(words) < style.least * len(before):
        return None, "too short"
    if len(words) > style.most * len(before) + 50:
        return None, "too long"
    return text, ""


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    question: str | None = None
    for line in text.split("\n"):
        if match := _QUESTION.fullmatch(line):
            question = match[1].strip()
        elif question and (match := _ANSWER.fullmatch(line)):
            pairs.append((question, match[1].strip()))
            question = None
    return pairs


# --- The endpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request led to. `failure`: why there is no text (""; there is one). Tokens: None where not said."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    failure: str = ""
    retries: int = 0


class _UnusableError(Exception):
    """An answer that cannot be used, and that another attempt may do better; its text is the reason."""


def api_key(variable: str | None) -> str | None:
    """The key in an environment variable; UserError, without the value, if it is missing or cannot be a key."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"the environment variable {variable} is not set", "it holds the API key of the endpoint")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"the environment variable {variable} does not hold an API key", "it has blanks or control characters"
        )
    return key


class Client:
    """Asks an endpoint, any number of requests at a time; use as an asynchronous context manager."""

    def __init__(self, endpoint: EndpointConfig) -> None:
        try:
            import openai
        except ImportError:
            raise UserError("asking an endpoint needs openai", install_line("curation")) from None
        self.endpoint = endpoint
        self._openai = openai
        self._key = api_key(endpoint.api_key_env)
        self._headers: dict[str, Any] = {} if self._key else {"Authorization": openai.Omit()}
        is_here = urlsplit(endpoint.base_url).hostname in ("localhost", "127.0.0.1", "::1")  # no proxy leads back here
        with _without_variables("OPENAI_"):  # keys and headers for another host
            self._client = openai.AsyncOpenAI(
                api_key=self._key or "none",
                base_url=endpoint.base_url,
                max_retries=endpoint.max_attempts - 1,
                timeout=endpoint.timeout,
                http_client=openai.DefaultAsyncHttpxClient(
                    follow_redirects=False, trust_env=not is_here, timeout=endpoint.timeout
                ),
            )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """One request, repeated where that may help.

        Returns an Answer, with `failure` set where the endpoint refuses this very request or does not answer in the
        end. RunFailed: what concerns all requests (the key is refused, there is no such model).
        """
        openai, retries, reason = self._openai, 0, ""
        while retries < self.endpoint.max_attempts:
            try:
                create = self._client.chat.completions.with_streaming_response.create
                async with create(**body, extra_headers=self._headers) as response:
                    retries += response.retries_taken
                    async with asyncio.timeout(self.endpoint.timeout):
                        return _parsed(await _read(response), retries)
            except openai.APIStatusError as error:
                return self._refused(error)
            except openai.APITimeoutError:
                return Answer(failure="timeout", retries=self.endpoint.max_attempts - 1)
            except openai.APIConnectionError:
                return Answer(failure="no connection", retries=self.endpoint.max_attempts - 1)
            except TimeoutError:
                reason = "timeout"
            except _UnusableError as error:
                reason = str(error)
            except Exception as error:  # of the HTTP library, which openai passes on while an answer is read
                if not type(error).__module__.startswith("http"):
                    raise
                reason = "no connection"
            retries += 1
        return Answer(failure=reason, retries=retries - 1)

    def _refused(self, error: openai.APIStatusError) -> Answer:
        status = error.status_code
        if status in (408, 409, 429) or status >= 500:
            return Answer(failure=f"status {status}", retries=self.endpoint.max_attempts - 1)
        where = f"{self.endpoint.base_url}: status {status}{self._message(error)}"
        if status in (401, 403):
            variable = self.endpoint.api_key_env
            raise RunFailed(where, f"is the key in {variable} right?" if variable else "set endpoint.api_key_env")
        if status in (404, 405) or status < 400:
            raise RunFailed(where, f"is endpoint.base_url right, and is there a model {self.endpoint.model}?")
        return Answer(failure=f"{_REFUSED} {status}")

    def _message(self, error: openai.APIStatusError) -> str:
        """The endpoint's own words, one short line, without the key should it repeat it."""
        message = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
        line = " ".join(str(message or "").split())[:160]
        if self._key and any(self._key[i : i + 6] in line for i in range(max(1, len(self._key) - 5))):
            return ""
        return f": {line}" if line else ""


@contextlib.contextmanager
def _without_variables(prefix: str) -> Iterator[None]:
    """Without the environment variables that begin so."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefix)}
    try:
        yield
    finally:
        os.environ.update(hidden)


async def _read(response: openai.AsyncAPIResponse[Any]) -> bytes:
    """The whole body of an answer, up to a limit."""
    parts, size = [], 0
    async for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise _UnusableError("answer too large")
    return b"".join(parts)


def _parsed(raw: bytes, retries: int) -> Answer:
    try:
        reply = json.loads(raw)
        choice = reply["choices"][0]
        content = choice["message"]["content"]
        if content is not None and not isinstance(content, str):
            raise TypeError("content is no text")
    except (ValueError, KeyError, IndexError, TypeError):
        raise _UnusableError("unreadable answer") from None
    usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if isinstance(count, int) else None for count in counts)
    reason = choice.get("finish_reason")
    return Answer(content or "", reason if isinstance(reason, str) else None, prompt, completion, "", retries)


# --- Answers are kept as they come ----------------------------------------------------------------------------------


class Journal:
    """Answers by request on disk, one line each; a last line that was cut off by a crash is dropped."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.answers: dict[str, Answer] = {}
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    record = json.loads(line)
                    key = record.pop("key")
                    answer = Answer(**record)
                except (ValueError, AttributeError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self.answers[key] = answer
                whole += len(line)
            os.truncate(path, whole)
        self._file = path.open("ab")

    def add(self, key: str, answer: Answer) -> None:
        """Append one; it has left this process when this returns."""
        record = {"key": key} | {name: getattr(answer, name) for name in Answer.__slots__}
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        self.answers[key] = answer
        self._file.write(line)
        self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def request_key(body: Mapping[str, Any]) -> str:
    """What identifies a request: all that is sent but the key."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def ask_all(bodies: Callable[[], Iterable[Mapping[str, Any]]], endpoint: EndpointConfig, journal: Journal) -> None:
    """Ask for everything that the journal does not know, `endpoint.concurrency` requests at a time.

    Args:
        bodies: yields the requests, the same ones each time it is called: they are not all held in memory.

    A request that is refused by itself is kept as an answer; of other failures, another attempt of the run asks again.
    Both count against `endpoint.max_failed`.

    Raises:
        RunFailed: too many requests failed, or none is answered any more, or the endpoint refuses the key or the model.
    """
    wanted = {request_key(body) for body in bodies()}
    total = len(wanted)
    failed = Counter(journal.answers[key].failure for key in wanted & journal.answers.keys())
    del failed[""]
    wanted -= journal.answers.keys()
    in_a_row, reported = 0, time.monotonic()

    def check() -> None:
        if failed.total() > int(endpoint.max_failed * total) or in_a_row >= _IN_A_ROW * endpoint.concurrency:
            raise RunFailed(
                f"{endpoint.base_url}: {failed.total()} of {total} requests failed, "
                f"most by {failed.most_common(1)[0][0]}",
                "what was answered is kept, and the same command goes on; endpoint.max_failed allows for more",
            )

    def remaining() -> Generator[tuple[str, Mapping[str, Any]], None, None]:
        for body in bodies():
            if (key := request_key(body)) in wanted:
                wanted.discard(key)  # the same request twice is one request
                yield key, body

    async def work(client: Client, requests: Iterator[tuple[str, Mapping[str, Any]]]) -> None:
        """One request after another, until there are no more. RunFailed: see above."""
        nonlocal in_a_row, reported
        for key, body in requests:
            answer = await client.ask(body)
            if not answer.failure or answer.failure.startswith(_REFUSED):
                journal.add(key, answer)  # at once, so that a kill loses no more than what is under way
            else:
                journal.answers[key] = answer
            in_a_row = in_a_row + 1 if answer.failure else 0
            failed.update([answer.failure] if answer.failure else [])
            check()
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                print(f"  {len(journal.answers)} of {total} requests answered", file=sys.stderr, flush=True)

    async def ask_wanted() -> None:
        requests = remaining()
        async with Client(endpoint) as client:
            workers = [asyncio.create_task(work(client, requests)) for _ in range(endpoint.concurrency)]
            finished, busy = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            if busy:  # one has failed; what the others have asked may be paid for already
                requests.close()
                finished |= (await asyncio.wait(busy, timeout=_LAST_SECONDS))[0]
            errors = [error for worker in finished if (error := worker.exception())]
            if errors:
                raise errors[0]

    check()
    if wanted:
        asyncio.run(ask_wanted())


# --- A shard --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RephrasingCounts:
    """What a task returns: `table` of documents and answers kept and rejected, and the `usage` of each style.

    Usage: requests, answers, retries, prompt_tokens, completion_tokens; untold: answers without a token count; failed
    requests by reason, as "failed: REASON".
    """

    table: StepTable
    usage: dict[str, Counter[str]]


def count(usage: Counter[str], answer: Answer) -> None:
    """Count one request and what it led to."""
    usage.update(requests=1, retries=answer.retries)
    if answer.failure:
        usage[f"failed: {answer.failure}"] += 1
        return
    tokens = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    usage.update({name: number or 0 for name, number in tokens.items()}, answers=1, untold=int(None in tokens.values()))


def request_bodies(document: Document, style: str, settings: RephrasingSettings) -> list[tuple[str, dict[str, Any]]]:
    """(segment, body of the request) for each part of a document. The seed follows from document, style and part."""
    rule = settings.styles.rules()[style]
    bodies = []
    for number, segment in enumerate(segments(document["text"], rule.max_input_words)):
        if len(segment.split()) < settings.min_words:
            continue
        seed = stable_hash(str(settings.seed), str(document["id"]), style, str(number)) % 2**31
        body = {
            "model": settings.endpoint.model,
            "messages": messages(STYLES[style], segment),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": rule.max_output_tokens,
            "seed": seed,
        }
        bodies.append((segment, body))
    return bodies


def rephrase_shard(shard: DocumentShard, job: tuple[RephrasingSettings, Path], output: ShardOutput) -> RephrasingCounts:
    """A task: the documents as they are, and beside them `NAME-synthetic` with what the model made of them.

    `job`: the settings, and the folder of the journals.
    """
    path, (settings, folder) = shard.work, job
    table = StepTable()
    usage: dict[str, Counter[str]] = {style: Counter() for style in settings.styles.rules()}
    with Journal(folder / f"{shard.name}.jsonl") as journal:
        ask_all(partial(_bodies, path, settings), settings.endpoint, journal)
        with DocumentWriter(output.path(output_name(shard))) as writer:
            for document in read_documents(path):
                table.read.add(document)
                table.keep(document, ["real"])
                writer.write(document)
        synthetic = output.path(f"{DOCUMENTS}/{shard.name}-synthetic{SUFFIX}")
        with DocumentWriter(synthetic) as writer:
            for document, style, parts in _wanted(path, settings):
                made = []
                for segment, body in parts:
                    answer = journal.answers[request_key(body)]
                    count(usage[style], answer)
                    if answer.failure:
                        continue
                    text, reason = accept(STYLES[style], segment, answer.text, answer.finish_reason, body["seed"])
                    if text is None:
                        rejected = {"id": f"{document['id']}#{style}", "text": answer.text}
                        table.drop(rejected, f"{style}: {reason}")
                    else:
                        made.append(text)
                if made:
                    new = _synthetic(document, style, settings.endpoint.model, "\n\n".join(made))
                    table.keep(new, [f"synthetic, {style}"])
                    writer.write(new)
        if not writer.tally.documents:
            synthetic.unlink()
    return RephrasingCounts(table, usage)


def _wanted(
    path: Path, settings: RephrasingSettings
) -> Iterator[tuple[Document, str, list[tuple[str, dict[str, Any]]]]]:
    """The documents and styles that go together, and the requests that each pair makes. What is held out stays as it
    is: rephrased, it would be text to train on."""
    for document in read_documents(path):
        if document.get("split", "train") != "train":
            continue
        for style, rule in settings.styles.rules().items():
            if document.get("quality") in rule.labels and (parts := request_bodies(document, style, settings)):
                yield document, style, parts


def _bodies(path: Path, settings: RephrasingSettings) -> Iterator[dict[str, Any]]:
    return (body for *_, parts in _wanted(path, settings) for _, body in parts)


def _synthetic(document: Document, style: str, model: str, text: str) -> Document:
    kept: Document = {name: document[name] for name in ("url", "language", "quality", "bucket") if name in document}
    made = {"source": f"synthetic_{style}", "rephrased_from": document["id"], "model": model}
    return {"id": f"{document['id']}#{style}", "text": text, **kept, **made}
