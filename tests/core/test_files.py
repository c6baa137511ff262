"""What stoker writes: whole or not at all, private, and to whatever the path names."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from stoker.core.files import cache_folder, write


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_private_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, "one")
    assert (path.read_text(), mode(path)) == ("one", 0o600)
    path.chmod(0o644)
    write(path, "two")
    assert (path.read_text(), mode(path)) == ("two", 0o644)
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write(path, "half \ud800")
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "nowhere" / "a.json", "one")


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write(pipe, "through")
    reader.join(60)
    assert got == ["through"]


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("runs") == tmp_path / "xdg" / "stoker" / "runs"
    assert not (tmp_path / "xdg").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("staged") == tmp_path / ".cache" / "stoker" / "staged"


def test_a_link_or_pipe_under_a_name_that_nobody_gave_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    for k, make in enumerate((lambda p: p.symlink_to(target), lambda p: p.symlink_to("/dev/full"), os.mkfifo)):
        path = tmp_path / f"{k}.json"
        make(path)
        write(path, "report", named=False)
        assert not path.is_symlink()
        assert (path.read_text(), mode(path)) == ("report", 0o600)
    assert target.read_text() == "kept"
    assert len(os.listdir(tmp_path)) == 4


def test_a_name_prepared_by_somebody_else_is_not_written_to(tmp_path: Path) -> None:
    (other := tmp_path / f".report.json.{os.getpid()}").write_text("")
    write(tmp_path / "report.json", "secret")
    assert not other.read_text()
