"""What does a first run show? A model that calls tools by itself, and what each answer computed.

The bundled model has learnt to ask a small ledger. The ledger is drawn, held by tools in this
process, and what it says is known here: a wrong answer is told as one.
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack

import click

from ripresa.cluster.app import local_cluster
from ripresa.cluster.client import (
    Answer,
    Client,
    Content,
    Message,
    ToolCall,
    ToolCallReady,
    tool,
    tool_result,
    user,
)
from ripresa.cluster.config import ClusterConfig
from ripresa.cluster.progress import progress
from ripresa.workers.demo.ledger.conversation import MAX_CALLS, Turn
from ripresa.workers.demo.ledger.draws import Draws, Split
from ripresa.workers.demo.ledger.evaluation import NUM_CONVERSATIONS
from ripresa.workers.demo.ledger.scripts import Script, draw_tour
from ripresa.workers.demo.ledger.tool_server import TOOLS, ToolServer

DEFINITIONS = tuple(
    tool(function["name"], function["description"], function["parameters"])
    for function in (schema["function"] for schema in TOOLS)
)
MAX_TOKENS = 160
"""Of an answer; no right one is longer."""
TIMEOUT_S = 120.0
SHOWN_CHARS = 120


def tour(number: int) -> Script:
    """Questions about a ledger that neither training nor evaluation has seen."""
    return draw_tour(Draws(Split.EVALUATION, NUM_CONVERSATIONS + number))


def run_demo(config: ClusterConfig, ledger: int, api_key: str | None = None) -> bool:
    """Start a local cluster, run the loop against it, stop what was started.

    Args:
        ledger: which one is drawn.
        api_key: of a tenant, where the configuration asks for one.

    Returns:
        Whether every answer of the bundled model was right; another model's are not judged.

    Raises:
        RipresaError: the model or a setting is wrong.
    """
    is_bundled = config.model.path is None
    script = tour(ledger)
    with ExitStack() as stack:
        with progress("starting the cluster"):
            cluster = stack.enter_context(local_cluster(config))
        click.echo(
            f"{config.encoders.replicas} encoder and {config.decoders.replicas} decode workers, "
            f"gRPC on {cluster.grpc_address}"
        )
        click.echo(
            "The model may call get, set, read and calc, or none; nobody tells it which. It is "
            "asked greedily."
        )
        if not is_bundled:
            click.echo("It is not the bundled model, which has learnt these tools.")
        with Client(cluster.grpc_address, api_key=api_key, timeout_s=TIMEOUT_S) as client:
            num_right = run_loop(client, script)
        click.echo(f"\n{num_right} of {len(script.turns)} answers are the ledger's")
        click.echo("stopping")
        with progress("stopping"):
            stack.close()
    return num_right == len(script.turns) or not is_bundled


def run_loop(client: Client, script: Script) -> int:
    """Ask every question, run the tools that answers call, send the results back; print all of it.

    Returns:
        How many questions were answered as the ledger has it.

    Raises:
        CallError: a request is refused or fails.
    """
    server = ToolServer(copy.deepcopy(script.world))
    messages: list[Message] = []
    return sum([_ask(client, server, messages, turn) for turn in script.turns])


def _ask(client: Client, server: ToolServer, messages: list[Message], turn: Turn) -> bool:
    """One question, and whether it was answered right; `messages` are added to."""
    click.echo(f"\n> {turn.user}")
    messages.append(user(turn.user))
    for _ in range(MAX_CALLS + 1):
        results: dict[str, Message] = {}
        with client.chat(
            messages,
            tools=DEFINITIONS,
            effort="none",
            max_tokens=MAX_TOKENS,
            temperature=0.0,
        ) as stream:
            for event in stream:
                match event:
                    case Content():
                        click.echo(event.text, nl=False)
                    case ToolCallReady():
                        # The tool runs now; the model may go on with another call.
                        results[event.call.id] = _run(server, event.call)
            answer = stream.answer()
        if answer.content:
            click.echo()
        click.echo(f"  {_usage(answer)}")
        # Every call wants a result, also one that was cut.
        cut = [call.id for call in answer.tool_calls if call.id not in results]
        messages += [answer.message, *results.values()]
        messages += [tool_result(call_id, "error: the call was cut") for call_id in cut]
        if not answer.tool_calls:
            break
    is_right = not answer.tool_calls and answer.content.strip() == turn.answer
    click.echo("  right" if is_right else f"  WRONG: the ledger says: {turn.answer}")
    return is_right


def _run(server: ToolServer, call: ToolCall) -> Message:
    """A tool's result; what is wrong with a call is a result, too."""
    click.echo(f"  call    {call.name}({call.arguments_json})")
    started = time.perf_counter()
    result = server.call(call.name, call.arguments_json)
    took_ms = 1000 * (time.perf_counter() - started)
    line = "; ".join(result.splitlines())
    shown = line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]} ..."
    click.echo(f"  result  {shown} ({took_ms:.0f} ms)")
    return tool_result(call.id, result)


def _usage(answer: Answer) -> str:
    completed = answer.completed
    assert completed is not None  # a whole answer has it
    usage, first_s = completed.usage, completed.timings.time_to_first_token_s
    decoder_rows = usage.prompt_tokens - completed.cache.decoder_start_token
    said = (
        f"prompt {usage.prompt_tokens} tokens: {usage.cached_tokens} cached; computed "
        f"{usage.computed_tokens} encoder rows and {decoder_rows} decoder rows"
    )
    return said if first_s is None else f"{said}; first token after {1000 * first_s:.0f} ms"
