"""Names are matched as DeepSpeed matches them, except that an exact key is its name and nothing else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.errors import CheckpointFormatError
from deepspeed_affine.ir import exact_name
from deepspeed_affine.ir import pattern_of as exact_key
from deepspeed_affine.lowering.patterns import PatternList

NAMES = st.text(st.sampled_from("abw._-+*[]()$^\\| é0\n"), min_size=1, max_size=12)


@given(NAMES)
def test_an_exact_key_is_read_back_as_its_name(name):
    assert exact_name(exact_key(name)) == name


@given(NAMES, NAMES)
def test_an_exact_key_matches_no_other_name(name, other):
    found = PatternList("entry", [exact_key(name)]).matches(other)
    assert found == ((exact_key(name),) if other == name else ())


@given(st.lists(st.sampled_from(["w", "w.*", ".*b", "^a$", "a|b", r"w\.0$", "^w.0$", "(a)"]), max_size=5), NAMES)
def test_legacy_patterns_match_as_re_match(patterns, name):
    expected = tuple(key for key in dict.fromkeys(patterns) if re.match(key, name))
    if not name.endswith("\n"):
        assert PatternList("entry", patterns).matches(name) == expected


def test_an_unescaped_dot_makes_a_key_a_pattern():
    assert exact_name("^layer.0$") is None
    assert PatternList("entry", ["^layer.0$"]).matches("layerX0") == ("^layer.0$",)


def test_two_matching_patterns_are_named():
    with pytest.raises(CheckpointFormatError, match=r"w\.extra.*'w', 'w\.\*'") as caught:
        PatternList("vocabulary_parameter_patterns", ["w", "w.*"]).single("w.extra")
    assert caught.value.param == "w.extra"


def test_an_exact_key_beside_a_pattern_keeps_stored_order():
    patterns = PatternList("entry", ["w", exact_key("w.a"), "w.*"])
    assert patterns.matches("w.a") == ("w", exact_key("w.a"), "w.*")


def test_an_exact_key_wins_over_patterns():
    patterns = PatternList("entry", ["w", exact_key("w.a"), "w.*"])
    assert patterns.single("w.a") == exact_key("w.a")
    assert patterns.exact("w.a") == exact_key("w.a")
    assert patterns.exact("w") is None
    with pytest.raises(CheckpointFormatError, match=r"w\.b"):
        patterns.single("w.b")


def test_one_pattern_listed_twice_is_one_pattern():
    assert PatternList("entry", ["w", "w"]).single("w") == "w"


def test_a_pattern_that_is_no_regular_expression_is_refused_by_name():
    with pytest.raises(CheckpointFormatError, match=r"row_patterns holds the pattern '\*\.weight'"):
        PatternList("row_patterns", ["*.weight"])


def test_a_key_that_is_no_string_is_refused():
    with pytest.raises(CheckpointFormatError, match="holds 3, a int"):
        PatternList("entry", [3])
