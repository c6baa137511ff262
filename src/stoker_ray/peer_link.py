"""Authenticated messages between the caches of two nodes: both prove that they know the secret of the run.

::

    client                                          server
    a random number                            ->
                                              <-    a random number, and a proof of both numbers
    a proof of both numbers                    ->
    messages, each with a tag                 <->

A proof is HMAC-SHA256 with the secret, which is never sent. A tag is BLAKE2b of the message and its number, with a key
derived from both random numbers and the secret, a different one for each direction. So if an intermediary changes,
drops, repeats or adds a message, the connection ends. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import TypeAlias

Buffer: TypeAlias = bytes | memoryview

LENGTH = struct.Struct("<q")
MOST_BYTES = 1 << 30  # limit for a message
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
SERVER, CLIENT, ASKS, ANSWERS = b"server", b"client", b"asks", b"answers"  # purposes of proofs and keys


class Link:
    """One end of a connection. Without keys, messages have no tags: between processes that share it privately."""

    def __init__(self, connection: socket.socket, sends: bytes = b"", hears: bytes = b"") -> None:
        self._connection = connection
        self._sends, self._hears = sends, hears  # keys
        self._sent = self._heard = 0

    def send(self, *parts: Buffer) -> None:
        length = sum(memoryview(part).nbytes for part in parts)
        message = [LENGTH.pack(length), *parts]
        if self._sends:
            message.append(_tag(self._sends, self._sent, parts))
        self._sent += 1
        self._connection.sendall(b"".join(message))

    def receive(self, most: int = MOST_BYTES) -> memoryview:
        """Receives the next message. Raises ValueError if it is longer than ``most`` bytes, or its tag is wrong."""
        (length,) = LENGTH.unpack(_receive(self._connection, LENGTH.size))
        if not 0 <= length <= most:
            raise ValueError
        message = _receive(self._connection, length)
        if self._hears:
            tag = _receive(self._connection, TAG_BYTES)
            if not hmac.compare_digest(tag, _tag(self._hears, self._heard, (message,))):
                raise ValueError
        self._heard += 1
        return message


def accept(connection: socket.socket, secret: bytes, seconds: float) -> Link:
    """Returns the server's end, once the client has proved that it knows the secret. Raises ValueError if the proof is
    wrong, and OSError if it does not arrive within ``seconds``."""
    until = time.monotonic() + seconds
    client = bytes(_receive(connection, NONCE_BYTES, until))
    server = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(server + _keyed(secret, SERVER, client, server))
    _check(_receive(connection, PROOF_BYTES, until), _keyed(secret, CLIENT, client, server))
    connection.settimeout(None)
    return Link(connection, _keyed(secret, ANSWERS, client, server), _keyed(secret, ASKS, client, server))


def connect(connection: socket.socket, secret: bytes, seconds: float) -> Link:
    """Returns the client's end, once the server has proved that it knows the secret. Raises ValueError if the proof is
    wrong, and OSError if it does not arrive within ``seconds``."""
    until = time.monotonic() + seconds
    client = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(client)
    server = bytes(_receive(connection, NONCE_BYTES, until))
    _check(_receive(connection, PROOF_BYTES, until), _keyed(secret, SERVER, client, server))
    connection.sendall(_keyed(secret, CLIENT, client, server))
    return Link(connection, _keyed(secret, ASKS, client, server), _keyed(secret, ANSWERS, client, server))


def _keyed(secret: bytes, purpose: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, purpose + client + server, "sha256")


def _check(proof: memoryview, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ValueError


def _tag(key: bytes, number: int, parts: tuple[Buffer, ...]) -> bytes:
    made = hashlib.blake2b(LENGTH.pack(number), key=key, digest_size=TAG_BYTES)
    for part in parts:
        made.update(part)
    return made.digest()


def _receive(connection: socket.socket, n: int, until: float | None = None) -> memoryview:
    """Receives ``n`` bytes. Raises OSError if they do not all arrive by ``until``, on the monotonic clock."""
    data = memoryview(bytearray(n))
    at = 0
    while at < n:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        got = connection.recv_into(data[at:])
        if not got:
            raise ConnectionResetError
        at += got
    return data
