"""A perceptron learns the digits in bfloat16, by autocast; its weights are float32."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images[:960], dtype=torch.float32) / 16, torch.tensor(labels[:960])
dataset = TensorDataset(inputs, targets)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
loader = DataLoader(dataset, batch_size=48)


def loss_of(inputs, targets):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(model(inputs), targets)


for _ in range(4):
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(*batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

with torch.no_grad():
    final_loss = loss_of(inputs, targets).item()
