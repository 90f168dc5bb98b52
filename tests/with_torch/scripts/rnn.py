"""An LSTM learns to go on with waves."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
phases = torch.rand(480, 1, dtype=torch.float64) * 6.28
waves = torch.sin(phases + torch.arange(13) * 0.5).unsqueeze(2)
dataset = TensorDataset(waves[:, :-1], waves[:, 1:])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(1, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, inputs):
        return self.head(self.recurrent(inputs)[0])


model = Model().double()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005, eps=1e-4)
loader = DataLoader(dataset, batch_size=48)

for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()

weights = model.state_dict()
