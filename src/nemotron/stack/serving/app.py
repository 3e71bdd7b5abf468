"""The endpoints: a FastAPI application over an engine and a model.

A request's answers are cancelled when its client is gone, when it took too long, and when anything here fails. Errors
have OpenAI's shape. Without a key only this machine is answered, whatever name it is asked by.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Discriminator, Tag
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemotron.kit.chat_template import load_template, special_token
from nemotron.stack.serving.prompt import chat_prompt, completion_prompts, encode, render_chat
from nemotron.stack.serving.refusals import ApiError, what_is_wrong
from nemotron.stack.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
)
from nemotron.stack.serving.work import Server, Work, streamed_answer, whole_answer

MAX_BYTES = 16 * 2**20  # of a request
LOCAL = ("127.0.0.1", "localhost", "[::1]")
OPEN = ("/", "/health")  # without a key
PAGE = Path(__file__).with_name("page.html")
Tokenizable = Annotated[
    Annotated[TokenizeText, Tag("of a text")] | Annotated[TokenizeChat, Tag("of a chat")],
    Discriminator(lambda body: "of a chat" if isinstance(body, dict) and "messages" in body else "of a text"),
]
T = TypeVar("T")


def create_app(server: Server, api_key: str | None, is_local: bool) -> FastAPI:
    """The application.

    Args:
        api_key: that every request but those to `OPEN` has to bring; None: none is asked for.
        is_local: it is meant for this machine alone, and so answers to no other name: a page in a browser here may
            have had its own name point to this machine.
    """
    # No pages of documentation: FastAPI's own load scripts from elsewhere.
    app = FastAPI(title="nemotron serve", docs_url=None, redoc_url=None)
    model = server.model

    def check_model(name: str | None) -> None:
        if name not in (None, model.name):
            raise ApiError(404, f"no model {name!r}; {model.name!r} is served", param="model", code="model_not_found")

    async def answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
        check_model(body.model)
        server.check_count(body)  # before so many prompts are tokenised
        if isinstance(body, ChatRequest):
            prompts = [await asyncio.to_thread(chat_prompt, model, body)]
        else:
            prompts = await asyncio.to_thread(completion_prompts, model, body)
        work = Work(server, body, prompts)
        if body.stream:
            return EventStream(work, streamed_answer(work))
        try:
            response = await while_connected(request, whole_answer(work))
        finally:
            work.close()
        return Response(response.model_dump_json(), media_type="application/json")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    def described() -> dict[str, Any]:
        return {
            "id": model.name, "object": "model", "created": model.created, "owned_by": "nemotron", "root": model.name,
            "max_model_len": model.max_length,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return described()

    @app.post("/tokenize")
    async def tokenize(body: Tokenizable) -> dict[str, Any]:
        check_model(body.model)

        def tokens() -> list[int]:
            if isinstance(body, TokenizeChat):
                text = render_chat(model, body, add_generation_prompt=body.add_generation_prompt)
            else:
                text = body.prompt
            return encode(model, text, body.add_special_tokens)

        ids = await asyncio.to_thread(tokens)
        pieces = [model.tokenizer.id_to_token(token) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": model.max_length, "tokens": ids, "token_strs": pieces}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(body.model)
        size = model.tokenizer.get_vocab_size()
        if unknown := [token for token in body.tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {unknown[0]} is none of {size}", param="tokens")
        return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What lm-eval asks before it has its texts tokenised here."""
        files = [model.folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        tokens = {name: special_token(files, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        template = load_template(model.template).source if model.template else None
        return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": template}

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response(status_code=200 if server.engine.is_alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        headers = {"Retry-After": "1"} if error.code == "queue_full" else None
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        kinds: dict[str, type[BaseModel]] = {
            "/v1/chat/completions": ChatRequest,
            "/v1/completions": CompletionRequest,
            "/tokenize": TokenizeChat if isinstance(error.body, dict) and "messages" in error.body else TokenizeText,
            "/detokenize": DetokenizeRequest,
        }
        return await refuse(request, what_is_wrong(error, kinds[request.url.path]))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        refusal = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(refusal.body, refusal.status, error.headers)  # of 405, Allow

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return await refuse(request, ApiError(500, f"{type(error).__name__}: {error}", code="internal_error"))

    app.add_middleware(Guard, api_key=api_key, is_local=is_local, server=server)
    return app


class Guard:
    """Lets a request in: by its key, by the name that it asks for, and not larger than `MAX_BYTES`; and counts it."""

    def __init__(self, app: ASGIApp, api_key: str | None, is_local: bool, server: Server) -> None:
        self.app, self.api_key, self.is_local, self.server = app, api_key, is_local, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")  # any path may be asked for, and is no label
                self.server.metrics.responses.labels(route, message["status"]).inc()
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope), scope["method"])
        except ApiError as error:
            # A client that sends its body first would have the connection reset, with the answer in it.
            left = 4 * MAX_BYTES if "expect" not in Headers(scope=scope) else 0
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])
            # What follows is not read: the connection is of no use any more.
            refusal = JSONResponse(error.body, error.status, {"Connection": "close"})
            await refusal(scope, receive, count)
            return
        await self.app(scope, receive, count)

    def _check(self, path: str, headers: Headers, method: str) -> None:
        host = headers.get("host", "")
        if self.is_local and host.removesuffix(f":{host.rpartition(':')[2]}") not in LOCAL and host not in LOCAL:
            raise ApiError(403, f"asked for as {host!r}: this server is for this machine alone; --host lets others in")
        if self.api_key is not None and path not in OPEN:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("latin-1"), self.api_key.encode()):
                raise ApiError(401, "no API key, or a wrong one", code="invalid_api_key")
        if method == "POST":
            length = headers.get("content-length", "")
            if not length.isdecimal() or "transfer-encoding" in headers:  # chunks would be as long as they like
                raise ApiError(411, "Content-Length is missing, or not alone")
            if int(length) > MAX_BYTES:
                raise ApiError(413, f"more than {MAX_BYTES} bytes")


class EventStream(StreamingResponse):
    """A stream of server-sent events, whose work is closed however it ends, also before its first event."""

    def __init__(self, work: Work, events: AsyncIterator[BaseModel]) -> None:
        super().__init__(_event_lines(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancelled where the client is gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.work.close()


async def _event_lines(events: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield f"data: {event.model_dump_json()}\n\n"
    except Exception as error:  # the status has been sent long ago
        if not isinstance(error, ApiError):
            logging.getLogger("uvicorn.error").exception("an answer could not be sent")
            error = ApiError(500, "the server failed", code="server_error")
        yield f"data: {json.dumps(error.body)}\n\n"
    yield "data: [DONE]\n\n"


async def while_connected(request: Request, answering: Awaitable[T]) -> T:
    """What `answering` gives; it is cancelled where the client is gone first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(answering), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(499, "the client has closed the connection")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
