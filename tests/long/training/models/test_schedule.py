"""The learning rate of any number of steps."""

import torch

from training.models.schedule import rise_and_fall


def test_any_number_of_steps_rises_and_falls():
    for steps in (*range(1, 23), 100, 101):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule, rates = rise_and_fall(optimizer, 0.1, steps), []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step() if len(rates) < steps else None
        assert max(rates) <= 0.1 + 1e-9, steps
        assert min(rates) > 0, steps
        if steps >= 20:
            assert rates[0] < max(rates) > rates[-1], steps
