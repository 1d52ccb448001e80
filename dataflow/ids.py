"""Identifiers that every floor shares."""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", str)
"""Names one dataset row or environment seed, e.g. `arithmetic/train/1042`."""

GroupId = NewType("GroupId", int)
"""Admission number of a group, counted from 0 and never reused in a run."""

TrajectoryId = NewType("TrajectoryId", str)
"""`<group>/<member>`, e.g. `17/3`."""

RequestId = NewType("RequestId", str)
"""Names one request to one engine. A retried turn is a new request."""

EngineId = NewType("EngineId", str)
"""E.g. `engine-0`."""
