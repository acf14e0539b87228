"""REINFORCE on a cart pole: each trainer plays its own episodes, and stops when its policy is good enough.

    gradpost up --trainers 2 -- python examples/reinforce.py

Against training in one process, three lines are new; they are marked. A trainer that has finished leaves the run, and
the others continue. Williams, 1992; Barto, Sutton, Anderson, 1983.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import gradpost

MAX_STEPS = 200  # of an episode


def move(state: Tensor, push: float) -> Tensor:
    """Return the state (position, speed, angle, angular speed) 0.02 s after a push of the cart, in newtons."""
    x, dx, angle, turn = state.tolist()
    pull = (push + 0.05 * turn * turn * math.sin(angle)) / 1.1
    dturn = (9.8 * math.sin(angle) - pull * math.cos(angle)) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
    ddx = pull - 0.05 * dturn * math.cos(angle) / 1.1
    return torch.tensor([x + 0.02 * dx, dx + 0.02 * ddx, angle + 0.02 * turn, turn + 0.02 * dturn])


def play(policy: nn.Module) -> tuple[Tensor, int]:
    """Play one episode; return the loss and the number of steps."""
    state, log_probabilities = 0.1 * torch.rand(4) - 0.05, []
    while len(log_probabilities) < MAX_STEPS and abs(state[0]) < 2.4 and abs(state[2]) < math.radians(12):
        action = (choice := torch.distributions.Categorical(logits=policy(state))).sample()
        log_probabilities.append(choice.log_prob(action))
        state = move(state, 10.0 if action else -10.0)
    returns = torch.zeros(len(log_probabilities))
    following = 0.0
    for step in reversed(range(len(returns))):
        following = returns[step] = 1 + 0.99 * following
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    return -(returns * torch.stack(log_probabilities)).sum(), len(returns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400, help="of each trainer, at most")
    parser.add_argument("--goal", type=float, default=120, help="the mean number of steps at which a trainer stops")
    options = parser.parse_args()

    torch.set_num_threads(1)  # several trainers share this machine
    session = gradpost.connect()  # new
    torch.manual_seed(session.rank)  # new: each trainer plays its own episodes
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    optimizer = gradpost.RemoteOptimizer(optimizer, model=policy)  # new

    mean, num_episodes = 10.0, 0
    while mean < options.goal and num_episodes < options.episodes:
        optimizer.zero_grad()
        loss, length = play(policy)
        loss.backward()
        optimizer.step()
        mean, num_episodes = 0.95 * mean + 0.05 * length, num_episodes + 1
    print(f"{num_episodes} episodes, {mean:.0f} steps in the mean of the last")


if __name__ == "__main__":
    main()
