"""A convolutional network with group normalization learns the digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.images[:480, None]) / 16, torch.tensor(digits.target[:480]))


def block(inputs, outputs):
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(2, outputs), nn.ReLU(), nn.MaxPool2d(2))


model = nn.Sequential(block(1, 4), block(4, 8), nn.Flatten(), nn.Linear(32, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
loader = DataLoader(dataset, batch_size=48)

for _ in range(2):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

weights = model.state_dict()
