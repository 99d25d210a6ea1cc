"""A journal vouches for what was recorded, and for nothing that a crash or damage made of it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepspeed_affine.errors import CheckpointFormatError, PolicyError
from deepspeed_affine.storage.journal import Finished, Journal, Read, read_journal

IDENTITY = {"source": [{"name": "a.pt", "bytes": 3, "digest": "d"}], "options": {"strict": True}, "software": {}}


def entry(number: int, reads: int = 2) -> Finished:
    sources = tuple(Read(f"säurce {n}.pt", str(n), n, n + 10, 0xFFFFFFFF - n) for n in range(reads))
    return Finished(f"zero/p.{number} 日本\n\udce9/fp32.pt".replace("\udce9", "é"), 1000 + number, number, sources)


def written(path: Path, count: int = 3) -> list[Finished]:
    entries = [entry(number) for number in range(count)]
    with Journal.create(str(path), IDENTITY, job="run 1") as journal:
        for item in entries:
            journal.record(item)
    return entries


def test_what_is_recorded_is_read_back(tmp_path):
    path = tmp_path / "journal-0.jsonl"
    entries = written(path)
    content = read_journal(str(path))
    assert content.identity == IDENTITY
    assert content.job == "run 1"
    assert not content.damaged
    assert list(content.finished.values()) == entries
    assert list(content.finished) == [item.path for item in entries]
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == 4
    assert os.listdir(tmp_path) == ["journal-0.jsonl"]


def test_a_later_line_for_a_file_counts(tmp_path):
    path = str(tmp_path / "j")
    with Journal.create(path, IDENTITY, [Finished("x", 1, 1)]) as journal:
        journal.record(Finished("x", 2, 2))
    assert read_journal(path).finished == {"x": Finished("x", 2, 2)}


def test_creating_replaces_what_was_there(tmp_path):
    path = tmp_path / "j"
    entries = written(path)
    with Journal.create(str(path), IDENTITY, entries[1:], job="run 2") as journal:
        journal.record(entry(9))
    content = read_journal(str(path))
    assert list(content.finished.values()) == [*entries[1:], entry(9)]
    assert content.job == "run 2"


def test_every_torn_end_is_ignored(tmp_path):
    path = tmp_path / "j"
    entries = written(path)
    data = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(data) if byte == ord("\n")]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        content = read_journal(str(path))
        whole = sum(end <= length for end in ends)
        assert list(content.finished.values()) == entries[: max(0, whole - 1)], length
        assert (content.identity is None) == (whole == 0)
        # A header that is torn is no journal; an entry that is torn is no damage.
        assert content.damaged == (0 < length < ends[0])


def test_nothing_after_damage_is_trusted_and_everything_before_is(tmp_path):
    path = tmp_path / "j"
    entries = written(path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    starts = [sum(len(line) for line in lines[:number]) for number in range(len(lines) + 1)]
    for position in range(starts[1], len(data)):
        for bit in (0x01, 0x10, 0x80):
            changed = bytearray(data)
            changed[position] ^= bit
            path.write_bytes(changed)
            content = read_journal(str(path))
            line = next(number for number in range(len(lines)) if position < starts[number + 1])
            # The end of the last line may be what was changed; then the line is torn.
            assert list(content.finished.values()) == entries[: line - 1], (position, bit)


def test_a_damaged_first_line_vouches_for_nothing(tmp_path):
    path = tmp_path / "j"
    written(path)
    data = path.read_bytes()
    header = data.index(b"\n")
    for position in range(header + 1):
        changed = bytearray(data)
        changed[position] ^= 0x01
        path.write_bytes(changed)
        if data[:position].endswith(b'{"format":'):
            # The format itself: a newer one is another test.
            continue
        content = read_journal(str(path))
        assert content.identity is None
        assert content.finished == {}
        assert content.damaged


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b"null\n",
        b"\xff\xfe\n",
        b'{"format":1,"identity":{}}\n',
        b'{"format":true,"identity":{},"job":"","check":"00000000"}\n',
        b"[" * 100_000 + b"\n",
        b'{"format":' + b"1" * 5000 + b"}\n",
    ],
)
def test_text_that_is_no_journal_vouches_for_nothing(tmp_path, data):
    path = tmp_path / "j"
    path.write_bytes(data)
    content = read_journal(str(path))
    assert content.identity is None
    assert content.damaged


def test_an_empty_journal_is_a_run_that_was_killed_at_once(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b"")
    content = read_journal(str(path))
    assert (content.identity, dict(content.finished), content.damaged) == (None, {}, False)


def test_a_newer_format_is_refused_by_name(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"format":2,"anything":[1.5]}\n')
    assert read_journal(str(path)).damaged
    path.write_bytes(b'{"format":2,"anything":[1]}\n')
    with pytest.raises(CheckpointFormatError, match=r"format 2.*reads format 1.*--no-resume") as caught:
        read_journal(str(path))
    assert caught.value.file == str(path)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Finished("../x", 1, 1),
        lambda: Finished("/x", 1, 1),
        lambda: Finished("a//b", 1, 1),
        lambda: Finished("", 1, 1),
        lambda: Finished("x\0", 1, 1),
        lambda: Finished("\ud800", 1, 1),
        lambda: Finished("x", -1, 1),
        lambda: Finished("x", True, 1),
        lambda: Finished("x", 1, 1 << 32),
        lambda: Finished("x", 1, -1),
        lambda: Read("f", "0", 2, 1, 0),
        lambda: Read("f", "0", -1, 1, 0),
        lambda: Read("f", "0", 0, 1, 1 << 32),
        lambda: Read("f", 0, 0, 1, 1),
        lambda: Read("f", "0", 0, True, 1),
    ],
)
def test_what_cannot_be_is_not_recorded(wrong):
    with pytest.raises(ValueError, match=r"."):
        wrong()


@pytest.mark.parametrize(
    "body",
    [
        b'{"path":"x","bytes":1,"crc32":1}',
        b'{"path":"x","bytes":1,"crc32":1,"reads":{}}',
        b'{"path":"x","bytes":1,"crc32":1,"reads":[[1]]}',
        b'{"path":"x","bytes":1,"crc32":1,"reads":[["f","0",0,1,2,3]]}',
        b'{"path":"x","bytes":1,"crc32":1,"reads":[["f","0",0,1,-2]]}',
        b'{"path":"x","bytes":1.0,"crc32":1,"reads":[]}',
        b'{"path":"x","path":"y","bytes":1,"crc32":1,"reads":[]}',
        b'{"path":"x","bytes":1,"crc32":1,"reads":[],"more":1}',
        b'{"path":"../x","bytes":1,"crc32":1,"reads":[]}',
        b'{"path":"x","bytes":NaN,"crc32":1,"reads":[]}',
    ],
)
def test_lines_with_a_right_checksum_and_wrong_content_are_refused(body):
    import zlib

    line = body[:-1] + b',"check":"%08x"}' % zlib.crc32(body)
    with pytest.raises(ValueError, match=r"."):
        Finished.from_line(line)


def test_threads_share_a_journal(tmp_path):
    path = str(tmp_path / "j")
    with Journal.create(path, IDENTITY) as journal:

        def work(number: int) -> None:
            for index in range(50):
                journal.record(entry(1000 * number + index, reads=number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    content = read_journal(path)
    assert not content.damaged
    assert len(content.finished) == 400
    assert content.finished[entry(3007, 3).path] == entry(3007, 3)


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """A line that does not fit is taken back, so that a later one is not lost with it."""
    path = tmp_path / "j"
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from deepspeed_affine.storage.journal import Finished, Journal, Read
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal.create(sys.argv[1], {})
journal.record(Finished("one", 1, 1))
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
try:
    journal.record(Finished("two", 1, 1, (Read("f" * 1000, "0", 0, 1, 1),)))
except OSError as error:
    print(error.errno)
journal.record(Finished("three", 1, 1))
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, str(path), root], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "27"
    content = read_journal(str(path))
    assert list(content.finished) == ["one", "three"]
    assert not content.damaged


def test_a_killed_process_loses_nothing_it_recorded(tmp_path):
    path = tmp_path / "j"
    code = (
        "import os, sys, signal; from deepspeed_affine.storage.journal import *\n"
        "journal = Journal.create(sys.argv[1], {})\n"
        "for n in range(100): journal.record(Finished(f'file {n}', n, n))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    assert len(read_journal(str(path)).finished) == 100


def test_a_closed_journal_takes_nothing(tmp_path):
    journal = Journal.create(str(tmp_path / "j"), IDENTITY)
    journal.close()
    journal.close()
    with pytest.raises(PolicyError, match="closed"):
        journal.record(entry(1))
