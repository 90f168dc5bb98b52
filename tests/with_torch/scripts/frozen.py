"""A new head on a frozen backbone, whose batch norm keeps its means."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images[:960]) / 16, torch.tensor(labels[:960]))

backbone = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
backbone.requires_grad_(False).eval()
model = nn.Sequential(backbone, nn.Linear(32, 10)).double()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.NAdam(trained, lr=0.01, eps=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
loader = DataLoader(dataset, batch_size=48)

for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()

weights = model.state_dict()
