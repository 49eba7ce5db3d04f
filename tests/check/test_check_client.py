"""Bad servers and bad networks: one clear line each, bounded in time, bytes and attempts."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import FakeServer, serve

from vllm_gaudi_ext.check import CheckOptions, CheckReport, Verdict, run_check
from vllm_gaudi_ext.check import client as client_module
from vllm_gaudi_ext.check.client import ServerTrouble, as_text, base_url, parse_answer, plain

SHORT: dict[str, Any] = {
    "answer_tokens": 8,
    "suffixes": (10,),
    "repeats": 2,
    "timeout": 10,
    "use_proxies": False,
    "scenarios": ("boundary",),
}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)


def run(server: FakeServer | str, **options: Any) -> CheckReport:
    url = server if isinstance(server, str) else server.url
    return run_check(url, CheckOptions(**{**SHORT, **options}))


def trouble(report: CheckReport) -> str:
    """The one line of a report that could not begin."""
    assert report.exit_code == 2
    [case] = [c for c in report.cases if c.case == "the server"]
    assert case.verdict is Verdict.FAILED
    assert "\n" not in case.detail
    return case.detail


def test_dropped_connections_are_tried_again() -> None:
    with serve(drop_first=3) as server:
        report = run(server)
        assert server.log.dropped == 3
    assert report.exit_code == 0
    assert report.retries == 3


def test_a_server_that_drops_everything_is_given_up_after_the_allowed_attempts() -> None:
    with serve(drop_first=10**9) as server:
        detail = trouble(run(server, retries=2))
        assert server.log.dropped == 3
    assert "cannot reach" in detail
    assert "3 attempts" in detail


def test_a_cold_run_that_is_tried_again_is_still_cold() -> None:
    """The attempt that was lost had filled the cache: its salt must not be used again."""
    # All of these are the introducing request, whose prompt is one.
    with serve(drop_first=4, drop_after_computing=True) as server:
        report = run(server, block_tokens=96, retries=4)
        salts = [r["cache_salt"] for r in server.log.requests[:5]]
    assert report.exit_code == 0, report
    assert len(set(salts)) == 5


def test_a_seed_that_is_tried_again_is_not_taken_for_an_ignored_salt() -> None:
    # The first request introduces the server, the second is the first play's seed.
    with serve(drop_number=2, drop_after_computing=True) as server:
        report = run(server, block_tokens=96)
        lost, again = server.log.requests[1:3]
    assert lost == again
    assert report.retries == 1
    assert report.exit_code == 0, report


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_servers_are_tried_again(status: int) -> None:
    with serve(refuse_first=(2, status)) as server:
        report = run(server)
    assert report.exit_code == 0
    assert report.retries == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_stays_busy_is_given_up(status: int) -> None:
    with serve(refuse_first=(10**9, status)) as server:
        detail = trouble(run(server, retries=2))
        assert len(server.log.requests) == 3
    assert f"answered {status}: come back later (3 attempts)" in detail


@pytest.mark.parametrize("status", [404, 409, 418])
def test_other_errors_are_not_tried_again(status: int) -> None:
    with serve(refuse_first=(10**9, status)) as server:
        detail = trouble(run(server))
        assert len(server.log.requests) == 1
    assert f"answered {status}" in detail


def test_a_slow_server_is_not_waited_for() -> None:
    with serve(delay=60.0) as server:
        start = time.monotonic()
        detail = trouble(run(server, timeout=0.3))
        assert time.monotonic() - start < 30
        assert len(server.log.requests) == 1
    assert "within 0.3 s (--timeout)" in detail


def test_a_server_that_dribbles_is_not_waited_for() -> None:
    """Each byte is in time, the answer is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                try:
                    for _ in range(600):
                        connection.sendall(b" ")
                        time.sleep(0.1)
                except OSError:
                    pass

        thread = threading.Thread(target=dribble, daemon=True)
        thread.start()
        start = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        detail = trouble(run(url, timeout=0.5, retries=0))
        assert time.monotonic() - start < 30
        thread.join(10)
    assert "within 0.5 s" in detail


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    detail = trouble(run(f"http://127.0.0.1:{port}", retries=1))
    assert f"cannot reach http://127.0.0.1:{port}" in detail


@pytest.mark.parametrize("url", ["http://no-such-host.invalid", "http://" + "a" * 300 + "/"])
def test_a_host_that_does_not_exist(url: str) -> None:
    assert trouble(run(url, retries=0))


def test_https_spoken_to_a_plain_server() -> None:
    with serve() as server:
        detail = trouble(run(server.url.replace("http:", "https:"), retries=0))
    assert "cannot reach" in detail


def test_a_huge_answer_is_not_read_to_its_end() -> None:
    with serve(body="huge") as server:
        detail = trouble(run(server, max_answer_bytes=1 << 20))
    assert "longer than 1,048,576 bytes" in detail


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("malformed", "is no JSON"),
        ("deep", "is no JSON"),
        ("html", "is no JSON: <html> [2J gateway </html>"),
        ("choices", "0 choices"),
    ],
)
def test_odd_answers(body: str, says: str) -> None:
    with serve(body=body) as server:
        assert says in trouble(run(server))


def test_a_key_is_needed_refused_and_accepted() -> None:
    with serve(api_key="right") as server:
        assert "an API key is needed" in trouble(run(server))
        refused = run(server, api_key="wrong-secret")
        assert "the API key was refused" in trouble(refused)
        assert "wrong-secret" not in refused.model_dump_json()
        accepted = run(server, api_key="right")
    assert accepted.exit_code == 0
    assert "right" not in accepted.model_dump_json()


def test_redirects_are_named_and_not_followed() -> None:
    with serve(redirect=True) as server:
        assert "redirects to http://elsewhere.invalid" in trouble(run(server))


def test_a_model_that_is_not_offered_is_named_with_those_that_are() -> None:
    with serve() as server:
        assert "does not offer 'other'; it offers: fake" in trouble(run(server, model="other"))


def test_a_folder_of_the_server_and_v1_are_understood() -> None:
    assert base_url("http://h:8000/v1/") == "http://h:8000"
    assert base_url("https://h/gate/v1") == "https://h/gate"
    with serve() as server:
        assert run(server.url + "/v1/").exit_code == 0


@pytest.mark.parametrize(
    "url",
    ["", "h:8000", "ftp://h", "http://", "http://user:secret@h", "http://h?x=1", "http://h:99999"],
)
def test_urls_that_name_no_server_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|port|query") as e:
        run_check(url)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("options", [{"api_key": "a\nb"}, {"headers": (("X", "a\r\nY: b"),)}])
def test_headers_cannot_be_smuggled(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no header may hold"):
        run_check("http://127.0.0.1:1", CheckOptions(**options))


def test_further_headers_are_sent() -> None:
    with serve() as server:
        run(server, headers=(("X-Data-Parallel-Rank", "1"),))
        assert all(h["X-Data-Parallel-Rank"] == "1" for h in server.log.headers)


def test_tls_files_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for options in ({"ca_file": bad}, {"client_cert": bad}, {"ca_file": tmp_path / "missing"}):
        with pytest.raises(ValueError, match=r"cannot load .*(bad\.pem|missing)"):
            run_check("https://127.0.0.1:1", CheckOptions(**options))
    with pytest.raises(ValueError, match="without a client certificate"):
        run_check("https://127.0.0.1:1", CheckOptions(client_key=bad))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_are_in_flight_than_allowed(concurrency: int) -> None:
    with serve(delay=0.01) as server:
        report = run(server, concurrency=concurrency, scenarios=("concurrent",))
        assert server.log.most_in_flight == concurrency
    assert report.exit_code == 0


@pytest.mark.parametrize(
    "options",
    [
        {"block_tokens": 0},
        {"block_tokens": -1},
        {"block_tokens": 10**12},
        {"answer_tokens": 0},
        {"concurrency": 0},
        {"concurrency": 10**6},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"retries": -1},
        {"scenarios": ("nonsense",)},
        {"cuts": "sometimes"},
        {"unknown": 1},
    ],
)
def test_absurd_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - pydantic's own subclass, with its own text
        CheckOptions(**options)


def test_strangers_text_is_one_short_line_without_prompts() -> None:
    quoted = "bad 'input': [11, 12, 13, 14, 15, 16, 17] \x1b[31m\n or 'the and for that with this'"
    assert plain(quoted) == "bad 'input': [...] [31m or '...'"
    assert len(plain("x" * 10_000)) == 240


def test_answers_that_contradict_themselves_are_refused() -> None:
    choice = {
        "text": "a",
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.1]},
    }
    with pytest.raises(ServerTrouble, match="differ in number"):
        parse_answer({"choices": [choice]})
    with pytest.raises(ServerTrouble, match="no completion"):
        parse_answer({"error": "x"})
    with pytest.raises(ServerTrouble, match="no completion"):
        parse_answer([1])


def test_ids_are_read_from_token_names() -> None:
    logprobs = {"tokens": ["token_id:5", "token_id:7"], "token_logprobs": [-0.1, -0.2]}
    answer = parse_answer({"choices": [{"text": "", "logprobs": logprobs}]})
    assert answer.token_ids == (5, 7)


def test_text_prompts_keep_answers_as_they_came() -> None:
    assert as_text((0, 1, " the answer.", 2)) == "the and the answer. for"
