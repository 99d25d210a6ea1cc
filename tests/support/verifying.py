"""Outputs to verify, edits of them that a checksum does not show, and the verdicts."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from converting import convert
from synthetic import COLUMN, REPLICATED, ROW, Cut, ExpertLayer, Param, World, make, random_full, save

from deepspeed_affine.cli import ds_affine
from deepspeed_affine.storage.manifest import MANIFEST_NAME, Manifest, ManifestFile

EXPERTS = [ExpertLayer("moe.experts", {w: random_full((4, 3, 2), 7) for w in ("w1", "w2", "w3")}, ((0, 1), (2, 3)))]


def every_cut() -> list[Param]:
    """A parameter of every kind of cut, for two ranks."""
    return [
        Param("emb", random_full((10, 3), 1), Cut("vocab", original_rows=9)),
        Param("up", random_full((4, 3), 2), COLUMN),
        Param("down", random_full((3, 4), 3), ROW, group=1),
        Param("qkv", random_full((12, 2), 4), Cut("sub", sub_sizes=(4, 4, 4))),
        Param("norm.weight", random_full((5,), 5), REPLICATED),
        Param("mean", random_full((3,), 6), Cut("average"), group=1),
    ]


def few() -> list[Param]:
    return [Param("up", random_full((4, 3), 2), COLUMN), Param("norm", random_full((5,), 5), REPLICATED)]


def only_module() -> list[Param]:
    return [
        Param("fixed", random_full((4, 2), 8), COLUMN, kind="frozen"),
        Param("counts", random_full((3,), 9), kind="buffer"),
    ]


WORLDS: dict[str, tuple[World, list[Param], list[ExpertLayer]]] = {
    "zero1": (World(stage=1, tp=2, dp=2), [*every_cut(), *only_module()], []),
    "zero2": (World(stage=2, tp=2, dp=3), every_cut(), []),
    "zero3": (World(stage=3, tp=2, dp=2), [*every_cut(), *only_module()], []),
    "flat": (World(stage=3, dp=3), [Param("w", random_full((7, 3), 1)), Param("b", random_full((5,), 2))], []),
    "half": (World(stage=1, tp=2, dp=2, dtype=torch.bfloat16), every_cut(), []),
    "pipeline": (
        World(stage=1, pp=2, tp=2, dp=2),
        [Param("tied", random_full((6, 2), 1), stages=(0, 1)), Param("last", random_full((4, 2), 2), ROW, stages=(1,))],
        [],
    ),
    "experts": (World(stage=1, dp=2), few(), EXPERTS),
    "folded": (World(stage=1, tp=2, dp=2), few(), EXPERTS),
    "plain step": (World(stage=1, dp=2, step=7), few(), []),
}


def made(base: Path, name: str = "zero1", *options: str) -> tuple[str, Path]:
    """``(source, output)``: a checkpoint, and what it is converted to."""
    world, params, experts = WORLDS[name]
    source = make(world, params, experts).save(base / "source")
    assert convert(source, base / "out", *options) == 0
    return source, base / "out"


def verify(folder: str | os.PathLike[str], capsys: Any, *options: str) -> tuple[int, dict[str, Any], str]:
    """``(exit code, the JSON document, what was said on stderr)``."""
    capsys.readouterr()
    code = ds_affine(["verify", os.fspath(folder), "--json", "--workers", "2", *options])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


def toggle(path: str | os.PathLike[str], byte: int, bit: int = 0) -> None:
    """One bit of a file becomes the other one."""
    with open(path, "r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


def content(*folders: str | os.PathLike[str]) -> dict[str, tuple[bytes, int]]:
    """Every byte of some folders, and when it was last changed."""
    return {
        os.fspath(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for folder in folders
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """The manifest vouches for the files as they are now; ``change`` edits its parts first."""
    old = Manifest.read(os.fspath(folder))
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST_NAME:
            before = old.files.get(name)
            data = path.read_bytes()
            named = (before.param, before.state) if before else (None, None)
            files[name] = ManifestFile(len(data), zlib.crc32(data), *named)
    parts = {"identity": dict(old.identity), "files": files, "parameters": dict(old.parameters)}
    if change is not None:
        change(parts)
    (folder / MANIFEST_NAME).write_bytes(Manifest(**parts).to_bytes())


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """The file is saved anew, with right checksums, after ``change`` of its object (returned, or changed in place)."""
    root = torch.load(path, weights_only=False)
    changed = change(root)
    save(root if changed is None else changed, path)


def tensor_of(root: Any) -> torch.Tensor:
    return root["param"] if isinstance(root, dict) else root


def flip_element(path: Path, element: int, bit: int = 0) -> None:
    """One bit of one element is the other one, and every checksum in the file is right."""

    def change(root: Any) -> None:
        tensor_of(root).view(-1).view(torch.uint8)[element * tensor_of(root).element_size()] ^= 1 << bit

    edit(path, change)
