"""Switches of Ray Serve's environment under which replicas run; Ray 2.60 has no other form for them.

They are read when ``ray.serve`` is imported, in every process of Serve's, and are given to these by the job's
environment. Pinned ones are checked in each process (`replica.check_switches`); of the others a user's own value wins.
"""

from __future__ import annotations

import os

PINNED = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # in place of Serve's proxy; with it replicas listen themselves (direct ingress)
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # else each chunk crosses two threads
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",  # the router reads prompts
}
BODY_BYTES = 2**17  # of a body that the router reads; HAProxy has two buffers of it a connection
RETRY = "conn-failure empty-response"  # a request of which nothing was answered is asked of another replica


def switches(drain_s: float, request_s: float, folder: str, ports: tuple[int, int, int], pack: bool) -> dict[str, str]:
    """All of them.

    Args:
        drain_s: seconds that a replica's requests have when it ends.
        request_s: most seconds of a request, which a reloaded HAProxy must outlive.
        folder: for HAProxy's files, on the head's host.
        ports: free ones on the head's host, of HAProxy's metrics, of its statistics, and of Serve's own proxy.
        pack: replicas on few hosts.
    """
    chosen = {
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(BODY_BYTES),
        "RAY_SERVE_HAPROXY_RETRY_ON": RETRY,
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(request_s + drain_s) + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY": "1" if pack else "0",
        "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE": "2",  # where one is lost the other is asked
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # a busy host takes longer than the 5 s that Serve gives HAProxy
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    return {**chosen, **{name: os.environ[name] for name in chosen if name in os.environ}, **PINNED}
