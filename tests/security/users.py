"""Processes of other users, and in other namespaces, as tests of what these can reach need them. They want root."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import stoker

VICTIM, OTHER = 61001, 61002  # users that nobody is
SOURCE = Path(stoker.__file__).parents[1]
LIMIT_S = 60


def user(uid: int, container: Path | None = None) -> list[str]:
    """What begins a command line that this user is to run, without any capability. ``container``: in mount and PID
    namespaces of its own, in which this folder is another one. The network is that of this process: so runs a pod with
    ``hostNetwork`` beside another."""
    shell = _open_homes()
    options = ["--mount"]
    if container is not None:
        shell += f"mount -t tmpfs tmpfs {container}\n"
        options += ["--pid", "--fork", "--mount-proc"]
    ids = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    # The shell in between runs as that user: what setpriv itself executes, root may execute.
    as_user = ["setpriv", *ids, "sh", "-c", 'exec "$@"', "sh"]
    return ["unshare", *options, "sh", "-c", f'set -e\n{shell}exec "$@"', "sh", *as_user]


def _open_homes() -> str:
    """What lets others at this interpreter and these sources in a home that is root's alone, in a mount namespace."""
    paths = {Path(sys.base_prefix), Path(sys.prefix), SOURCE}
    hidden: dict[Path, list[Path]] = {}
    for path in sorted(paths):
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                hidden.setdefault(folder, []).append(path)
                break
    lines = []
    for folder, inside in hidden.items():
        lines += [f"exec {k}<{path}" for k, path in enumerate(inside, 3)]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {folder}"]
        lines += [f"mkdir -p {path}; mount -c --rbind /proc/self/fd/{k} {path}" for k, path in enumerate(inside, 3)]
        lines += [f"exec {k}<&-" for k, _ in enumerate(inside, 3)]
    return "".join(f"{line}\n" for line in lines)


@functools.cache
def why_not() -> str:
    """Why no process of another user can run the tests' interpreter here; "" where it can."""
    if os.getuid() != 0:
        return "only root can be another user"
    if not shutil.which("setpriv") or not shutil.which("unshare"):
        return "setpriv and unshare (util-linux) are not installed"
    line = [*user(VICTIM), sys.executable, "-c", "import click, stoker"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    return "" if done.returncode == 0 else f"another user cannot run the tests: {done.stderr.strip()[-200:]}"


@functools.cache
def why_no_namespaces(*options: str) -> str:
    """Why there are no such namespaces here, for a user without capabilities if it is a user namespace."""
    before = user(VICTIM) if "--user" in options else []
    done = subprocess.run([*before, "unshare", *options, "true"], capture_output=True, text=True, timeout=LIMIT_S)
    return "" if done.returncode == 0 else f"unshare {' '.join(options)}: {done.stderr.strip()}"


@contextlib.contextmanager
def network() -> Iterator[list[str]]:
    """What begins command lines of processes that share a network which nobody else has: abstract sockets are its own."""
    line = ["unshare", "--net", "sh", "-c", "echo; read line"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        holder.communicate(b"\n", timeout=LIMIT_S)


def needs(*options: str) -> None:
    """Skips a test where there are no other users, or no such namespaces."""
    why = why_not() or (options and why_no_namespaces(*options))
    if why:
        pytest.skip(why)


def environment(**more: str) -> dict[str, str]:
    """Of a process of another user."""
    known = {k: os.environ[k] for k in ("PATH", "LANG") if k in os.environ}
    return {**known, "PYTHONPATH": str(SOURCE), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **more}


def out_of(line: Sequence[str | Path], **variables: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        list(map(str, line)), env=environment(**variables), capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout
