"""Sends HTTP/2 without a check of its rules, and reports the results.

    PYTHONPATH=h2.zip python3 h2_client.py < cases.json > results.json

Runs inside sandboxes; needs h2, hpack and hyperframe. A case has `address`, `sni`, and `requests`: each a list of
[name, value] pairs and a body (latin-1, None for none), one stream after the other on one connection. A result is a
list with the status of each stream as text, `reset`, or `closed`.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h2.config
import h2.connection
import h2.events

PATIENCE_SECONDS = 5.0


def run(case: dict[str, Any]) -> list[str]:
    """Run one case. Never raises."""
    outcomes = {1 + 2 * number: "closed" for number in range(len(case["requests"]))}
    try:
        _converse(case, outcomes)
    except Exception as problem:  # noqa: BLE001 - what went wrong is the result
        if all(outcome == "closed" for outcome in outcomes.values()):
            outcomes = dict.fromkeys(outcomes, f"closed {type(problem).__name__}")
    return list(outcomes.values())


def _converse(case: dict[str, Any], outcomes: dict[int, str]) -> None:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    config = h2.config.H2Configuration(
        validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding=None
    )
    connection = h2.connection.H2Connection(config)
    raw = socket.create_connection((case["address"], case["port"]), timeout=PATIENCE_SECONDS)
    with context.wrap_socket(raw, server_hostname=case["sni"]) as sock:
        connection.initiate_connection()
        for number, (fields, body) in enumerate(case["requests"]):
            stream = 1 + 2 * number
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
            connection.send_headers(stream, headers, end_stream=body is None)
            if body is not None:
                connection.send_data(stream, body.encode("latin-1"), end_stream=True)
            sock.sendall(connection.data_to_send())
            while outcomes[stream] == "closed":
                data = sock.recv(65536)
                if not data:
                    return
                for event in connection.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived):
                        outcomes[event.stream_id] = dict(event.headers)[b":status"].decode()
                    elif isinstance(event, h2.events.StreamReset):
                        outcomes[event.stream_id] = "reset"
                    elif isinstance(event, h2.events.ConnectionTerminated):
                        return
                sock.sendall(connection.data_to_send())


def main() -> None:
    """Run all cases, a few at a time."""
    cases = json.load(sys.stdin)
    with ThreadPoolExecutor(8) as pool:
        json.dump(dict(zip(cases, pool.map(run, cases.values()))), sys.stdout)  # noqa: B905 - Python 3.9 has no strict


if __name__ == "__main__":
    main()
