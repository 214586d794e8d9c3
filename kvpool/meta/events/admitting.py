"""Who is let in: ZeroMQ asks about each handshake (ZAP, ZeroMQ RFC 27), and the followers' file decides.

asked      version, request id, domain, address, routing id, mechanism, credentials: a public key of 32 bytes
answered   version, request id, status, text, user id, metadata
"""

from zmq.utils import z85

from kvpool.ops.curve import Followers

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
PUBLIC_KEY_BYTES = 32


def admit(asked: list[bytes], followers: Followers) -> list[bytes]:
    """The answer to one question: yes for the CURVE key of a follower, no for all else."""
    request = asked[1] if len(asked) > 1 else b""
    user = ""
    if len(asked) == 7 and asked[0] == ZAP_VERSION and asked[5] == b"CURVE" and len(asked[6]) == PUBLIC_KEY_BYTES:
        follower = followers.find(z85.encode(asked[6]))
        user = "" if follower is None else follower.name
    status, text = (b"200", b"OK") if user else (b"400", b"not served here")
    return [ZAP_VERSION, request, status, text, user.encode(), b""]
