"""A client that goes away takes its request with it, and nothing of it stays: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from scripted_server import Served

BODY = {"messages": [{"role": "user", "content": "hello"}]}


class Listening:
    """A server in a thread, and clients of it that can be left at any place."""

    def __init__(self, served: Served) -> None:
        self.served = served
        served.says("</think>" + "some words " * 20)
        self.server = uvicorn.Server(
            uvicorn.Config(served.app, port=0, log_level="error", ws="none", timeout_graceful_shutdown=5)
        )
        self.tasks = 0
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self.wait(lambda: self.server.started)
        self.address = self.server.servers[0].sockets[0].getsockname()
        self.loop = self.server.servers[0].get_loop()

    def send(self, **fields: object) -> socket.socket:
        """A request, as far as it is sent."""
        body = json.dumps(BODY | fields).encode()
        connection = socket.create_connection(self.address, timeout=20)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
        return connection

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds."""
        until = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.001)

    def open_gate(self) -> None:
        """Let tokens come, from the thread of the loop."""
        self.loop.call_soon_threadsafe(self.served.engine.open_gate)

    @property
    def num_tasks(self) -> int:
        """Tasks on the server's loop."""
        return len(asyncio.all_tasks(self.loop))

    def stop(self) -> None:
        """End the server."""
        self.server.should_exit = True
        self._thread.join()


@pytest.fixture
def listening(served: Served) -> Iterator[Listening]:
    server = Listening(served)
    yield server
    server.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_while_waiting_is_not_answered(listening: Listening, stream: bool, n: int) -> None:
    engine = listening.served.engine
    engine.close_gate()
    connection = listening.send(stream=stream, n=n)
    listening.wait(lambda: len(engine.running) == n)
    connection.close()
    listening.wait(lambda: engine.finished["cancelled"] == n)
    assert not engine.running
    listening.wait(lambda: not listening.server.server_state.connections)


def test_who_leaves_a_stream_in_the_middle_ends_it(listening: Listening) -> None:
    engine = listening.served.engine
    engine.close_after = 20
    connection = listening.send(stream=True)
    answer = b""
    while b"data: " not in answer:
        answer += connection.recv(4096)
    connection.close()
    listening.wait(lambda: engine.finished["cancelled"] == 1)


def test_of_many_clients_that_leave_anywhere_nothing_stays(listening: Listening) -> None:
    draw, engine = random.Random(0), listening.served.engine
    at_rest = listening.num_tasks
    for _ in range(2):
        engine.close_gate()
        connections = [listening.send(stream=draw.random() < 0.7, n=draw.choice([1, 1, 2])) for _ in range(25)]
        if draw.random() < 0.5:
            listening.wait(lambda: len(engine.running) >= 25)
        draw.shuffle(connections)
        for i, connection in enumerate(connections):
            if i == 8:
                listening.open_gate()
            if i >= 8 and draw.random() < 0.5:
                with contextlib.suppress(OSError):
                    while connection.recv(1 << 16):
                        pass
            if draw.random() < 0.5:  # a reset in place of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        listening.open_gate()
        listening.wait(lambda: not engine.running and not listening.server.server_state.connections)
        listening.wait(lambda: listening.num_tasks <= at_rest)
    assert sum(engine.finished.values()) == len(engine.asked)


def test_those_at_work_are_answered_while_the_server_stops(listening: Listening) -> None:
    engine = listening.served.engine
    engine.close_gate()
    connection = listening.send()
    listening.wait(lambda: bool(engine.running))
    listening.server.should_exit = True
    listening.wait(lambda: not listening.server.servers[0].is_serving())
    with pytest.raises(OSError):
        socket.create_connection(listening.address, timeout=5).close()
    listening.open_gate()
    answer = b""
    while more := connection.recv(1 << 16):
        answer += more
    connection.close()
    assert b"200 OK" in answer and b"some words" in answer
