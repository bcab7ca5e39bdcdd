"""How does a user learn why a request ran where it ran? The verb `ripresa explain`."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request

import click

from ripresa.cluster.cli_options import with_api_key
from ripresa.workers.errors import ErrorCode, RipresaError, Unavailable

TIMEOUT_S = 15.0


@click.command()
@click.argument("request_id")
@click.option(
    "--address",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="Where the gateways serve HTTP.",
)
@with_api_key
def explain(request_id: str, address: str, api_key: str) -> None:
    """Print how a request was placed: plan, reason, what lost, planned and real hit, recipe.

    Gateways remember their newest requests (`planner.log_plans`). The id is the one that the
    client gave, or the one in `started`. A server with API keys tells of the requests of your key's
    tenant alone.

    \b
    Example:
      ripresa generate --prompt "Once upon a time" --request-id first
      ripresa explain first
    """
    quoted = urllib.parse.quote(request_id, safe="")
    base = address if "://" in address else f"http://{address}"
    url = f"{base}/admin/plans/{quoted}"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    asked = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:
            document = json.load(response)
    except urllib.error.HTTPError as error:
        raise _refusal(error, request_id) from error
    except OSError as error:
        raise Unavailable(
            f"no gateway answers HTTP on {base} ({error}); name its HTTP port with --address"
        ) from error
    for line in document["lines"]:
        click.echo(line)


def _refusal(error: urllib.error.HTTPError, request_id: str) -> RipresaError:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered {error.code} {error.reason}"
    if error.code == 401:
        return RipresaError(ErrorCode.UNAUTHENTICATED, message)
    code = ErrorCode.NOT_FOUND if error.code == 404 else ErrorCode.UNAVAILABLE
    return RipresaError(code, message, field="request_id")
