"""Places to keep files in, for tests: a folder, and fsspec's in-memory, local and S3 file systems, the last on a real
server that runs in this process."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deepspeed_affine.storage import remote
from deepspeed_affine.storage.remote import Place, place_of

KINDS = ("memory", "file", "s3")
ODD = "a b+c [1] é %41 & #x"
"""A folder's name that is a pattern, an escape or a separator to whoever takes it for more than a name."""


class Store:
    """An empty folder of one kind. ``requests`` lists the calls an S3 server has received for it."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.requests: list[tuple[str, str]] = []

    @property
    def place(self) -> Place:
        return place_of(self.url)

    @property
    def system(self) -> Any:
        return self.place.system

    def write(self, path: str, data: bytes) -> str:
        """The object's URL, once it is there."""
        place = self.place.below(path)
        place.make_parent()
        place.system.pipe_file(place.path, data)
        return place.url

    def copy_in(self, folder: str | os.PathLike[str], name: str = "ckpt") -> str:
        """The URL of a copy of all files of a local folder."""
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                self.write(f"{name}/{file.relative_to(folder).as_posix()}", file.read_bytes())
        return f"{self.url}/{name}"

    def files(self, path: str = "") -> dict[str, bytes]:
        """Every object below, read without the code under test."""
        system, root = fsspec.core.url_to_fs(f"{self.url}/{path}" if path else self.url)
        system.invalidate_cache()
        start = root.strip("/") + "/"
        return {
            name.strip("/").removeprefix(start): bytes(system.cat_file(name))
            for name, entry in system.find(root, detail=True).items()
            if entry["type"] == "file" and not name.endswith("/")
        }


@pytest.fixture(scope="session")
def s3_server() -> Iterator[None]:
    """A server on a free port, to which s3fs is pointed by the environment, as a user would."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.delenv("AWS_PROFILE", raising=False)
        yield
    server.stop()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are tried again at once."""
    monkeypatch.setattr(remote, "DELAYS", (0.0,) * len(remote.DELAYS))


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return make_store(request.param, request, tmp_path, monkeypatch)


@pytest.fixture
def s3(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return make_store("s3", request, tmp_path, monkeypatch)


@pytest.fixture
def memory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    return make_store("memory", request, tmp_path, monkeypatch)


def make_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    unique = f"t{uuid.uuid4().hex[:12]}"
    if kind == "memory":
        return Store(kind, f"memory://{unique}/{ODD}")
    if kind == "file":
        return Store(kind, f"file://{tmp_path}/{unique}/{ODD}")
    request.getfixturevalue("s3_server")
    fsspec.filesystem("s3").mkdir(unique)
    store = Store(kind, f"s3://{unique}/{ODD}")

    def noted(method: str, options: dict[str, Any]) -> None:
        store.requests.append((method, options.get("Key", "")))

    before_s3_requests(monkeypatch, noted)
    return store


def before_s3_requests(monkeypatch: pytest.MonkeyPatch, look: Callable[[str, dict[str, Any]], None]) -> None:
    """``look`` sees every request s3fs is about to make, by its name and options; it may change them, or raise."""
    import s3fs
    from fsspec.asyn import sync_wrapper

    original = s3fs.S3FileSystem._call_s3

    async def watched(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        look(method, kwargs)
        return await original(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", watched)
    # Its files call this one, which was made of the other.
    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", sync_wrapper(watched))


class Failing:
    """Stands in for a method and fails the calls it is told to, counted from 1."""

    def __init__(
        self,
        method: Callable[..., Any],
        fails: Callable[[int, tuple[Any, ...]], bool],
        error: Callable[[], BaseException] = lambda: ConnectionError("the line went dead"),
    ) -> None:
        self.method = method
        self.fails = fails
        self.error = error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.fails(self.calls, args):
            raise self.error()
        return self.method(*args, **kwargs)
