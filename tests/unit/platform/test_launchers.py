"""Nodes from the placement plan, and the job scripts, manifests and commands that start a run on them."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from penstock.actors.cluster import RAY_ENVIRONMENT
from penstock.dataflow.errors import ConfigError, PlacementError
from penstock.platform.checks.load import compose_config
from penstock.platform.cli import launch
from penstock.platform.cli import main as cli
from penstock.platform.cluster.launchers import NODE_ENVIRONMENT, NodeGroup, RaySettings, job_submission, node_groups
from tests.unit.platform.kuberay_fields import RayJob

EIGHT = ["experiment=math_qwen_8gpu"]
ONE = ["experiment=gsm8k_qwen_1gpu"]
DEMO = ["experiment=arithmetic"]
TWO_TYPES = [
    *EIGHT,
    "trainer.num_ranks=16",
    "cluster.pools.train={count: 16, accelerator_type: H100}",
    "cluster.pools.generate={accelerator_type: L40S, memory_gib: 48}",
]
KUBERAY = ["launch.image=example.org/penstock:1", "launch.volume_claim=runs"]
SBATCH_OPTIONS = """
account array begin chdir comment constraint cpus-per-gpu cpus-per-task dependency distribution error exclude exclusive
gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres hint job-name kill-on-invalid-dep licenses
mail-type mail-user mem mem-per-cpu mem-per-gpu nice nodelist nodes no-kill no-requeue ntasks ntasks-per-gpu
ntasks-per-node open-mode output overcommit partition prefer priority qos requeue reservation signal switches
thread-spec time time-min tmp uid wait wckey
"""
"""Long options of sbatch (SLURM 23.11 and newer) that may stand in a script."""


def groups(*overrides: str, gpus_per_node: int = 8) -> list[NodeGroup]:
    return node_groups(compose_config([*overrides, "cluster.address=auto"]), gpus_per_node)


def sizes(*overrides: str, gpus_per_node: int = 8) -> list[tuple[str | None, int, int]]:
    found = groups(*overrides, gpus_per_node=gpus_per_node)
    return [(group.accelerator_type, group.num_nodes, group.gpus) for group in found]


def printed(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["launch", *words, "--dry-run"])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["launch", *words, "--dry-run"])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def directives(script: str) -> list[list[tuple[str, str]]]:
    """Options of each component of a job, by the rules of sbatch: `#SBATCH` lines before the first command."""
    components: list[list[tuple[str, str]]] = [[]]
    for line in script.splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if not line.startswith("#SBATCH "):
            continue
        (word,) = shlex.split(line.removeprefix("#SBATCH "))
        if word == "hetjob":
            components.append([])
            continue
        option, _, value = word.removeprefix("--").partition("=")
        assert word.startswith("--"), line
        assert option in SBATCH_OPTIONS.split(), line
        components[-1].append((option, value))
    return components


@pytest.mark.parametrize(
    ("overrides", "gpus_per_node", "expected"),
    [
        (EIGHT, 8, [(None, 1, 8)]),
        (EIGHT, 4, [(None, 2, 4)]),
        (EIGHT, 6, [(None, 2, 4)]),
        (ONE, 8, [(None, 1, 1)]),
        (DEMO, 8, [(None, 1, 0)]),
        (TWO_TYPES, 8, [("H100", 2, 8), ("L40S", 1, 4)]),
        # Engines of three GPUs leave one of four free, which the four ranks fill.
        ([*EIGHT, "rollout.engine.tensor_parallel_size=2", "cluster.pools.generate.count=8"], 4, [(None, 3, 4)]),
        ([*EIGHT, "trainer.sequence_parallel_size=2", "trainer.num_ranks=4"], 3, [(None, 3, 3)]),
    ],
)
def test_the_nodes_are_those_that_the_placement_fills(
    overrides: list[str], gpus_per_node: int, expected: list[tuple[str | None, int, int]]
) -> None:
    assert sizes(*overrides, gpus_per_node=gpus_per_node) == expected


def test_an_engine_that_does_not_fit_on_a_node_is_refused_with_both_numbers() -> None:
    wide = [*EIGHT, "rollout.engine.tensor_parallel_size=4", "rollout.num_engines=1"]
    assert sizes(*wide, gpus_per_node=4) == [(None, 2, 4)]
    with pytest.raises(ConfigError, match=r"gpus_per_node=2.*tensor_parallel_size=4 needs 4 GPUs of one node"):
        sizes(*wide, gpus_per_node=2)
    colocated = [*ONE, "cluster.pools.gpu.count=2", "trainer.num_ranks=2", "trainer.sequence_parallel_size=2"]
    with pytest.raises(ConfigError, match=r"trainer\.tensor.*sequence_parallel_size=2 needs 2 GPUs of one node"):
        sizes(*colocated, gpus_per_node=1)


def test_gpus_that_differ_need_names() -> None:
    with pytest.raises(ConfigError, match=r"train: 80 GiB, any, generate: 48 GiB, any.*accelerator_type"):
        sizes(*EIGHT, "cluster.pools.generate.memory_gib=48")


def test_a_node_has_the_memory_and_cores_of_its_processes() -> None:
    (one,), (all_of_it,) = groups(*EIGHT, gpus_per_node=4), groups(*EIGHT)
    assert one.memory_gib < all_of_it.memory_gib < 2 * one.memory_gib
    assert one.cpus < all_of_it.cpus
    (demo,) = groups(*DEMO)
    assert 1 <= demo.cpus <= 16
    assert 16 < demo.memory_gib < 40


def test_nodes_pass_on_what_a_ray_of_the_drivers_own_has() -> None:
    assert NODE_ENVIRONMENT.items() >= {(k, v) for k, v in RAY_ENVIRONMENT.items() if k.startswith("RAY_")}


@pytest.mark.parametrize("overrides", [EIGHT, ONE, DEMO, TWO_TYPES], ids=["eight", "one", "demo", "two types"])
def test_a_slurm_script_has_valid_directives_and_syntax(overrides: list[str]) -> None:
    script = printed("slurm", *overrides, "launch.partition=a b", "launch.account=me", "launch.time_limit=1-00:00:00")
    components = directives(script)
    found = groups(*overrides)
    assert len(components) == len(found)
    for component, group in zip(components, found, strict=True):
        options = dict(component)
        assert len(options) == len(component), "an option is given twice"
        assert options["nodes"] == str(group.num_nodes)
        assert options["ntasks-per-node"] == "1"
        assert options["cpus-per-task"] == str(group.cpus)
        assert options["mem"] == f"{group.memory_gib}G"
        assert (options["partition"], options["account"], options["time"]) == ("a b", "me", "1-00:00:00")
        names = {"H100": "h100:8", "L40S": "l40s:4"}
        of_any = str(group.gpus) if group.gpus else None
        assert options.get("gpus-per-node") == names.get(group.accelerator_type or "", of_any)
    first = dict(components[0])
    assert {"requeue", "open-mode", "chdir", "output", "job-name"} <= first.keys()
    assert first["signal"] == "B:TERM@600"
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=20, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_directive_that_sbatch_does_not_know_is_found() -> None:
    with pytest.raises(AssertionError, match="gpu-per-node"):
        directives("#!/bin/bash\n#SBATCH --gpu-per-node=8\n")


def test_options_of_ray_in_scripts_exist() -> None:
    from ray.scripts.scripts import cli as ray_cli

    script = printed("slurm", *EIGHT) + printed("ray", *EIGHT, "launch.head=h")
    known = {option for parameter in ray_cli.commands["start"].params for option in parameter.opts}
    used = set()
    for line in script.replace("\\\n", " ").splitlines():
        if re.search(r"\bray start\b|local ports|^ +--(node|dashboard|metrics)", line):
            used |= set(re.findall(r"--[a-z-]+", line))
    assert len(used) > 10
    assert used - known == set()
    submit = ray_cli.commands["job"].commands["submit"]
    assert isinstance(submit, click.Command)
    assert "--address" in {option for parameter in submit.params for option in parameter.opts}


def test_a_site_names_its_gpus_itself() -> None:
    words = [*TWO_TYPES, "launch.gpu_names={H100: h100-sxm}"]
    first, second = map(dict, directives(printed("slurm", *words)))
    assert (first["gpus-per-node"], second["gpus-per-node"]) == ("h100-sxm:8", "l40s:4")


def test_the_driver_joins_continues_and_writes_where_all_nodes_see_it(tmp_path: Path) -> None:
    script = printed("slurm", *EIGHT, f"+launch.shared_dir={tmp_path}", "env.args={a: '$x y'}")
    (line,) = [line for line in script.splitlines() if line.startswith("  start penstock train")]
    typed = shlex.split(line)[3:]
    own = [f"run_dir={tmp_path}/runs/math_qwen_8gpu", "cluster.address=auto", "resume=auto", "stop_grace_s=570"]
    assert typed == [*EIGHT, "env.args={a: '$x y'}", *own]
    assert f"export PATH={Path(sys.executable).parent}:" in script
    patient = printed("slurm", *EIGHT, "stop_grace_s=100")
    assert "stop_grace_s=100" in patient
    assert "stop_grace_s=570" not in patient
    elsewhere = printed("slurm", *EIGHT, "run_dir=/big/runs/a")
    assert "run_dir=/big/runs/a" in elsewhere.partition("  start penstock train")[2]


def pods(job: RayJob) -> dict[str, Any]:
    spec = job.spec.rayClusterSpec
    return {"head": spec.headGroupSpec, **{group.groupName: group for group in spec.workerGroupSpecs}}


@pytest.mark.parametrize("overrides", [EIGHT, ONE, DEMO, TWO_TYPES], ids=["eight", "one", "demo", "two types"])
def test_a_manifest_has_only_fields_of_the_api(overrides: list[str]) -> None:
    names = "launch.gpu_names={H100: NVIDIA-H100-80GB-HBM3}"
    job = RayJob.model_validate(yaml.safe_load(printed("kuberay", *overrides, *KUBERAY, names, "launch.namespace=rl")))
    assert job.metadata.namespace == "rl"
    assert job.spec.entrypoint.startswith("cd /shared && exec penstock train experiment=")
    assert "run_dir=/shared/runs/" in job.spec.entrypoint
    assert job.spec.entrypoint.endswith(" stop_grace_s=570")
    found = pods(job)
    nodes = [group for group in groups(*overrides) if group.gpus]
    assert len(found) == 1 + len(nodes)
    for name, group in found.items():
        (container,) = group.template.spec.containers
        assert container.image == "example.org/penstock:1"
        mounts = {mount.name: mount.mountPath for mount in container.volumeMounts}
        volumes = {volume.name: volume for volume in group.template.spec.volumes}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        assert mounts.keys() == volumes.keys()
        assert volumes["shared"].persistentVolumeClaim.claimName == "runs"
        shm = volumes["shm"].emptyDir
        assert shm.medium == "Memory"
        assert int(shm.sizeLimit.removesuffix("Gi")) < int(container.resources.limits["memory"].removesuffix("Gi"))
        assert container.resources.limits == container.resources.requests
        assert ("nvidia.com/gpu" in container.resources.limits) == (name != "head")
    for group in nodes:
        worker = found[f"gpu-{group.accelerator_type or 'any'}".lower()]
        assert worker.replicas == worker.minReplicas == worker.maxReplicas == group.num_nodes
        (container,) = worker.template.spec.containers
        assert container.resources.limits["nvidia.com/gpu"] == str(group.gpus)
        selector = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"} if group.accelerator_type == "H100" else {}
        assert worker.template.spec.nodeSelector == selector


def test_a_field_that_kuberay_does_not_have_is_found() -> None:
    raw = yaml.safe_load(printed("kuberay", *EIGHT, *KUBERAY))
    raw["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["numReplicas"] = 2
    with pytest.raises(ValidationError, match="numReplicas"):
        RayJob.model_validate(raw)


def test_a_name_of_a_run_becomes_one_that_kubernetes_accepts() -> None:
    raw = yaml.safe_load(printed("kuberay", *EIGHT, *KUBERAY, f"name=My_Run.2{'x' * 60}-"))
    assert RayJob.model_validate(raw).metadata.name == f"penstock-my-run-2{'x' * 23}"


def test_plain_ray_is_told_line_by_line_and_its_job_keeps_every_word(tmp_path: Path) -> None:
    value = "env.args={a: [1, 2], b: x}"
    text = printed("ray", *EIGHT, "launch.head=node1", "launch.gpus_per_node=4", f"launch.shared_dir={tmp_path}", value)
    assert text.startswith("# 2 nodes with 4 GPUs, ")
    head, other, submit, stop = [line for line in text.splitlines() if not line.startswith("#")]
    assert "ray start --head --port=6379" in head
    assert "ray start --address=node1:6379" in other
    assert all(f"{key}={value}" in line for key, value in NODE_ENVIRONMENT.items() for line in (head, other))
    assert stop == "ray stop"
    words = shlex.split(submit)
    separator = words.index("--")
    assert words[:separator] == ["ray", "job", "submit", "--address", "http://node1:8265"]
    # What Ray makes of them, and what the shell on the head makes of that.
    entrypoint = subprocess.list2cmdline(words[separator + 1 :]).replace("exec penstock", "printf '%s\\n'")
    received = subprocess.run(entrypoint, shell=True, text=True, capture_output=True, timeout=20, check=True)
    own = [f"run_dir={tmp_path}/runs/math_qwen_8gpu", "cluster.address=auto", "resume=auto", "stop_grace_s=570"]
    assert received.stdout.splitlines() == ["train", *EIGHT, value, *own]


@pytest.mark.parametrize(
    "word", ["a b", "{a:1,b:2}", "$HOME", "it's", "*", "a;b", "back\\slash", "ä", '{"a":1}', '{"a": 1}', "# x"]
)
def test_words_survive_ray_and_a_shell(word: str) -> None:
    sent = job_submission(["printf", "%s", word], RaySettings(head="h", shared_dir="/"))
    line = subprocess.list2cmdline(sent[sent.index("--") + 1 :]).replace("exec ", "")
    assert subprocess.run(line, shell=True, text=True, capture_output=True, timeout=20, check=True).stdout == word


def test_a_word_that_does_not_survive_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not keep.*--config-dir"):
        job_submission(["penstock", "a=$b c"], RaySettings(head="h", shared_dir="/"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm", *EIGHT, "launch.partitoin=a"], "launch.partitoin=a: is no setting of this launcher. Did you mean"),
        (["slurm", *EIGHT, "launch.image=a"], "launch.image=a: is no setting of this launcher."),
        (["slurm", *EIGHT, "launch.time_limit=soon"], "launch.time_limit=soon: it is minutes, HH:MM:SS"),
        (["slurm", *EIGHT, "launch.shared_dir=runs"], "launch.shared_dir=runs: it is an absolute path"),
        (["slurm", *EIGHT, "launch.gpus_per_node=many"], "launch.gpus_per_node=many: Input should be a valid integer"),
        (["slurm", *EIGHT, "launch.gpu_names={a"], "launch.gpu_names={a: is no YAML"),
        (["slurm", *EIGHT, "resume=never"], "resume=never: a launched run has resume=auto. Leave it out."),
        (["kuberay", *EIGHT], "launch.volume_claim: is needed: Claim of a volume that all pods can write"),
        (["ray", *EIGHT], "launch.head: is needed: Host name or address of the head node."),
        (["slurm", "experiment=math_qwen_8gpu", "launch.x=1", "trainer.lr=1"], "2 problems"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(words: list[str], told: str) -> None:
    assert told in refused(*words)


def test_without_the_scheduler_the_run_is_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda _: None)
    with pytest.raises(PlacementError, match=r"sbatch: not found.*--dry-run"):
        launch.run_launch("slurm", EIGHT, None, dry_run=False)


@pytest.mark.parametrize(("launcher", "reads"), [("slurm", True), ("kuberay", True), ("ray", False)])
def test_what_is_submitted_is_what_a_dry_run_prints(
    launcher: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "kubectl", "ray"):
        program = tmp_path / name
        script = (
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n[ {name} = ray ] || cat > {tmp_path}/read\nexit 7\n'
        )
        program.write_text(script)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = [*EIGHT, *(KUBERAY if launcher == "kuberay" else []), *(["launch.head=h"] if launcher == "ray" else [])]
    result = CliRunner().invoke(cli.app, ["launch", launcher, *words])
    assert result.exit_code == 7, "the scheduler's own exit code"
    text = printed(launcher, *words)
    if reads:
        assert (tmp_path / "read").read_text() == text
    else:
        received = (tmp_path / "words").read_text().splitlines()
        assert shlex.join(["ray", *received]) in text


class FakeRay:
    """A cluster that a node joins at each question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusals: int, most: int) -> None:
        import ray

        self.refusals, self.most, self.asked = refusals, most, 0
        self.is_up = False
        monkeypatch.setenv("RAY_ADDRESS", "fake")
        monkeypatch.setattr(ray, "is_initialized", lambda: self.is_up)
        monkeypatch.setattr(ray, "init", self.join)
        monkeypatch.setattr(ray, "nodes", self.nodes)
        monkeypatch.setattr(ray, "shutdown", lambda: setattr(self, "is_up", False))
        monkeypatch.setattr(launch.time, "sleep", lambda _: None)

    def join(self, **_: object) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise ConnectionError("no head yet")
        self.is_up = True

    def nodes(self) -> list[dict[str, object]]:
        self.asked = min(self.asked + 1, self.most)
        dead = {"NodeManagerHostname": "dead", "Alive": False}
        return [dead, *({"NodeManagerHostname": f"node{i}", "Alive": True} for i in range(self.asked))]


def test_the_wait_ends_when_all_nodes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay(monkeypatch, refusals=2, most=3)
    said: list[str] = []
    assert launch.run_wait(3, 60.0, said.append) == 0
    first, last = said
    assert first.startswith("launch: 0 of 3 nodes (no head yet) are in Ray at fake, 0 s so far; the limit is 60 s")
    assert last == "3 nodes: node0, node1, node2"
    assert not cluster.is_up


@pytest.mark.parametrize(("refusals", "told"), [(0, r"2 of 3 nodes.*node0, node1"), (10**9, r"0 of 3.*no head yet")])
def test_the_wait_has_a_limit_and_names_who_is_there(refusals: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch, refusals=refusals, most=2)
    clock = iter(range(1000))
    monkeypatch.setattr(launch.time, "monotonic", lambda: 30.0 * next(clock))
    said: list[str] = []
    with pytest.raises(PlacementError, match=told):
        launch.run_wait(3, 300.0, said.append)
    assert [line.partition("are in Ray at fake, ")[2].split()[0] for line in said] == ["30", "60", "120", "180", "240"]


def test_the_wait_does_not_let_ray_try_an_address_at_which_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay(monkeypatch, refusals=0, most=2)
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(PlacementError, match=r"0 of 2 .*nothing answers there \(Connection refused\)"):
            launch.run_wait(2, 0.0, lambda _: None)
    assert cluster.refusals == 0, "Ray was not asked"
