"""What does a first run show? An agent's loop with two real tools, and what each turn computed.

The bundled model's weights are random, so the loop asks for a tool by its name each turn. Calls,
results and usage are real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import click

from ripresa.cluster.app import local_cluster
from ripresa.cluster.client import (
    Answer,
    Client,
    Content,
    Message,
    ToolCall,
    ToolCallReady,
    system,
    tool,
    tool_result,
    user,
)
from ripresa.cluster.config import ClusterConfig
from ripresa.cluster.progress import progress

ROOT = Path(__file__).parents[1]
"""Where this installation's code lies."""
FOLDERS = ("cluster", "workers", "kernels", "protos")
SUFFIXES = (".py", ".md")

QUESTION = "How large is ripresa, and what of it is documentation? Look before you answer."
TURNS = ("list_files", "count_lines", "none")
"""The `tool_choice` of each turn."""
MAX_CALL_TOKENS, MAX_ANSWER_TOKENS = 400, 64
"""A random model spells what a call must hold in small pieces."""
TIMEOUT_S = 120.0
SHOWN_CHARS = 100


def list_files(folder: str) -> str:
    """The files directly in a folder of ripresa's own code."""
    return json.dumps(sorted(path.name for path in _folder(folder).iterdir() if path.is_file()))


def count_lines(folder: str, suffix: str) -> str:
    """Files and lines below a folder of ripresa's own code, of one kind."""
    if suffix not in SUFFIXES:
        raise ValueError(f"suffix must be one of {', '.join(SUFFIXES)}, not {suffix!r}")
    texts = [path.read_text() for path in _folder(folder).rglob(f"*{suffix}")]
    return json.dumps({"files": len(texts), "lines": sum(text.count("\n") for text in texts)})


TOOLS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {"list_files": list_files, "count_lines": count_lines}
)
_PROPERTIES = {
    "folder": {"type": "string", "enum": list(FOLDERS)},
    "suffix": {"type": "string", "enum": list(SUFFIXES)},
}
DEFINITIONS = tuple(
    tool(
        name,
        function.__doc__ or "",
        {
            "type": "object",
            "properties": {parameter: _PROPERTIES[parameter] for parameter in parameters},
            "required": parameters,
            "additionalProperties": False,
        },
    )
    for name, function, parameters in (
        ("list_files", list_files, ["folder"]),
        ("count_lines", count_lines, ["folder", "suffix"]),
    )
)


def run_demo(config: ClusterConfig, api_key: str | None = None) -> None:
    """Start a local cluster, run the loop against it, stop what was started.

    Args:
        api_key: of a tenant, where the configuration asks for one.

    Raises:
        RipresaError: the model or a setting is wrong.
    """
    with ExitStack() as stack:
        with progress("starting the cluster"):
            cluster = stack.enter_context(local_cluster(config))
        click.echo(
            f"{config.encoders.replicas} encoder and {config.decoders.replicas} decode workers, "
            f"gRPC on {cluster.grpc_address}"
        )
        if config.model.path is None:
            click.echo(
                "The bundled model's weights are seeded random numbers: its words are noise. Each "
                "turn asks for a tool; the model writes the arguments."
            )
        with Client(cluster.grpc_address, api_key=api_key, timeout_s=TIMEOUT_S) as client:
            run_loop(client)
        click.echo("stopping")
        with progress("stopping"):
            stack.close()


def run_loop(client: Client) -> None:
    """Ask, run the tools that the answers call, send the results back; print all of it.

    Raises:
        CallError: a request is refused or fails.
    """
    messages = [system("You answer questions about a code base."), user(QUESTION)]
    click.echo(f"\n> {QUESTION}")
    for number, choice in enumerate(TURNS, start=1):
        click.echo(f"\nturn {number}, tool_choice {choice}")
        results: dict[str, Message] = {}
        # Without thinking: words of a random model would fill the turn and reach no call.
        with client.chat(
            messages,
            tools=DEFINITIONS,
            tool_choice=choice,
            effort="none",
            max_tokens=MAX_ANSWER_TOKENS if choice == "none" else MAX_CALL_TOKENS,
            temperature=1.0,
            seed=number,
        ) as stream:
            for event in stream:
                match event:
                    case Content():
                        click.echo(event.text, nl=False)
                    case ToolCallReady():
                        # The tool runs now; the model may go on with another call.
                        results[event.call.id] = tool_result(event.call.id, _run(event.call))
            answer = stream.answer()
        if answer.content:
            click.echo()
        if not results and choice != "none":
            click.echo(f"  no whole call came (the answer ended by {answer.reason})")
        click.echo(f"  {_usage(answer)}")
        # Every call wants a result, also one that was cut.
        cut = [call.id for call in answer.tool_calls if call.id not in results]
        messages += [answer.message, *results.values()]
        messages += [tool_result(call_id, "error: the call was cut") for call_id in cut]


def _run(call: ToolCall) -> str:
    """A tool's result; what is wrong with a call is a result, too."""
    click.echo(f"  call    {call.name}({call.arguments_json})")
    started = time.perf_counter()
    try:
        if call.name not in TOOLS:
            raise ValueError(f"there is no tool {call.name}")
        result = TOOLS[call.name](**call.arguments())
    except (TypeError, ValueError) as error:
        result = f"error: {error}"
    took_ms = 1000 * (time.perf_counter() - started)
    shown = result if len(result) <= SHOWN_CHARS else f"{result[:SHOWN_CHARS]} ..."
    click.echo(f"  result  {shown} ({took_ms:.0f} ms)")
    return result


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


def _folder(name: str) -> Path:
    if name not in FOLDERS:
        raise ValueError(f"folder must be one of {', '.join(FOLDERS)}, not {name!r}")
    return ROOT / name
