"""How does a user ask a running cluster from the command line? The verb `ripresa generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ripresa.cluster.cli_options import YEAR_S, FiniteRange, with_api_key
from ripresa.cluster.progress import progress
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import ReplayMode, TailVariant

if TYPE_CHECKING:
    from ripresa.cluster.client import Event, Options, Started, Timings, Usage


@click.command()
@click.option("--address", default="127.0.0.1:9000", show_default=True, help="The gateway.")
@click.option("--prompt", help="The prompt, as plain text.")
@click.option("--prompt-file", type=click.File("rb"), help="Read the prompt here; - is stdin.")
@click.option("--token-ids", metavar="ID,ID,...", help="The prompt, as token ids.")
@click.option("--max-tokens", type=click.IntRange(min=0), help="Default: all that fits.")
@click.option("--temperature", type=float, help="0 is greedy. Default: 1.")
@click.option("--top-k", type=int, help="Keep the k likeliest tokens. Default: all.")
@click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability.")
@click.option("--stop-token-id", type=click.IntRange(min=0), multiple=True, help="Repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sentence token.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), help="Repeats an answer. Default: drawn."
)
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in ReplayMode]),
    help="What may be reused of earlier prompts, and how exactly. Default: bounded.",
)
@click.option(
    "--tail",
    type=click.Choice([tail.value for tail in TailVariant]),
    help="Which rows the decoder half of the prefill reads. Default: the server's.",
)
@click.option(
    "--session",
    "session_id",
    default="",
    help="Name a conversation; its next turn goes on from it.",
)
@click.option("--model", default="", help="Refuse another model than this.")
@click.option("--request-id", default="", help="Name the request, to abort it from elsewhere.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(0, YEAR_S, min_open=True),
    help="Seconds for the whole answer.",
)
@click.option(
    "--connect-timeout",
    "connect_timeout_s",
    type=FiniteRange(0, YEAR_S, min_open=True),
    default=15.0,
    show_default=True,
    help="Seconds to wait for a gateway.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the answer, and how it was computed, for `ripresa reproduce`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line and event.")
@with_api_key
def generate(
    address: str,
    prompt: str | None,
    prompt_file: BinaryIO | None,
    token_ids: str | None,
    mode: str | None,
    tail: str | None,
    session_id: str,
    model: str,
    request_id: str,
    timeout_s: float | None,
    connect_timeout_s: float,
    record: Path | None,
    as_json: bool,
    api_key: str,
    **sampling: object,
) -> None:
    """Ask a running cluster and stream the answer.

    The text goes to stdout as it arrives, a summary to stderr. The prompt is plain text: no
    template is applied, and a special token's spelling in it stays text (use --token-ids).
    A gateway that restarts is waited for; Ctrl-C cancels the request on the server.

    \b
    Examples:
      ripresa generate --prompt "Once upon a time" --max-tokens 40
      ripresa generate --prompt-file prompt.txt --temperature 0
      cat prompt.txt | ripresa generate --prompt-file - --seed 7 --json
      ripresa generate --token-ids 0,4,260,5 --top-p 0.95
      ripresa generate --prompt "Once upon a time" --record answer.json
      ripresa generate --token-ids 0,4,260,5 --mode exact --tail exact --session mine
    """
    from ripresa.cluster.client import Client
    from ripresa.cluster.gateway.recording import recording_of

    given: Any = {name: value for name, value in sampling.items() if value not in (None, ())}
    given["stop_token_ids"] = given.pop("stop_token_id", ())
    options: Options = {"model": model, "request_id": request_id, "session_id": session_id}
    if mode is not None:
        options["replay_mode"] = mode
    if tail is not None:
        options["tail"] = tail
    question = _read_prompt(prompt, prompt_file, token_ids)
    with Client(address, api_key=api_key or None) as client:
        with progress(f"connecting to {address}"):
            client.wait_until_connected(connect_timeout_s)
        if record is not None and isinstance(question, str):
            question = list(client.tokenize(question))
        with client.generate(
            question, options=options, return_token_ids=True, timeout_s=timeout_s, **given
        ) as stream:
            _print(_telling_waits(stream), as_json)
            answer = stream.answer()
    if record is not None:
        recording_of(stream.request, answer).write(record)


def _read_prompt(
    prompt: str | None, prompt_file: BinaryIO | None, token_ids: str | None
) -> str | list[int]:
    """The one prompt that was given."""
    given = [option for option in (prompt, prompt_file, token_ids) if option is not None]
    if len(given) != 1:
        raise click.UsageError("give one of --prompt, --prompt-file and --token-ids")
    if prompt_file is not None:
        try:
            return prompt_file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                "--prompt-file", f"is not UTF-8: byte {error.start} is no part of a character"
            ) from error
    if token_ids is None:
        assert prompt is not None
        return prompt
    try:
        return [int(part) for part in token_ids.split(",")]
    except ValueError as error:
        raise InvalidArgument("--token-ids", "must be numbers with commas between them") from error


def _telling_waits(events: Iterator[Event]) -> Iterator[Event]:
    """The same events; a long wait for the placement or the first token is told on stderr."""
    for what in ("waiting for a worker", "waiting for the first token"):
        with progress(what):
            event = next(events, None)
        if event is None:
            return
        yield event
    yield from events


def _print(events: Iterator[Event], as_json: bool) -> None:
    from ripresa.cluster.client import Completed, Finished, Started, Text

    started: Started | None = None
    reason = ""
    for event in events:
        if as_json:
            click.echo(_json(event))
            continue
        match event:
            case Started():
                started = event
            case Text():
                click.echo(event.text, nl=False)
            case Finished():
                reason = event.reason
            case Completed() if started is not None:
                click.echo()
                click.echo(_summary(started, reason, event.usage, event.timings), err=True)


def _json(event: Event) -> str:
    """An event by its name, and what it says."""
    from google.protobuf.json_format import MessageToDict

    name = type(event).__name__.lower()
    return json.dumps(
        {"event": name, **asdict(event)},
        default=lambda message: MessageToDict(message, preserving_proto_field_name=True),
    )


def _summary(started: Started, reason: str, usage: Usage, timings: Timings) -> str:
    parts = [
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached)",
        f"answer {usage.completion_tokens} tokens ({reason})",
    ]
    if timings.time_to_first_token_s is not None:
        parts.append(f"first token after {1000 * timings.time_to_first_token_s:.0f} ms")
    if usage.completion_tokens > 1 and timings.decode_s:
        parts.append(f"{(usage.completion_tokens - 1) / timings.decode_s:.0f} tokens/s")
    return ", ".join([*parts, f"seed {started.seed}", f"worker {started.worker_id}"])
