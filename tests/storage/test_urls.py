"""What is a URL, and its parts; local paths are left to os.path."""

import os

import pytest

from deepspeed_affine.storage.urls import absolute, is_url, join, name_of, parent_of

URLS = [
    "s3://b/x",
    "gs://b",
    "memory://x",
    "file:///x",
    "local:///x",
    "simplecache::s3://b/x",
    "a+b.c-1::zip://x",
    "S3://b",
]
PATHS = ["x", "/x", "./s3://b", "/s3://b", "s3:/b", "://x", "a b://x", "", ".", "C:\\x", "x::y", "é://x"]


@pytest.mark.parametrize("text", URLS)
def test_urls(text):
    assert is_url(text)


@pytest.mark.parametrize("text", PATHS)
def test_paths(text):
    assert not is_url(text)
    assert absolute(text) == os.path.abspath(text)
    assert join(text, "a", "b/c") == os.path.join(text, "a", "b/c")


def test_out_of_a_link_is_where_the_system_says(tmp_path, monkeypatch):
    (tmp_path / "real/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/inner")
    (tmp_path / "real/beside").write_text("here")
    for folder, text in ((tmp_path, "link/../beside"), (tmp_path / "link", "../beside")):
        monkeypatch.chdir(folder)
        assert absolute(text) == str((tmp_path / "real/beside").resolve())
    assert absolute(tmp_path / "link/../beside") == str((tmp_path / "real/beside").resolve())
    assert absolute("/x/y/../z/./w/") == "/x/z/w"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://b/x/", "s3://b/x"),
        ("s3://b/x//", "s3://b/x"),
        ("s3://b/", "s3://b"),
        ("s3://b", "s3://b"),
        ("memory://", "memory://"),
        ("file:///", "file:///"),
        ("file:///x/", "file:///x"),
        ("simplecache::s3://b/x/", "simplecache::s3://b/x"),
        ("zip://a/b/::s3://b/x.zip", "zip://a/b::s3://b/x.zip"),
        ("s3://b/x/../y", "s3://b/x/../y"),
    ],
)
def test_a_url_loses_its_last_slashes_and_nothing_else(given, expected):
    assert absolute(given) == expected
    assert absolute(expected) == expected


@pytest.mark.parametrize(
    ("parent", "name", "whole"),
    [
        ("s3://b/x", "y", "s3://b/x/y"),
        ("s3://b", "x", "s3://b/x"),
        ("s3://", "b", "s3://b"),
        ("memory://", "x", "memory://x"),
        ("file:///", "x", "file:///x"),
        ("file:///x", "a b+[1]é%41", "file:///x/a b+[1]é%41"),
        ("simplecache::s3://b", "x", "simplecache::s3://b/x"),
        ("zip://::s3://b/x.zip", "a", "zip://a::s3://b/x.zip"),
        ("zip://a::s3://b/x.zip", "b", "zip://a/b::s3://b/x.zip"),
    ],
)
def test_parts_of_a_url(parent, name, whole):
    assert join(parent, name) == whole
    assert name_of(whole) == name
    assert parent_of(whole) == parent
    assert join(parent, "u", "v/w") == join(join(join(parent, "u"), "v"), "w")


def test_the_parent_of_a_root_is_itself():
    for root in ("s3://", "memory://", "file:///", "zip://::s3://b/x.zip"):
        assert (parent_of(root), name_of(root)) == (root, "")
