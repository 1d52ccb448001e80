"""`make cluster`: several machines on this one, with Ray in them, until Ctrl-C.

    python -m tests.cluster [--nodes 4] [--delay-ms 20] [--loss 0.001]

Prints how to run a command on a node. Commands while it runs: `cut N`, `heal N`, `kill N`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.cluster.nodes import RAY_PORT, Machines, can_make_nodes, machines, start_ray_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="number of machines, 2 to 16")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one-way delay between two of them")
    parser.add_argument("--loss", type=float, default=0.001, help="share of lost packets")
    options = parser.parse_args()
    if not 2 <= options.nodes <= 16:
        parser.error(f"--nodes={options.nodes}: it is 2 to 16")
    if not can_make_nodes():
        parser.error("this needs Linux, root, and the right to make network namespaces and TUN devices")
    with (
        tempfile.TemporaryDirectory() as folder,
        machines(Path(folder), options.nodes, delay_s=options.delay_ms / 1000, loss=options.loss) as made,
    ):
        start_ray_on(made.nodes)
        first = made.nodes[0]
        print(f"{options.nodes} nodes are up. On the first: nsenter -t {first.pid} -n -m -p -u bash")
        print(f"There: penstock train … cluster.address={first.address}:{RAY_PORT} run_dir=/a/shared/folder")
        print("Commands here: cut N, heal N, kill N (nodes from 0); Ctrl-D ends all.", flush=True)
        _obey(made)


def _obey(made: Machines) -> None:
    while True:
        try:
            words = input("> ").split()
        except (EOFError, KeyboardInterrupt):
            return
        acts = {"cut": made.network.cut, "heal": made.network.heal, "kill": lambda node: made.nodes[node].kill()}
        if len(words) == 2 and words[0] in acts and words[1].isdigit() and int(words[1]) < len(made.nodes):
            acts[words[0]](int(words[1]))
        else:
            print(f"cut, heal or kill, and a node from 0 to {len(made.nodes) - 1}")


if __name__ == "__main__":
    main()
