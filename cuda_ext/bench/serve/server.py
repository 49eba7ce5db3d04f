"""The server mode: an arm is a real `vllm serve`, and vLLM's own `vllm bench serve` its client.

The client's file has the times of every request; what the server says of itself is read from its
`/metrics` while a point runs, and from its log. Two servers share a GPU by vLLM's sleep mode, whose
HTTP calls need VLLM_SERVER_DEV_MODE, or one is stopped before the other starts.

What the other mode does within the engine's process, none can do to a server: no profile, no
weights of a trained one's size, and no planted fault that the gate has to see. What asks for the
first two is refused (`server_problems`), and the result says the rest (`checks.server_notes`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from cuda_ext.bench.serve import load as loads
from cuda_ext.bench.serve.arms import ArmFailed, OutOfTime, Tick
from cuda_ext.bench.serve.child import STOP_S, log_tail
from cuda_ext.bench.serve.config import Arm, BenchConfig, Profile
from cuda_ext.bench.serve.load import Point, Request
from cuda_ext.bench.serve.measure import EngineFigures, Record, Run
from vllm_gaudi_ext import envs

HOST = "127.0.0.1"
POLL_S = 0.25
READY_POLL_S = 1.0
CLIENT_POLL_S = 1.0
ANSWER_S = 600.0
"""For an answer to one call, where the deadline is not sooner."""
FIT_TOKENS = 8192
_FIT = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_ACTIVE = "ReplaySSM is active for"
_LINE = re.compile(
    r"(?P<prefix>(?:\([^()]* pid=\d+\) ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:: +| [\d-]+(?: [\d:.]+)? \[[^\]]*\] ?))?)"
    r"(?P<said>.*)"
)
"""A line of vLLM's log, or of uvicorn's. vLLM's prefix stands before each line of a message, and
before none of a raw traceback."""
_ERROR = re.compile(r"\b\w*(Error|Exception): .*")
_BETWEEN_ERRORS = re.compile(
    r'Traceback \(most recent|  File "|During handling of|The above exception was'
    r"|\S+\.py:\d+: \w*Warning: "
)
_HARMLESS = ("DEBUG", "INFO", "WARNING")
LAST_ERRORS, ERROR_LINES = 5, 30
LAST_PORT = 65534
"""The second server's is the next."""
ONE_WAY = frozenset(
    {
        "headless",
        "grpc",
        "data-parallel-multi-port-external-lb",
        "disable-log-stats",
        "aggregate-engine-logging",
    }
)
"""Switches of `vllm serve` without a `--no-` form, in 0.31.0 and 0.33.0; all are off by default."""
_UNMEASURED = {
    "disable-log-stats": "its metrics are what is read of a server",
    "headless": "it would answer no request",
    "grpc": "it is asked over HTTP",
}
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
}
_COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def server_problems(config: BenchConfig) -> list[str]:
    """Why a config can't be run with a server; each with its key and what to write."""
    found = []
    if config.shape is not None:
        found.append("shape: it has no tokenizer, which the client needs; name serve.model")
    if config.flag("skip-tokenizer-init"):
        found.append("serve.skip-tokenizer-init: the client needs a tokenizer")
    found += [
        f"serve.{name}: {why}; leave it out"
        for name, why in _UNMEASURED.items()
        if config.flag(name)
    ]
    if config.profile.concurrency:
        found.append(
            f"profile.concurrency: {config.profile.concurrency}, and a process of its own can't be "
            "profiled; write [], and no --profile"
        )
    if config.load.token_ids is not None:
        found.append(
            f"load.token_ids: {list(config.load.token_ids)}, and vLLM's client makes its prompts "
            "of any token; leave it out"
        )
    if config.flag("load-format") == "dummy" and config.dummy_weights != "vllm":
        found.append(
            f"dummy_weights: {config.dummy_weights}, and a server has those that vLLM makes; write "
            "vllm, or no load-format dummy"
        )
    return found


def port_problems(port: int, arms: Sequence[Arm]) -> list[str]:
    """Which arms' servers could not listen."""
    found = []
    for arm in arms:
        number = port_of(arm, port)
        if why := _why_no_port(number):
            found.append(f"--port {port}: {number}, of {arm}, can't be had ({why}); name another")
    return found


def port_of(arm: Arm, port: int) -> int:
    """An arm's port, of the two that begin with `port`."""
    return port + (arm == "replay")


def _why_no_port(port: int) -> str | None:
    with socket.socket() as probe:
        # As vLLM takes it: one that was closed a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def metric_sums(text: str) -> dict[str, float]:
    """Sums over all labels of the metrics that a point asks for.

    Args:
        text: of a `/metrics` page.
    """
    from prometheus_client.parser import text_string_to_metric_families

    names = {name: key for key, name in {**_GAUGES, **_COUNTERS}.items()}
    found = dict.fromkeys((*_GAUGES, *_COUNTERS), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                found[names[sample.name]] += sample.value
    return found


def metric_labels(text: str, name: str) -> dict[str, str]:
    """Labels of the first sample of a metric; empty where there is none."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                return dict(sample.labels)
    return {}


def client_arguments(
    config: BenchConfig, point: Point, run: int, url: str, model: str, result: Path
) -> list[str]:
    """The command line of `vllm bench serve` for a point, less the program."""
    low, high = config.load.prompt_tokens
    middle = (low + high) / 2
    ratio = {"input": (high - low) / (2 * middle), "output": 0.0}
    # Decorrelated by point and run, and alike in both arms.
    text = f"{config.load.seed} {run} {point.label}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:3], "big")
    arguments = ["--backend", "openai", "--base-url", url, "--model", model]
    arguments += ["--dataset-name", "random", "--random-input-len", str(round(middle))]
    arguments += ["--random-range-ratio", json.dumps(ratio)]
    arguments += ["--random-output-len", str(point.output_tokens)]
    arguments += ["--num-prompts", str(point.requests), "--seed", str(seed)]
    arguments += ["--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    if point.rate is None:
        arguments += ["--max-concurrency", str(point.concurrency)]
    else:
        arguments += ["--request-rate", str(point.rate)]
    arguments += ["--save-result", "--save-detailed"]
    return [*arguments, "--result-dir", str(result.parent), "--result-filename", result.name]


def records_of(result: Mapping[str, Any], asked_tokens: int) -> list[Record]:
    """The requests in a detailed result of `vllm bench serve`."""
    columns = ("input_lens", "output_lens", "ttfts", "latencies", "errors")
    return [
        Record(
            prompt_tokens=int(prompt),
            asked_tokens=asked_tokens,
            tokens=int(tokens),
            ttft_s=float(ttft),
            e2e_s=float(latency),
            error=str(error) or None,
        )
        for prompt, tokens, ttft, latency, error in zip(
            *(result[name] for name in columns), strict=True
        )
    ]


def last_words(log: Path) -> str:
    """Why a server ended: the last different errors in its log, or its last lines if it has none.

    An engine's own error is followed by pages of those that it leads to, and of the shutdown. The
    further lines of an error are of the same message, or, of a raw traceback, stand below it; those
    are where a refusal names its flags.
    """
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    errors: list[list[str]] = []
    prefix: str | None = None
    for line in lines:
        found = _LINE.fullmatch(line)
        assert found is not None
        said = found["said"]
        follows = prefix == found["prefix"] and not _BETWEEN_ERRORS.match(said)
        if follows and (not said or said[0].isspace()):
            errors[-1].append(said)
            continue
        error = None if found["level"] in _HARMLESS else _ERROR.search(said)
        if error:
            errors.append([error[0]])
            prefix = found["prefix"]
        elif follows:
            errors[-1].append(said)
        else:
            prefix = None
    told = dict.fromkeys("\n".join(error[:ERROR_LINES]).rstrip() for error in errors)
    return "\n".join(list(told)[-LAST_ERRORS:]) or log_tail(log)


def switches_off(flags: Mapping[str, Any]) -> list[str]:
    """The flags that are false, as options, but for those that can only be switched on.

    vLLM 0.31.0 passes over a false in the file of `--config`: it looks for the `--no-` form among
    the options of the program, where those of `serve` are not.
    """
    return [
        f"--no-{name}" for name, value in flags.items() if value is False and name not in ONE_WAY
    ]


class _Sampler:
    """Asks for the metrics while a point runs.

    Args:
        read: gives `metric_sums`.
        tick: hears of each.
    """

    def __init__(self, read: Callable[[], dict[str, float]], tick: Tick) -> None:
        self._read, self._tick = read, tick
        self._end = threading.Event()
        self.most = dict.fromkeys(_GAUGES, 0.0)
        self.before = self._read()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(POLL_S):
            try:
                found = self._read()
            except (ArmFailed, OutOfTime):
                # Whoever waits for the client finds out.
                continue
            for name in _GAUGES:
                self.most[name] = max(self.most[name], found[name])
            self._tick({"running": int(found["running"]), "waiting": int(found["waiting"])})

    def end(self) -> None:
        """Ask no more."""
        self._end.set()

    def figures(self) -> EngineFigures:
        """Ends, and gives what was seen."""
        self.end()
        self._thread.join()
        after = self._read()
        since = {name: int(after[name] - self.before[name]) for name in _COUNTERS}
        return EngineFigures(
            running_max=int(self.most["running"]),
            waiting_max=int(self.most["waiting"]),
            kv_usage_max=self.most["usage"],
            preemptions=since["preemptions"],
            drafts=since["drafts"],
            accepted=since["accepted"],
        )


class ServerArm:
    """An arm that is a `vllm serve` of its own; see `arms.ArmProcess`.

    Args:
        arm, config, flags, environment, folder, deadline: as `child.EngineChild`.
        port: of the stock server; the other one has the next.
    """

    module = "vllm.entrypoints.cli.main"

    def __init__(
        self,
        arm: Arm,
        config: BenchConfig,
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        deadline: float | None,
        *,
        port: int,
    ) -> None:
        self.arm = arm
        self._config, self._deadline, self._folder = config, deadline, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._flags = folder / f"{arm}.yaml"
        self._flags.write_text(yaml.safe_dump(dict(flags), sort_keys=False))
        self._off = switches_off(flags)
        self._model = str(flags.get("served-model-name") or flags["model"])
        self._tokenizer = str(flags.get("tokenizer") or flags["model"])
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            # A server's engine is a process of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            # `_facts` reads lines of this level.
            "VLLM_LOGGING_LEVEL": "INFO",
            **environment,
        }
        self._environment = envs.with_overrides(variables)
        # The same in both arms; and its library goes by a proxy if there is one.
        self._client_environment = self._environment | {"VLLM_PLUGINS": "", "no_proxy": HOST}
        self._port = port_of(arm, port)
        self._url = f"http://{HOST}:{self._port}"
        self.log = folder / f"{arm}.log"
        self._client_log = folder / f"{arm}.client.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self._url, timeout=ANSWER_S, trust_env=False)

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def start(self, tick: Tick) -> dict[str, Any]:
        """Start the server and wait until it answers."""
        begin = time.monotonic()
        self._check_port()
        command = [sys.executable, "-m", self.module, "serve"]
        command += ["--config", str(self._flags), "--host", HOST, "--port", str(self._port)]
        # Of the log's last lines each would tell of a look at the metrics.
        command += [*self._off, "--disable-uvicorn-access-log"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # A group of its own, to be ended with its engine and workers.
                start_new_session=True,
            )
        while True:
            self._check_alive("ready")
            try:
                if self._client.get("/health", timeout=5.0).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(READY_POLL_S)
        return self._facts(time.monotonic() - begin)

    def _check_port(self) -> None:
        """Another's server there would be measured in place of this one."""
        if why := _why_no_port(self._port):
            raise ArmFailed(
                f"{self.arm}: port {self._port} can't be had ({why}); name another with --port"
            )

    def _check_alive(self, awaited: str) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ArmFailed(f"{self.arm}: vllm serve ended with {code}\n{last_words(self.log)}")
        left = self._left()
        if left is not None and left <= 0:
            raise OutOfTime(f"{self.arm}: not {awaited} before the deadline")

    def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        """The server's answer to one call."""
        left = self._left()
        timeout = ANSWER_S if left is None else min(max(left, 0.1), ANSWER_S)
        try:
            answer = self._client.request(method, path, timeout=timeout, **content)
        except httpx.HTTPError as error:
            self._check_alive(f"answered {path}")
            told = f"{type(error).__name__}: {error}"
            raise ArmFailed(f"{self.arm}: {path}: {told}\n{last_words(self.log)}") from None
        if answer.status_code != 200:
            told = f"{answer.status_code} {answer.text[:500]}".rstrip()
            # 5xx: the engine may have died of something.
            why = f"\n{last_words(self.log)}" if answer.is_server_error else ""
            raise ArmFailed(f"{self.arm}: {path} said {told}{why}")
        return answer

    def _metrics(self) -> dict[str, float]:
        return metric_sums(self._ask("GET", "/metrics").text)

    def _facts(self, seconds: float) -> dict[str, Any]:
        log = self.log.read_text(errors="replace")
        found = _FIT.search(log)
        fits = None
        if found and int(found.group(1).replace(",", "")) == FIT_TOKENS:
            fits = float(found.group(2))
        cache = metric_labels(self._ask("GET", "/metrics").text, "vllm:cache_config_info")
        caching = cache.get("enable_prefix_caching")
        # `config._problems` has it that both arms are to be without.
        if caching != "False":
            raise ArmFailed(
                f"{self.arm}: enable_prefix_caching is {caching!r} by the server's metrics, and "
                "serve.enable-prefix-caching says false"
            )
        drafts = self._config.flag("speculative-config") or {}
        return {
            "vllm": self._ask("GET", "/version").json().get("version"),
            "start_s": round(seconds, 1),
            "replay_active": _ACTIVE in log,
            "drafts": drafts.get("num_speculative_tokens", 0),
            "num_gpu_blocks": int(cache["num_gpu_blocks"]) if "num_gpu_blocks" in cache else None,
            "prefix_caching": False,
            "fit_8k": fits,
        }

    def warm_up(self, tick: Tick) -> None:
        """Serve what nobody measures."""
        wanted = self._config.load.warm_up
        self._bench(Point(None, 1000.0, wanted.output_tokens, wanted.requests), -1, tick)

    def point(self, point: Point, run: int, tick: Tick) -> Run:
        """Measure one point."""
        settling = self._config.load.warm_up.before_each_point
        if settling:
            quiet = Point(settling, None, loads.SETTLING_TOKENS, settling)
            self._bench(quiet, -1, lambda _: None)
        sampler = _Sampler(self._metrics, tick)
        try:
            result = self._bench(point, run, tick)
        finally:
            sampler.end()
        engine = sampler.figures()
        records = records_of(result, point.output_tokens)
        # The client makes its prompts from these and from the tokenizer, and tells their lengths.
        lengths = [record.prompt_tokens for record in records]
        arguments = client_arguments(self._config, point, run, "", "", Path("result"))
        digest = hashlib.sha256(repr((arguments, lengths)).encode()).hexdigest()[:16]
        return Run(
            self.arm, point.label, run, float(result["duration"]), digest, tuple(records), engine
        )

    def _bench(self, point: Point, run: int, tick: Tick) -> dict[str, Any]:
        result = self._folder / f"{self.arm}.client.json"
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", self.module, "bench", "serve"]
        command += client_arguments(self._config, point, run, self._url, self._model, result)
        command += ["--tokenizer", self._tokenizer]
        with self._client_log.open("wb") as log:
            client = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._client_environment,
            )
        try:
            code = self._wait_for(client, f"done with {point.label}")
        finally:
            client.kill()
            client.wait()
        # To the client, a server that died is one whose requests failed.
        self._ask("GET", "/health")
        if code != 0 or not result.is_file():
            tail = log_tail(self._client_log)
            raise ArmFailed(f"{self.arm}: vllm bench serve ended with {code}\n{tail}")
        return dict(json.loads(result.read_text()))

    def _wait_for(self, client: subprocess.Popen[bytes], awaited: str) -> int:
        while True:
            try:
                return client.wait(CLIENT_POLL_S)
            except subprocess.TimeoutExpired:
                self._check_alive(awaited)

    def gate(self, tick: Tick) -> dict[str, Any]:
        """The gate's log-probabilities, by `/v1/completions` with prompts of token ids."""
        config = self._config
        vocabulary = _vocabulary(self._tokenizer)
        prompts = loads.gate_prompts(config.load, config.gate, vocabulary)
        output = config.gate.output_tokens
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda p: self._complete(p, output, score=False), prompts))
            continued = [p + a["token_ids"] for p, a in zip(prompts, answers, strict=True)]
            rescored = list(pool.map(lambda p: self._complete(p, 1, score=True), continued))
            together = list(pool.map(lambda p: self._complete(p, 1, score=True), prompts))
        alone = [self._complete(prompt, 1, score=True) for prompt in prompts]
        return {
            "prompts": loads.digest([Request(p, output) for p in prompts]),
            "read": {
                "together": [_scores(a, p) for a, p in zip(together, prompts, strict=True)],
                "alone": [_scores(a, p) for a, p in zip(alone, prompts, strict=True)],
            },
            "decode": {
                "together": {
                    "said": [a["logprobs"]["token_logprobs"] for a in answers],
                    "read": [
                        _scores(a, c)[len(p) - 1 :]
                        for a, c, p in zip(rescored, continued, prompts, strict=True)
                    ],
                }
            },
        }

    def _complete(
        self, prompt: Sequence[int], output_tokens: int, *, score: bool
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= {"prompt_logprobs": 0} if score else {"logprobs": 1}
        return dict(self._ask("POST", "/v1/completions", json=body).json()["choices"][0])

    def profile(self, profile: Profile, tick: Tick) -> list[dict[str, Any]]:
        """Nothing: another process can't be looked into."""
        return []

    def sleep(self) -> None:
        """Leave the device to the other arm."""
        self._ask("POST", "/sleep", params={"level": "1"})

    def wake(self) -> None:
        """Take it back."""
        self._ask("POST", "/wake_up")

    def stop(self, *, force: bool = False) -> None:
        """End the server, and by force whatever is left of its process group.

        It is asked in any case: its engine is a process of its own, which it ends, and which would
        keep the device if it did not.
        """
        self._client.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _scores(choice: Mapping[str, Any], prompt: Sequence[int]) -> list[float]:
    entries: Iterable[Any] = choice["prompt_logprobs"][1:]
    return [
        float(entry[str(token)]["logprob"])
        for entry, token in zip(entries, list(prompt)[1:], strict=True)
    ]


def _vocabulary(tokenizer: str) -> int:
    from vllm.tokenizers import get_tokenizer

    return len(get_tokenizer(tokenizer))
