"""Low-rank adapters of a frozen layer that is used twice."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images[:960]) / 16, torch.tensor(labels[:960]))


class Adapted(nn.Module):
    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs):
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


shared = Adapted(nn.Linear(64, 64), 4)
model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(64, 10)).double()
optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.01, eps=1e-3)
loader = DataLoader(dataset, batch_size=48)

for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

weights = model.state_dict()
