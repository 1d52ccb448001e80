"""A tracker of your own: SwanLab. Offline it writes into the run directory, and `swanlab sync` uploads that later.

SwanLab is not installed with Penstock, and needs protobuf < 7: `pip install swanlab` replaces a newer one. A resumed
run has the same id; that SwanLab's server then continues the run was not tried, for lack of an account.
"""

import json
from uuid import uuid4

import swanlab


class SwanLabTracker:
    def __init__(self, run):
        self.run, self.last_step = run, 0

    def log(self, step, metrics):
        self.last_step = step
        self.run.log(dict(metrics), step=step)

    def log_summary(self, summary):
        self.run.log({"summary": swanlab.Text(json.dumps(summary, indent=2))}, step=self.last_step)

    def close(self):
        self.run.finish()


def open_run(run_dir, run_name, config, project="penstock", mode="offline"):
    id_file, folder = run_dir / "swanlab_run_id", run_dir / "swanlab"
    if not id_file.exists():
        id_file.write_text(uuid4().hex[:12])
    folder.mkdir(exist_ok=True)
    resumed = {"id": id_file.read_text(), "resume": "allow"}
    run = swanlab.init(project=project, name=run_name, mode=mode, log_dir=str(folder), config=config, **resumed)
    return SwanLabTracker(run)
