"""How does a user ask a running cluster from the command line? The verb `ripresa generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from ripresa.cluster.progress import progress
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.replay import TailVariant

if TYPE_CHECKING:
    from ripresa.cluster.gateway.client import Answer, Began, Ended


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
    "--tail",
    type=click.Choice([tail.value for tail in TailVariant]),
    help="Which rows the decoder half of the prefill reads. Default: the server's.",
)
@click.option("--model", default="", help="Refuse another model than this.")
@click.option("--request-id", default="", help="Name the request, to abort it from elsewhere.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds for the whole answer.")
@click.option(
    "--connect-timeout",
    "connect_timeout_s",
    type=float,
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
def generate(
    address: str,
    prompt: str | None,
    prompt_file: BinaryIO | None,
    token_ids: str | None,
    tail: str | None,
    model: str,
    request_id: str,
    timeout_s: float | None,
    connect_timeout_s: float,
    record: Path | None,
    as_json: bool,
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
    """
    from ripresa.cluster.gateway.client import Client
    from ripresa.cluster.gateway.recorder import Recorder

    given = {name: value for name, value in sampling.items() if value not in (None, ())}
    given["stop_token_ids"] = given.pop("stop_token_id", ())
    question = _read_prompt(prompt, prompt_file, token_ids)
    with Client(address) as client:
        with progress(f"connecting to {address}"):
            client.wait_until_connected(connect_timeout_s)
        recorder = None if record is None else Recorder()
        if recorder is not None and isinstance(question, str):
            question = list(client.tokenize(question))
        answers = client.generate(
            question,
            sampling=given,
            tail=None if tail is None else TailVariant(tail),
            model=model,
            request_id=request_id,
            timeout_s=timeout_s,
            recorder=recorder,
        )
        with closing(answers):
            _print(_telling_waits(answers), as_json)
    if record is not None and recorder is not None:
        recorder.recording().write(record)


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


def _telling_waits(answers: Iterator[Answer]) -> Iterator[Answer]:
    """The same answers; a long wait for the placement or the first token is told on stderr."""
    for what in ("waiting for a worker", "waiting for the first token"):
        with progress(what):
            answer = next(answers, None)
        if answer is None:
            return
        yield answer
    yield from answers


def _print(answers: Iterator[Answer], as_json: bool) -> None:
    from ripresa.cluster.gateway.client import Began, Ended, Piece

    began: Began | None = None
    for answer in answers:
        if as_json:
            event = type(answer).__name__.lower()
            click.echo(json.dumps({"event": event, **asdict(answer)}))
            continue
        match answer:
            case Began():
                began = answer
            case Piece():
                click.echo(answer.text, nl=False)
            case Ended() if began is not None:
                click.echo()
                click.echo(_summary(began, answer), err=True)


def _summary(began: Began, ended: Ended) -> str:
    parts = [
        f"prompt {began.prompt_tokens} tokens ({began.cached_tokens} cached)",
        f"answer {ended.completion_tokens} tokens ({ended.reason})",
        f"first token after {1000 * ended.time_to_first_token_s:.0f} ms",
    ]
    if ended.completion_tokens > 1 and ended.decode_s > 0:
        parts.append(f"{(ended.completion_tokens - 1) / ended.decode_s:.0f} tokens/s")
    return ", ".join([*parts, f"seed {began.seed}", f"worker {began.worker_id}"])
