"""A generator and a discriminator, each with an optimizer, learn points of a circle."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
angles = torch.rand(480, dtype=torch.float64) * 6.28
dataset = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1), torch.randn(480, 3, dtype=torch.float64))

generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)).double()
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.99), eps=1e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.99), eps=1e-4)
loader = DataLoader(dataset, batch_size=48)


def loss_of(points, real):
    logits = discriminator(points)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


for _ in range(2):
    for real, noise in loader:
        made = generator(noise)
        of_discriminator.zero_grad()
        (loss_of(real, 1.0) + loss_of(made.detach(), 0.0)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        loss_of(made, 1.0).backward()
        of_generator.step()

weights = {**generator.state_dict(prefix="generator."), **discriminator.state_dict(prefix="discriminator.")}
