"""A streamed answer on the client's side: ids, comments and the error, with times."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nodes import Node, chat_body

SILENCE_S = 120.0
"""An answer without a line for this long hangs."""


@dataclass(slots=True)
class Answer:
    """The received part of an answer. Its thread writes it; others read, and wait in `until`."""

    asked_at: float
    ids: list[int] = field(default_factory=list[int])
    arrivals: list[float] = field(default_factory=list[float])
    """The time of each event with ids; one event may have several."""
    comments: list[str] = field(default_factory=list[str])
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""
    """The failure; empty during the answer and after a good end."""
    ended_at: float | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def until(self, condition: Callable[["Answer"], object], within_s: float) -> bool:
        """Waits for the condition; False if the answer ended, or the time passed, without it."""
        with self._changed:
            _ = self._changed.wait_for(
                lambda: condition(self) or self.ended_at is not None, within_s
            )
            return bool(condition(self))

    def ended(self, within_s: float) -> bool:
        return self.until(lambda answer: answer.ended_at is not None, within_s)

    def commented(self, start: str) -> bool:
        return any(comment.startswith(start) for comment in self.comments)

    def gaps(self) -> list[float]:
        """Seconds before each event with ids, the first one's since the request."""
        return [b - a for a, b in pairwise([self.asked_at, *self.arrivals])]

    def take(self, line: bytes) -> None:
        text = line.decode().rstrip("\n")
        with self._changed:
            if text.startswith(": "):
                self.comments.append(text[2:])
            elif text == "data: [DONE]":
                self.ended_at = time.monotonic()
            elif text.startswith("data: "):
                self._event(json.loads(text[6:]))
            self._changed.notify_all()

    def _event(self, event: Any) -> None:
        if "error" in event:
            self.error = f"{event['error']['code']}: {event['error']['message']}"
            return
        self.stats = event.get("generation_stats", self.stats)
        for choice in event["choices"]:
            if choice["token_ids"]:
                self.ids += choice["token_ids"]
                self.arrivals.append(time.monotonic())

    def end(self, why: str) -> None:
        with self._changed:
            if self.ended_at is None:
                self.error = self.error or why
                self.ended_at = time.monotonic()
            self._changed.notify_all()


def ask(door: Node, prompt: str, **fields: Any) -> Answer:
    """Sends the request and returns at once; a thread reads the answer to its end."""
    answer = Answer(time.monotonic())
    body = chat_body(prompt, stream=True, return_token_ids=True, **fields)
    arguments = (door.connect(door.port, SILENCE_S), body, answer)
    threading.Thread(target=_listen, args=arguments, daemon=True).start()
    return answer


def _listen(connection: http.client.HTTPConnection, body: Any, answer: Answer) -> None:
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            return answer.end(f"status {response.status}: {response.read().decode()}")
        for line in response:
            answer.take(line)
        answer.end("the stream ended without [DONE]")
    except TimeoutError:
        answer.end(f"hangs: nothing came for {SILENCE_S:.0f} s")
    except (OSError, http.client.HTTPException) as fault:
        answer.end(f"the connection broke: {fault!r}")
    finally:
        connection.close()


def events(running: Node, scope: str = "node") -> list[Any]:
    """The events of the node or of the `cluster`, oldest first: `GET /v1/events`."""
    connection = running.connect(running.port, 60)
    try:
        connection.request("GET", f"/v1/events?follow=0&scope={scope}")
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
    finally:
        connection.close()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
