"""Rewards: what a response is worth, computed in bounded worker processes. Imports no torch."""

from luspo_megatron.reward.base import Reward, RewardInput, RewardResult
from luspo_megatron.reward.pool import RewardPool
from luspo_megatron.reward.scorer import RewardScorer, reward_violations
from luspo_megatron.reward.watch import ConstantRewardWatch

__all__ = [
    "ConstantRewardWatch",
    "Reward",
    "RewardInput",
    "RewardPool",
    "RewardResult",
    "RewardScorer",
    "reward_violations",
]
