"""A small transformer learns to tell the previous letter of a random text."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
text = torch.randint(10, (480, 8))
dataset = TensorDataset(text, text.roll(1, dims=1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(10, 16), nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, text):
        return self.head(self.layers(self.words(text) + self.places.weight))


model = Model().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
loader = DataLoader(dataset, batch_size=48)

for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        warm_up.step()

weights = model.state_dict()
