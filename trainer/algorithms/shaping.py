"""What is added to a reward because of the length of its answer."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_new_tokens: int, cache_share: float) -> float:
    """0 up to L_max − L_cache, linear to −1 at L_max, −1 beyond. DAPO, arXiv 2503.14476, eq. 13.

    Args:
        num_tokens: Sampled tokens of the answer.
        max_new_tokens: L_max.
        cache_share: L_cache / L_max in (0, 1], length of the ramp; the paper has 4096 of 20480 tokens.
    """
    cache_tokens = cache_share * max_new_tokens
    excess = num_tokens - (max_new_tokens - cache_tokens)
    return -min(max(excess / cache_tokens, 0.0), 1.0)
