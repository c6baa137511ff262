"""PyTorch Geometric: its own loader over a list of graphs, and over a Dataset that makes them as they are asked for."""

import torch
from seen import Seen
from torch_geometric.data import Data, Dataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.transforms import RandomNodeSplit  # noqa: F401  (imported as tutorials do)


def graph(i):
    g = torch.Generator().manual_seed(i)
    n = 5 + i % 7
    edges = torch.randint(0, n, (2, 3 * n), generator=g)
    return Data(x=torch.randn(n, 8, generator=g), edge_index=edges, y=torch.tensor([i % 3]), number=i)


class Lazy(Dataset):
    def len(self):
        return 120

    def get(self, i):
        data = graph(i)
        data.x = data.x + 0.01 * torch.randn_like(data.x)
        return data


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lin = GCNConv(8, 16), torch.nn.Linear(16, 3)

    def forward(self, data):
        return self.lin(global_mean_pool(self.conv(data.x, data.edge_index).relu(), data.batch))


def main():
    torch.manual_seed(12)
    model = GCN()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    loaders = {
        "list": DataLoader([graph(i) for i in range(120)], batch_size=24, shuffle=True),
        "lazy": DataLoader(Lazy(), batch_size=24, shuffle=True, num_workers=2),
    }
    seen = {k: Seen() for k in loaders}
    for _ in range(3):
        for name, loader in loaders.items():
            for data in loader:
                each = data.to_data_list()
                drawn = [d.x for d in each] if name == "lazy" else None
                seen[name].add(data.number, data.y, [d.edge_index for d in each], drawn=drawn)
                loss = torch.nn.functional.cross_entropy(model(data), data.y)
                opt.zero_grad()
                loss.backward()
                opt.step()
            seen[name].epoch(name)
    seen["lazy"].end()


if __name__ == "__main__":
    main()
