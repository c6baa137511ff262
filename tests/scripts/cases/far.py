"""Each sample is a request to a server that takes its time, as of an object store."""

import http.server
import random
import threading
import time
import urllib.request

import numpy as np
import torch
from seen import Seen
from torch.utils.data import DataLoader, Dataset


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(0.01)
        body = np.full(64, int(self.path[1:]), np.float32).tobytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Remote(Dataset):
    def __init__(self, url):
        self.url = url

    def __len__(self):
        return 120

    def __getitem__(self, index):
        with urllib.request.urlopen(f"{self.url}/{index}") as answer:
            row = np.frombuffer(answer.read(), np.float32)
        first = random.randint(0, 32)
        return torch.from_numpy(row[first : first + 32].copy()) * torch.rand(()), index


if __name__ == "__main__":
    random.seed(1)
    torch.manual_seed(1)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    loader = DataLoader(Remote(f"http://127.0.0.1:{server.server_address[1]}"), 16, True, num_workers=2)
    seen = Seen()
    for epoch in range(4):
        for x, index in loader:
            seen.add(index, drawn=x)
        seen.epoch()
    seen.end()
    server.shutdown()
