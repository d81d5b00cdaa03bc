"""A program that runs Pagoda on a Ray cluster of several nodes on this machine.

    python -m tests.e2e.cluster PORT SETTING

It reads commands from its standard input and answers each with a line of JSON. The engines fill the worker nodes; the
ingress is alone on the head, so that losing a worker costs engines only.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import build_app
from tests.e2e.server import ROOT
from tests.ports import free_port
from tests.waiting import until

REPLY_PREFIX = "cluster: "


class Setting(NamedTuple):
    """The workers, and what the engines on them reserve."""

    workers: int
    cpus: int  # logical CPUs of Ray, of each worker
    cpus_per_engine: int  # or per rank
    engines: int
    ranks: int = 1  # of an engine

    @property
    def engines_per_node(self) -> int:
        """For engines of one rank."""
        return self.cpus // self.cpus_per_engine


SETTINGS = {
    "engines": Setting(workers=2, cpus=4, cpus_per_engine=2, engines=4),
    "two ranks": Setting(workers=3, cpus=4, cpus_per_engine=2, engines=2, ranks=2),
    "four ranks": Setting(workers=2, cpus=4, cpus_per_engine=2, engines=1, ranks=4),
}


def reply(**facts: Any) -> None:
    """Write one line for the test; the prefix separates it from Ray's output."""
    print(REPLY_PREFIX + json.dumps(facts), flush=True)


def arguments(setting: Setting) -> dict[str, Any]:
    """Return the shipped config's arguments, with engines that fit only on worker nodes."""
    args: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]["args"]
    args["engine"].update(dtype="float32", tensor_parallel_size=setting.ranks)
    args["replicas"].update(num_engine_replicas=setting.engines, cpus_per_engine=setting.cpus_per_engine)
    if setting.ranks > 1:
        args["replicas"].update(placement_strategy="SPREAD")
    return args


def start(cluster: Cluster, port: int, setting: Setting) -> None:
    """Deploy onto the head; return once the ingress runs there, so that workers can be added."""
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    free = ray.available_resources()["CPU"]
    target = serve.RunTarget(build_app(arguments(setting)), name="pagoda", route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    until(lambda: ray.available_resources()["CPU"] < free, "the ingress runs on the head")


def main(port: int, setting: Setting) -> None:
    """Run the cluster until the standard input ends."""
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        start(cluster, port, setting)
        workers = [cluster.add_node(num_cpus=setting.cpus) for _ in range(setting.workers)]
        reply(dashboard=f"http://{cluster.webui_url}", workers=[worker.node_id for worker in workers])
        for line in sys.stdin:
            assert line == "remove\n"
            cluster.remove_node(workers.pop(), allow_graceful=False)
            reply(workers=[worker.node_id for worker in workers])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), SETTINGS[sys.argv[2]])
