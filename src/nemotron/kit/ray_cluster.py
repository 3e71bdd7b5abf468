"""Joining the Ray cluster that RAY_ADDRESS names, without what it does to signals."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
from collections.abc import Iterator

from nemo_runspec.errors import UserError, first_line, leaving_signals
from nemo_runspec.installation import install_line
from nemo_runspec.variables import RAY_ADDRESS

_CONNECT_SECONDS = 10.0


def join_ray(address: str) -> None:
    """Become a driver of the Ray cluster at `address`, the value of RAY_ADDRESS; `ray.shutdown()` leaves it.

    Raises:
        UserError: Ray is not installed, or no cluster that can be joined answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"{RAY_ADDRESS}={address} is set, but Ray is not installed here ({error})",
            f"{install_line('ray')}, or unset {RAY_ADDRESS} to use the CPUs of this machine",
        ) from None
    _check_answers(address)
    with signals_wait():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
            raise UserError(
                f"{RAY_ADDRESS}={address}: cannot join the Ray cluster there: {first_line(error)}",
                f"unset {RAY_ADDRESS} to use the CPUs of this machine",
            ) from error


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let the script's handlers run after what is inside, not in it. For the main thread.

    Ray puts a handler of its own in the place of that for SIGTERM, and what a handler raises in one of its calls comes
    out as exit code 1.
    """
    numbers: tuple[int, ...] = (signal.SIGINT, *leaving_signals())
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in received:
            signal.raise_signal(number)


def _check_answers(address: str) -> None:
    """Refuse at once what Ray would try for minutes. Words like `auto` are left to Ray."""
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"{RAY_ADDRESS}={address}: jobs are submitted there, a script cannot join there",
            f"unset {RAY_ADDRESS} to use the CPUs of this machine; a profile with executor ray submits the job",
        )
    match = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    if match is None:
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{RAY_ADDRESS}={address}: no Ray cluster answers there: {getattr(error, 'strerror', None) or error}",
            f"unset {RAY_ADDRESS} to use the CPUs of this machine",
        ) from None
