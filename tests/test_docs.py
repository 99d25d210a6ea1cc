"""The pages hold together: links lead somewhere, sections say something, and named tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def name(page):
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_section_says_something(page):
    text = re.sub(r"```.*?```", "code", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.split(r"^#+ .*$", text, flags=re.M)
    found = re.findall(r"^(#+) (.*)$", text, flags=re.M)
    for (level, title), body, following in zip(found, headings[1:], [*found[1:], ("", "")], strict=True):
        assert body.strip() or len(following[0]) > len(level), title


def test_every_test_that_a_guarantee_names_exists():
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    for path in re.findall(r"`(tests/[\w/]+\.py)", text):
        assert (ROOT / path).exists(), path
    for function in re.findall(r"::(test_\w+)", text):
        assert any(f"def {function}(" in code for code in tests.values()), function
    for short in re.findall(r"`(test_\w+\.py)`", text):
        assert any(path.name == short for path in tests), short


@pytest.mark.parametrize("page", ["planning.md", "transfer.md"])
def test_examples_that_need_no_engine_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.S)
    runnable = [block for block in blocks if "import" in block and "contiguous_split_map" in block]
    assert runnable
    for block in runnable:
        exec(block, {})  # noqa: S102
