import multiprocessing
import socket
import threading
import time

import torch
from planted import CORES, Rows
from torch.utils.data import DataLoader


def serve(listening):
    """A store that answers after four milliseconds."""
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection):
    while connection.recv(8):
        time.sleep(0.004)
        connection.sendall(bytes(1024))


class Data(Rows):
    connection = None

    def __init__(self, n, port):
        super().__init__(n)
        self.port = port

    def __getitem__(self, i):
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.sendall(i.to_bytes(8, "little"))
        data = b""
        while len(data) < 1024:
            data += self.connection.recv(1024)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listening,), daemon=True)
    server.start()
    for batch in DataLoader(Data(1600, listening.getsockname()[1]), batch_size=8, num_workers=CORES):
        time.sleep(0.002)
    server.kill()
