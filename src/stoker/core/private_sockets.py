"""Unix sockets in a folder that only this user may enter.

A socket in the abstract namespace (unix(7)) has no permissions: every user, and every container that shares the
machine's network namespace, can connect to it. A socket in a folder of mode 700 is reachable only for processes of the
same user that have the folder mounted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator

REPORTS = "reports"  # name of the socket to which watched processes report
PREFIX = "stoker-"  # of folder names
MOST_BYTES = 107  # maximum length of a socket's path (unix(7))
BACKLOG = 4096  # pending connections; the kernel may allow fewer
RETRY_S = 0.05  # delay after a connection could not be accepted
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}


def listen_in_new_folder() -> tuple[str, socket.socket]:
    """Creates a folder in the temporary folder, with the server ``REPORTS`` in it. Also removes the folders of runs
    that were killed. Raises OSError if it cannot create either."""
    for old in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{PREFIX}*", REPORTS)):
        with contextlib.suppress(OSError), _entered(os.path.dirname(old)) as fd, _locked(fd):
            try:
                _connect(fd, os.path.dirname(old), REPORTS, 0.0).close()
            except ConnectionRefusedError:
                shutil.rmtree(os.path.dirname(old))
    folder = tempfile.mkdtemp(prefix=PREFIX)  # of mode 700
    try:
        # without the lock, another run would take the folder for abandoned before the server listens
        with _entered(folder) as fd, _locked(fd):
            return folder, _listen(fd, folder, REPORTS)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _entered(folder: str) -> Iterator[int]:
    """Yields a descriptor of the folder. Raises OSError if the folder does not exist or other users may enter it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "other users have access to it", folder)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked by another thread may hold the descriptor too


def _in_folder(fd: int, name: str) -> str:
    return f"/proc/self/fd/{fd}/{name}"  # short, and certainly the folder that was checked


def _listen(fd: int, folder: str, name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = os.path.join(folder, name)  # a full path: programs that clean temp folders look for it in /proc/net/unix
        server.bind(path if len(os.fsencode(path)) <= MOST_BYTES else _in_folder(fd, name))
        server.listen(BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def connect(folder: str, name: str, timeout: float) -> socket.socket:
    """Connects to a server, with a timeout in seconds. Raises OSError if nobody listens or too many connections are
    pending."""
    with _entered(folder) as fd:
        return _connect(fd, folder, name, timeout)


def _connect(fd: int, folder: str, name: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        is_there = os.path.exists("/proc/self/fd")  # not on every system
        connection.connect(_in_folder(fd, name) if is_there else os.path.join(folder, name))
    except BaseException:
        connection.close()
        raise
    return connection


def meet(folder: str, name: str, timeout: float) -> tuple[socket.socket, bool]:
    """Returns ``(socket, is_server)``: a server for the first caller of this name, a connection to it for the others.
    Raises OSError if neither is possible."""
    with _entered(folder) as fd, _locked(fd):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connect(fd, folder, name, timeout), False
        with contextlib.suppress(FileNotFoundError):  # left by a process that has ended
            os.unlink(name, dir_fd=fd)
        return _listen(fd, folder, name), True


def connections(server: socket.socket) -> Iterator[socket.socket]:
    """Yields connections to a server until it is closed; survives a shortage of descriptors or memory."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError as e:
            if server.fileno() < 0 or e.errno not in SHORTAGES:
                return
            time.sleep(RETRY_S)
            continue
        yield connection
