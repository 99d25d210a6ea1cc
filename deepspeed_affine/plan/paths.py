"""Names of output files, made from the names of parameters and states: ordinary names stay as they are.

A parameter name is data. It may hold spaces, brackets, slashes or any script, and DeepSpeed's loader will look for
it unchanged, so it is never escaped; what would leave the output folder or cannot be a file name is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_affine.errors import UnsupportedLayoutError

__all__ = ["check_paths", "state_path"]


def state_path(param: str, state: str) -> str:
    """The relative path, with ``/`` between folders, of the file that holds one state of one parameter."""
    for kind, name in (("parameter", param), ("optimizer state", state)):
        fault = _fault(name)
        if fault:
            raise UnsupportedLayoutError(
                f"{kind} {name!r}{'' if kind == 'parameter' else f' of parameter {param!r}'}: its name {fault}, so no "
                "file of a universal checkpoint can carry it. Rename it where the model is defined, and save again.",
                param=param,
            )
    return f"zero/{param}/{state}.pt"


def check_paths(paths: Iterable[str]) -> None:
    """No two of ``paths`` are one file, and none is a folder of another.

    Raises UnsupportedLayoutError naming the two.
    """
    files: set[str] = set()
    folders: dict[str, str] = {}
    for path in paths:
        if path in files:
            raise _clash(path, path)
        files.add(path)
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders[folder] = path
            folder = folder.rpartition("/")[0]
    for path in files:
        if path in folders:
            raise _clash(path, folders[path])


def _clash(path: str, other: str) -> UnsupportedLayoutError:
    said = "two values claim it" if path == other else f"it is also the folder of {other}"
    return UnsupportedLayoutError(
        f"output file {path}: {said}; every state of every parameter needs a file of its own. Rename the parameter "
        "where the model is defined, and save again."
    )


def _fault(name: str) -> str:
    if "\0" in name:
        return "holds a NUL character"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is not valid text"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "is no relative path of named parts"
    return ""
