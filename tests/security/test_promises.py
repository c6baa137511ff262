"""Each sentence and row of SECURITY.md has a test, or it only says what is not promised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker

from .users import OTHER, VICTIM, environment, needs, out_of, user

ROOT = Path(__file__).parents[2]
SAYS_WHAT_IS_TRUSTED, NOT_PROMISED = "it says what is trusted", "it says what is not promised"
# How a sentence or a row begins, and the tests of it.
TESTS = {
    "stoker runs your code": SAYS_WHAT_IS_TRUSTED,
    "It trusts what you hand it": SAYS_WHAT_IS_TRUSTED,
    "It trusts nothing that it finds": "tests/security/test_promises.py::test_each_sentence_has_a_test",
    "the dataset and your functions": "tests/contract/test_contexts.py::test_the_same_under_other_contexts",
    "what workers and parent say": "tests/security/test_promises.py::test_workers_and_parent_share_nothing_with_a_name",
    "a cache in memory of one process": "tests/security/test_pickles.py::test_in_memory_of_one_process_it_is",
    "a cache that the ranks of a node share": "tests/security/test_pickles.py::test_memory_of_ranks_and_nodes_is_never_unpickled "
    "tests/security/test_pickles.py::test_only_plain_values_travel",
    "reports of a script's processes": "tests/security/test_run.py::test_the_user_reaches_the_run",
    "caches on other nodes": "tests/security/test_peers.py::test_a_program_that_is_no_node_is_asked_for_nothing "
    "tests/security/test_peers.py::test_a_message_that_does_not_come_in_its_turn_ends_the_connection",
    "what comes through Ray": SAYS_WHAT_IS_TRUSTED,
    "a cache on disk": "tests/staging/test_disk_cache.py::test_nothing_in_a_cache_is_unpickled "
    "tests/staging/test_disk_cache.py::test_a_flipped_byte_is_never_served",
    "a state dict": "tests/sampling/test_state.py::test_rubbish_is_an_error_of_stoker_s_own",
    "tuning profiles, reports": "tests/diagnosis/test_compare.py::test_anything_for_a_report "
    "tests/diagnosis/test_compare.py::test_names_that_no_terminal_should_see "
    "tests/diagnosis/test_html.py::test_what_a_script_is_called_is_no_markup",
    "image files": NOT_PROMISED,
    "stoker reads a pickle only": "tests/security/test_pickles.py::test_whoever_unpickles_is_known",
    "code names each place": "tests/security/test_pickles.py::test_whoever_unpickles_is_known",
    "Another user of the machine": "tests/security/test_run.py::test_another_user_does_not "
    "tests/security/test_run.py::test_a_flood_by_another_user_leaves_the_report_whole "
    "tests/security/test_promises.py::test_another_user_reaches_no_memory",
    "No more does a container": "tests/security/test_run.py::test_a_container_with_the_same_user_and_network_does_not",
    "A process of the same user": NOT_PROMISED,
    "Between nodes of a cluster": NOT_PROMISED,
    "Who is in between": "tests/security/test_peers.py::test_what_is_in_between_hears_no_secret "
    "tests/security/test_peers.py::test_what_is_changed_on_the_way_is_dropped",
    "Idle or hostile connections": "tests/security/test_peers.py::test_idle_connections_do_not_end_the_server "
    "tests/security/test_peers.py::test_who_says_nothing_or_little_is_left",
    "Files that stoker writes": "tests/security/test_promises.py::test_another_user_reads_no_file_that_stoker_wrote "
    "tests/core/test_files.py::test_a_new_file_is_private_and_an_old_one_keeps_its_mode",
    "Links are followed": "tests/core/test_files.py::test_a_link_is_followed_and_a_pipe_is_written_to "
    "tests/commands/test_run.py::test_a_link_under_the_default_name_of_the_report_is_replaced",
    "A cache's folder that is a link": "tests/security/test_promises.py::test_a_link_inside_a_cache_is_not_followed "
    "tests/staging/test_disk_cache.py::test_links_and_pipes_inside_a_cache_are_not_read "
    "tests/staging/test_disk_cache.py::test_a_folder_that_is_a_link_is_not_followed",
    "code in a code": "tests/commands/test_config.py::test_the_table_of_another_user_is_not_read",
    "Nothing is sent anywhere": "tests/security/test_promises.py::test_nothing_is_sent_anywhere "
    "tests/security/test_environment.py::test_credentials_do_not_travel",
    "code and code remove only": "tests/commands/test_cache.py::test_what_else_lies_there",
    "A worker that dies": "tests/workers/faults/test_lives.py::test_a_life_gives_the_batches_of_a_calm_one",
    "Decoders run in workers": NOT_PROMISED,
    "To report something": NOT_PROMISED,
}


def sentences() -> Iterator[str]:
    text = (ROOT / "SECURITY.md").read_text().partition("\n")[2]
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    for block in re.split(r"\n\n|\n(?=[-|])", text):
        if block.startswith("|"):
            if not re.match(r"\| (what \||---)", block):
                yield block.strip("| ").partition(" |")[0]
        else:
            yield from re.split(r"(?<=\.)\s+(?=[A-Z]|code)", " ".join(block.removeprefix("- ").split()))


def test_each_sentence_has_a_test() -> None:
    known = {said: next((begin for begin in TESTS if said.startswith(begin)), None) for said in sentences() if said}
    assert len(known) >= 25
    assert not [said for said, begin in known.items() if begin is None]
    assert set(known.values()) == set(TESTS)
    for names in TESTS.values():
        for name in names.split() if "::" in names else ():
            file, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(), name


def open_in(pid: int) -> set[str]:
    out = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.path.lexists(fd):
            out.add(os.readlink(fd))
    return out


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
def test_workers_and_parent_share_nothing_with_a_name(method: str) -> None:
    before = open_in(os.getpid())
    it: Any = iter(stoker.DataLoader(list(range(64)), batch_size=4, num_workers=2, multiprocessing_context=method))
    next(it)
    there = set().union(open_in(os.getpid()), *(open_in(worker.pid) for worker in it._workers)) - before
    named = {row[6]: row[7] for row in map(str.split, open("/proc/net/unix")) if len(row) > 7}
    assert [x for x in there if x.startswith("/memfd:stoker")]
    for x in there:
        assert x.startswith(("pipe:", "socket:", "/memfd:", "anon_inode:", "/dev/null", "/proc/")), x
        assert not x.startswith("socket:") or x[8:-1] not in named
    del it


HOLDS = """
import sys
from stoker.staging.node_cache import new_memories
memories = new_memories(64, 2, 1 << 20, 1)
print(*[f"/proc/self/fd/{memory.fd}" for memory in memories], flush=True)
sys.stdin.readline()
"""
OPENS = """
import glob, os, sys
opened = 0
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        opened += 1
    except OSError:
        pass
print(len(sys.argv) - 1, opened)
"""


@pytest.mark.slow
def test_another_user_reaches_no_memory() -> None:
    needs()
    line = [*user(VICTIM), sys.executable, "-W", "ignore", "-c", HOLDS]
    with subprocess.Popen(line, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        paths = [path.replace("self", str(holder.pid)) for path in holder.stdout.readline().split()]
        assert out_of([*user(VICTIM), sys.executable, "-c", OPENS, *paths]).split() == ["2", "2"]
        assert out_of([*user(OTHER), sys.executable, "-c", OPENS, *paths]).split() == ["2", "0"]
        holder.communicate("\n")


WRITES = """
import sys, torch, stoker
from torch.utils.data import DataLoader
staged = stoker.Staged(list(range(64)), prepare=torch.tensor, cache="disk")
for _ in range(2):
    for batch in DataLoader(staged, batch_size=8): pass
"""


@pytest.mark.slow
def test_another_user_reads_no_file_that_stoker_wrote(temp: Path) -> None:
    """In folders that they may enter."""
    needs()
    work, cache = temp / "work", temp / "cache"
    for made in (work, cache):
        made.mkdir()
        made.chmod(0o755)
        os.chown(made, VICTIM, VICTIM)
    (temp / "train.py").write_text(WRITES)
    (temp / "train.py").chmod(0o644)
    command = [
        *user(VICTIM),
        sys.executable,
        "-m",
        "stoker",
        "run",
        "--json",
        work / "report.json",
        temp / "train.py",
    ]
    out_of(command, XDG_CACHE_HOME=str(cache), TMPDIR=str(work), STOKER_CACHE=str(cache / "staged"))
    written = [path for folder in (work, cache) for path in folder.rglob("*") if path.is_file()]
    assert {"report.json", "manifest.json", "head.npy"} <= {path.name for path in written}
    assert out_of([*user(OTHER), sys.executable, "-c", OPENS, *written]).split() == [str(len(written)), "0"]


def cache_in(folder: Path) -> stoker.Staged:
    return stoker.Staged(list(range(64)), prepare=torch.tensor, cache="disk", cache_dir=folder, cache_budget=1 << 20)


def begun(folder: Path) -> dict[str, Path]:
    """A cache with half of its samples. Returns its tables, by name."""
    staged = cache_in(folder)
    assert [int(staged[i]) for i in range(32)] == list(range(32))
    (made,) = folder.glob("*.part")
    return {path.name: path for path in made.glob("*.npy")}


def test_a_link_inside_a_cache_is_not_followed(tmp_path: Path) -> None:
    """Neither to write to what it leads to, nor to read from it."""
    names = list(begun(tmp_path / "first"))
    assert len(names) > 3
    for name in names:
        table, theirs = begun(tmp_path / name)[name], tmp_path / f"theirs of {name}"
        table.rename(theirs)
        table.symlink_to(theirs)
        before = theirs.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            staged = cache_in(tmp_path / name)
            assert [int(staged[i]) for i in range(64)] == list(range(64))
        assert theirs.read_bytes() == before, name


LISTENS = """
import os, sys
def note(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        fd = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (event + " " + repr(args[1:2]) + chr(10)).encode())
        os.close(fd)
sys.addaudithook(note)
"""
TRAINS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.arange(20_000.0 + i).exp().log()[:16] + torch.rand(1)
for _ in range(2):
    for batch in DataLoader(Data(), batch_size=8, num_workers=1): pass
"""


@pytest.mark.slow
def test_nothing_is_sent_anywhere(tmp_path: Path) -> None:
    """No process of a run connects to anything but the socket of the run, or asks for a name."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(LISTENS.format(log=str(tmp_path / "log")))
    (tmp_path / "train.py").write_text(TRAINS)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "hook")}
    line = [sys.executable, "-m", "stoker", "run", "--apply", "train.py"]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    noted = (tmp_path / "log").read_text().splitlines()
    assert noted
    assert not [x for x in noted if not re.fullmatch(r"socket\.connect \('/proc/self/fd/\d+/reports',\)", x)]
