"""What TLS cannot be faster than: AES-256-GCM over records of TLS's size, on one core and in cache."""

import os
import time

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvpool.bench.measure import GB, percentile, rounded

RECORD_BYTES = 16 << 10
ROUND_RECORDS = 4096
ROUNDS = 5
_NONCE_BYTES = 12


class CipherRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="cipher"):
    """One measurement.

    Attributes:
        cipher: Which.
        record_bytes: What is sealed at a time.
        gbps: 10^9 bytes a second, of the median round.
    """

    cipher: str
    record_bytes: int
    gbps: float


def measure_cipher() -> CipherRow:
    """Seal records for about a tenth of a second."""
    seal, record, nonce = AESGCM(os.urandom(32)).encrypt, os.urandom(RECORD_BYTES), bytes(_NONCE_BYTES)
    times_s = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(ROUND_RECORDS):
            seal(nonce, record, None)  # nobody reads these: the nonce may be the same
        times_s.append(time.perf_counter() - began_s)
    gbps = RECORD_BYTES * ROUND_RECORDS / GB / percentile(times_s, 50)
    return CipherRow(cipher="AES-256-GCM", record_bytes=RECORD_BYTES, gbps=rounded(gbps))
