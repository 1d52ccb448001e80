"""What the preflight of a joined cluster says about its nodes: each problem with nodes, both values, and a remedy."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.actors.bundles import Bundle
from penstock.actors.node_probe import NodeProbe, NodeReport
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.placement import device_bundles
from penstock.platform.cluster.preflight import NodeNeeds, needs_of, node_findings, show_nodes
from penstock.platform.config.pools import PoolConfig

PACKAGES = {"ray": "2.60.0", "torch": "2.13.0", "transformers": "5.19.0", "deepspeed": "0.19.8", "vllm": "0.32.0"}
GOOD = NodeReport(
    name="the driver's machine",
    ray_gpus=8,
    accelerator_types=("H100",),
    python="3.12.3",
    packages=PACKAGES,
    code="c0de",
    gpus=(("NVIDIA H100", 79.6),) * 8,
    nvidia_driver="580.65.06",
    shm_free_gib=64.0,
)
POOL = PoolConfig(device="gpu", count=8, memory_gib=80, accelerator_type="H100")
NEEDS = NodeNeeds((Bundle(8, "H100"), Bundle(4, "H100")), {"gpu": POOL}, shm_gib=30.0)


def node(index: int, **changes: Any) -> NodeReport:
    return replace(GOOD, name=f"10.0.0.{index}", **changes)


def said(*nodes: NodeReport, needs: NodeNeeds = NEEDS, here: NodeReport = GOOD) -> list[tuple[str, str]]:
    return [(finding.severity, finding.message) for finding in node_findings(here, nodes, needs)]


def test_equal_nodes_have_no_findings() -> None:
    assert said(node(1), node(2)) == []


@pytest.mark.full
def test_nodes_whose_processes_have_the_same_number_write_to_the_run_directory_at_once(tmp_path: Path) -> None:
    """As in containers, where the numbers begin at 1 on every node."""
    (tmp_path / "sign").write_text("sign")
    with ThreadPoolExecutor(8) as nodes:
        reports = nodes.map(lambda _: NodeProbe().report(str(tmp_path), "sign", []), range(80))
        assert {report["folder_problem"] for report in reports} == {""}


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"silence": "it has not answered `listen` within 60 s"}, "error", ["is silent", "60 s", "raylet's log"]),
        ({"code": ""}, "error", ["penstock cannot be imported", "Install it"]),
        ({"code": "beef"}, "error", ["c0de on this machine", "beef", "same version or commit"]),
        ({"python": "3.11.9"}, "error", ["3.12.3 on this machine", "3.11.9"]),
        ({"packages": PACKAGES | {"vllm": "0.31.0"}}, "error", ["is 0.32.0", "0.31.0", "install vllm==0.32.0"]),
        ({"packages": PACKAGES | {"vllm": None}}, "error", ["vllm is 0.32.0", "not installed"]),
        ({"packages": PACKAGES | {"torch": "2.13.0+cpu"}}, "error", ["CPU build", "FLAVOR=cuda"]),
        ({"nvidia_driver": "535.104.05"}, "error", ["535.104.05", "580.65.06", "Install a newer driver"]),
        ({"ray_gpus": 6}, "warning", ["has 8 GPUs", "counts 6", "--num-gpus=8"]),
        ({"gpus": (("NVIDIA A100", 39.4),) * 8}, "warning", ["memory_gib=80", "39 GiB", "accelerator_type"]),
        ({"folder_problem": "does not exist there"}, "error", ["run directory does not exist", "same path"]),
        ({"folder_problem": "cannot be written there (Permission denied)"}, "error", ["Permission denied"]),
        ({"missing_paths": ("/models/qwen",)}, "error", ["/models/qwen does not exist on", "copy it there"]),
        ({"import_errors": {"reward.fn": "reward.fn='a.b': no module 'a'"}}, "error", ["no module 'a'", "Install"]),
        ({"shm_free_gib": 0.06}, "error", ["30.0 GiB", "0.1 GiB free", "--shm-size"]),
        ({"unreachable": ("10.0.0.1",)}, "error", ["ports are closed", "10.0.0.2 -> 10.0.0.1", "Open all TCP ports"]),
        ({"clock_offset_s": -75.0, "clock_error_s": 0.01}, "error", ["-75.0 s", "Synchronise"]),
        ({"clock_offset_s": 3.0, "clock_error_s": 0.01}, "warning", ["+3.0 s", "Synchronise"]),
        ({"niceness": 15}, "warning", ["15", "RAY_worker_niceness=0"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_problem_is_named_with_its_node_both_values_and_what_to_do(
    changes: dict[str, Any], severity: str, words: list[str]
) -> None:
    found = [one for one in said(node(1), node(2, **changes), node(3)) if "GPUs are needed" not in one[1]]
    assert [kind for kind, _ in found] == [severity], found
    assert [word for word in ["10.0.0.2", *words] if word not in found[0][1]] == []


def test_a_slow_answer_is_no_difference_of_the_clocks() -> None:
    assert said(node(1, clock_offset_s=2.5, clock_error_s=2.0), node(2)) == []


def test_ports_that_the_driver_cannot_reach_are_named_too() -> None:
    ((_, message),) = said(node(1), node(2), here=replace(GOOD, unreachable=("10.0.0.2",)))
    assert "the driver's machine -> 10.0.0.2" in message


def test_too_few_gpus_in_one_node_and_in_all_are_named_by_node() -> None:
    four = (("NVIDIA H100", 79.6),) * 4
    nodes = [node(index, ray_gpus=4, gpus=four) for index in (1, 2, 3)]
    ((severity, message),) = said(*nodes)
    assert severity == "error"
    assert "8 H100 GPUs are needed in one node, but the nodes have 4 on 10.0.0.1, 4 on 10.0.0.2" in message
    ((_, message),) = said(node(1))
    assert "12 H100 GPUs are needed, but the nodes have 8 on 10.0.0.1, 8 in all" in message
    ((_, message),) = said(node(1), node(2, accelerator_types=("A100",)))
    assert "12 H100 GPUs are needed, but the nodes have 8 on 10.0.0.1, 8 in all" in message


def test_a_node_without_gpus_needs_only_what_reward_workers_need() -> None:
    head = node(3, ray_gpus=0, gpus=(), nvidia_driver=None, shm_free_gib=0.06, folder_problem="does not exist there")
    head = replace(head, packages=PACKAGES | {"vllm": None, "torch": "2.13.0+cpu"}, missing_paths=("/models/qwen",))
    assert said(node(1), node(2), head) == []
    assert len(said(node(1), node(2), replace(head, code="", import_errors={"reward.fn": "no module 'a'"}))) == 2
    on_cpus = NodeNeeds(packages=("torch",), shm_gib=0.5)
    assert [severity for severity, _ in said(head, needs=on_cpus)] == ["error", "error", "error"]


def test_all_problems_are_said_at_once_below_one_table_with_a_row_for_each_node() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    nodes = [node(1, niceness=15), node(2, silence="it has not answered"), node(3, code="", python="3.11.9")]
    problems = show_nodes(GOOD, nodes, replace(NEEDS, bundles=(Bundle(8, "H100"),)), console)
    assert len(problems) == 3
    rows = [line for line in out.getvalue().splitlines() if "10.0.0." in line and "warning" not in line]
    assert [row.split()[1] for row in rows] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert "silent" in rows[1]
    assert "warning cluster: workers have a niceness of 15 on 10.0.0.1" in out.getvalue()


def test_the_needs_of_a_run_are_read_from_its_configuration() -> None:
    config = compose_config(["experiment=math_qwen_8gpu", "cluster.address=auto", "weights.staging=bucket"])
    needs = needs_of(config, "train")
    assert needs.bundles == tuple(device_bundles(config))
    assert needs.packages == ("torch", "transformers", "deepspeed", "vllm")
    assert set(needs.pools or {}) == {"train", "generate"}
    assert needs_of(config, "eval").packages == ("torch", "transformers", "vllm")
    assert needs.shm_gib == 0.0, "from device to device"
    assert needs_of(compose_config(["experiment=arithmetic", "cluster.address=auto"]), "train").shm_gib > 0
