"""A program that runs Pagoda on a Ray cluster of three nodes on this machine.

It reads commands from its standard input and answers each with a line of JSON. The engines fill the two worker nodes;
the ingress is alone on the head, so that losing a worker costs engines only.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from deployments.app import build_app
from tests.e2e.server import ROOT
from tests.ports import free_port
from tests.waiting import until

CPUS_PER_ENGINE = 2  # logical CPUs of Ray
ENGINES_PER_NODE = 2
WORKERS = 2
REPLY_PREFIX = "cluster: "


def reply(**facts: Any) -> None:
    """Write one line for the test; the prefix separates it from Ray's output."""
    print(REPLY_PREFIX + json.dumps(facts), flush=True)


def arguments() -> dict[str, Any]:
    """Return the shipped config's arguments, with engines that fit only on worker nodes."""
    args: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]["args"]
    args["engine"]["dtype"] = "float32"
    args["replicas"].update(num_engine_replicas=WORKERS * ENGINES_PER_NODE, cpus_per_engine=CPUS_PER_ENGINE)
    return args


def start(cluster: Cluster, port: int) -> None:
    """Deploy onto the head; return once the ingress runs there, so that workers can be added."""
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    free = ray.available_resources()["CPU"]
    target = serve.RunTarget(build_app(arguments()), name="pagoda", route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    until(lambda: ray.available_resources()["CPU"] < free, "the ingress runs on the head")


def main(port: int) -> None:
    """Run the cluster until the standard input ends."""
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        start(cluster, port)
        workers = [cluster.add_node(num_cpus=CPUS_PER_ENGINE * ENGINES_PER_NODE) for _ in range(WORKERS)]
        reply(dashboard=f"http://{cluster.webui_url}", workers=[worker.node_id for worker in workers])
        for line in sys.stdin:
            assert line == "remove\n"
            cluster.remove_node(workers.pop(), allow_graceful=False)
            reply(workers=[worker.node_id for worker in workers])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
