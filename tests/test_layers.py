"""Imports run downwards only, and the lower layers need neither torch nor DeepSpeed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed_affine

ROOT = Path(deepspeed_affine.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "ir": {"errors"},
    "lowering": {"errors", "ir"},
    "plan": {"errors", "ir"},
    "storage": {"errors"},
    "ninfer": {"errors", "ir", "storage"},
    "execute": {"errors", "ir", "lowering", "plan", "storage"},
    "hooks": {"errors", "ir", "lowering", "plan", "storage", "execute"},
    "commands": {"errors", "ir", "lowering", "plan", "storage", "execute", "ninfer", "hooks", "parity"},
    "parity": {"errors", "ir", "lowering", "storage", "commands", "hooks"},
    "cli": {"_version", "errors", "commands", "hooks"},
    "__main__": {"cli"},
}
INSIDE_FUNCTIONS_ONLY = {
    ("commands", "hooks"),
    ("parity", "hooks"),
    ("parity", "commands"),
    ("cli", "hooks"),
    ("ir", "execute"),
}
"""Reached inside a function: hand-over and demo start DeepSpeed, and a map's extract and rebuild move tensors."""

MODULES = sorted(path for path in ROOT.rglob("*.py") if path.name not in ("__init__.py", "_version.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Every imported module of the file, and whether it is imported when the file itself is."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            found.append((node.module or "", top))
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(tree, True)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    layer = layer_of(path)
    for module, at_top in imports(ast.parse(path.read_text(encoding="utf-8"))):
        parts = module.split(".")
        if parts[0] == "deepspeed":
            assert layer == "hooks" or (layer == "parity" and not at_top), f"{path} imports {module}"
        if parts[0] == "torch":
            inside = layer in ("ir", "ninfer") and not at_top
            assert layer not in ("ir", "plan", "errors", "cli", "ninfer") or inside, f"{path}: {module}"
        if parts[0] != "deepspeed_affine" or len(parts) == 1:
            continue
        target = parts[1]
        if target in (layer, "_version") or (layer, target) in INSIDE_FUNCTIONS_ONLY:
            assert target == layer or not at_top or (layer, target) not in INSIDE_FUNCTIONS_ONLY, f"{path}: {module}"
            continue
        assert target in MAY_IMPORT[layer], f"{path} ({layer}) imports {module}"


@pytest.mark.parametrize(
    "module",
    [
        "deepspeed_affine",
        "deepspeed_affine.ir",
        "deepspeed_affine.plan.conversion",
        "deepspeed_affine.ninfer",
        "deepspeed_affine.cli",
    ],
)
def test_importing_needs_neither_torch_nor_deepspeed(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_modules_are_small() -> None:
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 400}
    assert not long
