"""Data that are no whole number of batches: all of them in one process, 7 rows of 8 on the last rank."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images[:951]) / 16, torch.tensor(labels[:951])
dataset = TensorDataset(inputs, targets)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loader = DataLoader(dataset, batch_size=48)

for _ in range(2):
    for batch, answers in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), answers).backward()
        optimizer.step()

with torch.no_grad():
    final_loss = nn.functional.cross_entropy(model(inputs), targets).item()
