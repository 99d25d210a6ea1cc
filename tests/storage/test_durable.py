"""Small files are replaced at once, and a full disk is told from other failures."""

import errno
import os
import stat

import pytest

from deepspeed_affine.storage.durable import fsync_folders, is_no_space, replace_file, replace_text, write_all


def test_replacing_a_small_file(tmp_path):
    path = tmp_path / "latest_universal"
    replace_text(path, "one")
    inode = path.stat().st_ino
    replace_text(path, "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert path.stat().st_ino != inode
    assert os.listdir(tmp_path) == ["latest_universal"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_text(tmp_path / "folder", "x")
    with pytest.raises(OSError, match="directory"):
        replace_file(str(tmp_path / "folder"), b"x", str(tmp_path / "private"))
    assert os.listdir(tmp_path) == ["folder"]


def test_a_link_is_replaced_and_what_it_leads_to_is_not(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "pointer").symlink_to("theirs")
    replace_text(tmp_path / "pointer", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "pointer").is_symlink()
    (tmp_path / "private").symlink_to("theirs")
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(str(tmp_path / "pointer"), b"x", str(tmp_path / "private"))
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_private_file_left_by_a_kill_is_written_over(tmp_path):
    (tmp_path / "private").write_text("something longer than what comes")
    replace_file(str(tmp_path / "a"), b"x", str(tmp_path / "private"))
    assert (tmp_path / "a").read_bytes() == b"x"
    assert os.listdir(tmp_path) == ["a"]


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    events = []
    real = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("replace"), real(old, new)))
    replace_file(str(tmp_path / "a"), b"x", str(tmp_path / "private"))
    assert events == [str(tmp_path / "private"), "replace", str(tmp_path)]
    del events[:]
    replace_file(str(tmp_path / "a"), b"x", str(tmp_path / "private"), durable=False)
    assert events == ["replace"]


def test_folders_are_synced_from_the_inside(tmp_path, monkeypatch):
    os.makedirs(tmp_path / "a" / "b")
    (tmp_path / "a" / "file").touch()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    fsync_folders(str(tmp_path))
    assert synced == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    fd = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    write_all(fd, b"0123456789")
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_full_disk_is_told_from_other_failures():
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert is_no_space(OSError(number, "full"))
    for other in (None, ValueError(), OSError(errno.EIO, "x"), OSError("no number"), KeyboardInterrupt()):
        assert not is_no_space(other)
