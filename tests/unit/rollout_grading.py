"""A reward for tests: 1 when the response has an even number of tokens."""

from luspo_megatron.reward.base import RewardInput


def length_is_even(item: RewardInput) -> float:
    return float(item.response_length % 2 == 0)
