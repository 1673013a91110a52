"""Print the estimates of the package `obp` as JSON; run by experiments/off_policy.py in an environment of its own."""

import json
import sys

import numpy as np
from obp.ope import DoublyRobust, InverseProbabilityWeighting, SelfNormalizedInverseProbabilityWeighting

log = np.load(sys.argv[1])
target = log["target_distribution"][:, :, None]  # [decisions, actions, 1 position]
shared = {
    "reward": log["rewards"],
    "action": log["actions"],
    "pscore": log["propensities"],
    "action_dist": target,
    "position": np.zeros(len(log["rewards"]), int),
}
expected = log["expected_rewards"][:, :, None]
values = {
    "IPS": InverseProbabilityWeighting().estimate_policy_value(**shared),
    "SNIPS": SelfNormalizedInverseProbabilityWeighting().estimate_policy_value(**shared),
    "DR": DoublyRobust().estimate_policy_value(**shared, estimated_rewards_by_reg_model=expected),
}
print(json.dumps({name: float(value) for name, value in values.items()}))
