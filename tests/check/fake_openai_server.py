"""A small OpenAI-compatible server with a language model whose state can be made to go wrong.

The model keeps what a GDN hybrid keeps: a decaying state, which lives in a slot and is checkpointed
at block ends as vLLM's aligned split has it, and a sum over all tokens, which stands for attention
and is always right. `Faults` are the ways in which real servers were seen to break.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_gaudi_ext.check.scenarios import WORDS

VOCABULARY = 256
ANSWERS = 48  # token ids that the model answers with
WIDTH = 4
DECAY = 0.97

_tables = random.Random(7)
EMBED = [[_tables.gauss(0, 0.3) for _ in range(WIDTH)] for _ in range(VOCABULARY)]
HEAD = [[_tables.gauss(0, 2.0) for _ in range(2 * WIDTH)] for _ in range(ANSWERS)]

State = tuple[float, ...]
ZERO: State = (0.0,) * WIDTH


@dataclass
class Settings:
    """How the server behaves; the defaults are a correct vLLM."""

    block: int = 96
    budget: int = 192
    chunk_unit: int | None = None  # chunks end on multiples of this, not of the block
    caching: bool = True
    eagle: bool = False
    plain: bool = False  # a model without recurrent state: hits at any block, cuts anywhere
    rounding: float = 0.0  # what a cut adds to the state, as number formats do
    noise: float = 0.0  # logprobs are off by up to this, differently each time
    noise_together: float = 0.0  # the same, where another request is in flight
    salt_honoured: bool = True
    details: str = "always"  # of cached_tokens: always, nonzero, never
    logprobs: str = "yes"  # yes, null, refuse
    top_logprobs: bool = True
    token_id_prompts: bool = True
    token_id_answers: bool = True
    extras_refused: bool = False
    tokenizer: bool = True
    bos: bool = False
    max_model_len: int | None = 4096
    api_key: str | None = None
    # Faults of the model.
    stale_slot: bool = False  # a hit starts from what the slot's last owner left
    stale_after_other: bool = False  # the same, only where another session ran in between
    wrong_in_batch: bool = False  # hits that run together get the zero state
    wrong_decode_checkpoint: bool = False  # decode saves the state of its first token
    wrong_after_resume: bool = False  # a prefill that started from a hit saves the zero state
    one_state_per_session: bool = False  # a shorter hit gets the newest state
    wrong_last_token: bool = False  # a hit that leaves one token feeds another one
    hash_ignores_tokens: bool = False  # blocks are found by their place alone
    not_finite_on_hit: bool = False
    says_all_cached: bool = False
    says_off_block: bool = False
    # Faults of the transport.
    delay: float = 0.0
    drop_first: int = 0  # completions whose connection is closed without an answer
    drop_number: int = 0  # the one completion, from 1, that is dropped
    drop_after_computing: bool = False
    refuse_first: tuple[int, int] = (0, 503)  # so many completions answer this status
    fail_on_hit: bool = False
    body: str = ""  # huge, malformed, deep, html, choices
    redirect: bool = False


@dataclass
class Log:
    """What the server saw."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    dropped: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)


class Model:
    """The model, its cache and its one slot."""

    def __init__(self, settings: Settings) -> None:
        self.s = settings
        self.states: dict[Any, State] = {}
        self.blocks: set[Any] = set()
        self.slot: State = ZERO
        self.slot_owner: str | None = None
        self.newest: dict[str, State] = {}
        self.lock = threading.Lock()
        self.chance = random.Random()

    def _key(self, salt: str, tokens: list[int], length: int) -> Any:
        if self.s.hash_ignores_tokens:
            return salt, length
        return salt, length, hash(tuple(tokens[:length]))

    def _step(self, state: State, token: int) -> State:
        e = EMBED[token % VOCABULARY]
        return tuple(DECAY * x + y for x, y in zip(state, e, strict=True))

    def _rounded(self, state: State, by_decode: bool = False) -> State:
        """The error of one cut: another one for a chunk's end than for a decode step."""
        q = -self.s.rounding if by_decode else self.s.rounding
        return tuple(x + q for x in state)

    def _find(self, salt: str, tokens: list[int]) -> tuple[int, int]:
        """(hit, junction): tokens to start from, and tokens whose attention blocks are there."""
        b = self.s.block
        if not self.s.caching:
            return 0, 0
        last = (len(tokens) - 1) // b
        junction = 0
        for k in range(1, last + 1):
            if self._key(salt, tokens, k * b) not in self.blocks:
                break
            junction = k * b
        for length in range(junction, 0, -b):
            if self.s.one_state_per_session or self._key(salt, tokens, length) in self.states:
                return length, junction
        return 0, junction

    def _chunks(self, start: int, n: int, junction: int) -> Iterator[tuple[int, int]]:
        """The chunks of a prefill, cut as vLLM's aligned split cuts them."""
        b = self.s.chunk_unit or self.s.block
        last = n - n % b
        if self.s.eagle:
            last = max(last - b, 0)
        while start < n:
            end = min(start + self.s.budget, n)
            if self.s.plain:
                last = junction = 0
            if end < last:
                end = end // b * b
            for stop in (junction, last):
                if start < stop < end:
                    end = stop
            yield start, end
            start = end

    def run(
        self, tokens: list[int], answer_tokens: int, salt: str, together: bool
    ) -> tuple[int, list[int], list[dict[int, float]]]:
        """Returns cached tokens, the answer, and per answer token label to logprob."""
        with self.lock:
            return self._run(tokens, answer_tokens, salt, together)

    def _run(
        self, tokens: list[int], answer_tokens: int, salt: str, together: bool
    ) -> tuple[int, list[int], list[dict[int, float]]]:
        s, b = self.s, self.s.block
        hit, junction = self._find(salt, tokens)
        if s.eagle and hit and self._key(salt, tokens, hit) not in self.states:
            hit = 0
        state = ZERO
        if hit:
            state = self.states.get(self._key(salt, tokens, hit), ZERO)
            if s.one_state_per_session:
                state = self.newest[salt]
            if s.stale_slot or (s.stale_after_other and self.slot_owner != salt):
                state = self.slot
            if s.wrong_in_batch and together:
                state = ZERO
        fed = list(tokens)
        if s.wrong_last_token and hit and len(tokens) - hit == 1:
            fed[-1] += 1
        total = [sum(EMBED[t % VOCABULARY][i] for t in tokens) for i in range(WIDTH)]
        for start, end in self._chunks(hit, len(tokens), junction):
            for i, t in enumerate(fed[start:end], start + 1):
                state = self._step(state, t)
                if s.plain and i % b == 0:
                    self._save(salt, tokens, i, state)
            # Without the aligned split a hit's last chunk is shorter than the cold run's.
            state = self._rounded(state, by_decode=s.plain and end - start < b)
            if end % b == 0 and not s.plain:
                self._save(salt, tokens, end, ZERO if hit and s.wrong_after_resume else state)
        sequence = list(tokens)
        answer: list[int] = []
        places: list[dict[int, float]] = []
        first_state = state
        for i in range(answer_tokens):
            place = self._logprobs(state, total, len(sequence), together)
            if s.not_finite_on_hit and hit and i == 2:
                place = dict.fromkeys(place, math.nan)
            best = max(place, key=lambda t: (place[t], t))
            answer.append(best)
            places.append(place)
            sequence.append(best)
            if i + 1 < answer_tokens:
                state = self._rounded(self._step(state, best), by_decode=True)
                total = [x + y for x, y in zip(total, EMBED[best % VOCABULARY], strict=True)]
                if len(sequence) % b == 0:
                    wrong = s.wrong_decode_checkpoint
                    self._save(salt, sequence, len(sequence), first_state if wrong else state)
        for k in range(1, (len(sequence) - 1) // b + 1):
            self.blocks.add(self._key(salt, sequence, k * b))
        self.slot, self.slot_owner = state, salt
        return hit, answer, places

    def _save(self, salt: str, tokens: list[int], length: int, state: State) -> None:
        self.states[self._key(salt, tokens, length)] = state
        self.newest[salt] = state

    def _logprobs(
        self, state: State, total: list[float], n: int, together: bool
    ) -> dict[int, float]:
        features = [math.tanh(x) for x in state] + [math.tanh(x / n) for x in total]
        logits = [sum(w * f for w, f in zip(row, features, strict=True)) for row in HEAD]
        amount = self.s.noise + (self.s.noise_together if together else 0.0)
        if amount:
            logits = [x + self.chance.uniform(-amount / 2, amount / 2) for x in logits]
        top = max(logits)
        log_sum = top + math.log(sum(math.exp(x - top) for x in logits))
        return {token: x - log_sum for token, x in enumerate(logits)}


class FakeServer(ThreadingHTTPServer):
    """The HTTP side."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, settings: Settings) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.settings = settings
        self.model = Model(settings)
        self.log = Log()
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are part of the tests, and no news."""


class Handler(BaseHTTPRequestHandler):
    """vLLM's routes, as far as the checker uses them."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet, else each answer waits 40 ms for an ACK
    server: FakeServer

    def log_message(self, *_: object) -> None:
        """Keep the test log quiet."""

    def do_GET(self) -> None:
        if self._unauthorised() or self._redirected():
            return
        if self.path == "/v1/models":
            card: dict[str, Any] = {"id": "fake", "object": "model"}
            if self.server.settings.max_model_len is not None:
                card["max_model_len"] = self.server.settings.max_model_len
            self._json(200, {"object": "list", "data": [card]})
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._unauthorised():
            return
        if self.path == "/tokenize" and self.server.settings.tokenizer:
            words = body["prompt"].split()
            self._json(200, {"tokens": [WORDS.index(w) + 10 for w in words]})
        elif self.path == "/v1/completions":
            self._completion(body)
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def _completion(self, body: dict[str, Any]) -> None:
        s, log = self.server.settings, self.server.log
        with self.server.guard:
            log.requests.append(body)
            log.headers.append(dict(self.headers))
            log.in_flight += 1
            log.most_in_flight = max(log.most_in_flight, log.in_flight)
            number = len(log.requests)
        try:
            self._answer(s, body, number)
        finally:
            with self.server.guard:
                log.in_flight -= 1

    def _answer(self, s: Settings, body: dict[str, Any], number: int) -> None:
        if s.delay:
            time.sleep(s.delay)
        times, status = s.refuse_first
        if number <= times:
            self._json(status, {"error": {"message": "come back later"}}, {"Retry-After": "0"})
            return
        dropping = number <= s.drop_first or number == s.drop_number
        if dropping and not s.drop_after_computing:
            self._drop()
            return
        trouble = self._refusal(s, body)
        if trouble:
            self._json(400, {"error": {"message": trouble, "code": 400}})
            return
        together = False
        if s.wrong_in_batch or s.noise_together:
            # Let requests of one batch arrive before the first of them is served.
            time.sleep(0.05)
            together = self.server.log.in_flight > 1
        prompt = body["prompt"]
        tokens = prompt if isinstance(prompt, list) else [_token(w) for w in prompt.split()]
        if s.bos:
            tokens = [1, *tokens]
        salt = body.get("cache_salt", "") if s.salt_honoured else ""
        hit, answer, places = self.server.model.run(tokens, body["max_tokens"], salt, together)
        if dropping:
            self._drop()
        elif hit and s.fail_on_hit:
            self._json(500, {"error": {"message": "EngineCore encountered an issue"}})
        elif s.body:
            self._odd_body(s.body)
        else:
            self._json(200, self._completed(s, body, tokens, hit, answer, places))

    def _refusal(self, s: Settings, body: dict[str, Any]) -> str:
        if isinstance(body["prompt"], list) and not s.token_id_prompts:
            return "prompt must be a string"
        if s.extras_refused and "ignore_eos" in body:
            return "Unrecognized request argument supplied: ignore_eos"
        if s.logprobs == "refuse" and body.get("logprobs"):
            return f"Requested sample logprobs of {body['logprobs']}, greater than max allowed: 0"
        return ""

    def _completed(
        self,
        s: Settings,
        body: dict[str, Any],
        tokens: list[int],
        hit: int,
        answer: list[int],
        places: list[dict[int, float]],
    ) -> dict[str, Any]:
        as_ids = body.get("return_tokens_as_token_ids") and s.token_id_answers
        name = (lambda t: f"token_id:{t}") if as_ids else (lambda t: f" t{t}")
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(f" t{t}" for t in answer),
            "finish_reason": "length",
            "logprobs": None,
        }
        if body.get("return_token_ids") and s.token_id_answers:
            choice["token_ids"] = answer
        if body.get("logprobs") and s.logprobs == "yes":
            k = body["logprobs"]
            rows = [sorted(p.items(), key=lambda x: -x[1])[: k + 1] for p in places]
            choice["logprobs"] = {
                "text_offset": [0] * len(answer),
                "tokens": [name(t) for t in answer],
                "token_logprobs": [p[t] for p, t in zip(places, answer, strict=True)],
                "top_logprobs": [{name(t): v for t, v in row} for row in rows]
                if s.top_logprobs
                else None,
            }
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": len(answer)}
        said = hit
        if s.says_all_cached and hit:
            said = len(tokens)
        if s.says_off_block and hit:
            said = hit - 5
        if s.details == "always" or (s.details == "nonzero" and said):
            usage["prompt_tokens_details"] = {"cached_tokens": said}
        return {"id": "cmpl-1", "model": "fake", "choices": [choice], "usage": usage}

    def _odd_body(self, body: str) -> None:
        if body == "huge":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 33))
            self.end_headers()
            for _ in range(4096):
                self.wfile.write(b" " * (1 << 20))
        texts = {
            "malformed": '{"choices": [',
            "deep": "[" * 200_000,
            "html": "<html>\x1b[2J gateway </html>",
            "choices": '{"choices": []}',
        }
        self._send(200, texts[body].encode())

    def _unauthorised(self) -> bool:
        key = self.server.settings.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._json(401, {"error": "Unauthorized"})
        return True

    def _redirected(self) -> bool:
        if not self.server.settings.redirect:
            return False
        self._send(307, b"", {"Location": "http://elsewhere.invalid/v1/models"})
        return True

    def _drop(self) -> None:
        self.server.log.dropped += 1
        self.close_connection = True
        self.connection.close()

    def _json(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(data).encode(), headers)

    def _send(self, status: int, raw: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


def _token(word: str) -> int:
    return WORDS.index(word) + 10 if word in WORDS else int(word.removeprefix("t"))


@contextmanager
def serve(**settings: Any) -> Iterator[FakeServer]:
    """A running server with these `Settings`."""
    server = FakeServer(Settings(**settings))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
