"""Independent reference of the objectives: plain floats, explicit loops over sequences and tokens, from the equations.

Nothing here is vectorised or shared with the package, on purpose. J is maximised (loss = -J). The numbers in
luspo_goldens.json were made this way and checked by finite differences.
"""

import math


def clipped_minimum(ratio, advantage, low, high):
    """min(ratio A, clip(ratio) A) and its derivative with respect to ratio."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= bounded * advantage:
        return ratio * advantage, advantage
    return bounded * advantage, 0.0


def objective(name, sequences, low, high, n_seq, n_tokens, max_length=8, kl_coef=0.0, entropy_coef=0.0):
    """J and dJ/dlogp of a list of sequences, each a dict with lists ``new``, ``old``, ``mask`` and a float
    ``advantage``; optional lists ``ref``, ``entropy``, ``rollout_weight``. ``n_seq`` and ``n_tokens`` are global."""
    total, gradients = 0.0, []
    for sequence in sequences:
        new, old, mask = sequence["new"], sequence["old"], sequence["mask"]
        tokens = [t for t in range(len(new)) if mask[t]]
        length = len(tokens)
        gradient = [0.0] * len(new)
        gradients.append(gradient)
        if length == 0:
            continue
        advantage = sequence["advantage"]
        correction = sequence.get("rollout_weight", [1.0] * len(new))
        if name in ("gspo", "luspo"):
            ratio = math.exp(math.fsum(new[t] - old[t] for t in tokens) / length)
            value, slope = clipped_minimum(ratio, advantage, low, high)
            scale = (length if name == "luspo" else 1) / n_seq * math.fsum(correction[t] for t in tokens) / length
            total += scale * value
            for t in tokens:
                gradient[t] += scale * slope * ratio / length
            per_token = (1.0 if name == "luspo" else 1 / length) / n_seq
        else:
            per_token = {
                "grpo": 1 / (length * n_seq),
                "drgrpo": 1 / (n_seq * max_length),
                "dapo": 1 / n_tokens,
                "cispo": 1 / n_tokens,
            }[name]
            for t in tokens:
                ratio = math.exp(new[t] - old[t])
                if name == "cispo":
                    factor = min(max(ratio, 1 - low), 1 + high) * advantage
                    total += per_token * correction[t] * factor * new[t]
                    gradient[t] += per_token * correction[t] * factor
                else:
                    value, slope = clipped_minimum(ratio, advantage, low, high)
                    total += per_token * correction[t] * value
                    gradient[t] += per_token * correction[t] * slope * ratio
        for t in tokens:
            if kl_coef:
                d = sequence["ref"][t] - new[t]
                total -= kl_coef * per_token * (math.exp(d) - d - 1)
                gradient[t] -= kl_coef * per_token * (1 - math.exp(d))
            if entropy_coef:
                total += entropy_coef * per_token * sequence["entropy"][t]
    return total, gradients
