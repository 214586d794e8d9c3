"""gRPC over the simulated network: unary calls and the control stream, with the real servicers behind them."""

import math
from dataclasses import dataclass

import grpc

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.ops.grpc_server import ERROR_KEY, code_of

from .network import Frame
from .scheduler import current

DIAL_S = 1.0


@dataclass(frozen=True)
class Call:
    """A request of ``method``; the messages of a stream follow one by one."""

    method: str
    request: object = None


@dataclass(frozen=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    error: str = ""


OK = Status(grpc.StatusCode.OK)


class SimRpcError(grpc.RpcError):
    """What a stub raises."""

    def __init__(self, status):
        super().__init__(status.details)
        self._status = status

    def code(self):
        return self._status.code

    def details(self):
        return self._status.details

    def trailing_metadata(self):
        return ((ERROR_KEY, self._status.error),) if self._status.error else ()


UNAVAILABLE = Status(grpc.StatusCode.UNAVAILABLE, "the connection broke")
LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")


class Grpc:
    """Stands in for the module `grpc` where channels are made."""

    RpcError = grpc.RpcError
    StatusCode = grpc.StatusCode

    @staticmethod
    def insecure_channel(address, options=()):
        return Channel(address.partition(":")[0])


class Channel:
    """Calls to the server called ``name``; a connection each."""

    def __init__(self, name):
        self._name = name

    def unary_unary(self, method, **_):
        return lambda request, timeout, metadata=None: self._ask(Call(method, request), timeout)

    def stream_stream(self, method, **_):
        return lambda requests: Stream(self._open(DIAL_S), method, requests)

    def stream_unary(self, method, **_):
        raise NotImplementedError(method)

    unary_stream = stream_unary

    def close(self):
        pass

    def _open(self, timeout_s):
        try:
            return current().network.dial(self._name, timeout_s, kind="grpc")
        except UnavailableError as error:
            raise SimRpcError(Status(grpc.StatusCode.UNAVAILABLE, str(error))) from error

    def _ask(self, call, timeout_s):
        until_s = current().now_s + timeout_s
        sock = self._open(timeout_s)
        try:
            _send(sock, call)
            frame = sock.receive(until_s - current().now_s)
        except ConnectionError as error:
            raise SimRpcError(UNAVAILABLE) from error
        finally:
            sock.close()
        if frame is None:
            raise SimRpcError(LATE)
        if isinstance(frame.message, Status):
            raise SimRpcError(frame.message)
        return frame.message


class Stream:
    """The calling side of a stream: requests go out as they come, replies are iterated over."""

    def __init__(self, sock, method, requests):
        self._sock = sock
        _send(sock, Call(method))
        current().spawn(sock.process, self._pump, requests)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            message = self._sock.receive(math.inf).message
        except ConnectionError as error:
            raise SimRpcError(UNAVAILABLE) from error
        if message is OK:
            raise StopIteration
        if isinstance(message, Status):
            raise SimRpcError(message)
        return message

    def cancel(self):
        self._sock.close()

    def _pump(self, requests):
        for request in requests:
            if not self._sock.is_open or self._sock.broken:
                return
            _send(self._sock, request)


class _AbortedError(Exception):
    pass


class Context:
    """What servicers are given."""

    def __init__(self, sock):
        self._sock = sock
        self.status = OK

    def is_active(self):
        return self._sock.is_open and not self._sock.broken

    def abort(self, code, details):
        self.status = Status(code, details)
        raise _AbortedError

    def peer(self):
        return "simulated"


def serve(sock, servicers):
    """Answer one call on ``sock`` by the servicers, by the full name of their service."""
    try:
        call = sock.receive(30.0)
        if call is not None:
            _answer(sock, call.message, servicers)
    except ConnectionError:
        pass
    finally:
        sock.close()


def _answer(sock, call, servicers):
    _, service, name = call.method.split("/")
    method, context = getattr(servicers[service], name), Context(sock)
    try:
        if call.request is not None:
            _send(sock, method(call.request, context))
            return
        for message in method(_requests(sock), context):
            _send(sock, message)
    except _AbortedError:
        pass
    except SimRpcError:
        return  # the caller went before it had said anything; gRPC logs that
    except KvpoolError as error:
        context.status = Status(code_of(error), str(error), type(error).__name__)
    _send(sock, context.status)


def _requests(sock):
    while True:
        try:
            yield sock.receive(math.inf).message
        except ConnectionError as error:
            raise SimRpcError(UNAVAILABLE) from error


def _send(sock, message):
    if not sock.is_open or sock.broken:
        raise ConnectionResetError("the connection is closed")
    sock.network.send(sock.wire, Frame(message))
