"""stoker.installed(): stoker's engine behind torch's own DataLoader, for code that makes its loaders itself."""

import torch
import torch.utils.data

import stoker


def framework_fit(dataset, epochs):
    """Stands for a trainer that nobody wants to edit: it makes torch's own loader."""
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
    weights = torch.zeros(8, requires_grad=True)
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = (inputs @ weights - targets).square().mean()
            (gradient,) = torch.autograd.grad(loss, weights)
            weights.data -= 0.05 * gradient
    return weights.detach(), type(iter(loader)).__module__.partition(".")[0]


def main():
    inputs = torch.randn(2048, 8, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(inputs, inputs @ torch.arange(8.0))
    torch.manual_seed(0)
    plain, engine = framework_fit(dataset, epochs=3)
    print(f"engine of {engine}: {plain[:4].tolist()}")
    torch.manual_seed(0)
    with stoker.installed():
        fitted, engine = framework_fit(dataset, epochs=3)
    print(f"engine of {engine}: {fitted[:4].tolist()}")
    print(f"the same weights: {torch.equal(plain, fitted)}")


if __name__ == "__main__":
    main()
