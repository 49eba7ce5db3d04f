"""Prompts and arrivals: alike in every process, as long as asked, new for each repetition."""

from __future__ import annotations

import itertools
import subprocess
import sys

import bench_data

from cuda_ext.bench.serve import load as loads
from cuda_ext.bench.serve.config import Gate, Load
from cuda_ext.bench.serve.load import Point

LOAD = Load(
    concurrency=[1, 4],
    request_rates=[2.5],
    open_requests=200,
    waves=3,
    prompt_tokens=(20, 50),
    output_tokens=[8, 64],
)


def test_points_are_every_load_at_every_output_length() -> None:
    assert [point.label for point in loads.points(LOAD)] == [
        "1 in flight, 8 out",
        "4 in flight, 8 out",
        "2.5 requests/s, 8 out",
        "1 in flight, 64 out",
        "4 in flight, 64 out",
        "2.5 requests/s, 64 out",
    ]
    assert [point.requests for point in loads.points(LOAD)] == [3, 12, 200] * 2


def test_lengths_and_ids_lie_in_their_ranges() -> None:
    given = loads.requests(LOAD, Point(64, None, 8, 64), 0, 512)
    lengths = {len(request.prompt) for request in given}
    assert min(lengths) >= 20
    assert max(lengths) <= 50
    assert len(lengths) > 10
    ids = {token for request in given for token in request.prompt}
    # Ids at both ends are special in real vocabularies.
    assert min(ids) == 10
    assert max(ids) == 459
    assert all(request.output_tokens == 8 for request in given)
    assert all(request.arrival_s == 0 for request in given)


def test_ids_can_be_chosen() -> None:
    given = loads.requests(
        LOAD.model_copy(update={"token_ids": (3, 5)}), loads.points(LOAD)[0], 0, 512
    )
    assert {token for request in given for token in request.prompt} == {3, 4, 5}


def test_open_loop_arrivals_come_at_the_rate() -> None:
    point = loads.points(LOAD)[2]
    arrivals = [request.arrival_s for request in loads.requests(LOAD, point, 0, 512)]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    # Exponential gaps: the mean of 199 is within a quarter of 1 / rate but once in 2,000 seeds.
    assert abs(mean - 0.4) < 0.1
    assert max(gaps) > 2 * mean


def test_points_runs_and_seeds_have_prompts_of_their_own() -> None:
    first, second, *_ = loads.points(LOAD)

    def digest(load: Load, point: Point, run: int) -> str:
        return loads.digest(loads.requests(load, point, run, 512))

    other = LOAD.model_copy(update={"seed": 1})
    found = {digest(LOAD, first, 0), digest(LOAD, first, 1), digest(other, first, 0)}
    found.add(digest(LOAD, second, 0))
    assert len(found) == 4


def test_another_process_makes_the_same_requests() -> None:
    code = (
        "import bench_data; from cuda_ext.bench.serve import load as l; "
        "c = bench_data.config().load; print(l.digest(l.requests(c, l.points(c)[1], 2, 4096)))"
    )
    folder = bench_data.__file__.rsplit("/", 1)[0]
    here = bench_data.config().load
    mine = loads.digest(loads.requests(here, loads.points(here)[1], 2, 4096))
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {code}"],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == mine


def test_gate_prompts_span_their_lengths() -> None:
    prompts = loads.gate_prompts(LOAD, Gate(prompts=4, prompt_tokens=(9, 99)), 512)
    assert [len(prompt) for prompt in prompts] == [9, 39, 69, 99]
    assert loads.gate_prompts(LOAD, Gate(prompts=4, prompt_tokens=(9, 99)), 512) == prompts


def test_fillers_leave_the_gates_prompts_part_of_a_step() -> None:
    assert loads.filler_lengths([40, 90], 256, 510, 0.3) == [217]
    # No prompt longer than the model takes, and none a token shorter than it must be.
    lengths = loads.filler_lengths([40, 1200], 16384, 8190, 0.7)
    assert lengths == [7758, 7758]
    assert sum(lengths) + int(1240 * 0.7) == 16384
    # Prompts of more than a step are cut as they are.
    assert loads.filler_lengths([200, 200], 256, 510, 0.3) == []
    prompts = loads.filler_prompts(LOAD, [5, 3], 64)
    assert [len(prompt) for prompt in prompts] == [5, 3]
    assert prompts == loads.filler_prompts(LOAD, [5, 3], 64)
