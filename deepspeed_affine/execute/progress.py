"""A progress bar over bytes that also counts files; nothing where it is not shown."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Counts from any thread. ``shown`` False prints nothing and imports nothing."""

    def __init__(self, nbytes: int, files: int, *, shown: bool, what: str = "converting") -> None:
        self._files = files
        self._done = 0
        self._lock = threading.Lock()
        self._bar: Any = None
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=nbytes, unit="B", unit_scale=True, desc=what, postfix={"files": f"0/{files}"})

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, nbytes: int) -> None:
        if self._bar is not None and nbytes:
            with self._lock:
                self._bar.update(nbytes)

    def file(self) -> None:
        if self._bar is not None:
            with self._lock:
                self._done += 1
                self._bar.set_postfix(files=f"{self._done}/{self._files}", refresh=False)
