"""One byte flipped on the wire, after the source has hashed it: `weight_sync.verify` decides whether it is noticed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from luspo_megatron.weights.manifest import Bucket, EngineConnection, Manifest, TensorSlice
from luspo_megatron.weights.transports.base import SAMPLE_EVERY, TransferError
from luspo_megatron.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender, host_store
from tests.wire_proxy import FlippingWire

TENSORS, NUMEL = 16, 25_000  # 100 kB each, one bucket of 1.6 MB
HURT = 5


def push(position: int | None, verify: str, version: int) -> tuple[Any, FlippingWire, torch.Tensor]:
    """One bucket through the wire: what was received (or the error), the wire, what was sent."""
    store, host, port = host_store(timeout=120)
    wire = FlippingWire(port, position)
    sent = torch.randn(TENSORS * NUMEL)
    slices = tuple(TensorSlice(f"layers.{i}", "float32", (NUMEL,), 0, NUMEL, i * NUMEL * 4) for i in range(TENSORS))
    manifest = Manifest(version, (Bucket(0, sent.numel() * 4, slices),))
    result: list[Any] = [None]

    def receive() -> None:
        receiver = ProcessGroupReceiver(EngineConnection(host, wire.receiver_port, 0, (0,), 2, 1, 120))
        receiver.begin(manifest)
        try:
            result[0] = receiver.receive(manifest.buckets[0]).view(torch.float32).clone()
        except TransferError as error:
            result[0] = error
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    sender = ProcessGroupSender(host, wire.source_port, 0, 0, 2, 120, verify=verify)  # type: ignore[arg-type]
    sender.begin(manifest)
    sender.send(manifest.buckets[0], sent.view(torch.uint8)).wait()
    thread.join(150)
    sender.close()
    wire.close()
    del store
    assert wire.carried > sent.numel() * 4, "the push did not pass through the proxy"
    return result[0], wire, sent


IN_TENSOR = HURT * NUMEL * 4 + 50_000  # in the middle of it; gloo's own headers are far shorter than that


def test_the_proxy_alone_changes_nothing() -> None:
    received, wire, sent = push(None, "full", 1)
    assert wire.flipped == 0 and torch.equal(received, sent)


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_flipped_byte_is_named_with_full_and_passes_unseen_with_off(verify: str) -> None:
    received, wire, sent = push(IN_TENSOR, verify, 1)
    assert wire.flipped == 1
    if verify == "full":
        assert isinstance(received, TransferError)
        assert f"layers.{HURT};" in str(received) and "checksum" in str(received) and "source 0" in str(received)
        return
    [wrong] = (received != sent).nonzero()[:, 0].tolist()
    assert wrong // NUMEL == HURT


def test_sampling_finds_it_in_one_of_so_many_pushes() -> None:
    found = [isinstance(push(IN_TENSOR, "sample", version)[0], TransferError) for version in range(SAMPLE_EVERY)]
    assert found == [version == HURT for version in range(SAMPLE_EVERY)]
