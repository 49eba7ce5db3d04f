"""Chunks end on B, the budget is used to the last whole block, and nobody starves."""

from __future__ import annotations

from typing import Any

import driving
import harness
import pytest

from vllm_gaudi_ext.scheduler import GdnAsyncScheduler, GdnScheduler

B = 384
# The scope makes pytest run all tests of one kind together, on one engine; those that ask for one
# kind stand beside them.
each_kind = pytest.mark.parametrize(
    "asynchronous", [True, False], ids=["async", "sync"], scope="module"
)


class Item:
    """Where an image stands in a prompt, as the scheduler sees it."""

    def __init__(self, offset: int) -> None:
        self.mm_position = self
        self.offset = offset


@pytest.mark.parametrize(
    ("images", "expected"),
    [([], 0), ([100], 0), ([100, 250], 250), ([250], 250), ([251], 0)],
    ids=["text", "behind it", "two in one block", "at the cut", "past the cut"],
)
def test_chunk_that_must_end_before_an_image_still_advances(
    engines: Any, images: list[int], expected: int
) -> None:
    """The encoder budget ends a chunk at token 250, inside the block it starts in."""
    from types import SimpleNamespace

    scheduler = engines(max_num_batched_tokens=1024, async_scheduling=True).scheduler
    request = SimpleNamespace(
        num_computed_tokens=0,
        num_prompt_tokens=2000,
        num_tokens=2000,
        shared_prefix_boundary=0,
        mm_features=[Item(offset) for offset in images],
    )
    assert scheduler._mamba_block_aligned_split(request, 250) == expected
    request.num_computed_tokens = 250
    # The next chunk stops where the checkpoint is made.
    assert scheduler._mamba_block_aligned_split(request, 700) == B - 250
    assert scheduler._mamba_block_aligned_split(request, 0) == 0


def test_streaming_input_session_is_rejected_alone(engines: Any) -> None:
    """A session ends with an error of its own; the request beside it is served."""
    engine = engines(max_num_batched_tokens=1024, async_scheduling=True)
    core = engine.core
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest, FinishReason
    from vllm.v1.request import Request

    def request(name: str, *, resumable: bool, closing: bool = False) -> Request:
        made = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[0] if closing else harness.prompt(5, 50),
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )
        return Request.from_engine_core_request(made, core.request_block_hasher)

    reasons: dict[str, Any] = {}

    def drain() -> None:
        for _ in range(40):
            outputs, _ = core.step_fn()
            for group in (outputs or {}).values():
                for output in group.outputs:
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
            if not engine.scheduler.has_requests() and not core.batch_queue:
                return

    core.add_request(request("session", resumable=True))
    core.add_request(request("plain", resumable=False))
    core.add_request(request("session", resumable=True))
    drain()
    assert reasons == {"session": FinishReason.ERROR, "plain": FinishReason.LENGTH}
    # The closing message of the session must not start a request of its own.
    core.add_request(request("session", resumable=False, closing=True))
    assert not engine.scheduler.has_requests()
    core.add_request(request("alone", resumable=True))
    drain()
    assert reasons["alone"] == FinishReason.ERROR
    # A session that was cancelled sends no closing message; its id may come back in earnest.
    core.add_request(request("alone", resumable=False))
    drain()
    assert reasons["alone"] == FinishReason.LENGTH
    assert driving.free_slots(engine) + len(engine.runner._gdn_req_to_base_slot) == 4


@each_kind
def test_chunks_end_on_block_boundaries_and_fill_the_budget(
    engines: Any, asynchronous: bool
) -> None:
    engine = engines(max_num_batched_tokens=1024, async_scheduling=asynchronous)
    expected = GdnAsyncScheduler if asynchronous else GdnScheduler
    assert type(engine.scheduler) is expected
    with driving.watched(engine) as seen:
        engine.run([harness.prompt(1, 1500)], max_tokens=2, salt=driving.salt())
    (chunks,) = seen.chunks().values()
    # 1,024 tokens hold two blocks; the tail runs from the last boundary to the end.
    assert chunks[:3] == [(0, 2 * B), (2 * B, B), (3 * B, 1500 - 3 * B)]


@each_kind
def test_live_block_size_stays_b_when_the_config_is_completed_again(
    engines: Any, asynchronous: bool
) -> None:
    """vLLM completes the config once more when the engine's handshake ends."""
    engine = engines(max_num_batched_tokens=1024, async_scheduling=asynchronous)
    config = engine.core.vllm_config
    before = (config.cache_config.block_size, config.cache_config.mamba_block_size)
    assert before == (B, B)
    config.__post_init__()
    assert (config.cache_config.block_size, config.cache_config.mamba_block_size) == before
    cached = engine.run([harness.prompt(2, B + 9)] * 2, max_tokens=2, salt=driving.salt())
    assert cached[0].tokens == cached[1].tokens


def test_structured_request_is_rejected_alone_under_synchronous_scheduling(engines: Any) -> None:
    """In vllm-gaudi 0.26.0 it would put made-up tokens into its neighbours' answers."""
    from vllm.sampling_params import StructuredOutputsParams

    engine = engines(max_num_batched_tokens=1024, async_scheduling=False)
    long = harness.prompt(6, 1500)
    cold = driving.cold(engine, long, 8)
    run = driving.Requests(engine)
    structured = StructuredOutputsParams(regex="[a-z ]{40}")
    run.add("plain", long, 8, driving.salt())
    run.add("grammar", harness.prompt(7, 60), 20, driving.salt(), structured_outputs=structured)
    run.drain()
    assert run.outputs["grammar"].outputs[0].finish_reason == "error"
    assert run.result("plain").distance(cold) == 0.0


def test_flipped_block_size_stops_the_engine_instead_of_cutting_elsewhere(engines: Any) -> None:
    engine = engines(max_num_batched_tokens=1024)
    engine.core.vllm_config.cache_config.block_size = 128
    with pytest.raises(RuntimeError, match=r"128 tokens.*B=384"):
        engine.run([harness.prompt(3, 900)], max_tokens=1, salt=driving.salt())
    engines.stop()


def test_every_request_advances_in_a_small_budget(engines: Any) -> None:
    """Case C20: the smallest legal budget, and as many sequences as it admits."""
    engine = engines(max_num_batched_tokens=512, max_num_seqs=8)
    prompts = [harness.prompt(10 + i, 500 + 60 * i) for i in range(8)]
    with driving.watched(engine) as seen:
        results = engine.run(prompts, max_tokens=12, salt=driving.salt())
    assert all(len(r.tokens) == 12 for r in results)
    idle = [s for s in seen.steps if s.total_num_scheduled_tokens == 0]
    assert len(idle) <= 2, "a step without progress while requests wait"
    longest_wait = max(
        len(seen.steps) - sum(name in s.num_scheduled_tokens for s in seen.steps)
        for name in seen.chunks()
    )
    assert longest_wait < len(seen.steps)
