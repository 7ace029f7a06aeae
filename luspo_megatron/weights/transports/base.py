"""How buckets of bytes get from a trainer rank to the engine workers: one Protocol for each end.

A transport moves bytes and proves that they arrived: after every bucket the sender broadcasts a trailer with an
xxh3_64 checksum per slice, the receiver recomputes and compares. It knows nothing of models or layouts. Left out:
acknowledgements at the level of a push (the engine's answer to ``update_weights`` is that) and compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import xxhash
from torch import Tensor

from luspo_megatron.errors import RunError
from luspo_megatron.weights.manifest import Bucket, Manifest, TensorSlice

Verify = Literal["off", "sample", "full"]
SAMPLE_EVERY = 8  # verify="sample" checks every eighth slice, other ones in each push


class TransferError(RunError):
    """Bytes were lost, changed or never came. Names the source, the tensor and the bucket."""


class SendHandle(Protocol):
    def wait(self) -> None:
        """Block until the bucket's buffer may be overwritten. Raises TransferError when the send failed."""


class Sender(Protocol):
    """One trainer rank's end. The buffers it is given are the caller's two; each is filled again after its `wait()`."""

    def begin(self, manifest: Manifest) -> None:
        """A push starts; its buckets of this source follow in order."""

    def send(self, bucket: Bucket, buffer: Tensor) -> SendHandle:
        """Start broadcasting ``buffer`` (uint8 [bucket.nbytes], contiguous). Do not touch it before ``wait()``."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """One engine worker's end, for all sources."""

    def begin(self, manifest: Manifest) -> None:
        """A push starts; `receive` is called for its buckets in order. Lets the next one travel meanwhile."""

    def receive(self, bucket: Bucket) -> Tensor:
        """The next bucket of ``bucket.source`` as uint8 [bucket.nbytes], checked. Valid until the next call."""

    def close(self) -> None: ...


def slice_checksum(buffer: Tensor, piece: TensorSlice) -> int:
    """xxh3_64 of the bytes of one slice. ``buffer``: uint8 on the host. As a signed 64-bit integer."""
    raw = buffer[piece.offset : piece.offset + piece.nbytes].numpy()
    return int.from_bytes(xxhash.xxh3_64_digest(raw), "big", signed=True)


def make_trailer(bucket: Bucket, buffer: Tensor, verify: Verify, turn: int = 0) -> Tensor:
    """int64 [n_slices, 2]: (1, checksum) for a slice to check, (0, 0) for others. Self-describing, so that the
    receiving end needs no setting. ``turn``: what is sampled moves on by one slice with each."""
    trailer = torch.zeros(len(bucket.slices), 2, dtype=torch.int64)
    if verify == "off":
        return trailer
    host = buffer.cpu()
    for index, piece in enumerate(bucket.slices):
        if verify == "full" or index % SAMPLE_EVERY == turn % min(SAMPLE_EVERY, len(bucket.slices)):
            trailer[index, 0] = 1
            trailer[index, 1] = slice_checksum(host, piece)
    return trailer


def check_trailer(bucket: Bucket, buffer: Tensor, trailer: Tensor, number: int) -> None:
    """Raise TransferError naming every slice whose bytes differ from what the source hashed."""
    rows: Sequence[Sequence[int]] = trailer.tolist()
    if not any(row[0] for row in rows):
        return
    host = buffer.cpu()
    wrong = [str(piece) for piece, (checked, expected) in zip(bucket.slices, rows, strict=True)
             if checked and slice_checksum(host, piece) != expected]
    if wrong:
        raise TransferError(
            f"weight bucket {number} from source {bucket.source} ({bucket.nbytes} bytes): the checksum differs for "
            f"{', '.join(wrong)}; the engine keeps its old version and needs a full push"
        )
