"""The weight transport: bytes arrive unchanged at every worker, or an error names what went wrong.

Not covered: NCCL between GPUs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import prod

import pytest
import torch

from luspo_megatron.weights.manifest import Bucket, EngineConnection, Manifest, TensorSlice
from luspo_megatron.weights.transports.base import TransferError
from luspo_megatron.weights.transports.in_process import InProcessNetwork
from luspo_megatron.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender, host_store


def whole(name: str, tensor: torch.Tensor, offset: int) -> TensorSlice:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSlice(name, dtype, tuple(tensor.shape), 0, tensor.numel(), offset)


def split(name: str, tensor: torch.Tensor, bucket_bytes: int, source: int) -> tuple[list[Bucket], list[torch.Tensor]]:
    """One tensor cut into buckets smaller than itself."""
    buckets, buffers = [], []
    per = bucket_bytes // tensor.element_size()
    dtype = str(tensor.dtype).removeprefix("torch.")
    for start in range(0, tensor.numel(), per):
        part = tensor.flatten()[start : start + per]
        piece = TensorSlice(name, dtype, tuple(tensor.shape), start, part.numel(), 0)
        buckets.append(Bucket(source, piece.nbytes, (piece,)))
        buffers.append(part.clone().view(torch.uint8))
    return buckets, buffers


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """Run jobs at the same time; results or exceptions, in order."""
    results: list[object] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_two_sources_to_two_workers_split_tensors_are_reassembled_bitwise() -> None:
    store, host, port = host_store()
    torch.manual_seed(0)
    big = {0: torch.randn(37, 53), 3: torch.randn(101, 7).to(torch.bfloat16)}
    big[0][0, 0], big[0][1, 1] = float("nan"), -0.0
    plans = {source: split(f"t{source}", tensor, 1000, source) for source, tensor in big.items()}
    assert all(len(buckets) > 1 for buckets, _ in plans.values())
    order = [bucket for pair in zip(plans[0][0], plans[3][0], strict=False) for bucket in pair]
    order += plans[0][0][len(plans[3][0]):] + plans[3][0][len(plans[0][0]):]
    assert Manifest(1, tuple(order)).violations() == []

    def send(source: int) -> None:
        sender = ProcessGroupSender(host, port, 1, source, 3, 20)
        buckets, buffers = plans[source]
        for bucket, buffer in zip(buckets, buffers, strict=True):
            sender.send(bucket, buffer).wait()
        sender.close()

    def receive(rank: int) -> dict[str, torch.Tensor]:
        receiver = ProcessGroupReceiver(EngineConnection(host, port, 1, (0, 3), 3, rank, 20))
        out = {f"t{s}": torch.zeros_like(t).flatten() for s, t in big.items()}
        for bucket in order:
            got = receiver.receive(bucket)
            for piece in bucket.slices:
                target = out[piece.name]
                target[piece.start : piece.start + piece.numel] = got[piece.offset : piece.offset + piece.nbytes].view(
                    target.dtype
                )
        receiver.close()
        return {name: tensor.view(big[int(name[1:])].shape) for name, tensor in out.items()}

    results = in_threads(lambda: send(0), lambda: send(3), lambda: receive(1), lambda: receive(2))
    for result in results[2:]:
        assert isinstance(result, dict), result
        for source, tensor in big.items():
            assert torch.equal(result[f"t{source}"].view(torch.uint8), tensor.view(torch.uint8))
    del store


def test_buffer_may_be_overwritten_after_wait_though_one_worker_is_slow() -> None:
    store, host, port = host_store()
    tensors = [torch.full((300_000,), float(i)) for i in range(6)]
    buckets = [Bucket(0, t.numel() * 4, (whole(f"t{i}", t, 0),)) for i, t in enumerate(tensors)]

    def send() -> None:
        sender = ProcessGroupSender(host, port, 1, 0, 3, 20)
        buffer = torch.empty(buckets[0].nbytes, dtype=torch.uint8)  # one buffer for all
        for bucket, tensor in zip(buckets, tensors, strict=True):
            buffer.copy_(tensor.view(torch.uint8))
            sender.send(bucket, buffer).wait()
            buffer.fill_(255)

    def receive(rank: int, delay: float) -> list[float]:
        receiver = ProcessGroupReceiver(EngineConnection(host, port, 1, (0,), 3, rank, 20))
        out = []
        for bucket in buckets:
            time.sleep(delay)
            values = receiver.receive(bucket).view(torch.float32)
            assert values.min() == values.max()
            out.append(values[0].item())
        return out

    _, fast, slow = in_threads(send, lambda: receive(1, 0.0), lambda: receive(2, 0.1))
    assert fast == slow == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    del store


@pytest.mark.parametrize(("verify", "refused"), [("full", True), ("sample", True), ("off", False)])
def test_changed_bytes_are_refused_naming_source_tensor_and_bucket(
    verify: str, refused: bool
) -> None:
    store, host, port = host_store()
    tensor = torch.arange(64, dtype=torch.float32)
    bucket = Bucket(5, 256, (whole("model.norm.weight", tensor, 0),))
    sent = Bucket(5, 256, (TensorSlice("model.norm.weight", "float32", (64,), 0, 63, 0),))  # hashes other bytes

    def send() -> None:
        ProcessGroupSender(host, port, 1, 5, 2, 20, verify=verify).send(sent, tensor.view(torch.uint8)).wait()

    def receive() -> torch.Tensor:
        return ProcessGroupReceiver(EngineConnection(host, port, 1, (5,), 2, 1, 20)).receive(bucket)

    _, result = in_threads(send, receive)
    if refused:
        assert isinstance(result, TransferError)
        for word in ("model.norm.weight", "source 5", "bucket 0", "checksum"):
            assert word in str(result)
    else:
        assert isinstance(result, torch.Tensor)
    del store


def test_a_member_that_leaves_is_noticed_at_once() -> None:
    store, host, port = host_store()
    bucket = Bucket(0, 4, (TensorSlice("w", "float32", (1,), 0, 1, 0),))
    joined = threading.Event()

    def send() -> None:
        sender = ProcessGroupSender(host, port, 1, 0, 2, 60)
        joined.wait(30)
        sender.close()

    def receive() -> float:
        receiver = ProcessGroupReceiver(EngineConnection(host, port, 1, (0,), 2, 1, 60))
        joined.set()
        start = time.monotonic()
        with pytest.raises(TransferError, match="source 0.*w"):
            receiver.receive(bucket)
        return time.monotonic() - start

    _, seconds = in_threads(send, receive)
    assert isinstance(seconds, float) and seconds < 5
    del store


def test_a_missing_member_is_an_error_after_the_timeout() -> None:
    store, host, port = host_store()
    with pytest.raises(TransferError, match="source 0, generation 2: member 0 of 2"):
        ProcessGroupSender(host, port, 2, 0, 2, 1.0)
    del store


def test_in_process_double_checks_like_the_real_one() -> None:
    network = InProcessNetwork(sources=(0,), num_workers=2)
    tensor = torch.randn(10)
    bucket = Bucket(0, 40, (whole("w", tensor, 0),))
    buffer = tensor.view(torch.uint8).clone()
    network.sender(0).send(bucket, buffer).wait()
    buffer.zero_()
    for worker in range(2):
        assert torch.equal(network.receiver(worker).receive(bucket).view(torch.float32), tensor)


def manifest(*slices: TensorSlice, nbytes: int = 1000) -> Manifest:
    return Manifest(3, (Bucket(0, nbytes, slices),))


def test_manifest_round_trip_and_violations() -> None:
    good = manifest(TensorSlice("a", "float32", (2, 3), 0, 4, 0), TensorSlice("a", "float32", (2, 3), 4, 2, 16))
    assert good.violations() == []
    assert Manifest.from_dict(good.to_dict()) == good
    connection = EngineConnection("127.0.0.1", 1, 2, (0, 1), 3, 1)
    assert EngineConnection.from_dict(connection.to_dict()) == connection
    bad = {
        "missing": manifest(TensorSlice("a", "float32", (6,), 0, 2, 0), TensorSlice("a", "float32", (6,), 3, 3, 8)),
        "sent twice": manifest(TensorSlice("a", "float32", (6,), 0, 4, 0), TensorSlice("a", "float32", (6,), 3, 3, 16)),
        "5 of 6": manifest(TensorSlice("a", "float32", (6,), 0, 5, 0)),
        "outside": manifest(TensorSlice("a", "float32", (6,), 0, 6, 0), nbytes=20),
        "unknown": manifest(TensorSlice("a", "float99", (6,), 0, 6, 0)),
        "differs": manifest(TensorSlice("a", "float32", (6,), 0, 3, 0), TensorSlice("a", "float32", (3, 2), 3, 3, 12)),
    }
    for word, case in bad.items():
        assert any(word in line for line in case.violations()), (word, case.violations())
    assert prod(()) == 1 and TensorSlice("scalar", "float32", (), 0, 1, 0).whole
