"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from dpbench.records import files
from dpbench.records.files import UnwritableFile
from tests.disks import limited

LIMIT = 4096


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path, there):
    path = tmp_path / "page.html"
    if there:
        path.write_text("before")
    with limited(LIMIT), pytest.raises(UnwritableFile, match=str(path)) as error:
        files.write(path, "x" * 10 * LIMIT)
    assert error.value.errno == errno.EFBIG
    assert "disk" in str(error.value)
    assert [*tmp_path.iterdir()] == [path] * there
    assert not there or path.read_text() == "before"


def interrupted(path, error):
    with files.replacing(path) as part:
        part.write_text("half")
        raise error


def test_an_error_or_an_interrupt_in_the_block_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            interrupted(path, error())
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_reader_never_finds_a_part_of_the_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("before")
    with files.replacing(path) as part, part.open("w") as out:
        out.write("half")
        out.flush()
        assert path.read_text() == "before"
        out.write(" and half")
    assert path.read_text() == "half and half"


def test_folders_are_made(tmp_path):
    path = files.write(tmp_path / "a/b/page.html", "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_mode_of_the_umask_and_an_earlier_one_keeps_its_mode(tmp_path, umask):
    path = tmp_path / "page.html"
    before = os.umask(umask)
    try:
        files.write(path, "first")
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
        path.chmod(0o640)
        files.write(path, "second")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path, there):
    (tmp_path / "deep").mkdir()
    target = tmp_path / "deep/page.html"
    if there:
        target.write_text("before")
    (tmp_path / "deep/again.html").symlink_to("page.html")
    link = tmp_path / "link.html"
    link.symlink_to("deep/again.html")
    files.write(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert not target.is_symlink()


def test_a_pipe_and_a_device_are_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    files.write(files.Path(os.devnull), "text")
    assert files.Path(os.devnull).is_char_device()
    with pytest.raises(UnwritableFile, match="/dev/full"):
        files.write(files.Path("/dev/full"), "text")


def test_a_descriptor_is_written_and_its_file_is_not_replaced(tmp_path):
    """`--output /dev/stdout >file` must write to the file that the shell has opened."""
    path = tmp_path / "out"
    with path.open("w+") as out:
        inode = path.stat().st_ino
        (tmp_path / "link").symlink_to(f"/dev/fd/{out.fileno()}")
        for name in (f"/dev/fd/{out.fileno()}", tmp_path / "link"):
            files.write(files.Path(name), "text")
            assert path.read_text() == "text"
            assert path.stat().st_ino == inode


@pytest.mark.parametrize("name", ["folder", "file/page.html", "loop"])
def test_what_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    for call in (files.check_writable, lambda path: files.write(path, "text")):
        with pytest.raises(UnwritableFile, match=str(path)):
            call(path)
    assert len([*tmp_path.iterdir()]) == 3


def test_a_check_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path / "page.html"
    files.check_writable(path)
    assert [*tmp_path.iterdir()] == []
    path.write_text("before")
    files.check_writable(path)
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_must_not_be_written_is_not_replaced(tmp_path):
    """A rename needs no right to the file itself."""
    path = tmp_path / "page.html"
    path.write_text("before")
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("root may write every file")
    with pytest.raises(UnwritableFile):
        files.write(path, "after")
    assert path.read_text() == "before"
