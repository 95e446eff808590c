from __future__ import annotations

import asyncio

import pytest

from treadle.runtime.protocol import Endpoints
from treadle.runtime.request import Request, SamplingParams
from treadle.serve.engine_client import EngineClient


def test_a_request_that_cannot_be_sent_holds_no_place(tmp_path):
    async def run():
        client = EngineClient(Endpoints(str(tmp_path)), 4)
        params = SamplingParams()
        params.logits_processors = {"mine": {"by": 2**64}}
        try:
            with pytest.raises(OverflowError):
                client.submit(Request(id="r", prompt=[1], params=params))
            assert client.in_flight == 0
        finally:
            await client.close()

    asyncio.run(run())
