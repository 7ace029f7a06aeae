"""A TCP proxy between the two ends of a weight group that changes one byte on its way.

gloo's members find each other through addresses in a store. Each end is given a proxy of the store; in what the store
answers, the other end's address is replaced by that of a data proxy, so the ends' own connection runs through it.
Nothing of the package is replaced: the bytes are changed after the source has hashed them and before the engine reads.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterable

LOOPBACK = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)  # sockaddr_in: family, port, 127.0.0.1


# gloo compares ports as they lie in memory (low byte first). No port that the system gives is outside these two.
BELOW_ALL = range(0x5000, 0x8000, 0x100)
ABOVE_ALL = range(0xEEFF, 0x10000, 0x100)


def listen(ports: Iterable[int]) -> socket.socket:
    """On the first free one of 127.0.0.1's ports."""
    for port in ports:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            server.close()
            continue
        server.listen()
        return server
    raise OSError("no free port")


class Forwarder:
    """Accepts connections and forwards them to ``port``; ``change(direction, position, data)`` edits what passes."""

    def __init__(self, port: int, change: Callable[[str, int, bytes], bytes], ports: Iterable[int] = (0,)) -> None:
        self._target, self._change = port, change
        self._server = listen(ports)
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                upstream = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, upstream]
                for source, target, direction in ((client, upstream, "in"), (upstream, client, "out")):
                    threading.Thread(target=self._pump, args=(source, target, direction), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        position = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(self._change(direction, position, data))
                position += len(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class FlippingWire:
    """Between a source and one receiver. ``position``: which byte of the source's stream to the receiver is flipped;
    None flips none. Give ``source_port`` and ``receiver_port`` to the two ends as their store's port."""

    def __init__(self, store_port: int, position: int | None) -> None:
        self.position, self.flipped, self.carried = position, 0, 0
        self._wires: dict[tuple[str, int], Forwarder] = {}
        # which end connects follows from the order of the addresses, so each must see the other on the same side
        self._stores = {
            "source": Forwarder(store_port, self._rewriting("source", ABOVE_ALL)),
            "receiver": Forwarder(store_port, self._rewriting("receiver", BELOW_ALL)),
        }
        self.source_port, self.receiver_port = self._stores["source"].port, self._stores["receiver"].port

    def _rewriting(self, end: str, ports: Iterable[int]) -> Callable[[str, int, bytes], bytes]:
        def change(direction: str, position: int, data: bytes) -> bytes:
            if direction == "in":
                return data

            def replace(match: re.Match[bytes]) -> bytes:
                real = int.from_bytes(match[1], "big")
                if (end, real) not in self._wires:
                    self._wires[end, real] = Forwarder(real, self._flipping(end), ports)
                port = self._wires[end, real].port.to_bytes(2, "big")
                return match[0][:2] + port + match[0][4:]

            return LOOPBACK.sub(replace, data)

        return change

    def _flipping(self, end: str) -> Callable[[str, int, bytes], bytes]:
        # what the source sends goes "in" where it connected, "out" where the receiver did
        towards_receiver = "in" if end == "source" else "out"

        def change(direction: str, position: int, data: bytes) -> bytes:
            if direction != towards_receiver:
                return data
            self.carried += len(data)
            if self.position is not None and position <= self.position < position + len(data):
                changed = bytearray(data)
                changed[self.position - position] ^= 0x10
                self.flipped += 1
                return bytes(changed)
            return data

        return change

    def close(self) -> None:
        for one in (*self._stores.values(), *self._wires.values()):
            one.close()
