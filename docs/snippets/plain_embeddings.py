import asyncio
import json
import os
import sys
import time
from pathlib import Path

import httpx

PER_MINUTE = float(os.environ["TOKENS_PER_MINUTE"])
TEXTS_PER_REQUEST, IN_FLIGHT, TRIES, SECONDS = 64, 16, 6, 60
begin_at = 0.0


async def wait_for_turn(tokens: float) -> None:
    """Spread the tokens of a minute over the minute."""
    global begin_at
    begin_at = max(begin_at, time.monotonic()) + tokens * 60 / PER_MINUTE
    await asyncio.sleep(begin_at - time.monotonic())


async def embed(client: httpx.AsyncClient, gate: asyncio.Semaphore, texts: list[str]) -> list[list[float]]:
    async with gate:
        for attempt in range(TRIES):
            await wait_for_turn(sum(len(text) for text in texts) / 4)
            try:
                answer = await client.post("embeddings", json={"model": "small", "input": texts})
                if answer.status_code == 429:
                    await asyncio.sleep(float(answer.headers.get("retry-after", 2**attempt)))
                    continue
                found = answer.raise_for_status().json()["data"]
                return [one["embedding"] for one in sorted(found, key=lambda one: one["index"])]
            except (httpx.HTTPError, ValueError):
                await asyncio.sleep(2**attempt)
    raise RuntimeError(f"no answer for {texts[0]!r}")


async def main(texts: list[str]) -> list[list[float]]:
    parts = [texts[at : at + TEXTS_PER_REQUEST] for at in range(0, len(texts), TEXTS_PER_REQUEST)]
    key, gate = os.environ["OPENAI_API_KEY"], asyncio.Semaphore(IN_FLIGHT)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=SECONDS) as client:
        answers = await asyncio.gather(*(embed(client, gate, part) for part in parts))
    return [vector for answer in answers for vector in answer]


texts = json.loads(Path(sys.argv[1]).read_text())
Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(texts))))
