"""Print the estimates of the package `obp` as JSON; run by experiments/off_policy.py in an environment of its own."""

import json
import sys

import numpy as np
from obp.ope import (
    DoublyRobust,
    InverseProbabilityWeighting,
    SelfNormalizedInverseProbabilityWeighting,
    SelfNormalizedSlateIndependentIPS,
    SelfNormalizedSlateRewardInteractionIPS,
    SelfNormalizedSlateStandardIPS,
    SlateIndependentIPS,
    SlateRewardInteractionIPS,
    SlateStandardIPS,
)

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
rewards = log["slate_rewards"]  # [slates, positions]; as are the probabilities of the shown items
policies = {"": log["slate_propensities"], "evaluation_policy_": log["slate_targets"]}
slates, positions = rewards.shape
slate = {
    "slate_id": np.repeat(np.arange(slates), positions),
    "reward": rewards.ravel(),
    "position": np.tile(np.arange(positions), slates),
}
whole = {f"{policy}pscore": np.repeat(chances.prod(axis=1), positions) for policy, chances in policies.items()}
alone = {f"{policy}pscore_item_position": chances.ravel() for policy, chances in policies.items()}
so_far = {f"{policy}pscore_cascade": chances.cumprod(axis=1).ravel() for policy, chances in policies.items()}
ways = {
    "standard": (SlateStandardIPS, SelfNormalizedSlateStandardIPS, whole),
    "independent": (SlateIndependentIPS, SelfNormalizedSlateIndependentIPS, alone),
    "cascade": (SlateRewardInteractionIPS, SelfNormalizedSlateRewardInteractionIPS, so_far),
}
for kind, (ips, snips, chances) in ways.items():
    values[f"slates, {kind}"] = ips(len_list=positions).estimate_policy_value(**slate, **chances)
    values[f"slates, {kind} SNIPS"] = snips(len_list=positions).estimate_policy_value(**slate, **chances)
# obp has no DR of slates whose positions are independent of each other: they are as many decisions, whose values are added.
values["slates, independent DR"] = sum(
    DoublyRobust().estimate_policy_value(
        reward=rewards[:, place],
        action=log["slate_items"][:, place],
        pscore=log["slate_propensities"][:, place],
        action_dist=np.repeat(log["slate_policy"][None, place, :, None], slates, axis=0),
        position=np.zeros(slates, int),
        estimated_rewards_by_reg_model=log["slate_expected_rewards"][:, place, :, None],
    )
    for place in range(positions)
)
print(json.dumps({name: float(value) for name, value in values.items()}))
