"""Two batches make a step: their gradients are accumulated."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images[:960]) / 16, torch.tensor(labels[:960]))

model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-4)
loader = DataLoader(dataset, batch_size=48)

for _ in range(2):
    for number, (inputs, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), targets) / 2
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

weights = model.state_dict()
