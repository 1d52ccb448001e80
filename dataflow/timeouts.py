"""Longest and shortest time-outs, which settings of several sections share."""

MAX_TIMEOUT_S = 30 * 24 * 3600.0
"""Longest time-out, seconds. One of 30 days never ends a hang, and system calls refuse numbers of 10 digits."""
MIN_CALL_TIMEOUT_S = 0.001
"""Shortest time-out of one call, seconds. No answer of another process arrives sooner."""
