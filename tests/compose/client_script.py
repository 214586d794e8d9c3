"""Runs in the client's container: chains, told by their seeds, are stored, matched or loaded, and every byte compared.

Reads lines of [what, seed, transports, time-out] and answers each with a line: one JSON object.
"""

import hashlib
import json
import sys
import time

import numpy as np

import kvpool

BLOCKS, BLOCK_BYTES = 32, 64 << 10


def answer(what: str, seed: int, transports: str, timeout_s: float) -> dict[str, object]:
    hashes = [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(BLOCKS)]
    content = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
    tls = kvpool.TlsSettings(dir="/certs")
    with kvpool.connect("grpc://metadata:7300", transports=transports.split(","), timeout_s=timeout_s, tls=tls) as pool:
        if what == "nodes":
            return {"nodes": {node.node_id: node.state for node in pool.status().nodes}}
        keyspace = pool.namespace(kvpool.Namespace(model="compose", block_tokens=16, block_bytes=BLOCK_BYTES))
        if what == "store":
            return {"stored": keyspace.store(hashes, content).stored}
        if what == "match":
            matched = keyspace.match(hashes)
            return {"matched": matched.blocks, "reason": matched.reason}
        read = np.zeros_like(content)
        began_s = time.monotonic()
        loaded = keyspace.load(hashes, read)
        took_s = time.monotonic() - began_s
        came = [reason is None for reason in loaded.reasons]
        return {
            "loaded": loaded.loaded,
            "wrong": sum(bool(c) and not np.array_equal(read[i], content[i]) for i, c in enumerate(came)),
            "reasons": sorted({reason for reason in loaded.reasons if reason is not None}),
            "transports": sorted(pool.stats().loaded_bytes),
            "took_s": took_s,
        }


for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), flush=True)  # noqa: T201
