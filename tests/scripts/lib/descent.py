"""Gradient descent for scripts about something else: the first step of one of torch.optim imports torch._dynamo, which
takes a second of each run."""

import torch


class SGD:
    def __init__(self, parameters, lr=1e-3):
        self.parameters, self.lr = list(parameters), lr

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if p.grad is not None:
                p -= self.lr * p.grad
