"""Identifiers used in all packages."""

from __future__ import annotations

from typing import Final, NewType

TaskId = NewType("TaskId", str)
"""Names one dataset row or environment seed, e.g. `arithmetic/train/1042`."""

GroupId = NewType("GroupId", int)
"""Admission number of a group, counted from 0 and never reused in a run."""

TrajectoryId = NewType("TrajectoryId", str)
"""`<group>/<member>`, e.g. `17/3`."""

RequestId = NewType("RequestId", str)
"""Names one request to one engine. A retried turn is a new request."""

EngineId = NewType("EngineId", str)
"""E.g. `engine-0`, or `partner-engine-0` in a run with two policies."""

PolicyId = NewType("PolicyId", str)
"""Names a policy of a run, e.g. the one that sampled a trajectory."""

POLICY: Final = PolicyId("policy")
"""The policy of a run; in most runs the only one."""

PARTNER: Final = PolicyId("partner")
"""The second policy of a run with two policies (`partner` in the configuration)."""
