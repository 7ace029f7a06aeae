"""Pushes to a real server: what it samples with afterwards is the actor's weights, to 1e-5 in float32.

Both ends are real: the actor's ranks are processes with a gloo world, the engine is the server that a run would start.
On the CPU vLLM runs its own CPU kernels; SGLang runs with stand-ins for sgl_kernel (README). Not covered: NCCL, engines
with several workers.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from luspo_megatron.rollout.engine import GenerateRequest
from tests.distributed.actor_jobs import Case
from tests.engines import jobs
from tests.engines.conftest import Folders, start_host
from tests.engines.side import FleetHost
from tests.workers import pool

CASES = [Case(world=2, tp=2, ep=2), Case(world=2, pp=2), Case(world=2)]
TOLERANCE = 1e-5


def next_version(host: FleetHost) -> int:
    return host.fleet.weight_version + 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("case", CASES, ids=["tp2ep2", "pp2", "dp2"])
def test_a_then_b_then_a(host: FleetHost, folders: Folders, case: Case, temperature: float) -> None:
    """Field case 19 is the temperature: both ends take it into their log-probs."""
    if temperature != 1.0 and case is not CASES[0]:
        pytest.skip("once is enough")
    version = next_version(host)
    results = pool(2).run(jobs.push_and_compare, case, [folders.a, folders.b, folders.a], host.address, version,
                          temperature=temperature)
    for number in range(3):
        scored = {i for result in results for i in result[number]["scored"]}
        assert scored == set(range(len(jobs.PROMPTS))), "every sample was scored by some rank"
        worst = max(result[number]["worst"] for result in results)
        assert worst <= TOLERANCE, f"push {number}: sampled and actor's log-probs differ by {worst}"
        assert results[0][number]["versions"] == {(version + number, version + number)}
    a, b, again = (results[0][number]["responses"] for number in range(3))
    assert a == again and a != b, "the same seeds under the same weights"


def test_an_update_in_flight(host: FleetHost, folders: Folders) -> None:
    """Sequences that are running go on under the new weights: their first tokens are the old weights', the others the
    new ones', and the versions of the sample say so.

    How fast an engine is depends on the machine, so the push comes sooner or later until it meets all sequences in
    their midst. Whenever it came, each token is of the old or of the new weights, in this order."""
    tried = []
    for wait in (0.2, 0.05, 0.8, 0.01, 3.0):
        old, new, spans, logprobs = pool(2).run(
            jobs.update_in_flight, Case(world=2, tp=2, ep=2, max_tokens=2048), folders.a, folders.b, host.address,
            next_version(host), wait)[0]
        version = host.fleet.weight_version
        switches = [switch_of(a, b, sampled) for a, b, sampled in zip(old, new, logprobs, strict=True)]
        if all(0 < switch < len(sampled) for switch, sampled in zip(switches, logprobs, strict=True)):
            assert spans == [(version - 1, version)] * len(spans)
            return
        tried.append((wait, switches, spans))
    pytest.fail(f"no push came while all sequences were running: {tried}")


def switch_of(old: np.ndarray, new: np.ndarray, sampled: np.ndarray) -> int:
    """How many tokens were sampled under the old weights; all after them must be the new ones'."""
    fits_old, fits_new = np.abs(sampled - old) <= TOLERANCE, np.abs(sampled - new) <= TOLERANCE
    switch = len(sampled) if fits_old.all() else int(np.argmin(fits_old))
    assert fits_new[switch:].all(), (switch, fits_old, fits_new)
    assert fits_new[:switch].sum() <= 0.1 * switch, "the two weights can be told apart"
    assert fits_old[switch:].sum() <= 0.1 * (len(sampled) - switch), "the two weights can be told apart"
    return switch


def test_a_flipped_byte_is_caught_and_the_push_repeated(host: FleetHost, folders: Folders) -> None:
    """A proxy between source and engine changes one byte after the source has hashed it."""
    version = next_version(host)
    result = pool(1).run(jobs.push_through_a_bad_wire, Case(), folders.b, host.address, version)[0]
    assert result["flipped"] == 1
    [warning] = result["warnings"]
    assert "the checksum differs for model.embed_tokens.weight" in warning, warning
    assert result["worst"] <= TOLERANCE and result["versions"] == {(version, version)}


def test_stops_seeds_and_lengths(host: FleetHost) -> None:
    """A sequence is its prompt's and its seed's alone, whatever else is in the request."""
    prompts = [[5, 9], [5, 9], [7, 8, 4, 3], [5, 9]]
    request = GenerateRequest(prompts, [11, 12, 13, 11], 1.0, 1.0, 12, [1])
    first = host.call(host.fleet.generate(request))
    assert first[0].response_ids == first[3].response_ids != first[1].response_ids
    alone = host.call(host.fleet.generate(GenerateRequest(prompts[2:3], [13], 1.0, 1.0, 12, [1])))
    assert alone[0].response_ids == first[2].response_ids
    assert np.allclose(alone[0].logprobs, first[2].logprobs, atol=TOLERANCE)
    third = first[2].response_ids[2]
    stopped = host.call(host.fleet.generate(GenerateRequest(prompts[2:3], [13], 1.0, 1.0, 12, [1, third])))[0]
    ends = first[2].response_ids.index(third) + 1
    assert stopped.response_ids == first[2].response_ids[:ends] and stopped.finish_reason == "stop"
    assert first[1].finish_reason == "length" and len(first[1].response_ids) == 12
    greedy = host.call(host.fleet.generate(GenerateRequest(prompts[:2], [1, 2], 0.0, 1.0, 6, [1])))
    assert greedy[0].response_ids == greedy[1].response_ids


def test_a_request_without_the_token_is_refused(host: FleetHost) -> None:
    import aiohttp

    async def ask(method: str, path: str) -> int:
        async with aiohttp.ClientSession() as session, session.request(
                method, host.fleet.slots[0].url + path, json={}) as answer:
            return answer.status

    paths = {"vllm": ["/pause", "/update_weights", "/inference/v1/generate"],
             "sglang": ["/pause_generation", "/update_weights_from_disk", "/generate"]}[host.fleet.kind.name]
    assert [asyncio.run(ask("POST", path)) for path in paths] == [401] * 3


def test_routed_experts_are_the_models_own(host: FleetHost, folders: Folders, engine: str) -> None:
    if engine != "sglang":
        pytest.skip("vLLM reports them on GPUs only")
    from tests.engines.reference import top_experts

    generations = pool(1).run(jobs.push_and_sample, Case(), folders.a, host.address, next_version(host))[0]
    for prompt, generation in zip(jobs.PROMPTS, generations, strict=True):
        ids = prompt + generation.response_ids
        found = generation.routed_experts.array()
        assert found.shape == (len(ids) - 1, 2, 2)
        want = top_experts(folders.a, ids[:-1])
        assert (np.sort(found, -1) == np.sort(want, -1)).all()


@pytest.mark.timeout(300)
def test_without_the_workaround_vllm_on_cpu_keeps_old_experts(folders: Folders, engine: str,
                                                              tmp_path_factory: pytest.TempPathFactory) -> None:
    """What forget_packed_experts is for: the same push without it is accepted by every check but the log-probs'."""
    if engine != "vllm":
        pytest.skip("only vLLM packs experts")
    host = start_host("vllm", folders.a, tmp_path_factory.mktemp("packed"),
                      engine_env=("LUSPO_VLLM_KEEP_PACKED_EXPERTS=1",))
    try:
        [[result]] = pool(1).run(jobs.push_and_compare, Case(), [folders.b], host.address, 1)
    finally:
        host.close()
    assert result["versions"] == {(1, 1)}
    assert result["worst"] > 0.1, "vLLM packs its experts anew by itself: the workaround can go"

