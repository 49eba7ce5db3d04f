"""How the checker speaks to a server: one httpx client with every limit that a stranger needs.

Connection errors, 5xx and 429 are tried again, a bounded number of times with growing pauses;
nothing else is. An answer is read up to a limit of bytes and for a limit of seconds. The server's
words reach a person without control characters and without the numbers of a prompt.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_gaudi_ext.check.answer import Answer, Prompt
from vllm_gaudi_ext.check.scenarios import COMMON_TEXT, WORDS

FIRST_PAUSE = 0.5  # seconds before the first retry; doubled for each further one
LONGEST_PAUSE = 30.0
# Byte tokens: valid ids in byte-level and in byte-fallback vocabularies, and no special tokens.
BYTE_IDS = range(10, 250)
TOP_LOGPROBS = 5
# Servers like to quote a request that they refuse: rows of token ids, or of our words.
_PROMPT_PIECES = re.compile(
    r"\d+(?:\s*,\s*\d+){5,}|\b(?:" + "|".join(WORDS) + r")(?:\s+(?:" + "|".join(WORDS) + r")\b){5,}"
)
PROBE_UNITS = 24


class ServerTrouble(Exception):
    """The server gave no usable answer; the text is one line for a person."""


class Refused(ServerTrouble):
    """The server answered 400 or 422: it does not take the request as it stands."""


@dataclass(frozen=True)
class Connection:
    """Where the server is, and what an answer may cost.

    Args:
        url: http or https, with or without a trailing /v1.
        api_key: sent as a bearer token.
        headers: further request headers.
        timeout: seconds for one answer.
        retries: further attempts after a connection error, 5xx or 429.
        concurrency: requests in flight.
        max_answer_bytes: the longest body that is read.
        ca_file, client_cert, client_key: PEM files for TLS.
        insecure: do not verify the server's certificate.
        use_proxies: take proxies from the environment, as httpx does.
    """

    url: str
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timeout: float = 120.0
    retries: int = 3
    concurrency: int = 4
    max_answer_bytes: int = 8 << 20
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure: bool = False
    use_proxies: bool = True


@dataclass(frozen=True)
class Dialect:
    """What the server takes.

    Args:
        token_ids: prompts as token ids; else as text.
        extras: vLLM's own fields (ignore_eos, return_token_ids, ...).
        logprobs: how many top logprobs to ask for; 0 asks for none.
    """

    token_ids: bool = True
    extras: bool = True
    logprobs: int = TOP_LOGPROBS


@dataclass(frozen=True)
class Introduction:
    """What was learned about the server before the first scenario.

    Args:
        dialect: see `Dialect`.
        pool: units that prompts may be made of.
        overhead: tokens that the server adds to a prompt.
        tokens_per_unit: 1.0, or the ratio where words are several tokens each.
        answers_name_tokens: answers come with token ids.
    """

    dialect: Dialect
    pool: tuple[int, ...]
    overhead: int
    tokens_per_unit: float
    answers_name_tokens: bool


class _Logprobs(BaseModel):
    model_config = ConfigDict(extra="ignore")
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: str
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Details(BaseModel):
    model_config = ConfigDict(extra="ignore")
    cached_tokens: int | None = None


class _Usage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Completion(BaseModel):
    model_config = ConfigDict(extra="ignore")
    choices: list[_Choice]
    usage: _Usage | None = None


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    model_config = ConfigDict(extra="ignore")
    data: list[_Model]


class _Tokens(BaseModel):
    model_config = ConfigDict(extra="ignore")
    tokens: list[int]


def base_url(url: str) -> str:
    """The server's root, without /v1 and without a trailing slash.

    Raises:
        ValueError: no http(s) URL, or one that holds credentials, a query or a fragment.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as e:
        raise ValueError(f"{url!r} is no URL: {e}") from e
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is no URL of a server: it must look like http://host:8000")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise ValueError(f"{url!r} has no possible port")
    if parsed.userinfo:
        raise ValueError("the URL holds credentials; pass a key with --api-key")
    if parsed.query or parsed.fragment:
        raise ValueError(f"{url!r} has a query or a fragment; give the server's root")
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def plain(text: str, limit: int = 240) -> str:
    """A stranger's text as one short line, without control characters or pieces of a prompt."""
    text = _PROMPT_PIECES.sub("...", text[: 8 * limit])
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parse_answer(body: Any, attempts: int = 1) -> Answer:
    """Read a completion.

    Raises:
        ServerTrouble: the body is no completion with one choice, or contradicts itself.
    """
    try:
        completion = _Completion.model_validate(body)
    except ValidationError as e:
        raise ServerTrouble(f"no completion in the answer: {_first_error(e)}") from e
    if len(completion.choices) != 1:
        raise ServerTrouble(f"{len(completion.choices)} choices in the answer; 1 was asked for")
    choice = completion.choices[0]
    usage = completion.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    ids = tuple(choice.token_ids) if choice.token_ids is not None else None
    labels: tuple[str, ...] = (choice.text,) if ids is None else tuple(map(str, ids))
    logprobs: tuple[float | None, ...] | None = None
    top: tuple[dict[str, float], ...] | None = None
    if choice.logprobs is not None and choice.logprobs.token_logprobs:
        labels = tuple(choice.logprobs.tokens)
        logprobs = tuple(choice.logprobs.token_logprobs)
        rows = choice.logprobs.top_logprobs
        if len(labels) != len(logprobs) or (rows and len(rows) != len(labels)):
            raise ServerTrouble("tokens and logprobs in the answer differ in number")
        if rows:
            top = tuple(
                {k: float("nan") if v is None else v for k, v in (row or {}).items()}
                for row in rows
            )
        if ids is None and labels and all(x.startswith("token_id:") for x in labels):
            numbers = [x.removeprefix("token_id:") for x in labels]
            if all(x.isascii() and x.isdigit() for x in numbers):
                ids = tuple(map(int, numbers))
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        raise ServerTrouble("token ids and logprobs in the answer differ in number")
    return Answer(
        labels=labels,
        token_ids=ids,
        logprobs=logprobs,
        top=top,
        text=choice.text,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens,
        attempts=attempts,
    )


def as_text(prompt: Prompt) -> str:
    """A prompt as text: its word indexes as words, its answers as they came."""
    text = ""
    for unit in prompt:
        if isinstance(unit, int):
            text += (" " if text else "") + WORDS[unit]
        else:
            text += unit
    return text


class Client:
    """An async context manager around one server.

    Raises:
        ValueError: the URL, the key or a TLS file is unusable.
    """

    def __init__(self, connection: Connection, model: str | None = None) -> None:
        self._c = connection
        self._root = base_url(connection.url)
        self.model = model
        self.requests = 0
        self.retries = 0
        self._gate = asyncio.Semaphore(connection.concurrency)
        # The answer is counted as it comes, so it must not be compressed.
        headers = {"Accept-Encoding": "identity", "Accept": "application/json"}
        for name, value in connection.headers:
            headers[_header(name, "header name")] = _header(value, f"value of header {name!r}")
        if connection.api_key:
            headers["Authorization"] = f"Bearer {_header(connection.api_key, 'API key')}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(connection.timeout, connect=min(connection.timeout, 10.0)),
            # uvicorn drops an idle connection after 5 s; let it go before that.
            limits=httpx.Limits(max_connections=connection.concurrency, keepalive_expiry=2.0),
            verify=_tls(connection),
            trust_env=connection.use_proxies,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @property
    def root(self) -> str:
        """The server's address, without credentials."""
        return self._root

    async def find_model(self) -> int | None:
        """Choose the model, unless one was named.

        Returns:
            The longest sequence in tokens that the model takes, or None where it is not told.

        Raises:
            ServerTrouble: the list cannot be had, or does not hold the named model.
        """
        body, _ = await self._send("GET", "/v1/models")
        try:
            models = _Models.model_validate(body).data
        except ValidationError as e:
            raise ServerTrouble(
                f"no list of models at {self._root}/v1/models: is this an "
                f"OpenAI-compatible server? ({_first_error(e)})"
            ) from e
        if self.model is None:
            if not models:
                raise ServerTrouble("the server offers no model")
            self.model = models[0].id
        chosen = next((m for m in models if m.id == self.model), None)
        if chosen is None:
            offered = plain(", ".join(m.id for m in models[:8])) or "none"
            raise ServerTrouble(f"the server does not offer {self.model!r}; it offers: {offered}")
        return chosen.max_model_len

    async def introduce(self) -> Introduction:
        """Find out what the server takes, with a few short requests.

        Raises:
            ServerTrouble: it takes no form of completion request.
        """
        pool = await self._token_pool()
        trouble: ServerTrouble | None = None
        for token_ids, extras in ((True, True), (False, True), (True, False), (False, False)):
            dialect: Dialect | None = Dialect(token_ids=token_ids, extras=extras)
            while dialect is not None:
                units = pool[:PROBE_UNITS] if token_ids else tuple(range(PROBE_UNITS))
                try:
                    answer = await self.complete(units, 2, None, dialect)
                except Refused as e:
                    trouble = trouble or e
                    dialect = _fewer_logprobs(dialect, str(e))
                    continue
                return _introduction(dialect, pool if token_ids else range(len(WORDS)), answer)
        assert trouble is not None
        raise trouble

    async def complete(
        self, prompt: Prompt, answer_tokens: int, salt: str | None, dialect: Dialect
    ) -> Answer:
        """Ask for one greedy completion.

        Args:
            prompt: units, token ids or words as the dialect has it.
            answer_tokens: tokens to generate.
            salt: cache salt; None takes a fresh one for every attempt, since an attempt that
                failed half-way may have left its blocks in the cache.
            dialect: see `Dialect`.

        Raises:
            ServerTrouble: no usable answer.
        """
        payload: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt) if dialect.token_ids else as_text(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "seed": 0,
        }
        if dialect.logprobs:
            payload["logprobs"] = dialect.logprobs
        if dialect.extras:
            payload |= {
                "ignore_eos": True,
                # A generation_config.json on the server may set penalties.
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "return_token_ids": True,
            }
            if dialect.logprobs:
                payload["return_tokens_as_token_ids"] = True
        body, attempts = await self._send("POST", "/v1/completions", payload, salt)
        return parse_answer(body, attempts)

    async def _token_pool(self) -> tuple[int, ...]:
        """Token ids of common words where the server tokenizes, else of bytes."""
        request = {"model": self.model, "prompt": COMMON_TEXT, "add_special_tokens": False}
        try:
            body, _ = await self._send("POST", "/tokenize", request, salted=False, retry=False)
            ids = _Tokens.model_validate(body).tokens
        except (ServerTrouble, ValidationError):
            return tuple(BYTE_IDS)
        pool = tuple(dict.fromkeys(i for i in ids if 0 <= i < 2**31))
        return pool if len(pool) >= PROBE_UNITS else tuple(BYTE_IDS)

    async def _send(
        self,
        method: str,
        path: str,
        payload: dict[str, Any] | None = None,
        salt: str | None = None,
        *,
        salted: bool = True,
        retry: bool = True,
    ) -> tuple[Any, int]:
        """Send a request and return the parsed body and the attempts that it took."""
        attempts = 1 + (self._c.retries if retry else 0)
        async with self._gate:
            for attempt in range(1, attempts + 1):
                if payload is not None and salted:
                    payload = {**payload, "cache_salt": salt or secrets.token_urlsafe(32)}
                self.requests += 1
                self.retries += attempt > 1
                last = attempt == attempts
                try:
                    status, headers, raw = await asyncio.wait_for(
                        self._exchange(method, path, payload), self._c.timeout
                    )
                except (asyncio.TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as e:
                    raise ServerTrouble(
                        f"no answer from {self._root}{path} within {self._c.timeout:g} s "
                        "(--timeout)"
                    ) from e
                except (httpx.TransportError, ssl.SSLError) as e:
                    if _is_certificate_error(e):
                        raise ServerTrouble(
                            f"{self._root}: the certificate is not trusted: {plain(str(e))} "
                            "(--ca-file, or --insecure)"
                        ) from e
                    if last:
                        raise ServerTrouble(
                            f"cannot reach {self._root}: {plain(str(e)) or type(e).__name__}"
                            + (f" ({attempts} attempts)" if attempts > 1 else "")
                        ) from e
                    await asyncio.sleep(_pause(attempt, None))
                    continue
                except (httpx.HTTPError, OSError, ValueError, OverflowError) as e:
                    raise ServerTrouble(
                        f"no usable answer from {self._root}{path}: "
                        f"{plain(str(e)) or type(e).__name__}"
                    ) from e
                if (status == 429 or status >= 500) and not last:
                    await asyncio.sleep(_pause(attempt, headers.get("retry-after")))
                    continue
                return self._read(path, status, headers, raw, attempt), attempt
        raise AssertionError("the last attempt returns or raises")

    async def _exchange(
        self, method: str, path: str, payload: dict[str, Any] | None
    ) -> tuple[int, httpx.Headers, bytes]:
        limit = self._c.max_answer_bytes
        async with self._http.stream(method, self._root + path, json=payload) as response:
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > limit:
                    raise ServerTrouble(
                        f"the answer from {self._root}{path} is longer than {limit:,} bytes "
                        "(--max-answer-mib)"
                    )
                parts.append(part)
            return response.status_code, response.headers, b"".join(parts)

    def _read(
        self, path: str, status: int, headers: httpx.Headers, raw: bytes, attempts: int
    ) -> Any:
        where = f"{self._root}{path}"
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if status == 200:
            if body is None:
                raise ServerTrouble(f"the answer from {where} is no JSON: {plain(_text(raw), 80)}")
            return body
        words = plain(_message(body) or _text(raw), 240)
        if status in (401, 403):
            had = "the API key was refused" if self._c.api_key else "an API key is needed"
            raise ServerTrouble(
                f"{where} answered {status}: {had} (--api-key or GAUDI_EXT_API_KEY)"
            )
        if 300 <= status < 400:
            to = plain(headers.get("location", "nowhere"), 120)
            raise ServerTrouble(f"{where} redirects to {to}; give that server's URL")
        text = f"{where} answered {status}: {words}"
        if attempts > 1:
            text += f" ({attempts} attempts)"
        if status in (400, 422):
            raise Refused(text)
        raise ServerTrouble(text)


def _introduction(dialect: Dialect, pool: tuple[int, ...] | range, answer: Answer) -> Introduction:
    overhead, ratio = 0, 1.0
    if answer.prompt_tokens is not None:
        extra = answer.prompt_tokens - PROBE_UNITS
        # A BOS token or two; more means that units are not one token each.
        if 0 <= extra <= 2:
            overhead = extra
        elif answer.prompt_tokens > 0:
            ratio = answer.prompt_tokens / PROBE_UNITS
    return Introduction(
        dialect=dialect,
        pool=tuple(pool),
        overhead=overhead,
        tokens_per_unit=ratio,
        answers_name_tokens=dialect.token_ids and answer.token_ids is not None,
    )


def _fewer_logprobs(dialect: Dialect, message: str) -> Dialect | None:
    if "logprob" not in message.lower() or dialect.logprobs == 0:
        return None
    return replace(dialect, logprobs=1 if dialect.logprobs > 1 else 0)


def _pause(attempt: int, retry_after: str | None) -> float:
    pause = FIRST_PAUSE * 2 ** (attempt - 1)
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        pause = max(pause, float(retry_after[:6]))
    return min(pause, LONGEST_PAUSE)


def _header(value: str, what: str) -> str:
    if not value or not all(32 <= ord(c) < 127 for c in value):
        raise ValueError(f"the {what} is empty or holds characters that no header may hold")
    return value


def _tls(c: Connection) -> ssl.SSLContext | bool:
    if c.client_key is not None and c.client_cert is None:
        raise ValueError("a client key without a client certificate (--client-cert)")
    try:
        if c.ca_file is not None:
            context = ssl.create_default_context(cafile=str(c.ca_file))
        else:
            context = httpx.create_ssl_context(trust_env=c.use_proxies)
        if c.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if c.client_cert is not None:
            key = None if c.client_key is None else str(c.client_key)
            # An empty password instead of none: OpenSSL would ask for it at the terminal.
            context.load_cert_chain(str(c.client_cert), key, password="")
    except OSError as e:
        names = [str(p) for p in (c.ca_file, c.client_cert, c.client_key) if p is not None]
        raise ValueError(f"cannot load {' or '.join(names)}: {e}") from e
    return context


def _is_certificate_error(e: BaseException) -> bool:
    seen: BaseException | None = e
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _text(raw: bytes) -> str:
    return raw[:2000].decode("utf-8", "replace")


def _message(body: Any) -> str:
    """The message of an OpenAI-style or FastAPI-style error."""
    for _ in range(3):
        if isinstance(body, str):
            return body
        if not isinstance(body, dict):
            break
        body = body.get("error", body.get("message", body.get("detail")))
    return body if isinstance(body, str) else ""


def _first_error(e: ValidationError) -> str:
    first = e.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
