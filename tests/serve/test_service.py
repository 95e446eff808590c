from __future__ import annotations

import pytest
from tiny_text import tiny_tokenizer

from treadle.conf.schema import ServeConfig
from treadle.runtime.request import Request, SamplingParams, Stats
from treadle.runtime.text.prompt import Limits
from treadle.serve.metrics import Metrics
from treadle.serve.service import Service


class Client:
    """An engine to which the third request cannot be sent."""

    capacity, in_flight = 8, 0

    def __init__(self) -> None:
        self.under_way: list[str] = []

    def submit(self, request: Request) -> Client:
        if len(self.under_way) == 2:
            raise OverflowError(request.id)
        self.under_way.append(request.id)
        return self

    def close(self, keep: int | None = None) -> None:
        self.under_way.pop()


def test_where_one_request_cannot_be_sent_none_goes_on():
    client = Client()
    service = Service(
        name="m", fingerprint="f", created=0, tokenizer=tiny_tokenizer(), template=lambda: None,
        limits=Limits(max_len=64, vocab=320), config=ServeConfig(), client=client,
        metrics=Metrics(Stats, "m"),
    )  # fmt: skip
    requests = [Request(id=name, prompt=[1], params=SamplingParams(max_tokens=4)) for name in "abc"]
    with pytest.raises(OverflowError):
        service.submit(requests)
    assert client.under_way == []
    assert len(service.submit(requests[:2])) == 2
    assert client.under_way == ["a", "b"]
