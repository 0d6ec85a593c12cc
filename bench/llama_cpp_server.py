"""Serve a GGUF file with llama.cpp over OpenAI's HTTP: the peer of quantized weights.

``ENVIRONMENT/bin/python bench/llama_cpp_server.py MODEL.gguf --port 8080``, in an environment that has ``xllamacpp``.
Needs nothing of ours. Ends with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    """Start the server and wait for a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, default=32, help="requests that are computed together")
    parser.add_argument("--slot-tokens", type=int, default=512, help="prompt and output of one request")
    arguments = parser.parse_args()

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.slots * arguments.slot_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    # As the others are measured: every prompt is computed.
    params.cache_prompt = False
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    stop.wait()


if __name__ == "__main__":
    main()
