"""A thousand takes at once from a process of its own: `python -m tests.burst PORT COUNT`; prints each one's fate.

A take's number is its id and its prompt, so a reply that is another's shows. The waveform is the same for all, so that
this process holds it once; the requests are written by hand, since a client's pool of a thousand connections costs more
than the server that is measured.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys

import numpy as np

WAVE = base64.b64encode(np.zeros(48_000, np.float32).tobytes())  # 2 s, a quarter of a megabyte
REQUEST = b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


async def main(port: int, count: int) -> list[tuple[int, int, object, object]]:
    return await asyncio.gather(*(ask(port, number) for number in range(count)))


async def ask(port: int, number: int) -> tuple[int, int, object, object]:
    """(number, status, score, sample_id) of one take."""
    fields = {"protocol_version": "1", "num_samples": 48_000, "sample_rate": 24_000, "prompt": str(number),
              "metadata": {"id": f"take-{number}"}}
    head = json.dumps(fields)[:-1].encode() + b', "waveform_f32_base64": "'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.writelines([REQUEST % (len(head) + len(WAVE) + 2), head, WAVE, b'"}'])
    status = int((await reader.readline()).split()[1])
    while await reader.readline() != b"\r\n":
        pass
    reply = json.loads(await reader.read())
    writer.close()
    return number, status, reply.get("score"), reply.get("sample_id")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))))
