"""Backends for Results and for rate limiters that several processes share through a folder: no further server is needed.

Runs in: worker and producer processes of the tests, and in pytest itself. A killed process leaves nothing half written.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dramatiq.rate_limits import RateLimiterBackend
from dramatiq.results.backend import Missing, ResultBackend

#: Seconds between two looks of who waits for an event.
_PAUSE_S = 0.02


class FileResults(ResultBackend):
    """A result backend in a folder: one file per result, replaced in one step.

    Whatever was stored under a key, in order, stands in ``history``, so that a test can see what was overwritten.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def history(self, message: Any) -> list[Any]:
        """Return everything that was stored for ``message``, the oldest first; a failure as ``TypeName: text``."""
        path = self._history(self.build_message_key(message))
        lines = path.read_text().splitlines() if path.exists() else []
        return [_readable(json.loads(line)) for line in lines]

    def _get(self, message_key: str) -> Any:
        try:
            stored = self.encoder.decode((self.folder / message_key).read_bytes())
        except FileNotFoundError:
            return Missing
        return stored["result"] if time.time() < stored["expires"] else Missing

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        data = self.encoder.encode({"result": result, "expires": time.time() + ttl / 1000})
        temporary = self.folder / f".{uuid.uuid4().hex}"
        temporary.write_bytes(data)
        temporary.replace(self.folder / message_key)
        with self._history(message_key).open("ab", buffering=0) as file:
            file.write(self.encoder.encode(result) + b"\n")

    def _history(self, message_key: str) -> Path:
        return self.folder / f"{message_key}.history"


def _readable(result: Any) -> Any:
    if isinstance(result, dict) and "exn" in result:
        return f"{result['exn']['type']}: {result['exn']['msg']}"
    return result


class FileLimits(RateLimiterBackend):
    """A backend for rate limiters and barriers in a folder. Each operation holds the lock of that folder.

    The lock belongs to the process that holds it, so that a killed one keeps nobody waiting.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, key: str, value: int, ttl: int) -> bool:
        return self._change(key, ttl, lambda now, _: value if now is None else None)

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        return self._change(key, ttl, lambda now, _: _within((now or 0) + amount, most=maximum))

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        return self._change(key, ttl, lambda now, _: _within((now or 0) - amount, least=minimum))

    def incr_and_sum(
        self, key: str, keys: Callable[[], Iterable[str]], amount: int, maximum: int, ttl: int
    ) -> bool:
        def changed(now: int | None, values: dict[str, int]) -> int | None:
            total = amount + sum(values.get(one, 0) for one in keys())
            return None if total > maximum else _within((now or 0) + amount, most=maximum)

        return self._change(key, ttl, changed)

    def wait(self, key: str, timeout: int | None) -> bool:
        deadline = time.monotonic() + (timeout or 0) / 1000
        while not self._event(key).exists():
            if timeout is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def wait_notify(self, key: str, ttl: int) -> None:
        self._event(key).touch()

    def values(self) -> dict[str, int]:
        """Return what all keys hold that have not expired."""
        with self._locked():
            return _alive(self._read())

    def _change(
        self, key: str, ttl: int, changed: Callable[[int | None, dict[str, int]], int | None]
    ) -> bool:
        with self._locked():
            entries = self._read()
            values = _alive(entries)
            value = changed(values.get(key), values)
            if value is None:
                return False
            entries[key] = [value, time.time() + ttl / 1000]
            temporary = self.folder / ".values"
            temporary.write_text(json.dumps(entries))
            temporary.replace(self.folder / "values")
            return True

    def _read(self) -> dict[str, list[Any]]:
        try:
            return json.loads((self.folder / "values").read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)  # and with it the lock

    def _event(self, key: str) -> Path:
        return self.folder / f"event-{uuid.uuid5(uuid.NAMESPACE_OID, key).hex}"


def _alive(entries: dict[str, list[Any]]) -> dict[str, int]:
    return {key: value for key, (value, expires) in entries.items() if time.time() < expires}


def _within(value: int, *, least: int | None = None, most: int | None = None) -> int | None:
    if (least is not None and value < least) or (most is not None and value > most):
        return None
    return value
