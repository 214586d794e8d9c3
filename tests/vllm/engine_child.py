"""An engine as `vllm serve` runs it, told what to do over stdin: commands and replies are lines of JSON."""

import asyncio
import json
import os
import sys
import time

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot


async def generate(engine, number, prompt, params):
    began_s = time.monotonic()
    prompt = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    ttft_s, answer = None, {}
    async for output in engine.generate(prompt, SamplingParams(**params), str(number)):
        completion = output.outputs[0]
        if completion.token_ids and ttft_s is None:
            ttft_s = time.monotonic() - began_s
        answer = {
            "tokens": list(completion.token_ids),
            "finish": completion.finish_reason,
            "cached_tokens": output.num_cached_tokens or 0,
            "prompt": list(output.prompt_token_ids),
        }
    return {**answer, "ttft_s": ttft_s}


async def answer(engine, command):
    match command["do"]:
        case "generate":
            return await generate(engine, command["id"], command["prompt"], command["params"])
        case "abort":
            await engine.abort(str(command["which"]))
        case "reset":
            return {"ok": await engine.reset_prefix_cache(reset_connector=command["connector"])}
        case "metrics":
            return {m.name: m.value for m in get_metrics_snapshot() if hasattr(m, "value")}
        case "health":
            await engine.check_health()
    return {}


async def serve(replies):
    def reply(number, **message):
        replies.write(json.dumps({"id": number, **message}).encode() + b"\n")
        replies.flush()

    async def run(command):
        try:
            reply(command["id"], value=await answer(engine, command))
        except Exception as error:  # noqa: BLE001 - the test is told
            reply(command["id"], error=f"{type(error).__name__}: {error}")

    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**json.loads(await lines.readline())))
    reply(0, value={})
    tasks = set()
    try:
        while line := await lines.readline():
            task = asyncio.create_task(run(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints goes to the log
    asyncio.run(serve(stdout))
